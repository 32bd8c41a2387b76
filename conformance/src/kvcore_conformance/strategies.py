"""Hypothesis strategies that reach the hard places of every op. Public: vendors may build their own tests on them.

Arrays come in arenas (`kvcore_conformance.arena`): strided, reversed, transposed, misaligned, with guard bytes around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvcore import QuantSpec
from kvcore.dtypes import DTYPES, finite_max, to_dtype
from kvcore_conformance.arena import place

__all__ = [
    "CHANNELS",
    "FLOATS",
    "byte_arrays",
    "byte_buffers",
    "float_arrays",
    "indices",
    "out_like",
    "palette",
    "placed",
    "quant_specs",
    "shapes",
]

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32")
CHANNELS = (1, 2, 3, 4, 8, 16, 17)
"""Row widths of small inputs; 96 and 128 come with the larger ones."""

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def palette(dtype: object, *, nonfinite: bool = False, small: bool = True) -> Array:
    """Return the values of a float type at which implementations go wrong.

    Zeros of both signs, ties of every rounding in use, the largest finite values, subnormals (unless not `small`), and
    if asked for infinities and several NaNs.
    """
    resolved = to_dtype(dtype)
    limit = finite_max(resolved)
    ties = [n + 0.5 for n in (0, 1, 2, 3, 6, 7, 63, 126, 127, -1, -2, -3, -128)]
    eighths = [1.0625, 1.1875, 1.3125, -1.0625, 17.0, 18.0, 19.0, 0.1, -0.3, 1 / 3]
    plain = [0.0, -0.0, 1.0, -1.0, 2.0, 5.0, 100.0, -127.0, 128.0, *ties, *eighths, 448.0, 464.0, 465.0, 30000.0]
    edge = [limit, -limit, limit / 2, 2.0**-14, -(2.0**-14)]
    tiny = (
        [2.0**-24, -(2.0**-24), 2.0**-16, 1e-38, 2.0**-126, 2.0**-127, -(2.0**-130), 2.0**-133, 2.0**-149]
        if small
        else []
    )
    with np.errstate(over="ignore", under="ignore"):
        values = np.array(plain + edge + tiny, np.float32).astype(resolved)
    values = values[np.isfinite(values.astype(np.float32))]
    if not nonfinite:
        return values
    bits = _UINT[resolved.itemsize]
    top = int(np.array(np.inf, np.float32).astype(resolved).view(bits))
    sign = 1 << (8 * resolved.itemsize - 1)
    specials = np.array([top, top | sign, top + 1, top | sign | 1, *([top | top >> 1] * 2)], bits).view(resolved)
    return np.concatenate([values, specials])


@st.composite
def shapes(
    draw: st.DrawFn, min_dims: int = 1, max_dims: int = 3, limit: int = 48, empty: bool = False
) -> tuple[int, ...]:
    """Draw a small shape; its last axis from `CHANNELS`. `empty` allows an extent of 0 in front."""
    last = draw(st.sampled_from(CHANNELS))
    shape = [last]
    for _ in range(draw(st.integers(min_dims, max_dims)) - 1):
        room = max(1, limit // max(math.prod(shape), 1))
        shape.insert(0, draw(st.integers(0 if empty else 1, min(room, 5))))
    return tuple(shape)


@st.composite
def placed(draw: st.DrawFn, values: Array) -> Array:
    """Place an array in an arena: plain as often as not, else transposed, padded, interleaved or reversed.

    Of either kind, some begin at an odd address, or lie in odd strides.
    """
    shift = draw(st.sampled_from((0, 0, 0, 1, 2, 3)))
    if draw(st.booleans()):
        return place(values, shift=shift)
    order = draw(st.permutations(range(values.ndim)))
    gaps = draw(st.lists(st.integers(0, 3), min_size=values.ndim, max_size=values.ndim))
    flip = draw(st.integers(0, (1 << values.ndim) - 1))
    return place(values, order=order, gaps=gaps, flip=flip, shift=shift)


@st.composite
def out_like(draw: st.DrawFn, shape: Sequence[int], dtype: object) -> Array:
    """Draw an output: somewhere strange in memory, holding bytes that no op would write."""
    resolved = to_dtype(dtype)
    size = math.prod(shape) * resolved.itemsize
    junk = np.random.default_rng(7).integers(0, 256, size, np.uint8)
    return draw(placed(junk.view(resolved).reshape(tuple(shape)) if size else np.empty(tuple(shape), resolved)))


@st.composite
def float_arrays(
    draw: st.DrawFn,
    dtype: object,
    shape: Sequence[int] | None = None,
    *,
    nonfinite: bool = False,
    small: bool = True,
    magnitude: float | None = None,
) -> Array:
    """Draw floats, placed: any bit pattern, hard values mixed, ordinary values, or one value throughout.

    Parameters
    ----------
    dtype
        float16, bfloat16 or float32.
    shape : sequence of int, optional
    nonfinite : bool
        Infinities and NaNs among them.
    small : bool
        Subnormals and values near them among them.
    magnitude : float, optional
        An upper bound, for ops that have one.
    """
    resolved = to_dtype(dtype)
    extents = tuple(draw(shapes())) if shape is None else tuple(shape)
    count = math.prod(extents)
    kind = draw(st.sampled_from(("ordinary", "palette", "bits", "ordinary", "constant", "mixture")))
    choices = palette(resolved, nonfinite=nonfinite, small=small)
    picks = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    seed = draw(st.integers(0, 255))
    hard = choices[picks % len(choices)]
    if kind == "constant":
        hard = np.repeat(choices[seed % len(choices)], count).astype(resolved)
    ordinary = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * np.float32(2.0 ** (seed % 7))
    if kind == "bits":
        bits = np.random.default_rng(seed).integers(0, 1 << 8 * resolved.itemsize, count, _UINT[resolved.itemsize])
        values = bits.view(resolved)
    elif kind == "ordinary":
        values = ordinary.astype(resolved)
    else:
        values = np.where(picks % 4 == 0, hard, ordinary.astype(resolved)) if kind == "mixture" else hard
    values = np.array(values)
    wide = values.astype(np.float32)
    if not nonfinite:
        values[~np.isfinite(wide)] = 1
    if not small:
        values[(np.abs(wide) < 2.0**-40) & (wide != 0)] = 1
    if magnitude is not None:
        values[np.isfinite(wide) & (np.abs(wide) > magnitude)] = 1
    return draw(placed(values.reshape(extents)))


@st.composite
def byte_arrays(draw: st.DrawFn, dtype: str, shape: Sequence[int], low: int, high: int) -> Array:
    """Draw 8-bit integers within low .. high, placed; the ends more often than by chance."""
    count = math.prod(shape)
    picks = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8).astype(np.int64)
    values = np.where(picks % 8 == 7, high, np.where(picks % 8 == 6, low, low + picks % (high - low + 1)))
    return draw(placed(values.astype(DTYPES[dtype]).reshape(tuple(shape))))


@st.composite
def byte_buffers(draw: st.DrawFn, max_count: int = 4) -> list[Array]:
    """Draw contiguous byte buffers of awkward sizes, empty ones among them, perhaps none at all."""
    sizes = draw(
        st.lists(st.sampled_from((0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 100, 255, 256, 257)), max_size=max_count)
    )
    return [
        place(np.frombuffer(draw(st.binary(min_size=n, max_size=n)), np.uint8), seed=i) for i, n in enumerate(sizes)
    ]


@st.composite
def indices(
    draw: st.DrawFn, count: int, limit: int, *, distinct: bool = False, holes: bool = True, bad: bool = False
) -> Array:
    """Draw slots or block ids, int64 ``[count]``.

    Parameters
    ----------
    count, limit : int
        How many, and below what.
    distinct : bool
        No index twice.
    holes : bool
        Some, perhaps all, are -1.
    bad : bool
        One is out of range (a negative one other than -1, or `limit` and beyond).
    """
    if distinct and count > limit:
        taken = [*draw(st.permutations(range(limit))), *[-1] * (count - limit)]
        taken = draw(st.permutations(taken))
    elif distinct:
        taken = draw(st.permutations(range(limit)))[:count]
    else:
        taken = draw(st.lists(st.integers(0, max(limit - 1, 0)), min_size=count, max_size=count))
    values = np.array(taken, np.int64)
    if holes and count:
        every = draw(st.sampled_from((0, 0, 1, 2, 3)))
        if every:
            values[::every] = -1
    if bad and count:
        at = draw(st.integers(0, count - 1))
        values[at] = draw(st.sampled_from((-2, -(2**40), -(2**63), limit, limit + 1, 2**31, 2**32, 2**62)))
    return place(values)


def _levels(draw: st.DrawFn) -> tuple[float, ...]:
    count = draw(st.sampled_from((2, 3, 4, 16)))
    spread = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(count).astype(np.float32)
    halves = np.arange(count, dtype=np.float32) - np.float32(count // 2)
    levels = np.unique(spread if draw(st.booleans()) else halves)
    return tuple(float(v) for v in (levels if len(levels) > 1 else halves))


@st.composite
def quant_specs(draw: st.DrawFn, kind: str, ndim: int) -> QuantSpec:
    """Draw a quantiser of a kind for an array of `ndim` dims; scales shared over any of its axes, or none."""
    axes = tuple(sorted(draw(st.sets(st.integers(0, ndim - 1)))))
    if kind == "int":
        return QuantSpec.symmetric(draw(st.integers(2, 8)), axes)
    if kind == "affine":
        return QuantSpec.affine(draw(st.integers(1, 8)), axes)
    if kind == "codebook":
        return QuantSpec.codebook(_levels(draw), axes)
    return QuantSpec.fp8(kind, axes)
