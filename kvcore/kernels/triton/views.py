"""Strided arrays as the kernels see them: tables of extents and strides, with as few dims as will do. Host only.

The same as ``include/kvcore/views.hpp``: dims of extent 1 are dropped, dims that lie behind one another in all arrays
are merged, and C order stays, so that the number of an element is its position in a status word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.arrays import row_major
from kvcore.errors import LayoutError
from kvcore.kernels.abi import address

__all__ = ["ROW_BYTES", "Array", "View", "collapse", "numbering"]

ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a view.

    Parameters
    ----------
    address : int
        0 for what only counts (`numbering`).
    strides : tuple of int
        By dim of the view's shape: bytes, 0 where it is broadcast.
    size : int
        Bytes of an element.
    """

    address: int
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, array: Any, shape: Sequence[int] | None = None) -> Array:
        """Describe an array that has the dims of a shape (its own, if none is given), each with that extent or 1."""
        strides = tuple(0 if n == 1 else int(step) for n, step in zip(array.shape, array.strides, strict=True))
        if shape is not None and len(shape) != len(strides):
            raise LayoutError(f"an array of {len(strides)} dims cannot be indexed with {len(shape)}")
        return cls(address(array), strides, array.dtype.itemsize)

    @property
    def aligned(self) -> bool:
        """Whether each element lies at a multiple of its size."""
        return not any(step % self.size for step in (self.address, *self.strides))


def numbering(shape: Sequence[int], within: Sequence[int] | None = None) -> Array:
    """Return a stand-in whose "byte offset" is the number of an element in C order.

    `within`: the shape whose elements are numbered, with extent 1 where all elements along a dim share their number.
    """
    kept = shape if within is None else within
    steps = row_major(kept, 1)
    return Array(0, tuple(0 if n == 1 else step for n, step in zip(kept, steps, strict=True)), 1)


@dataclass(frozen=True, slots=True)
class View:
    """Several arrays of one shape, indexed together.

    Parameters
    ----------
    extents : tuple of int
        Outermost dim first; at least one.
    strides : tuple of tuple of int
        By array, then dim: bytes.
    access : tuple of int
        By array, how it is read: see `kvcore.kernels.triton.lang.elements`.
    sizes : tuple of int
        By array, bytes of an element.
    """

    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    access: tuple[int, ...]
    sizes: tuple[int, ...]

    def table(self, access: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
        """Return int64 ``[dims, 1 + arrays]``: extent, then the step in each array, in the unit of its access.

        Those are bytes for -1, rows of 16 bytes for 16, else elements. `access`: other ones than the view's own.
        """
        given = zip(self.access if access is None else access, self.sizes, strict=True)
        units = [1 if how < 0 else how if how == ROW_BYTES else size for how, size in given]
        columns = [[step // unit for step in steps] for steps, unit in zip(self.strides, units, strict=True)]
        return np.array([self.extents, *columns], np.int64).T.copy()

    @property
    def dims(self) -> int:
        """Number of dims, at least 1."""
        return len(self.extents)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.extents)

    @property
    def inner(self) -> int:
        """Extent of the innermost dim."""
        return self.extents[-1]

    @property
    def outer(self) -> int:
        """Number of rows along the innermost dim."""
        return math.prod(self.extents[:-1])

    @property
    def even(self) -> bool:
        """Whether rows are of a multiple of 16 elements, so that vectors need no mask of their own."""
        return self.inner % 16 == 0

    def shared(self, *arrays: int) -> bool:
        """Tell whether arrays are the same along a whole row."""
        return not any(self.strides[array][-1] for array in arrays)


def collapse(
    shape: Sequence[int],
    arrays: Sequence[Array],
    wanted: Callable[[int], bool] = lambda axis: True,
    vectors: int = 0,
) -> View:
    """View those dims of some arrays that are wanted, as if the others had extent 1.

    `vectors`: so many of the arrays, the first ones, may have access 16.
    """
    dims: list[tuple[int, list[int]]] = []
    for axis, extent in enumerate(shape):
        if not wanted(axis) or extent == 1:
            continue
        strides = [array.strides[axis] for array in arrays]
        if dims and dims[-1][1] == [extent * stride for stride in strides]:
            dims[-1] = dims[-1][0] * extent, strides
        else:
            dims.append((extent, strides))
    dims = dims or [(1, [0] * len(arrays))]
    by_array = tuple(tuple(strides[n] for _, strides in dims) for n in range(len(arrays)))
    access = tuple(_access(array, by_array[n], n < vectors) for n, array in enumerate(arrays))
    return View(tuple(extent for extent, _ in dims), by_array, access, tuple(array.size for array in arrays))


def _access(array: Array, strides: Sequence[int], vectors: bool) -> int:
    """Return how an array may be read, given its strides in the view."""
    if not array.aligned:
        return -1
    if strides[-1] != array.size:
        return 0
    rows = (array.address, *strides[:-1])
    return ROW_BYTES if vectors and not any(step % ROW_BYTES for step in rows) else 1
