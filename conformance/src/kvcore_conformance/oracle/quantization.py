"""Quantise, dequantise, rotate: one element at a time, one rounding per operation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import Quantized, QuantSpec
from kvcore.errors import QuantizationError
from kvcore_conformance.oracle.digest import G, mix
from kvcore_conformance.oracle.numbers import (
    FORMATS,
    Format,
    f32,
    groups,
    hold,
    policy,
    read,
    read_all,
    write,
    write_bits,
)

__all__ = ["dequantize", "quantize", "rotate"]

Array = npt.NDArray[Any]
_LOW, _HIGH = 2.0**-100, 2.0**125


def _code_max(spec: QuantSpec) -> float:
    if spec.kind == "int":
        return float(2 ** (spec.bits - 1) - 1)
    if spec.kind == "affine":
        return float(2**spec.bits - 1)
    if spec.kind == "fp8":
        return _fp8(spec).largest
    return max(abs(level) for level in spec.levels)


def _fp8(spec: QuantSpec) -> Format:
    return FORMATS[str(spec.code_dtype)]


def _check_scales(scale: Array) -> None:
    for at, value in read_all(scale).items():
        if not _LOW <= value <= _HIGH:  # a NaN is not within either
            raise QuantizationError(f"scale{list(at)} is {value}")


def quantize(
    x: Array, spec: QuantSpec, *, scale: Array | None = None, nonfinite: str = "error", out: Quantized
) -> None:
    """Each group by itself: a scale, its reciprocal, then each code."""
    values = policy(x, nonfinite)
    if scale is not None:
        _check_scales(scale)
    q = _code_max(spec)
    reciprocal = f32(1.0 / q)
    for at, members in groups(x.shape, spec.axes):
        finite = [values[m] if math.isfinite(values[m]) else 0.0 for m in members]
        low, high = min(finite), max(finite)
        absmax = max(abs(low), abs(high))
        if scale is not None:
            step = read(scale, at)
        elif spec.kind == "affine":
            spread = f32(f32(high * reciprocal) - f32(low * reciprocal))
            step = max(spread, f32(absmax * 2.0**-20))
        else:
            step = f32(absmax * reciprocal)
        if step < _LOW:
            step = 1.0
        step = min(step, _HIGH)
        inverse = f32(1.0 / step)
        zero = 0
        if spec.kind == "affine":
            zero = -round(f32(low * inverse))
            write(out.zero, at, zero)
        write(out.scale, at, step)
        for m in members:
            scaled = hold(f32(values[m] * inverse), values[m])
            if spec.kind == "fp8":
                write_bits(out.codes, m, _fp8(spec).encode(scaled))
            elif spec.kind == "codebook":
                middles = [f32(f32(a + b) * 0.5) for a, b in pairwise(spec.levels)]
                held = 0.0 if abs(scaled) < 2.0**-30 else scaled
                write(out.codes, m, sum(held > middle for middle in middles))
            elif spec.kind == "affine":
                write(out.codes, m, min(max(round(scaled) + zero, 0), int(q)))
            else:
                write(out.codes, m, min(max(round(scaled), -int(q)), int(q)))


def dequantize(q: Quantized, spec: QuantSpec, *, dtype: object = None, out: Array) -> None:
    """One product in float32, one rounding to the output."""
    _check_scales(q.scale)
    codes = read_all(q.codes)
    if spec.kind == "codebook":
        for at, code in codes.items():
            if code >= len(spec.levels):
                raise QuantizationError(f"codes{list(at)} is {code}, of {len(spec.levels)} levels")
    for at, code in codes.items():
        group = tuple(0 if i in spec.axes else n for i, n in enumerate(at))
        scale = read(q.scale, group)
        if spec.kind == "affine":
            value = f32(code - read(q.zero, group))
        elif spec.kind == "codebook":
            value = spec.levels[int(code)]
        else:
            value = code
        write(out, at, hold(f32(value * scale), value, scale))


def rotate(x: Array, *, seed: int, block: int, inverse: bool = False, dtype: object = None, out: Array) -> None:
    """Signs, butterflies in order, one multiply; signs last for the inverse."""
    values = policy(x, "error")
    for at, value in values.items():
        if abs(value) > 2.0**100:
            raise QuantizationError(f"x{list(at)} is {value}, beyond 2**100")
    factor = f32(1.0 / math.sqrt(block))
    signs = [-1.0 if mix(seed + (c + 1) * G) >> 63 else 1.0 for c in range(x.shape[-1])]
    for row in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], block):
            channels = range(start, start + block)
            v = [0.0 if abs(values[(*row, c)]) < 2.0**-90 else values[(*row, c)] for c in channels]
            if not inverse:
                v = [value * signs[c] for value, c in zip(v, channels, strict=True)]
            h = 1
            while h < block:
                for i in range(block):
                    if not i & h:
                        v[i], v[i + h] = f32(v[i] + v[i + h]), f32(v[i] - v[i + h])
                h *= 2
            for value, c in zip(v, channels, strict=True):
                write(out, (*row, c), f32(value * factor) * (signs[c] if inverse else 1.0))
