"""Memory under watch: every array of a test lies inside a larger buffer whose bytes are all compared afterwards.

An *arena* is a uint8 array that owns its memory, filled with a pattern. Arrays are views into it, with guard bytes
around and, where their strides leave some, between their elements. A test copies the arenas, lets the oracle write to
the copy, and compares all bytes: a byte written outside the addressed elements is a difference like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import Layout, RowLayout

__all__ = ["GUARD_BYTES", "Bound", "Bytes", "arena", "arenas", "clone", "pattern", "place", "root", "view"]

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 64
"""Bytes of pattern on either side of an array: a vector store that runs over by one is seen."""


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Return bytes in which no short run repeats: data of caches, and the filling of arenas."""
    return np.frombuffer(np.random.default_rng(seed + 0x5EED).bytes(nbytes), np.uint8)


def arena(nbytes: int, seed: int = 0) -> Bytes:
    """Allocate a buffer of `nbytes` bytes with guards around them, filled with the pattern."""
    memory = np.empty(nbytes + 2 * GUARD_BYTES, np.uint8)
    memory[:] = pattern(memory.size, seed)
    return memory


def view(
    memory: Bytes, offset: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> npt.NDArray[Any]:
    """Return a strided array inside an arena."""
    return np.ndarray(tuple(shape), dtype, memory, offset, tuple(strides))


def place(
    values: npt.NDArray[Any],
    *,
    order: Sequence[int] | None = None,
    gaps: Sequence[int] = (),
    flip: int = 0,
    shift: int = 0,
    seed: int = 0,
) -> npt.NDArray[Any]:
    """Copy an array into an arena of its own.

    Parameters
    ----------
    values : array
    order : sequence of int, optional
        Axes from outermost to innermost in memory; their own order if not given.
    gaps : sequence of int
        Elements left free behind each axis' run, innermost axis last; the last one is between neighbours.
    flip : int
        Bit i set: axis i runs backwards in memory.
    shift : int
        Bytes by which the array begins behind an aligned address, and by which each gap is wider: with one that is no
        multiple of the element size, elements lie where no element type wants them.
    seed : int
        Of the pattern around.
    """
    ndim, item = values.ndim, values.dtype.itemsize
    strides, step = [0] * ndim, item
    for axis, gap in zip(reversed(order or range(ndim)), reversed((*(0,) * ndim, *gaps)), strict=False):
        step += gap * item + (shift if gap else 0)
        strides[axis] = step
        step *= max(values.shape[axis], 1)
    offset = GUARD_BYTES + shift
    for axis in range(ndim):
        if flip >> axis & 1 and values.shape[axis] > 0:
            offset += strides[axis] * (values.shape[axis] - 1)
            strides[axis] = -strides[axis]
    memory = arena(max(step, item) + shift, seed)
    placed = view(memory, offset, values.shape, values.dtype, strides)
    placed.view()[...] = values
    return placed


@dataclass(frozen=True, eq=False)
class Bound:
    """A KV cache or chunk in an arena: its tensors, and the layout they are bound to.

    Parameters
    ----------
    text : str
        Layout string.
    extents : dict of str to int
        Extent of every axis: what the oracle goes by. The layout declares only `declared` of them.
    declared : tuple of str
    dtypes : dict of str to numpy.dtype
        Element type by part.
    tensors
        One array, or nested lists of arrays where the layout has list levels.
    """

    text: str
    extents: dict[str, int]
    declared: tuple[str, ...]
    dtypes: dict[str, np.dtype[Any]]
    tensors: Any
    typed: bool = False
    """Whether `dtypes` must be passed to bind, because the tensors do not say them."""

    @cached_property
    def rows(self) -> RowLayout:
        """The layout bound to the tensors."""
        layout = Layout(self.text, **{axis: self.extents[axis] for axis in self.declared})
        return layout.bind(self.tensors, dtypes=self.dtypes if self.typed else None)

    @property
    def tokens(self) -> int:
        """Slots of a cache, tokens of a chunk."""
        return self.extents["T"] if "T" in self.extents else self.extents["B"] * self.extents.get("N", 1)


def _walk(value: Any) -> Iterator[npt.NDArray[Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Bound):
        yield from _walk(value.tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, dict):
        yield from _walk(list(value.values()))


def root(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array that owns the memory of a view."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base


def arenas(value: Any) -> list[npt.NDArray[Any]]:
    """Return the arenas that the arrays in a value lie in, each once, in order of appearance."""
    found: dict[int, npt.NDArray[Any]] = {}
    for array in _walk(value):
        base = root(array)
        found.setdefault(id(base), base)
    return list(found.values())


def offset_in(array: npt.NDArray[Any], base: npt.NDArray[Any]) -> int:
    """Return where the first element of a view lies in the array that owns its memory, in bytes."""
    start = array.__array_interface__["data"][0]
    return int(start - base.__array_interface__["data"][0]) if math.prod(array.shape) else 0


def clone(value: Any, copies: dict[int, npt.NDArray[Any]] | None = None) -> Any:
    """Copy a value with every arena in it: views keep their offsets and strides, and what shared memory still does."""
    copies = {} if copies is None else copies
    if isinstance(value, np.ndarray):
        base = root(value)
        memory = copies.setdefault(id(base), base.copy())
        copied: npt.NDArray[Any] = np.ndarray(value.shape, value.dtype, memory, offset_in(value, base), value.strides)
        copied.flags.writeable = value.flags.writeable
        return copied
    if isinstance(value, Bound):
        tensors = clone(value.tensors, copies)
        return Bound(value.text, value.extents, value.declared, value.dtypes, tensors, value.typed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(clone(part, copies) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(clone(item, copies) for item in value)
    if isinstance(value, dict):
        return {key: clone(item, copies) for key, item in value.items()}
    return value
