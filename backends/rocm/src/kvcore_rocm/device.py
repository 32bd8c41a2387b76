"""The devices of this process: the library for the width of their warps, over HIP's runtime."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels.images import headers_hash
from kvcore.kernels.vendor import DeviceInfo, VendorLibrary
from kvcore.plugins.elf import wrong_machine
from kvcore_rocm import installed
from kvcore_rocm.images import image
from kvcore_rocm.tuning import tuning

__all__ = ["DEVICE_TYPE", "current", "device", "open_library"]

DEVICE_TYPE = "cuda"
"""As torch names AMD's devices."""


@functools.lru_cache(maxsize=1)
def device() -> VendorLibrary:
    """Return the library of this process; it serves the devices whose warps are as wide as the current one's.

    Raises
    ------
    BackendLoadError
        The library or HIP's runtime is missing or does not fit, or HIP shows no device.
    """
    driver = installed.driver_path()
    if not driver:
        raise BackendLoadError("HIP's runtime, libamdhip64.so, was not found; install ROCm 5.2 or later")
    return open_library(driver)


def current() -> tuple[int, int] | None:
    """Return torch's current device and its stream, or None where torch uses no AMD device."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.version, "hip", None) is None or not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream()
    return stream.device_index, stream.cuda_stream


def open_library(driver: str, cache: Path | None = None) -> VendorLibrary:
    """Return a library over a HIP runtime.

    Parameters
    ----------
    driver : str
        Path or name of ``libamdhip64.so``.
    cache : Path, optional
        Folder of compiled kernels; default the user's.

    Raises
    ------
    BackendLoadError
        As `device`.
    """
    library = _open(installed.WIDTHS[0], driver, cache)
    if library.count() == 0:
        raise BackendLoadError(
            f"HIP ({driver}) shows no device; see that HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES name one, and that "
            "/dev/kfd may be opened"
        )
    width = library.info(library.ordinal()).warp_width
    return library if width == installed.WIDTHS[0] else _open(width, driver, cache)


def _open(width: int, driver: str, cache: Path | None) -> VendorLibrary:
    path = installed.native_path(width)
    if not path.is_file():
        raise BackendLoadError(
            f"{path} is not there: kvcore-rocm was installed without its native library; reinstall it from a wheel, or "
            "from source where there is a C++17 compiler"
        )
    if built_for := wrong_machine(path):
        raise BackendLoadError(
            f"wrong wheel for this machine: {path} is for {built_for}; reinstall kvcore-rocm with this machine's pip"
        )
    library = VendorLibrary(
        path, DEVICE_TYPE, driver=driver, image=lambda made, info: _image(made, info, width, cache), tuning=tuning
    )
    library.current = current  # now: what is loaded first is for torch's device, and no other one is woken
    return library


def _image(library: VendorLibrary, info: DeviceInfo, width: int, cache: Path | None) -> bytes:
    if info.warp_width != width:
        raise BackendLoadError(
            f"{DEVICE_TYPE}:{info.ordinal} ({info.name}, {info.arch}) has warps of {info.warp_width} threads, and this "
            f"process serves those of {width}, as its first device has; let HIP_VISIBLE_DEVICES show one kind"
        )
    headers = library.dll.kvcore_rocm_headers
    headers.restype = ctypes.c_char_p
    if headers().decode() != headers_hash():
        raise BackendLoadError(
            "the kernels of the installed kvcore are not those that kvcore-rocm was built from; install both of one "
            "release"
        )
    return image(library.kernels, info.arch, cache)
