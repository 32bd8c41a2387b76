"""Arguments of the C ABI, packed: what `include/kvcore/abi.h` declares, from Python values.

Structs are assembled as bytes with `struct`, which is several times faster than filling ctypes structures; they have no
implicit padding. Names and order follow the header.
"""

from __future__ import annotations

import array as arrays
import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef
from kvcore.dtypes import DTYPES
from kvcore.errors import UnsupportedOpError
from kvcore.rows import RowLayout

__all__ = [
    "ABI_VERSION",
    "ABSENT",
    "MAX_DIMS",
    "OK",
    "TablesArgs",
    "address",
    "axes_mask",
    "pack_array",
    "pack_bytes_args",
    "pack_convert_args",
    "pack_paged_args",
]

ABI_VERSION = 1
MAX_DIMS = 8
OK = 2**64 - 1

_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"),
)
_CODES = {DTYPES[name]: code for code, name in enumerate(_NAMES)}  # enum kv_dtype
_ARRAY = struct.Struct("<Q8q8qii")
_PADDING = tuple((0,) * n for n in range(MAX_DIMS + 1))
ABSENT = _ARRAY.pack(0, *_PADDING[8], *_PADDING[8], 0, 0)
"""A `kv_array` that is not there."""


def address(array: Any) -> int:
    """Return the address of an array's first element; 0 if it has none."""
    if isinstance(array, np.ndarray):
        where: int = array.__array_interface__["data"][0]
        return where
    return ArrayRef.of(array).address


def pack_array(array: Any) -> bytes:
    """Return a `kv_array` for a NumPy array or an `ArrayRef`; None is `ABSENT`.

    Raises
    ------
    UnsupportedOpError
        The array has more dims than the ABI carries.
    """
    if array is None:
        return ABSENT
    shape = array.shape
    ndim = len(shape)
    if ndim > MAX_DIMS:
        raise UnsupportedOpError(f"native kernels take up to {MAX_DIMS} dims, got {ndim}; merge some with reshape")
    pad = _PADDING[MAX_DIMS - ndim]
    return _ARRAY.pack(address(array), *shape, *pad, *array.strides, *pad, ndim, _CODES[array.dtype])


def axes_mask(axes: Sequence[int]) -> int:
    """Return axes as bits."""
    return sum(1 << axis for axis in axes)


_PAGED = struct.Struct("<QQQQQqqqqiiiiii")
_CONVERT = struct.Struct("<QQQqii")
_BYTES = struct.Struct("<QQQQq")


def pack_paged_args(
    paged: RowLayout,
    chunks: Sequence[RowLayout],
    index: Any,
    *,
    unit: str,
    skip_tokens: int,
    check_duplicates: bool = False,
) -> tuple[bytes, Any]:
    """Return a `kv_paged_args`, and what it points to."""
    cache = paged.native()
    keep: tuple[Any, ...]
    if len(chunks) == 1:
        dense = chunks[0].native()
        planes, first, keep = dense.planes_at, dense.tokens_at, (cache, dense)
    else:
        tables = np.concatenate([chunk.native().planes for chunk in chunks] or [cache.planes[:0]])
        tokens = np.cumsum([0, *(chunk.block_tokens for chunk in chunks)], dtype=np.int64)
        planes, first, keep = address(tables), address(tokens), (cache, tables, tokens)
    args = _PAGED.pack(
        cache.planes_at, planes, cache.parts_at, first, address(index), index.shape[0],
        paged.blocks, paged.block_tokens, skip_tokens, len(chunks), len(cache.parts), paged.layers,
        unit == "block", check_duplicates, 0,
    )  # fmt: skip
    return args, keep


def pack_convert_args(src: RowLayout, out: RowLayout) -> tuple[bytes, Any]:
    """Return a `kv_convert_args`, and what it points to."""
    source, target = src.native(), out.native()
    args = _CONVERT.pack(
        source.planes_at, target.planes_at, source.parts_at, src.block_tokens, len(source.parts), src.layers
    )
    return args, (source, target)


def pack_bytes_args(src: Sequence[Any], out: Sequence[Any] | None, digests: Any) -> tuple[bytes, Any]:
    """Return a `kv_bytes_args`, and what it points to."""
    count = len(src)
    sizes = [x.shape[0] for x in src]
    lists = arrays.array("Q", [*map(address, src), *sizes, *map(address, out or ())])
    first = lists.buffer_info()[0]
    targets = 0 if out is None else first + 16 * count
    where = 0 if digests is None else address(digests)
    return _BYTES.pack(first, targets, first + 8 * count, where, count), lists


class TablesArgs(ctypes.Structure):
    """`kv_tables_args`."""

    _fields_ = (
        ("frequency", ctypes.c_void_p),
        ("cost", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("symbol", ctypes.c_void_p),
        ("bits", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )
