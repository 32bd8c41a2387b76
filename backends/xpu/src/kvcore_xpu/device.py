"""The library of this process, with Intel's GPUs as its devices or with the processor as the only one."""

from __future__ import annotations

import functools
from typing import Any

from kvcore import settings
from kvcore.errors import BackendLoadError
from kvcore.hookspecs import op_names
from kvcore.kernels.native import NativeOps
from kvcore.kernels.vendor import DeviceInfo, VendorLibrary
from kvcore_xpu import build
from kvcore_xpu.tuning import tuning

__all__ = ["device", "hooks"]

_GROUPS_OF_32_LANES = ("encode_symbols", "decode_symbols")

_NONE = {
    "gpu": "Level Zero shows no Intel GPU; check the driver and the access to /dev/dri (kvcore doctor)",
    "cpu": "OpenCL shows no processor; OCL_ICD_FILENAMES must name libintelocl.so before OpenCL is first used",
}


@functools.cache
def device(kind: str = "gpu") -> VendorLibrary:
    """Return the library, compiled when it is first asked for; its kernels are when a device is first used.

    Parameters
    ----------
    kind : {"gpu", "cpu"}

    Raises
    ------
    BackendLoadError
        Something is not installed, does not compile or does not load; or there is no device.
    """
    width = settings.current().xpu_sub_group
    build.prepare(kind)

    def image(library: VendorLibrary, info: DeviceInfo) -> bytes:
        return build.image(library.kernels, width, kind)

    device_type = "xpu" if kind == "gpu" else "xpu_cpu"
    made = VendorLibrary(build.library(kind, width), device_type, driver=kind, image=image, tuning=tuning)
    if made.count() == 0:
        raise BackendLoadError(_NONE[kind])
    return made


def hooks(kind: str) -> dict[str, Any]:
    """Return by name the ops of the C ABI that the sub-groups are wide enough for."""
    ops = NativeOps(device(kind))
    narrow = settings.current().xpu_sub_group < 32
    names = [op for op in op_names() if not (narrow and op in _GROUPS_OF_32_LANES)]
    return {f"kvcore_op_{op}": getattr(ops, f"kvcore_op_{op}") for op in names}
