"""Quantise, dequantise, rotate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import Quantized, QuantSpec, hookimpl
from kvcore.dtypes import FLOAT8_E4M3FN
from kvcore.errors import QuantizationError
from kvcore.quant import SCALE_MAX, SCALE_MIN
from kvcore_cpu_ref.digest import GOLDEN, mix
from kvcore_cpu_ref.floats import Float32, apply_policy, narrow
from kvcore_cpu_ref.reduction import absmax, minmax

__all__ = ["kvcore_op_dequantize", "kvcore_op_quantize", "kvcore_op_rotate"]

ONE = np.float32(1)


@hookimpl
def kvcore_op_quantize(
    x: npt.NDArray[Any],
    *,
    spec: QuantSpec,
    scale: Float32 | None = None,
    nonfinite: str = "error",
    out: Quantized,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    values = apply_policy(x, nonfinite)
    zero = None
    if scale is not None:
        _check_scale(scale)
    else:
        finite = np.where(np.isfinite(values), values, np.float32(0))
        scale = _scale(finite, spec)
        if spec.kind == "affine":
            low, _ = minmax(finite, spec.axes) if spec.axes else (finite, finite)
            zero = -np.rint(low * (ONE / scale)).astype(np.int32)
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signalling NaN under "propagate"
        scaled = values * (ONE / scale)
    # A finite value whose product overflows is no infinity: it saturates.
    largest = np.finfo(np.float32).max
    scaled = np.where(np.isfinite(values), np.clip(scaled, -largest, largest), scaled)
    codes = _encode(scaled, zero, spec)
    out.codes[...], out.scale[...] = codes, scale
    if zero is not None:
        out.zero[...] = zero
    return out


@hookimpl
def kvcore_op_dequantize(
    q: Quantized, *, spec: QuantSpec, out: npt.NDArray[Any], stream: Any = None, workspace: Any = None
) -> Any:
    _check_scale(q.scale)
    if spec.kind == "codebook":
        if q.codes.size and q.codes.max() >= len(spec.levels):
            raise QuantizationError(f"code {q.codes.max()} has no level; the codebook has {len(spec.levels)}")
        values = np.array(spec.levels, np.float32)[q.codes]
    elif spec.kind == "affine":
        values = (q.codes.astype(np.int64) - q.zero).astype(np.float32)
    else:
        values = q.codes.astype(np.float32)
    with np.errstate(over="ignore"):
        product = values * q.scale
    # A product of finite factors beyond float32 is a finite value that overflows: it saturates like any other.
    overflow = np.isinf(product) & np.isfinite(values)
    product = np.where(overflow, np.copysign(np.finfo(np.float32).max, values), product).astype(np.float32)
    out[...] = narrow(product, out.dtype)
    return out


@hookimpl
def kvcore_op_rotate(
    x: npt.NDArray[Any],
    *,
    seed: int,
    block: int,
    inverse: bool = False,
    out: npt.NDArray[Any],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    values = apply_policy(x, "error")
    if values.size and np.abs(values).max() > 2.0**100:
        raise QuantizationError(f"rotate takes magnitudes up to 2**100, x has {np.abs(values).max()}")
    values = np.where(np.abs(values) < 2.0**-90, np.float32(0), values)
    signs = rotation_signs(seed, x.shape[-1])
    if not inverse:
        values = values * signs
    v = values.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    h = 1
    while h < block:
        pairs = v.reshape(*v.shape[:-1], block // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack([a + b, a - b], axis=-2).reshape(v.shape)
        h *= 2
    rotated = v.reshape(x.shape) * np.float32(1 / np.sqrt(np.float64(block)))
    if inverse:
        rotated = rotated * signs
    out[...] = narrow(rotated, out.dtype)
    return out


def rotation_signs(seed: int, channels: int) -> Float32:
    """Return the sign of each channel, +1 or -1: bit 63 of a counter mixed with the seed."""
    counter = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(seed)
    return np.where(mix(counter) >> np.uint64(63), np.float32(-1), ONE)


def _scale(finite: Float32, spec: QuantSpec) -> Float32:
    """Return the scale of each group, within SCALE_MIN .. SCALE_MAX, or 1 for groups too small to matter."""
    reciprocal = np.float32(ONE / np.float32(spec.code_max))
    largest = absmax(finite, spec.axes) if spec.axes else np.abs(finite)
    with np.errstate(over="ignore"):  # what overflows is above SCALE_MAX, and is held there
        if spec.kind == "affine":
            low, high = minmax(finite, spec.axes) if spec.axes else (finite, finite)
            scale = np.maximum(high * reciprocal - low * reciprocal, largest * np.float32(2.0**-20))
        else:
            scale = largest * reciprocal
    return np.where(scale < SCALE_MIN, ONE, np.minimum(scale, np.float32(SCALE_MAX))).astype(np.float32)


def _check_scale(scale: Float32) -> None:
    bad = ~((scale >= SCALE_MIN) & (scale <= SCALE_MAX))
    if bad.any():
        raise QuantizationError(f"a scale of {scale[bad].flat[0]} is outside 2**-100 .. 2**125")


def _encode(scaled: Float32, zero: npt.NDArray[np.int32] | None, spec: QuantSpec) -> npt.NDArray[Any]:
    limit = np.float32(spec.code_max)
    if spec.kind == "int":
        return np.clip(np.rint(scaled), -limit, limit).astype(spec.code_dtype)
    if zero is not None:
        shifted: npt.NDArray[np.int64] = np.rint(scaled).astype(np.int64) + zero
        return np.clip(shifted, 0, int(limit)).astype(np.uint8)
    if spec.kind == "codebook":
        levels = np.array(spec.levels, np.float32)
        middles = (levels[:-1] + levels[1:]) * np.float32(0.5)
        scaled = np.where(np.abs(scaled) < 2.0**-30, np.float32(0), scaled)
        # searchsorted counts the middles below a value; one equal to it is not below, so a tie goes down.
        return np.searchsorted(middles, scaled, side="left").astype(np.uint8)
    # An infinity under "propagate" stays one in e5m2; e4m3fn has none, so it becomes NaN there.
    held = np.where(np.isinf(scaled), scaled, np.clip(scaled, -limit, limit))
    codes = held.astype(spec.code_dtype)
    nan = np.isnan(scaled) | (np.isinf(scaled) if spec.code_dtype == FLOAT8_E4M3FN else False)
    codes[nan] = np.array(0x7F if spec.code_dtype == FLOAT8_E4M3FN else 0x7E, np.uint8).view(spec.code_dtype)
    return codes
