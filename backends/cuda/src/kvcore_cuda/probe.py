"""Says whether the NVIDIA backend can run here: not yet, and what was found of driver, devices and torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys

from kvcore.plugins import Probe

__all__ = ["probe"]

_NO_KERNELS = "this release of kvcore-cuda contains no kernels; cpu_ref does every op on the host"


def probe() -> Probe:
    """Look for the driver, its devices and the kind of torch; imports neither torch nor initialises CUDA.

    `cuInit` is left alone on purpose: a process that has called it can no longer fork workers that use the
    device. The devices are counted through NVML, which has no such effect.
    """
    details = {"driver": _driver(), "devices": _devices(), "torch": _torch_build()}
    found = f"driver {details['driver']}, devices: {details['devices']}, torch: {details['torch']}"
    if details["torch"].startswith("ROCm"):
        found += "; a ROCm build of torch belongs to the backend rocm"
    return Probe(False, f"{_NO_KERNELS} (found: {found})", details)


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _driver() -> str:
    return "libcuda.so.1 not found" if _load("libcuda.so.1") is None else "libcuda.so.1 present"


def _devices() -> str:
    """Return the number of devices that the driver shows, before ``CUDA_VISIBLE_DEVICES`` narrows it."""
    nvml = _load("libnvidia-ml.so.1")
    if nvml is None:
        return "none (libnvidia-ml.so.1 not found)"
    status = nvml.nvmlInit_v2()
    if status != 0:
        return f"unknown (nvmlInit returned {status})"
    try:
        count = ctypes.c_uint(0)
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return str(count.value) if status == 0 else f"unknown (nvmlDeviceGetCount returned {status})"
    finally:
        nvml.nvmlShutdown()


def _torch_build() -> str:
    """Return what torch was built for: from its metadata, and from torch itself only if it is loaded."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    local = version.partition("+")[2]
    if getattr(torch_version, "hip", None) or local.startswith("rocm"):
        return f"ROCm build {version}"
    if getattr(torch_version, "cuda", None) or local.startswith("cu"):
        return f"CUDA build {version}"
    return f"{version}" if torch_version is None and not local else f"build without CUDA {version}"
