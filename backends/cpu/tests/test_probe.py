"""The probe says yes with what it dispatches to, or no with the reason; and nothing before it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvcore_cpu
from kvcore_cpu import native


def test_the_probe_says_which_instruction_set_and_how_many_threads(isa, monkeypatch):
    monkeypatch.setenv("KVCORE_CPU_THREADS", "3")
    answer = kvcore_cpu.backend().probe()
    assert answer.usable
    assert isa in answer.reason
    assert "3 threads" in answer.reason
    assert (answer.details["isa"], answer.details["threads"]) == (isa, "3")


def test_threads_are_bounded_where_nothing_is_asked_for():
    assert 1 <= int(kvcore_cpu.backend().probe().details["threads"]) <= 4


def test_an_instruction_set_that_the_machine_lacks_is_refused_with_those_that_there_are(monkeypatch):
    monkeypatch.setattr(native, "_instruction_sets", lambda dll: ["scalar"])
    monkeypatch.setenv("KVCORE_CPU_ISA", "avx2")
    answer = kvcore_cpu.backend().probe()
    assert not answer.usable
    assert "KVCORE_CPU_ISA=avx2" in answer.reason
    assert "scalar" in answer.reason


@pytest.mark.parametrize(("content", "reason"), [(None, "is not there"), (b"no library", "does not load")])
def test_a_library_that_is_missing_or_broken_is_the_reason(content, reason, monkeypatch, tmp_path):
    path = tmp_path / "_native.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "_PATH", path)
    native.library.cache_clear()
    try:
        answer = kvcore_cpu.backend().probe()
    finally:
        native.library.cache_clear()
    assert not answer.usable
    assert reason in answer.reason
    assert str(path) in answer.reason


def test_the_backend_describes_itself():
    spec = kvcore_cpu.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("cpu", ("cpu",), 50)
    assert spec.distribution == "kvcore-cpu"
    assert next(iter(spec.implementations)) == "native"


def test_discovery_loads_no_library_and_the_probe_no_torch():
    maps = "open('/proc/self/maps').read()"
    code = (
        f"import sys, kvcore_cpu; spec = kvcore_cpu.backend(); print('_native.so' in {maps});"
        f"spec.probe(); print('_native.so' in {maps}, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]


def test_the_library_needs_nothing_but_libc():
    needed = subprocess.run(["ldd", str(native._PATH)], capture_output=True, text=True, check=True).stdout
    names = {Path(line.split()[0]).name for line in needed.splitlines()}
    assert {n for n in names if not n.startswith(("linux-vdso", "ld-linux", "libc.", "libm.", "libpthread."))} == set()
