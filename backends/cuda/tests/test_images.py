"""Where kernels come from: the package, else NVRTC; and what is said when neither will do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvcore.errors import BackendLoadError
from kvcore.kernels.images import device_source
from kvcore_cuda import installed
from kvcore_cuda.images import compile_with
from kvcore_cuda.installed import Fatbin

ARCHS = ("75", "80", "86", "89", "90", "100", "120")


def held(*archs):
    return Fatbin(Path("kernels.fatbin"), archs, "nvcc", "")


@pytest.mark.parametrize(
    ("archs", "arch", "expected"),
    [
        (("sm_90",), "sm_90", True),
        (("sm_80",), "sm_86", True),  # of one family, and later
        (("sm_86",), "sm_80", False),
        (("sm_86",), "sm_87", False),  # of a family of its own
        (("sm_80",), "sm_90", False),
        (("sm_90", "compute_90"), "sm_100", True),  # translated by the driver
        (("compute_120",), "sm_103", False),
        (("sm_100",), "sm_103", True),
        (("sm_120",), "sm_121-simulated", True),
        (("sm_90",), "gfx90a", False),
    ],
)
def test_what_an_image_has_code_for(archs, arch, expected):
    assert held(*archs).has(arch) is expected


def library():
    found = ctypes.CDLL(str(installed.native_path()))
    found.kvcore_kernel_list.restype = ctypes.c_char_p
    return found.kvcore_kernel_list().decode()


@pytest.mark.parametrize("arch", [a if a == "90" else pytest.param(a, marks=pytest.mark.slow) for a in ARCHS])
def test_nvrtc_compiles_every_kernel(arch, tmp_path):
    compilers = installed.nvrtcs()
    if not compilers:
        pytest.skip("NVRTC is not installed")
    kernels = library()
    made = compile_with(compilers[0].path, device_source(kernels), f"sm_{arch}", tmp_path)
    assert made[:4] == b"\x7fELF"
    for line in kernels.splitlines():
        assert b".text." + line.split("\t")[0].encode() + b"\0" in made
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def test_an_architecture_that_nvrtc_does_not_know(tmp_path):
    compilers = installed.nvrtcs()
    if not compilers:
        pytest.skip("NVRTC is not installed")
    with pytest.raises(BackendLoadError, match=r"did not compile .*--gpu-architecture=sm_10.*INVALID_OPTION"):
        compile_with(compilers[0].path, device_source(""), "sm_10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def reason(in_a_process, prelude="", **environ):
    """Return why the native library is not taken, where nothing else may be."""
    code = f"""
{prelude}
try:
    kvcore.open_backend("cuda", fallback="error")
except kvcore.BackendLoadError as error:
    print(error)
"""
    return in_a_process(code, KVCORE_KERNELS="*=native", **environ)


def test_those_of_triton_are_asked_next_and_say_why_not_either(in_a_process):
    pytest.importorskip("triton")
    code = """
installed.nvrtcs = lambda: []
try:
    kvcore.open_backend("cuda", fallback="error")
except kvcore.BackendLoadError as error:
    print(error)
"""
    said = in_a_process(code, SIMULATED_CUDA_ARCH="61")  # which torch, whose driver is another one, does not see
    assert "no implementation loads: native: cuda:0 (simulated device, sm_61-simulated" in said
    assert "triton: torch" in said


def test_an_architecture_without_kernels_names_what_there_is_and_the_fix(in_a_process):
    said = reason(in_a_process, "installed.nvrtcs = lambda: []", SIMULATED_CUDA_ARCH="61")
    assert "cuda:0 (simulated device, sm_61-simulated, driver of CUDA 13.0) has no kernels" in said
    assert "they are for sm_90" in said
    assert "NVRTC was not found" in said
    assert "install NVRTC" in said


def test_kernels_that_the_driver_refuses_are_compiled_instead(simulated, in_a_process, tmp_path):
    """An NVRTC is not needed for it: that there is one, and is asked, is what shows."""
    prelude = f"""
import ctypes
ctypes.CDLL({str(simulated())!r}).simulated_set(b"refuse_fatbin", ctypes.c_int64(1))
installed.nvrtcs = lambda: [installed.Nvrtc("libnvrtc.so.0", 12)]
"""
    said = reason(in_a_process, prelude)
    assert "the package's kernels: " in said
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in said
    assert "libnvrtc.so.0" in said


def test_a_compiler_newer_than_the_driver_is_left_alone(in_a_process):
    prelude = 'found = None; installed.nvrtcs = lambda: [installed.Nvrtc("libnvrtc.so.13", 13)]'
    said = reason(in_a_process, prelude, SIMULATED_CUDA_VERSION="12040")
    assert "the package holds no compiled kernels" in said
    assert "libnvrtc.so.13: it is of CUDA 13, and the driver of 12" in said


def test_kernels_of_other_sources_than_the_library_are_not_loaded(in_a_process):
    said = reason(in_a_process, 'found = found._replace(headers="other"); installed.nvrtcs = lambda: []')
    assert "they are of other sources than the library; build them again" in said


def test_a_driver_that_is_too_old(in_a_process):
    code = """
try:
    device.open_library(installed.driver_name(), None)
except kvcore.BackendLoadError as error:
    print(error)
"""
    said = in_a_process(code, SIMULATED_CUDA_VERSION="11020")
    assert "is a driver for CUDA 11.2; 11.8 is needed: update NVIDIA's driver to 520 or later" in said


def test_a_library_that_is_no_driver(in_a_process):
    code = """
try:
    device.open_library(str(installed.native_path()), None)
except kvcore.BackendLoadError as error:
    print(error)
"""
    assert "has no cuDriverGetVersion, so it is no driver" in in_a_process(code)


def test_a_driver_without_a_device(in_a_process):
    code = """
try:
    device.open_library(installed.driver_name(), None)
except kvcore.BackendLoadError as error:
    print(error)
"""
    assert "shows no device; see that CUDA_VISIBLE_DEVICES names one" in in_a_process(code, SIMULATED_CUDA_DEVICES="0")
