"""Ops in Triton's language, for devices that the native library has no kernels for; torch and Triton come with it."""

from __future__ import annotations

from kvcore.kernels.triton import TWINS
from kvcore.kernels.triton.device import TorchOwner
from kvcore.kernels.triton.ops import TritonOps
from kvcore_rocm.device import device

_ops = TritonOps(TorchOwner(device()))

for _op in TWINS:
    globals()[f"kvcore_op_{_op}"] = getattr(_ops, f"kvcore_op_{_op}")
