"""Arrays where a backend computes: NumPy's on the host, `ArrayRef`s on a device.

Codecs call ops with arrays of either kind, and index, reshape and view them alike. What else they do with them stands
here: bring small arrays over the link, and pieces of large ones. On the host none of it copies without need.

What comes from a device is queued, and there when somebody waits: `fetched` does not, `host` does. A wait is a round
trip, so codecs put off what they can until one is due.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.arrays import ArrayRef
from kvcore.ops import Backend, send

__all__ = [
    "Array",
    "Place",
    "collected",
    "copied",
    "empty",
    "fetched",
    "fetched_ints",
    "filled",
    "host",
    "near",
    "on_device",
    "piece",
    "put_rows",
    "row_major",
    "spread",
    "taken_rows",
    "widened",
]

Array: TypeAlias = npt.NDArray[Any]

Place: TypeAlias = tuple[int, int]
"""A row of an array ``[S, T, C]``: segment and token."""

_UINT8 = np.dtype(np.uint8)


def on_device(array: Any) -> bool:
    """Tell whether an array that an op gave is out of the host's reach."""
    return not isinstance(array, np.ndarray)


def row_major(array: Any) -> bool:
    """Tell whether an array's elements lie one after the other, in C order."""
    found: bool = ArrayRef.of(array).row_major if on_device(array) else array.flags.c_contiguous
    return found


def empty(backend: Backend, shape: tuple[int, ...], dtype: Any) -> Any:
    """Allocate an array where the backend computes, uninitialised."""
    return backend.runtime.empty(shape, np.dtype(dtype))


def near(backend: Backend, array: Array) -> Any:
    """Return an array of the host where the backend computes."""
    return array if "cpu" in backend.spec.device_types else send(backend, array)


def host(backend: Backend, array: Any) -> Array:
    """Return an array that an op gave on the host, and wait for it; all that was `fetched` before is then there too."""
    (found,) = fetched(backend, [array])
    if on_device(array):
        backend.runtime.check()
    return found


def fetched(backend: Backend, given: Sequence[Any]) -> list[Array]:
    """Return arrays on the host that are filled when somebody waits; row-major ones are copied straight over."""
    found: list[Array] = [np.empty(a.shape, a.dtype) if on_device(a) else a for a in given]
    pairs = [(a, f) for a, f in zip(given, found, strict=True) if on_device(a) and f.nbytes]
    if pairs:
        there = [_flat(a if ArrayRef.of(a).row_major else copied(backend, a)) for a, _ in pairs]
        backend.copy_batch(there, out=[f.reshape(-1).view(np.uint8) for _, f in pairs])
    return found


def fetched_ints(backend: Backend, array: Any, nbytes: int) -> Array:
    """Fetch int64 values of which the lowest bytes say all, the sign included: of a device only those cross the link.

    Returns
    -------
    array
        For `widened`, which gives the values when somebody has waited.
    """
    if not on_device(array):
        found: Array = array
        return found
    low: ArrayRef = array.view(np.uint8).reshape(*array.shape, 8)[..., :nbytes]
    return fetched(backend, [copied(backend, low)])[0]


def widened(low: Array) -> npt.NDArray[np.int64]:
    """Return the values of which `fetched_ints` gave the lowest bytes, or all."""
    if low.dtype == np.int64:
        return low
    unused = 8 - low.shape[-1]
    whole = np.zeros((*low.shape[:-1], 8), np.uint8)
    whole[..., unused:] = low
    values: npt.NDArray[np.int64] = whole.view("<i8")[..., 0] >> 8 * unused  # the shift carries the sign down
    return values


def copied(backend: Backend, array: Any, out: Any = None) -> Any:
    """Copy an array whose last dim is contiguous, into `out` or a new row-major one; return that."""
    if not on_device(array):
        if out is None:
            return array.copy()
        out[...] = array
        return out
    target = empty(backend, array.shape, array.dtype) if out is None else out
    # Bytes of 8 bits each: of all ops the one that copies any strides.
    backend.pack_bits(array.view(np.uint8), 8, out=target.view(np.uint8))
    return target


def filled(backend: Backend, value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of one value, to be read only; on a device that is one element."""
    one = near(backend, np.full((1,) * len(shape), value, dtype))
    if not on_device(one):
        return np.broadcast_to(one, shape)
    return replace(ArrayRef.of(one), shape=shape, strides=(0,) * len(shape), readonly=True, owner=one)


def taken_rows(backend: Backend, x: Any, places: Sequence[Place]) -> Array:
    """Return rows ``[n, C]`` of ``[S, T, C]`` on the host; they are there when somebody waits."""
    if not on_device(x):
        held: Array = x[tuple(np.array(places, np.int64).reshape(-1, 2).T)]
        return held
    rows: Array = (
        collected(backend, [_row(x, place) for place in places]).view(x.dtype).reshape(len(places), x.shape[2])
    )
    return rows


def put_rows(backend: Backend, x: Any, places: Sequence[Place], rows: Array) -> None:
    """Write rows ``[n, C]`` of the host to places of ``[S, T, C]``; a single row goes to every place."""
    if not places:
        return
    if not on_device(x):
        x[tuple(np.array(places, np.int64).T)] = rows
        return
    spread(backend, rows.reshape(-1).view(np.uint8), [_row(x, place) for place in places])


def collected(backend: Backend, pieces: Sequence[ArrayRef]) -> npt.NDArray[np.uint8]:
    """Copy pieces, bytes ``[n]``, of a device to the host, one behind the other; they are there when somebody waits.

    They are brought together on the device first, so that they cross the link in one copy.
    """
    packed = empty(backend, (sum(piece.shape[0] for piece in pieces),), _UINT8)
    if pieces:
        backend.copy_batch(pieces, out=_cut(packed, [piece.shape[0] for piece in pieces]))
    return fetched(backend, [packed])[0]


def spread(backend: Backend, data: npt.NDArray[np.uint8], targets: Sequence[ArrayRef]) -> None:
    """Copy bytes ``[n]`` of the host to places of a device, one after another; or all of them to each of the places.

    They cross the link in one copy, and are distributed on the device.
    """
    sizes, placed = [target.shape[0] for target in targets], send(backend, data)
    sources = _cut(placed, sizes) if sum(sizes) == data.size else [placed] * len(sizes)
    backend.copy_batch(sources, out=targets)


def _cut(array: ArrayRef, sizes: Sequence[int]) -> list[ArrayRef]:
    starts = itertools.accumulate(sizes, initial=0)
    return [piece(array, start, size) for start, size in zip(starts, sizes, strict=False)]


def piece(array: ArrayRef, start: int, size: int) -> ArrayRef:
    """Return `size` bytes from a byte of an array's memory on: what slicing gives, for thousands of pieces."""
    return ArrayRef(array.address + start, (size,), (1,), _UINT8, array.device, array.readonly, array)


def _flat(array: Any) -> ArrayRef:
    ref = ArrayRef.of(array)
    return piece(ref, 0, int(np.prod(ref.shape)) * ref.dtype.itemsize)


def _row(x: ArrayRef, place: Place) -> ArrayRef:
    return piece(x, place[0] * x.strides[0] + place[1] * x.strides[1], x.shape[2] * x.dtype.itemsize)
