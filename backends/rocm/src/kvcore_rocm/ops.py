"""The ops of the native library, as `kvcore.hookspecs` has them."""

from __future__ import annotations

from kvcore.hookspecs import op_names
from kvcore.kernels.native import NativeOps
from kvcore_rocm.device import device

_device = device()
_device.load(_device.ordinal())  # now: where it has no kernels for the device, other implementations serve instead
_ops = NativeOps(_device)

for _op in op_names():
    globals()[f"kvcore_op_{_op}"] = getattr(_ops, f"kvcore_op_{_op}")
