"""Floating-point rules that all numeric ops share: exact widening, one rounding, policies for NaN and infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.dtypes import finite_max
from kvcore.errors import QuantizationError

__all__ = ["NAN32", "Float32", "apply_policy", "narrow", "widen"]

Float32 = npt.NDArray[np.float32]
NAN32 = np.array(0x7FC00000, np.uint32).view(np.float32)


def widen(x: npt.NDArray[Any]) -> Float32:
    """Convert to float32, which holds every fp16, bf16 and fp32 value exactly."""
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet, which is no error here
        return x.astype(np.float32)


def narrow(values: Float32, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round float32 to a float dtype: nearest even, finite values saturate, NaN is the quiet one with sign bit 0."""
    limit = np.float32(finite_max(dtype))
    held = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is replaced below
        rounded = held.astype(dtype)
    rounded[np.isnan(values)] = NAN32.astype(dtype)
    return rounded


def apply_policy(x: npt.NDArray[Any], nonfinite: str, what: str = "x") -> Float32:
    """Widen, and treat NaN and infinities as the policy says; ``"propagate"`` leaves them in."""
    values = widen(x)
    finite = np.isfinite(values)
    if nonfinite == "propagate" or finite.all():
        return values
    if nonfinite == "error":
        position = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise QuantizationError(
            f"{what}{list(position)} is {values[position]}; nonfinite='saturate' holds it at the largest finite value"
        )
    limit = np.float32(finite_max(x.dtype))
    return np.where(np.isnan(values), np.float32(0), np.clip(values, -limit, limit)).astype(np.float32)
