"""The devices of this process: the library, over NVIDIA's driver."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

from kvcore.errors import BackendLoadError, UnsupportedOpError
from kvcore.kernels.runtime_abi import TuningStruct
from kvcore.kernels.vendor import DeviceInfo, VendorLibrary
from kvcore.plugins.elf import wrong_machine
from kvcore_cuda import installed
from kvcore_cuda.images import images
from kvcore_cuda.installed import Fatbin
from kvcore_cuda.tuning import tuning

__all__ = ["DEVICE_TYPE", "current", "device", "open_library"]

DEVICE_TYPE = "cuda"


@functools.lru_cache(maxsize=1)
def device() -> VendorLibrary:
    """Return the library of this process.

    Raises
    ------
    BackendLoadError
        The library or the driver is missing or does not fit, or the driver shows no device.
    """
    return open_library(installed.driver_name(), installed.fatbin())


def current() -> tuple[int, int] | None:
    """Return torch's current device and its stream, or None where torch uses no NVIDIA device."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.version, "cuda", None) is None or not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream()
    return stream.device_index, stream.cuda_stream


def open_library(driver: str, fatbin: Fatbin | None, cache: Path | None = None) -> VendorLibrary:
    """Return a library over a driver.

    Parameters
    ----------
    driver : str
        Path or name of ``libcuda.so.1``.
    fatbin : Fatbin, optional
        Kernels that are compiled already.
    cache : Path, optional
        Folder of compiled kernels; default the user's.

    Raises
    ------
    BackendLoadError
        As `device`.
    """
    path = installed.native_path()
    if not path.is_file():
        raise BackendLoadError(
            f"{path} is not there: kvcore-cuda was installed without its native library; reinstall it from a wheel, or "
            "from source where there is a C++17 compiler"
        )
    if built_for := wrong_machine(path):
        raise BackendLoadError(
            f"wrong wheel for this machine: {path} is for {built_for}; reinstall kvcore-cuda with this machine's pip"
        )
    library = VendorLibrary(
        path, DEVICE_TYPE, driver=driver, image=lambda made, info: _load(made, info, fatbin, cache), tuning=tuning
    )
    if library.count() == 0:
        raise BackendLoadError(f"the driver ({driver}) shows no device; see that CUDA_VISIBLE_DEVICES names one")
    library.current = current  # now: what is loaded first is for torch's device, and no other one is woken
    return library


def _load(library: VendorLibrary, info: DeviceInfo, fatbin: Fatbin | None, cache: Path | None) -> bytes:
    """Return the kernels that the driver took: which of several it takes, it alone knows.

    It has them then, and loading them once more does nothing.
    """
    headers = library.dll.kvcore_cuda_headers
    headers.restype = ctypes.c_char_p
    chosen = tuning(info)
    values = TuningStruct(chosen.engine_bytes, chosen.blocks_per_unit, 0)
    compilers, refused = installed.nvrtcs(), []
    for name, make in images(
        *(library.kernels, info.arch, info.driver_version, headers().decode()),
        fatbin=fatbin,
        nvrtcs=compilers,
        folder=cache,
    ):
        try:
            image = make()
            library.call("device_load", info.ordinal, image, len(image), ctypes.byref(values))
        except (BackendLoadError, UnsupportedOpError) as error:
            refused.append(f"{name}: {error}")
        else:
            return image
    if fatbin is None:
        refused.insert(0, "the package holds no compiled kernels")
    if not compilers:
        refused.append("NVRTC was not found")
    shown = f"{info.name}, {info.arch}, driver of CUDA {info.driver_version // 1000}.{info.driver_version % 1000 // 10}"
    raise BackendLoadError(
        f"{DEVICE_TYPE}:{info.ordinal} ({shown}) has no kernels. For them to be compiled on first use, install NVRTC "
        "of the driver's version of CUDA or an earlier one (nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12).\n"
        + "\n".join(refused)
    )
