"""The ops: all that the C ABI has."""

from __future__ import annotations

from fakevendor.device import device
from kvcore.hookspecs import op_names
from kvcore.kernels.native import NativeOps

_ops = NativeOps(device())
for _op in op_names():
    globals()[f"kvcore_op_{_op}"] = getattr(_ops, f"kvcore_op_{_op}")
