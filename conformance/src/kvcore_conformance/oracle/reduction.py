"""Reductions, element by element in the stated order."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

from kvcore.errors import QuantizationError
from kvcore_conformance.oracle.numbers import f32, groups, policy, read, read_all, write

__all__ = ["reduce_absmax", "reduce_minmax", "reduce_moments", "reduce_norm"]

Array = npt.NDArray[Any]
Axes = tuple[int, ...]


def reduce_absmax(x: Array, axes: Axes, *, nonfinite: str = "error", out: Array) -> None:
    """The largest magnitude; NaN wins over infinity."""
    values = policy(x, nonfinite)
    for at, members in groups(x.shape, axes):
        group = [abs(values[m]) for m in members]
        write(out, at, math.nan if any(map(math.isnan, group)) else max(group))


def reduce_minmax(x: Array, axes: Axes, *, nonfinite: str = "error", out: Array) -> None:
    """Smallest and largest; a NaN makes both NaN, a zero is +0."""
    values = policy(x, nonfinite)
    for at, members in groups(x.shape, axes):
        group = [values[m] for m in members]
        unordered = any(map(math.isnan, group))
        for side, pick in enumerate((min, max)):
            write(out, (side, *at), math.nan if unordered else pick(group) + 0.0)


def reduce_moments(x: Array, exponent: Array, axes: Axes, *, out: Array) -> None:
    """Sums of rint(x * 2**exponent) and of its square."""
    scaled: dict[tuple[int, ...], int] = {}
    for at, value in read_all(x).items():
        power = int(read(exponent, tuple(min(i, n - 1) for i, n in zip(at, exponent.shape, strict=True))))
        if not math.isfinite(value):
            raise QuantizationError(f"x{list(at)} is {value}")
        scaled[at] = _rint_scaled(value, power)
        if not -32768 <= scaled[at] <= 32767:
            raise QuantizationError(f"x{list(at)} * 2**{power} is beyond int16")
    for at, members in groups(x.shape, axes):
        write(out, (0, *at), sum(scaled[m] for m in members))
        write(out, (1, *at), sum(scaled[m] ** 2 for m in members))


def _rint_scaled(value: float, power: int) -> int:
    """Round value * 2**power half to even, in exact integers."""
    numerator, denominator = value.as_integer_ratio()
    if power >= 0:
        numerator <<= min(power, 400)  # 2**400 times anything but 0 is beyond int16 already
    else:
        denominator <<= min(-power, 2000)  # far below one half in any case
    quotient, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and quotient % 2):
        quotient += 1
    return quotient


def reduce_norm(x: Array, axes: Axes, *, nonfinite: str = "error", out: Array) -> None:
    """The root of the sum of squares, halves added until one is left; scaled by the power of two of the largest."""
    values = policy(x, nonfinite)
    for at, members in groups(x.shape, axes):
        group = [values[m] for m in members]
        largest = math.nan if any(map(math.isnan, group)) else max(map(abs, group))
        if not math.isfinite(largest):
            write(out, at, largest)
            continue
        if largest < 2.0**-126:
            write(out, at, 0.0)
            continue
        power = min(max(math.frexp(largest)[1] - 1, -126), 126)
        scaled = [math.ldexp(value, -power) for value in group]
        squares = [f32(v * v) if abs(v) >= 2.0**-24 else 0.0 for v in scaled]
        squares += [0.0] * ((1 << (len(squares) - 1).bit_length()) - len(squares))
        while len(squares) > 1:
            half = len(squares) // 2
            squares = [f32(squares[i] + squares[i + half]) for i in range(half)]
        write(out, at, f32(math.ldexp(f32(math.sqrt(squares[0])), power)))
