"""Says whether the NVIDIA backend can run here, and why not: torch, the library, the driver, devices, and kernels."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from kvcore.plugins import Probe
from kvcore.plugins.elf import wrong_machine
from kvcore.plugins.torch_build import TorchBuild, torch_build
from kvcore.settings import current
from kvcore_cuda import installed

__all__ = ["probe"]

_OLDEST = 11080  # CUDA 11.8, as csrc/cuda.hpp has it
_MANAGEMENT = "libnvidia-ml.so.1"
_KERNEL_DRIVER = Path("/proc/driver/nvidia/gpus")


class _Device(NamedTuple):
    name: str
    arch: str


def probe() -> Probe:
    """Look at torch's build, the library, the driver, the devices and the kernels for them, in this order.

    `cuInit` is left alone on purpose: a process that has called it can no longer fork workers that use the device. The
    devices are counted through NVML, which has no such effect. torch is not imported.
    """
    named, driver = current().cuda_driver, installed.driver_name()
    version, release = _driver_version(driver), ""
    devices: list[_Device] | str = "not looked for"
    if version is not None and not named:
        devices, release = _devices()
    build, packaged, compilers = torch_build(), installed.fatbin(), installed.nvrtcs()
    details = {
        "driver": _driver_text(driver, version, release),
        "devices": devices if isinstance(devices, str) else _listed(devices),
        "torch": str(build or "not installed"),
        "kernels": "none" if packaged is None else f"{' '.join(packaged.archs)} ({packaged.compiler})",
        "nvrtc": compilers[0].path if compilers else "none",
    }
    reason = (
        _torch_reason(build)
        or _native_reason()
        or _driver_reason(driver, version, release)
        or ("" if named else _device_reason(devices))
        or _kernel_reason(devices, bool(compilers))
    )
    if reason:
        return Probe(False, reason, details)
    shown = "whatever KVCORE_CUDA_DRIVER shows" if named else details["devices"]
    return Probe(True, f"devices: {shown}; driver {details['driver']}; kernels {details['kernels']}", details)


# --- what there is


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _driver_version(driver: str) -> int | None:
    """Return 13000 for a driver of CUDA 13.0, 0 for a library that is none; None where none loads."""
    library = _load(driver)
    if library is None:
        return None
    number = ctypes.c_int(0)
    try:
        return number.value if library.cuDriverGetVersion(ctypes.byref(number)) == 0 else 0
    except AttributeError:
        return 0


def _driver_text(driver: str, version: int | None, release: str) -> str:
    if version is None:
        return f"{driver} not found"
    return f"{release or driver} (CUDA {_of_cuda(version)})"


def _of_cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _devices() -> tuple[list[_Device] | str, str]:
    """Return the devices that may be seen, or how many there are, or why nobody knows; and the driver's release."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return "hidden by CUDA_VISIBLE_DEVICES", ""
    nvml = _load(_MANAGEMENT)
    if nvml is None:
        try:
            count = sum(1 for _ in _KERNEL_DRIVER.iterdir())
        except OSError:
            count = 0
        return (str(count), "") if count else (f"none ({_MANAGEMENT} not found)", "")
    status = nvml.nvmlInit_v2()
    if status != 0:
        return f"unknown (nvmlInit returned {status})", ""
    try:
        text = ctypes.create_string_buffer(80)
        release = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0 else ""
        count_ = ctypes.c_uint(0)
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count_))
        if status != 0:
            return f"unknown (nvmlDeviceGetCount returned {status})", release
        return [_device(nvml, index) for index in range(count_.value)], release
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, index: int) -> _Device:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return _Device("a device", "")
    name = text.value.decode("utf-8", "replace") if nvml.nvmlDeviceGetName(handle, text, len(text)) == 0 else "a device"
    status = nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return _Device(name, f"sm_{major.value}{minor.value}" if status == 0 else "")


def _listed(devices: list[_Device]) -> str:
    words = [f"{device.name} {device.arch}".strip() for device in devices]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words)) or "none"


# --- what is wrong with it


def _torch_reason(build: TorchBuild | None) -> str:
    if build is None or build.kind != "rocm":
        return ""
    return (
        "torch is built for ROCm, and what it calls cuda belongs to the backend rocm; "
        "for NVIDIA devices install torch's build for CUDA"
    )


def _native_reason() -> str:
    library = installed.native_path()
    if not library.is_file():
        return (
            f"kvcore-cuda was installed without its native library ({library.name} missing); reinstall it from a "
            "wheel, or from source where there is a C++17 compiler"
        )
    built_for = wrong_machine(library)
    if not built_for:
        return ""
    return f"wrong wheel for this machine: {library.name} is for {built_for}; reinstall kvcore-cuda with its own pip"


def _driver_reason(driver: str, version: int | None, release: str) -> str:
    if version is None:
        return f"NVIDIA's driver, {driver}, was not found; install it, or give a container its GPUs (--gpus all)"
    if version >= _OLDEST:
        return ""
    return (
        f"driver {release or driver} is of CUDA {_of_cuda(version)}, and {_of_cuda(_OLDEST)} is needed; "
        "update NVIDIA's driver to 520 or later"
    )


def _device_reason(devices: list[_Device] | str) -> str:
    if devices and not (isinstance(devices, str) and devices.startswith(("none", "hidden"))):
        return ""  # an unknown number may be some: the driver says so when it is opened
    if isinstance(devices, str) and devices.startswith("hidden"):
        return "CUDA_VISIBLE_DEVICES hides every device; unset it, or let it name one"
    return "the driver shows no device; see nvidia-smi, and that a container was given its GPUs"


def _kernel_reason(devices: list[_Device] | str, has_compiler: bool) -> str:
    packaged = installed.fatbin()
    if has_compiler:
        return ""
    fix = "install NVRTC, which compiles them on first use (nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for CUDA 12)"
    if packaged is None:
        return f"kvcore-cuda was built without compiled kernels; {fix}"
    archs = [] if isinstance(devices, str) else [device.arch for device in devices if device.arch]
    if archs and not any(packaged.has(arch) for arch in archs):
        return f"wrong wheel for this machine: it holds kernels for {' '.join(packaged.archs)}, not {archs[0]}; {fix}"
    return ""
