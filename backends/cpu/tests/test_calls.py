"""Calls as an engine lives with them: dispatch, threads, the GIL, forks, memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvcore import Layout
from kvcore.errors import BackendLoadError, ConfigError
from kvcore.kernels.abi import OK, pack_bytes_args, pack_paged_args
from kvcore_cpu import native
from kvcore_cpu.native import configure, library

LARGE = 256 << 20


def in_use():
    return library().dll.kvcore_cpu_isa(-1).decode()


def tasks():
    return len(os.listdir("/proc/self/task"))


def settled():
    """Return the number of threads; one that has ended is listed a moment longer."""
    counts = []
    for _ in range(20):
        counts.append(tasks())
        time.sleep(0.002)
    return min(counts)


def digest_large(cpu, buffer):
    return int(cpu.digest([buffer])[0])


def test_an_opened_backend_uses_the_instruction_set_that_is_asked_for(cpu, isa):
    assert in_use() == isa


def test_the_best_instruction_set_is_used_where_none_is_asked_for(open_cpu, instruction_sets):
    open_cpu()
    assert in_use() == instruction_sets[0]


def test_an_unknown_instruction_set_changes_nothing(monkeypatch, open_cpu):
    open_cpu()
    before = in_use()
    monkeypatch.setenv("KVCORE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"KVCORE_CPU_ISA='sse9'.*scalar"):
        configure()
    assert in_use() == before


def test_an_instruction_set_that_the_machine_lacks_changes_nothing(monkeypatch, open_cpu):
    open_cpu()
    before = in_use()
    monkeypatch.setattr(native, "_instruction_sets", lambda dll: ["scalar"])
    monkeypatch.setenv("KVCORE_CPU_ISA", "avx2")
    with pytest.raises(BackendLoadError, match=r"KVCORE_CPU_ISA=avx2.*scalar"):
        configure()
    assert in_use() == before


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_call_uses_as_many_threads_as_it_may_and_leaves_none(threads, monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", str(threads))
    cpu, buffer = open_cpu(), np.zeros(LARGE, np.uint8)
    before = most = settled()
    worker = threading.Thread(target=lambda: [digest_large(cpu, buffer) for _ in range(3)])
    worker.start()
    while worker.is_alive():
        most = max(most, tasks())
    worker.join()
    assert most - before == threads  # the Python thread that calls is one of them
    assert settled() == before


def test_small_calls_make_no_threads(monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", "4")
    cpu, buffer = open_cpu(), np.zeros(1 << 20, np.uint8)
    before = most = settled()
    worker = threading.Thread(target=lambda: [digest_large(cpu, buffer) for _ in range(300)])
    worker.start()
    while worker.is_alive():
        most = max(most, tasks())
    assert most - before == 1


def test_any_number_of_threads_gives_the_same_bytes(isa, ref, monkeypatch, open_cpu):
    buffer = np.random.default_rng(1).integers(0, 256, (5 << 20) + 13, np.uint8)
    expected = digest_large(ref, buffer)
    for threads in (1, 2, 7):
        monkeypatch.setenv("KVCORE_CPU_THREADS", str(threads))
        assert digest_large(open_cpu(), buffer) == expected


def test_others_run_during_a_long_call(monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", "1")
    cpu, buffer = open_cpu(), np.zeros(LARGE, np.uint8)
    spans = []

    def call():
        began = time.monotonic()
        digest_large(cpu, buffer)
        spans.append((began, time.monotonic()))

    for _ in range(5):  # a busy machine may hold up anybody for once
        worker, seen = threading.Thread(target=call), []
        worker.start()
        while worker.is_alive():
            seen.append(time.monotonic())
        began, ended = spans[-1]
        inside = [t for t in seen if began < t < ended]
        if len(inside) > 100 and max(np.diff([began, *inside, ended])) < 0.5 * (ended - began):
            return
    pytest.fail("nothing else ran while the op did: it holds the GIL")


FORK = """
import os, numpy as np, kvcore
cpu = kvcore.open_backend("cpu", fallback="error")
buffer = np.arange(16 << 20, dtype=np.uint8)
before = int(cpu.digest([buffer])[0])
child = os.fork()
if child == 0:
    os._exit(0 if int(cpu.digest([buffer])[0]) == before else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), int(cpu.digest([buffer])[0]) == before)
"""


def test_a_fork_after_use_works_on_both_sides():
    environ = {**os.environ, "KVCORE_CPU_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=True, env=environ, timeout=60
    )
    assert done.stdout.split() == ["0", "True"]


def heap_in_use():
    """Return the bytes that the C heap has handed out, as glibc counts them."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    kind = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    function = ctypes.CDLL(None).mallinfo2
    function.restype = kind
    counted = function()
    return counted.uordblks + counted.hblkhd


def test_calls_leave_no_memory_behind(isa):
    configure()
    source, target = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    rows = Layout("L|KBNHD").bind([np.zeros((2, 4, 4, 1, 8), np.uint16)])
    chunk = Layout("LKTHD").bind(np.zeros((1, 2, 3, 1, 8), np.uint16))
    index, digests = np.array([5, 6, 7], np.int64), np.zeros(1, np.uint64)
    calls = {
        "copy_batch": pack_bytes_args([source], [target], digests),
        "scatter_paged": pack_paged_args(rows, [chunk], index, unit="slot", skip_tokens=0, check_duplicates=True),
    }
    status = ctypes.c_uint64(OK)
    launch, where = library().launch, ctypes.addressof(status)
    for op, (args, _keep) in calls.items():
        launch(op, args, None, where)
        before = heap_in_use()
        for _ in range(1000):
            launch(op, args, None, where)
        assert heap_in_use() - before < 16_000  # a chunk of malloc has 32 bytes at least; Python itself takes a few
