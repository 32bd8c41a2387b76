"""The probe: yes or no, why, and what it found; with stand-ins for the driver's libraries."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import subprocess
import sys

import pytest

import kvcore_cuda

NVML = """
#include <string.h>
extern "C" int nvmlInit_v2() { return %(init)d; }
extern "C" int nvmlSystemGetDriverVersion(char *text, unsigned) { strcpy(text, "570.86.10"); return 0; }
extern "C" int nvmlDeviceGetCount_v2(unsigned *count) { *count = %(count)d; return 0; }
extern "C" int nvmlDeviceGetHandleByIndex_v2(unsigned, void **device) { *device = 0; return 0; }
extern "C" int nvmlDeviceGetName(void *, char *text, unsigned) { strcpy(text, "NVIDIA H200"); return 0; }
extern "C" int nvmlDeviceGetCudaComputeCapability(void *, int *major, int *minor) {
    *major = %(major)d, *minor = 0;
    return 0;
}
extern "C" int nvmlShutdown() { return 0; }
"""
DRIVER = """
extern "C" int cuDriverGetVersion(int *version) { *version = %d; return 0; }
extern "C" int cuInit(unsigned) { __builtin_trap(); }
"""
TORCH = """
from kvcore.plugins.torch_build import TorchBuild
from kvcore_cuda import probe
probe.torch_build = lambda: TorchBuild({!r}, {!r})
"""


def probe_in_a_process(libraries="", prelude="", **environ):
    """Return what the probe says with libraries of a folder, and with a fatbin for sm_90 unless the prelude says so."""
    code = f"""
import json, sys, kvcore_cuda
from kvcore_cuda import installed
from pathlib import Path
installed.fatbin = lambda: installed.Fatbin(Path(), ("sm_90",), "nvcc 13.0.88", "")
{prelude}
before = "torch" in sys.modules
answer = kvcore_cuda.backend().probe()
print(json.dumps([answer.usable, answer.reason, dict(answer.details), before or "torch" not in sys.modules]))
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCORE_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, "LD_LIBRARY_PATH": str(libraries), **environ},
    )
    usable, reason, details, torch_untouched = json.loads(done.stdout)
    assert torch_untouched
    return {"usable": usable, "reason": reason, "details": details}


def build(folder, name, text):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build a stand-in for the driver")
    source = folder / "library.cpp"
    source.write_text(text)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(folder / name), str(source)], check=True)


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """Return what makes a folder with a driver and devices; the driver ends the process when it is initialised."""

    def make(version=12080, init=0, count=2, major=9):
        folder = tmp_path_factory.mktemp("driver")
        build(folder, "libnvidia-ml.so.1", NVML % {"init": init, "count": count, "major": major})
        build(folder, "libcuda.so.1", DRIVER % version)
        return folder

    return make


def test_the_backend_describes_itself():
    spec = kvcore_cuda.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("cuda", ("cuda",), 100)
    assert (spec.distribution, spec.core_kernels) == ("kvcore-cuda", True)
    assert set(spec.implementations) >= {"native"}


def test_without_a_driver_it_says_so_and_what_it_found():
    answer = probe_in_a_process(prelude="installed.DRIVER = 'libcuda.so.0'")
    assert answer["usable"] is False
    assert answer["reason"].startswith("NVIDIA's driver, libcuda.so.0, was not found; install it")
    assert set(answer["details"]) == {"driver", "devices", "torch", "kernels", "nvrtc"}
    assert all(answer["details"].values())


def test_a_driver_and_its_devices_make_it_usable(machine):
    answer = probe_in_a_process(machine())
    assert answer["usable"] is True, answer["reason"]
    assert answer["details"]["driver"] == "570.86.10 (CUDA 12.8)"
    assert answer["details"]["devices"] == "2 NVIDIA H200 sm_90"
    assert answer["details"]["kernels"] == "sm_90 (nvcc 13.0.88)"


def test_a_driver_that_is_too_old(machine):
    answer = probe_in_a_process(machine(version=11040))
    assert answer["usable"] is False
    assert (
        "driver 570.86.10 is of CUDA 11.4, and 11.8 is needed; update NVIDIA's driver to 520 or later"
        in (answer["reason"])
    )


def test_no_devices(machine):
    answer = probe_in_a_process(machine(count=0))
    assert answer["usable"] is False
    assert answer["reason"].startswith("the driver shows no device; see nvidia-smi")


@pytest.mark.parametrize("value", ["", "-1"])
def test_devices_that_the_user_has_hidden(machine, value):
    answer = probe_in_a_process(machine(), CUDA_VISIBLE_DEVICES=value)
    assert answer["usable"] is False
    assert answer["reason"].startswith("CUDA_VISIBLE_DEVICES hides every device")


def test_devices_that_nobody_can_count_are_left_to_the_driver(machine):
    answer = probe_in_a_process(machine(init=9))
    assert answer["usable"] is True
    assert answer["details"]["devices"] == "unknown (nvmlInit returned 9)"


def test_kernels_for_other_devices_are_the_wrong_wheel(machine):
    answer = probe_in_a_process(machine(major=8), prelude="installed.nvrtcs = lambda: []")
    assert answer["usable"] is False
    assert answer["reason"].startswith("wrong wheel for this machine: it holds kernels for sm_90, not sm_80")
    assert "install NVRTC" in answer["reason"]


def test_a_compiler_makes_up_for_kernels_that_are_not_there(machine):
    answer = probe_in_a_process(
        machine(major=8),
        prelude="installed.fatbin = lambda: None; installed.nvrtcs = lambda: [installed.Nvrtc('libnvrtc.so.12', 12)]",
    )
    assert answer["usable"] is True
    assert answer["details"]["nvrtc"] == "libnvrtc.so.12"


def test_neither_kernels_nor_a_compiler(machine):
    answer = probe_in_a_process(machine(), prelude="installed.fatbin = lambda: None; installed.nvrtcs = lambda: []")
    assert answer["usable"] is False
    assert answer["reason"].startswith("kvcore-cuda was built without compiled kernels; install NVRTC")


def test_a_library_for_another_processor_is_the_wrong_wheel(machine, tmp_path):
    other = 183 if platform.machine() == "x86_64" else 62
    (tmp_path / "_native.so").write_bytes(struct.pack("<4s14xH", b"\x7fELF", other))
    prelude = f"installed.native_path = lambda: Path({str(tmp_path / '_native.so')!r})"
    answer = probe_in_a_process(machine(), prelude=prelude)
    assert answer["usable"] is False
    assert answer["reason"].startswith("wrong wheel for this machine: _native.so is for ")


def test_a_package_without_its_library(machine, tmp_path):
    prelude = f"installed.native_path = lambda: Path({str(tmp_path / '_native.so')!r})"
    answer = probe_in_a_process(machine(), prelude=prelude)
    assert answer["usable"] is False
    assert "installed without its native library" in answer["reason"]


def test_a_rocm_build_of_torch_belongs_to_the_backend_rocm(machine):
    answer = probe_in_a_process(machine(), prelude=TORCH.format("rocm", "2.13.0+rocm7.0"))
    assert answer["usable"] is False
    assert answer["details"]["torch"] == "ROCm build 2.13.0+rocm7.0"
    assert "belongs to the backend rocm" in answer["reason"]


def test_a_driver_that_is_named_is_taken_instead(machine):
    folder = machine(version=13000)
    answer = probe_in_a_process(KVCORE_CUDA_DRIVER=str(folder / "libcuda.so.1"))
    assert answer["usable"] is True
    assert "whatever KVCORE_CUDA_DRIVER shows" in answer["reason"]
