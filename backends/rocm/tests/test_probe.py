"""The probe: yes or no, why, and what it found; on machines that are made up."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore_rocm
from kvcore.plugins.torch_build import TorchBuild
from kvcore_rocm import installed, probe
from kvcore_rocm.installed import Compiler

MI300 = "simd_count 1216\ngfx_target_version 90402\n"
CPU = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two MI300 and ROCm, on which the probe says yes; tests take something away."""
    monkeypatch.delenv("KVCORE_ROCM_DRIVER", raising=False)
    rocm = tmp_path / "rocm"
    rocm.mkdir()
    (rocm / "libamdhip64.so.6").write_bytes(b"")
    (rocm / "libhiprtc.so.6").write_bytes(b"")
    (tmp_path / "kfd").write_bytes(b"")
    for number, text in enumerate((CPU, MI300, MI300)):
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        (tmp_path / "nodes" / str(number) / "properties").write_text(text)
    libraries = {}
    for width in installed.WIDTHS:
        libraries[width] = tmp_path / f"_native{width}.so"
        libraries[width].write_bytes(b"")
    monkeypatch.setattr(probe, "_KFD", tmp_path / "kfd")
    monkeypatch.setattr(probe, "_NODES", tmp_path / "nodes")
    monkeypatch.setattr(installed, "_FOLDERS", (rocm,))
    monkeypatch.setattr(installed, "_PROGRAMS", ())
    monkeypatch.setattr(installed, "_loaded", lambda name: "")
    monkeypatch.setattr(installed, "native_path", libraries.__getitem__)
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild("rocm", "2.9.0+rocm6.4"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def ask():
    return kvcore_rocm.backend().probe()


def test_a_machine_with_all_that_is_needed(machine):
    answer = ask()
    assert answer.usable, answer.reason
    assert answer.details["devices"] == "2 gfx942"
    assert answer.details["driver"] == str(machine / "rocm" / "libamdhip64.so.6")
    assert answer.details["compiler"] == str(machine / "rocm" / "libhiprtc.so.6")
    assert "2 gfx942" in answer.reason


@pytest.mark.parametrize(("kind", "usable"), [("rocm", True), ("cpu", True), ("cuda", False)])
def test_cuda_and_rocm_exclude_each_other_by_torch(machine, monkeypatch, kind, usable):
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild(kind, "2.13.0"))
    answer = ask()
    assert answer.usable is usable
    assert answer.reason.startswith("torch is built for CUDA") is not usable
    assert "2.13.0" in answer.details["torch"]


def without_library(machine):
    (machine / "_native32.so").unlink()


def with_the_library_of_another_processor(machine):
    other = {"x86_64": 183, "aarch64": 62}.get(platform.machine(), 62)
    (machine / "_native64.so").write_bytes(struct.pack("<4s14xH", b"\x7fELF", other))


def without_runtime(machine):
    (machine / "rocm" / "libamdhip64.so.6").unlink()


def without_kernel_driver(machine):
    (machine / "kfd").unlink()


def without_devices(machine):
    for number in (1, 2):
        (machine / "nodes" / str(number) / "properties").write_text(CPU)


def without_compiler(machine):
    (machine / "rocm" / "libhiprtc.so.6").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_library, r"without its native library \(_native32\.so missing\); reinstall it from a wheel"),
        (with_the_library_of_another_processor, "wrong wheel for this machine: it is for"),
        (without_runtime, r"HIP's runtime, libamdhip64\.so, was not found; install ROCm"),
        (without_kernel_driver, "load amdgpu, and give a container --device=/dev/kfd"),
        (without_devices, "the AMD GPU driver shows no GPU"),
        (without_compiler, "nothing here compiles kernels for AMD devices; install one of hipRTC"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(machine, change, reason):
    change(machine)
    answer = ask()
    assert not answer.usable
    assert re.match(f".*{reason}", answer.reason), answer.reason
    assert all(answer.details.values())


def test_a_device_that_may_not_be_opened(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "join its group, mostly render or video" in ask().reason


def test_a_runtime_that_is_named_is_taken_and_stands_for_its_devices(machine, monkeypatch):
    without_kernel_driver(machine)
    monkeypatch.setenv("KVCORE_ROCM_DRIVER", str(machine / "nowhere.so"))
    assert "there is no such file" in ask().reason
    (machine / "mine.so").write_bytes(b"")
    monkeypatch.setenv("KVCORE_ROCM_DRIVER", str(machine / "mine.so"))
    answer = ask()
    assert answer.usable
    assert answer.details["driver"] == str(machine / "mine.so")
    assert "whatever KVCORE_ROCM_DRIVER shows" in answer.reason


@pytest.mark.parametrize(
    ("version", "arch"), [("90010", "gfx90a"), ("90402", "gfx942"), ("110000", "gfx1100"), ("120001", "gfx1201")]
)
def test_architectures_are_named_as_compilers_name_them(machine, version, arch):
    for number in (1, 2):
        text = f"simd_count 1\ngfx_target_version {version}\n"
        (machine / "nodes" / str(number) / "properties").write_text(text)
    assert ask().details["devices"] == f"2 {arch}"


# --- which runtime


def test_torchs_own_runtime_comes_before_the_systems(machine, monkeypatch):
    own = machine / "torch" / "lib"
    own.mkdir(parents=True)
    for name in ("libamdhip64.so", "libhiprtc.so"):
        (own / name).write_bytes(b"")
    monkeypatch.setattr(installed, "_package_folders", lambda: [own])
    assert installed.driver_path() == str(own / "libamdhip64.so")
    assert installed.compilers()[0] == Compiler("hiprtc", str(own / "libhiprtc.so"))


def test_the_runtime_that_is_loaded_comes_before_all_others(machine, simulated, tmp_path):
    path = tmp_path / "libamdhip64.so.6"
    path.write_bytes(Path(simulated).read_bytes())
    code = f"""
import ctypes
from kvcore_rocm import installed
ctypes.CDLL({str(path)!r})
print(installed.driver_path())
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == str(path)
    assert ctypes.CDLL(str(path)).hipInit(0) == 0


def test_compilers_are_listed_once_the_preferred_one_first(machine):
    (machine / "bin").mkdir()
    for name in ("hipcc", "clang++-19", "clang++"):
        (machine / "bin" / name).write_text("#!/bin/sh\n")
        (machine / "bin" / name).chmod(0o755)
    (machine / "bin" / "amdclang++").symlink_to("hipcc")
    assert [(c.kind, Path(c.path).name) for c in installed.compilers()] == [
        ("hiprtc", "libhiprtc.so.6"),
        ("clang", "hipcc"),
        ("clang", "clang++-19"),
        ("clang", "clang++"),
    ]


# --- the backend


def test_the_backend_describes_itself():
    spec = kvcore_rocm.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("rocm", ("cuda",), 100)
    assert (spec.distribution, next(iter(spec.implementations)), spec.core_kernels) == ("kvcore-rocm", "native", True)


def test_discovery_and_probe_import_no_torch_and_load_no_library_of_ours():
    code = """
import sys, kvcore_rocm
kvcore_rocm.backend().probe()
print("torch" in sys.modules, "_native64.so" in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
