"""The ops of the emulated device: those of the C ABI that its warps are wide enough for."""

from __future__ import annotations

from kvcore.hookspecs import op_names
from kvcore.kernels.native import NativeOps
from kvcore_emu.device import device

_device = device()
_ops = NativeOps(_device)

_GROUPS_OF_32_LANES = ("encode_symbols", "decode_symbols")

for _op in op_names():
    if _device.warp_width >= 32 or _op not in _GROUPS_OF_32_LANES:
        globals()[f"kvcore_op_{_op}"] = getattr(_ops, f"kvcore_op_{_op}")
