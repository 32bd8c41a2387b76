"""Re-position keys, or take RoPE off."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import hookimpl
from kvcore_cpu_ref.floats import Float32, narrow, widen

__all__ = ["kvcore_op_shift_rope"]


@hookimpl
def kvcore_op_shift_rope(
    x: npt.NDArray[Any],
    cos: Float32,
    sin: Float32,
    *,
    interleaved: bool = False,
    out: npt.NDArray[Any],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    pairs = cos.shape[1]
    first = np.arange(pairs) * 2 if interleaved else np.arange(pairs)
    second = first + (1 if interleaved else pairs)
    values = widen(x)
    plain = x if x.dtype == out.dtype else narrow(values, out.dtype)  # exact: out is float32 where the dtypes differ
    a, b = values[..., first], values[..., second]
    c, s = cos[:, None, :], sin[:, None, :]  # over heads
    same = np.broadcast_to((c == 1) & (s == 0), a.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        rotated_a = narrow(_settle(a * c - b * s, a, b), out.dtype)
        rotated_b = narrow(_settle(b * c + a * s, a, b), out.dtype)
    result = plain.copy()
    result[..., first] = np.where(same, plain[..., first], rotated_a)
    result[..., second] = np.where(same, plain[..., second], rotated_b)
    out[...] = result
    return out


def _settle(rotated: Float32, a: Float32, b: Float32) -> Float32:
    """Hold what overflowed float32 from finite input at its largest value; infinities that were there stay."""
    overflow = np.isinf(rotated) & np.isfinite(a) & np.isfinite(b)
    return np.where(overflow, np.copysign(np.finfo(np.float32).max, rotated), rotated).astype(np.float32)
