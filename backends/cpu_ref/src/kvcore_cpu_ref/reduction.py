"""Reductions: order-free, or in an order that is part of the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import hookimpl
from kvcore.errors import QuantizationError
from kvcore_cpu_ref.floats import NAN32, Float32, apply_policy, widen

__all__ = [
    "kvcore_op_reduce_absmax",
    "kvcore_op_reduce_minmax",
    "kvcore_op_reduce_moments",
    "kvcore_op_reduce_norm",
]

Axes = tuple[int, ...]


@hookimpl
def kvcore_op_reduce_absmax(
    x: npt.NDArray[Any],
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Float32,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    out[...] = absmax(apply_policy(x, nonfinite), axes)
    return out


@hookimpl
def kvcore_op_reduce_minmax(
    x: npt.NDArray[Any],
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Float32,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    out[0], out[1] = minmax(apply_policy(x, nonfinite), axes)
    return out


@hookimpl
def kvcore_op_reduce_moments(
    x: npt.NDArray[Any],
    exponent: npt.NDArray[np.int32],
    *,
    axes: tuple[int, ...],
    out: npt.NDArray[np.int64],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    with np.errstate(invalid="ignore"):  # a signalling NaN; it is refused below like any other
        values = x.astype(np.float64) if x.dtype == np.int16 else widen(x).astype(np.float64)
    if not np.isfinite(values).all():
        raise QuantizationError("x has a NaN or infinity; moments are those of finite values")
    # float64 holds x * 2**e exactly unless it is far below one half (rounds to 0) or far above int16 (refused).
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.rint(np.ldexp(values, exponent))
    if scaled.size and (scaled.min() < -32768 or scaled.max() > 32767):
        worst = float(np.abs(scaled).max())
        raise QuantizationError(
            f"x * 2**exponent rounds to a magnitude of {worst:.0f}, beyond int16; lower the exponent"
        )
    q = scaled.astype(np.int64)
    out[0] = q.sum(axis=axes, keepdims=True)
    out[1] = (q * q).sum(axis=axes, keepdims=True)
    return out


@hookimpl
def kvcore_op_reduce_norm(
    x: npt.NDArray[Any],
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Float32,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    values = apply_policy(x, nonfinite)
    largest = absmax(values, axes)
    # frexp gives a mantissa in [1/2, 1); the specification's exponent is that of a mantissa in [1, 2).
    exponent = np.clip(np.frexp(np.where(np.isfinite(largest), largest, 1))[1] - 1, -126, 126)
    finite = np.where(np.isfinite(values), values, np.float32(0))
    scaled = np.ldexp(finite.astype(np.float64), -exponent).astype(np.float32)
    scaled[np.abs(scaled) < 2.0**-24] = 0
    # Groups with an infinity are not scaled, and may overflow here; their result is taken from `largest`.
    with np.errstate(over="ignore"):
        squares = tree_sum(scaled * scaled, axes)
        norm = np.ldexp(np.sqrt(squares), exponent)
    norm[largest < 2.0**-126] = 0
    out[...] = np.where(np.isfinite(largest), norm, largest)
    return out


def absmax(values: Float32, axes: Axes) -> Float32:
    """Largest magnitude, axes kept; NaN if there is one."""
    return _canonical(np.abs(values).max(axis=axes, keepdims=True))


def minmax(values: Float32, axes: Axes) -> tuple[Float32, Float32]:
    """Smallest and largest value, axes kept; NaN if there is one."""
    return _canonical(values.min(axis=axes, keepdims=True)), _canonical(values.max(axis=axes, keepdims=True))


def tree_sum(values: Float32, axes: Axes) -> Float32:
    """Sum over axes (kept) in the fixed order of the specification: upper half onto lower half, until one is left."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(values.shape))
    others = [i for i in range(values.ndim) if i not in axes]
    rows = values.transpose(*others, *axes)
    count = math.prod(values.shape[i] for i in axes)
    rows = rows.reshape(*(values.shape[i] for i in others), count)
    size = 1 << math.ceil(math.log2(count))
    rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], size - count), np.float32)], axis=-1)
    while size > 1:
        size //= 2
        rows = rows[..., :size] + rows[..., size:]
    return rows.reshape(kept)


def _canonical(result: Float32) -> Float32:
    """One zero, one NaN: which of several equal candidates a maximum returns must not show."""
    with np.errstate(invalid="ignore"):  # adding to a signalling NaN
        return np.where(np.isnan(result), NAN32, result + np.float32(0)).astype(np.float32)
