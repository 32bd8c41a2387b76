"""KVS1 segments in one native call: what `kvcore.codecs.segments` composes, byte for byte.

The C side is ``csrc/segments.inl.hpp``; its arguments are in ``csrc/segments.h``.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.segments import MAX_RAW_ROWS, Decoded, SegmentFlags, StepRule
from kvcore.entropy import TILE_CHANNELS, TableSet, tile_capacity
from kvcore.errors import CorruptFrameError, OutOfMemoryError, QuantizationError
from kvcore.hookspecs.markers import hookimpl
from kvcore.kernels.abi import OK, address, pack_array
from kvcore_cpu.native import library

__all__ = ["kvcore_fused_decode_segments", "kvcore_fused_encode_segments"]

_ENCODE = struct.Struct("<QQQQQQQqiiii")
_DECODE = struct.Struct("<QQQQQQQQQQqiiii")
_NONFINITE = 3
_WRONG = {
    7: ("stream", "the mode and word count of a tile are no tile"),
    8: ("stream", "a tile has a class beyond 31"),
    9: ("stream", "a tile has a state that no encoder leaves"),
    10: ("stream", "words of a tile are missing or left over"),
    11: ("stream", "a tile has a value that means nothing"),
    12: ("stream", "padding is not zero"),
    32: ("length", "its bytes or tiles end before its parts do, or go on after them"),
    33: ("stream", "its head means nothing"),
    34: ("stream", "its raw rows are out of order, or beyond its tokens"),
}


@hookimpl
def kvcore_fused_encode_segments(
    x: Any,
    *,
    tables: TableSet,
    rule: StepRule,
    raw_rows: Sequence[Sequence[int]] = (),
    raw_values: Any = None,
    unroped: bool = False,
    names: Sequence[str] | None = None,
    stream: Any = None,
    workspace: Any = None,
) -> list[CodedSegment]:
    source = x if raw_values is None else raw_values
    count, tokens, channels = x.shape
    rows, counts = np.zeros((count, MAX_RAW_ROWS), np.uint8), np.zeros(count, np.uint8)
    for s, own in enumerate(raw_rows):
        rows[s, : len(own)], counts[s] = own, len(own)
    tiles = -(-channels // TILE_CHANNELS)
    whole = tokens <= MAX_RAW_ROWS + 1  # more tokens than that are never all raw
    raw_bytes = (tokens if whole else MAX_RAW_ROWS) * channels * source.dtype.itemsize
    capacity = 8 + MAX_RAW_ROWS + tokens + raw_bytes + tiles * tile_capacity(tokens, TILE_CHANNELS)
    out, sizes = np.empty((count, capacity), np.uint8), np.empty(count, np.int64)
    modes, words = np.empty((count, tiles), np.uint8), np.empty((count, tiles), np.uint16)
    held = library().tables(tables)
    args = _ENCODE.pack(
        address(rows), address(counts), held.handle, address(out), address(sizes), address(modes), address(words),
        capacity, rule.constant, rule.level or 0, rule.level is not None, unroped,
    )  # fmt: skip
    status = _call("encode_segments", pack_array(x) + pack_array(source) + args)
    if status != OK:
        raise _unquantised(status, x, names)
    coded = []
    for row, size, raw, m, w in zip(out, sizes.tolist(), counts.tolist(), modes.tolist(), words.tolist(), strict=True):
        has_tiles = tokens > MAX_RAW_ROWS and tokens - raw >= 2
        coded.append(CodedSegment(row[:size].tobytes(), tuple(zip(m, w, strict=True)) if has_tiles else ()))
    return coded


@hookimpl
def kvcore_fused_decode_segments(
    segments: Sequence[CodedSegment],
    *,
    tables: TableSet,
    tokens: int,
    channels: int,
    dtype: np.dtype[Any],
    stream: Any = None,
    workspace: Any = None,
) -> Decoded:
    count, tiles = len(segments), -(-channels // TILE_CHANNELS)
    data = np.frombuffer(b"".join([segment.data for segment in segments]), np.uint8)
    first_byte, first_tile = _first([len(s.data) for s in segments]), _first([len(s.tiles) for s in segments])
    directory = [tile for segment in segments for tile in segment.tiles]
    modes = np.array([mode for mode, _ in directory], np.uint8)
    words = np.array([n for _, n in directory], np.uint16)
    values = np.empty((count, tokens, channels), np.float32)
    flags, rows = np.empty(count, np.uint8), np.empty((count, MAX_RAW_ROWS), np.uint8)
    counts = np.empty(count, np.int16)
    held = library().tables(tables)
    args = _DECODE.pack(
        *map(address, (data, first_byte, modes, words, first_tile)), held.handle,
        *map(address, (values, flags, rows, counts)), count, tokens, channels, dtype.itemsize, 0,
    )  # fmt: skip
    status = _call("decode_segments", args)
    if status != OK:
        reason, why = _WRONG[status & 0xFF]
        raise CorruptFrameError(f"segment {status >> 8} of a part: {why}", reason=reason)
    unroped = flags & np.uint8(SegmentFlags.UNROPED)
    if (unroped != unroped[0]).any():
        raise CorruptFrameError("RoPE is taken off in some segments of a part, and not in others", reason="stream")
    numbers, raw, taken = [], [], []
    whole, starts = (flags & np.uint8(SegmentFlags.ALL_RAW)).tolist(), first_byte.tolist()
    for s, n in enumerate(counts.tolist()):
        numbers.append(list(range(tokens)) if whole[s] else rows[s, :n].tolist())
        start = starts[s] + 4 + (0 if whole[s] else n + (tokens + 1) // 2)
        raw.append(data[start : start + n * channels * dtype.itemsize].view(dtype).reshape(n, channels))
        taken.append(0 if whole[s] else tiles)
    return Decoded(values, numbers, raw, bool(unroped[0]), taken)


def _first(sizes: list[int]) -> npt.NDArray[np.int64]:
    """Return where each of some pieces starts, and where the last one ends."""
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends


@functools.cache
def _function(name: str) -> Any:
    function = getattr(library().dll, f"kvcore_{name}")
    function.restype, function.argtypes = ctypes.c_int32, (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


def _call(name: str, args: bytes) -> int:
    """Run a function of the library; return its status word."""
    status = ctypes.c_uint64(OK)
    if _function(name)(args, None, ctypes.addressof(status)):
        raise OutOfMemoryError(f"no memory to run {name}; code fewer layers or heads at a time")
    return status.value


def _unquantised(status: int, x: Any, names: Sequence[str] | None) -> QuantizationError:
    """Say which segment cannot be quantised, and why."""
    count, tokens, _ = x.shape
    at, code = status >> 8, status & 0xFF
    s, t = divmod(at, tokens) if code == _NONFINITE else (at - count * tokens, 0)
    name = names[s] if names else f"segment {s}"
    if code == _NONFINITE:
        return QuantizationError(
            f"{name} has a NaN or infinity in row {t}; nonfinite='raw' stores such rows as they are"
        )
    return QuantizationError(
        f"{name} has values up to {float(np.nanmax(np.abs(x[s].astype(np.float32)))):.3g}, beyond what 16-bit codes "
        "reach with the coarsest step"
    )
