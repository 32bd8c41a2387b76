"""KVS1 segments: composed from the ops of whatever backend holds the memory.

`encode_segments` and `decode_segments` are the definition of what a fused implementation must equal, byte for byte.
Many segments of one shape are coded in one go: the reference is vectorised over tiles, and so are kernels.

A segment's bytes, little-endian::

    k u8 | flags u8 | raw rows u8 | 0 | raw row numbers u8[...] | multipliers: 4 bits a token, low nibble first
    | raw rows in the logical dtype | zero pad to 4 | tiles of 64 channels, the last one narrower

Nibbles hold multiplier + 8. With flag ALL_RAW the multipliers and tiles are absent, and all rows are raw, in order,
without their numbers. Segments that are coded together may have other raw rows each: one's bytes never depend on
another's values, so that they are the same however heads are spread over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment
from kvcore.codecs.frame_values import PartInfo, SegmentSize, align
from kvcore.codecs.parts import Reader
from kvcore.codecs.places import Place, copied, empty, on_device, put_rows, taken_rows
from kvcore.codecs.quantizer import MULTIPLIERS
from kvcore.codecs.step_choice import StepRule, choose_steps, placed_steps
from kvcore.codecs.tiling import decode_tiles, encode_tiles, max_tiles_size, tile_count
from kvcore.dtypes import BFLOAT16
from kvcore.entropy import TILE_CHANNELS, TILE_TOKENS, TableSet, tile_bytes
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.ops import Backend
from kvcore.quant import Quantized, QuantSpec

__all__ = [
    "MAX_RAW_ROWS",
    "Decoded",
    "SegmentFlags",
    "StepRule",
    "chunks_of",
    "decode_segments",
    "encode_segments",
    "max_segment_size",
    "raw_rows_of",
]

MAX_RAW_ROWS = 4

Tile: TypeAlias = tuple[int, int]

_SPEC = QuantSpec.symmetric(16, (2,))
_DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))


class SegmentFlags(IntFlag):
    """What a segment's bytes contain."""

    UNROPED = 1
    ALL_RAW = 2


@dataclass(frozen=True, slots=True)
class Decoded:
    """A chunk of S segments.

    Parameters
    ----------
    values : float32 array ``[S, T, C]``
        Where the backend computes. Still without RoPE if `unroped`. Raw rows hold nothing of use.
    rows : list of list of int
        Numbers of each segment's raw rows.
    raw : list of array ``[rows of the segment, C]``
        Each segment's raw rows, to be put in place at the very end.
    unroped : bool
    tiles : list of int
        Tiles that each segment took from its directory: none where all rows are raw.
    """

    values: Any
    rows: list[list[int]]
    raw: list[Array]
    unroped: bool
    tiles: list[int]


def encode_segments(
    backend: Backend,
    x: Any,
    *,
    tables: TableSet,
    rule: StepRule,
    raw_rows: Sequence[Sequence[int]] = (),
    raw_values: Any = None,
    unroped: bool = False,
    names: Sequence[str] | None = None,
) -> list[CodedSegment]:
    """Encode S segments of one shape.

    Parameters
    ----------
    backend : Backend
    x : float16, bfloat16 or float32 array ``[S, T, C]``
        Where the backend computes; of what is on a device, coded bytes and statistics leave it. T of 1 to 256. With
        `unroped` it is keys with RoPE taken off. Raw rows may hold anything, NaN too.
    tables : TableSet
    rule : StepRule
    raw_rows : sequence of sequence of int
        For each segment the rows that are stored as they are, at most 4, ascending; ``()`` if no segment has any.
        A segment of up to 4 tokens, or with fewer than 2 other rows, is stored as it is.
    raw_values : array ``[S, T, C]``, optional
        Where raw rows are taken from, in the logical dtype; `x` if not given.
    unroped : bool
        Recorded, for the decoder.
    names : sequence of str, optional
        Of the segments, for errors.

    Raises
    ------
    QuantizationError
        A NaN or infinity, or values beyond every step, in other rows. Nothing has been written.
    LayoutError
        No such array, more tokens than a tile has, raw rows out of order, or lists of them for another number of
        segments.
    """
    _check_shape(x.shape, x.dtype)
    if raw_values is not None and tuple(raw_values.shape) != tuple(x.shape):
        raise LayoutError(f"raw values {list(raw_values.shape)} are those of segments {list(x.shape)}")
    count, tokens, _ = x.shape
    flags = SegmentFlags.UNROPED if unroped else SegmentFlags(0)
    rows = _check_rows(raw_rows, count, tokens)
    fused = backend.fused("encode_segments")
    if fused is not None:
        coded: list[CodedSegment] = fused(
            x, tables=tables, rule=rule, raw_rows=rows, raw_values=raw_values, unroped=unroped, names=names
        )
        return coded
    names = names or [f"segment {s}" for s in range(count)]
    quantised = [s for s in range(count) if tokens > MAX_RAW_ROWS and tokens - len(rows[s]) >= 2]
    whole = sorted(set(range(count)) - set(quantised))
    stored = {**{s: rows[s] for s in quantised}, **{s: list(range(tokens)) for s in whole}}
    raw = _RawRows(backend, x if raw_values is None else raw_values, stored)
    segments: dict[int, CodedSegment] = {}
    if quantised:
        skip = np.zeros((len(quantised), tokens), np.bool_)
        for i, s in enumerate(quantised):
            skip[i, rows[s]] = True
        if skip.any() or whole:
            x = _without_rows(backend, x, quantised, skip)
        k, multipliers = choose_steps(backend, x, skip, rule, [names[s] for s in quantised])
        scale = placed_steps(backend, k[:, None] + 2 * multipliers)
        values = backend.quantize(x, _SPEC, scale=scale).codes
        made = encode_tiles(backend, values, tables, use_offsets=True, skip=skip.astype(np.uint8))
        for i, s in enumerate(quantised):
            head = _head(int(k[i]), multipliers[i], flags, rows[s], raw.of(s))
            segments[s] = CodedSegment(head + made[i].data, made[i].tiles)
    elif on_device(x):
        backend.runtime.check()  # nothing else has waited for the raw rows
    return [segments[s] if s in segments else _all_raw(raw.of(s), flags) for s in range(count)]


def decode_segments(
    backend: Backend,
    readers: Sequence[Reader],
    directory: Sequence[Sequence[Tile]],
    *,
    tables: TableSet,
    tokens: int,
    channels: int,
    dtype: np.dtype[Any],
) -> Decoded:
    """Decode what comes next in the readers of S segments: one chunk of up to 256 tokens of each.

    Parameters
    ----------
    backend : Backend
    readers : sequence of Reader
        Of segments that `encode_segments` made together.
    directory : sequence of sequence of (int, int)
        Each segment's tiles from here on; those of later chunks may follow.
    tables : TableSet
    tokens, channels : int
    dtype : numpy.dtype
        The logical dtype, which raw rows have.

    Raises
    ------
    CorruptFrameError
        With reason ``"stream"`` or ``"length"``: the bytes are no segments of this shape.
    LayoutError
        There are no segments of this shape and dtype.
    """
    _check_shape((len(readers), tokens, channels), dtype)
    heads = [_read_head(reader, tokens, channels, dtype) for reader in readers]
    unroped = {bool(h.flags & SegmentFlags.UNROPED) for h in heads}
    if len(unroped) > 1:
        raise CorruptFrameError("RoPE is taken off in some segments of a part, and not in others", reason="stream")
    coded = [s for s, h in enumerate(heads) if not h.flags & SegmentFlags.ALL_RAW]
    values, taken = empty(backend, (len(heads), tokens, channels), np.float32), [0] * len(heads)
    if coded:
        count = tile_count(tokens, channels)
        y = decode_tiles(
            backend,
            [readers[s] for s in coded],
            [tuple(directory[s][:count]) for s in coded],
            tables,
            tokens=tokens,
            channels=channels,
            use_offsets=True,
        )
        index = np.array([heads[s].k + 2 * heads[s].multipliers for s in coded], np.int64)
        scale = placed_steps(backend, index)
        for start, stop in _runs(coded):  # where all segments are coded, and mostly they are, there is one
            own = coded.index(start)
            part = slice(own, own + stop - start)
            backend.dequantize(Quantized(y[part], scale[part]), _SPEC, out=values[start:stop])
        for s in coded:
            taken[s] = count
    return Decoded(values, [h.rows for h in heads], [h.raw for h in heads], unroped.pop(), taken)


def max_segment_size(tokens: int, part: PartInfo, raw_rows: int) -> SegmentSize:
    """Return the most that a segment takes, bytes and tiles: of up to 256 tokens, with up to so many raw rows."""
    whole = align(4 + tokens * part.row_bytes, 4)
    if tokens <= MAX_RAW_ROWS:
        return whole, ()
    kept = min(raw_rows, tokens - 2)
    nbytes, tiles = max_tiles_size(tokens, part.width)
    coded = align(4 + kept * (1 + part.row_bytes) + (tokens + 1) // 2, 4) + nbytes
    return (max(coded, whole) if tokens - raw_rows < 2 else coded), tiles


def chunks_of(
    segment: CodedSegment, *, tables: TableSet, tokens: int, channels: int, dtype: np.dtype[Any]
) -> list[CodedSegment]:
    """Cut a whole segment into those of its chunks of up to 256 tokens, by the sizes that each tells; decodes nothing.

    Raises
    ------
    CorruptFrameError
        The sizes do not add up.
    """
    view, found, at, tile = memoryview(segment.data), [], 0, 0
    widths = [min(TILE_CHANNELS, channels - first) for first in range(0, channels, TILE_CHANNELS)]
    row_bytes = channels * dtype.itemsize
    for start in range(0, tokens, TILE_TOKENS):
        count, head = min(TILE_TOKENS, tokens - start), view[at : at + 4]
        if len(head) < 4:
            raise CorruptFrameError(f"a segment of {len(view)} bytes ends before its parts do", reason="length")
        if head[1] & SegmentFlags.ALL_RAW:
            own: tuple[Tile, ...] = ()
            nbytes = 4 + count * row_bytes
        else:
            own = segment.tiles[tile : tile + len(widths)]
            nbytes = 4 + head[2] * (1 + row_bytes) + (count + 1) // 2
        sizes = [tile_bytes(mode, words, w, tables, True) or 0 for (mode, words), w in zip(own, widths, strict=False)]
        stop = at + -(-nbytes // 4) * 4 + sum(sizes)
        found.append(CodedSegment(view[at:stop], own))
        at, tile = stop, tile + len(own)
    if at != len(view) or tile != len(segment.tiles):
        raise CorruptFrameError(f"a segment of {len(view)} bytes is not as long as its parts", reason="length")
    return found


def raw_rows_of(
    segment: CodedSegment, *, tables: TableSet, tokens: int, channels: int, dtype: np.dtype[Any]
) -> list[int]:
    """Return the numbers of a whole segment's raw rows, all its chunks together; nothing is decoded for it.

    Raises
    ------
    CorruptFrameError
        The bytes are no segment of this shape.
    """
    reader, tiles, found = Reader(segment.data), iter(segment.tiles), []
    for start in range(0, tokens, TILE_TOKENS):
        head = _read_head(reader, min(TILE_TOKENS, tokens - start), channels, dtype)
        found += [start + row for row in head.rows]
        if head.flags & SegmentFlags.ALL_RAW:
            continue
        for first in range(0, channels, TILE_CHANNELS):
            mode, words = next(tiles, (-1, 0))
            size = tile_bytes(mode, words, min(TILE_CHANNELS, channels - first), tables, True)
            if size is None:
                raise CorruptFrameError("a segment has fewer tiles than its rows take", reason="length")
            reader.take(size)
    return found


def _without_rows(backend: Backend, x: Any, segments: Sequence[int], skip: npt.NDArray[np.bool_]) -> Any:
    """Copy some segments of ``[S, T, C]``, with zeros in the rows of `skip`."""
    if not on_device(x):
        x = x[list(segments)]
        x[skip] = 0
        return x
    held = empty(backend, (len(segments), *x.shape[1:]), x.dtype)
    for start, stop in _runs(segments):
        own = segments.index(start)
        copied(backend, x[start:stop], out=held[own : own + stop - start])
    put_rows(backend, held, [(int(s), int(t)) for s, t in np.argwhere(skip)], np.zeros((1, x.shape[2]), x.dtype))
    return held


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges that ascending numbers make up."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1] = runs[-1][0], n + 1
        else:
            runs.append((n, n + 1))
    return runs


class _RawRows:
    """The raw rows of segments, on the host when somebody waits."""

    def __init__(self, backend: Backend, source: Any, rows: dict[int, list[int]]) -> None:
        self._first: dict[int, tuple[int, int]] = {}
        places: list[Place] = []
        for s, own in rows.items():
            self._first[s] = len(places), len(places) + len(own)
            places += [(s, row) for row in own]
        self._rows = taken_rows(backend, source, places)

    def of(self, segment: int) -> Array:
        """Return a segment's rows ``[rows, C]``."""
        start, stop = self._first[segment]
        return self._rows[start:stop]


def _check_shape(shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    if dtype not in _DTYPES:
        raise LayoutError(f"segments are of {', '.join(map(str, _DTYPES))}, not {dtype}")
    if len(shape) != 3 or not 1 <= shape[1] <= TILE_TOKENS or 0 in shape:
        raise LayoutError(
            f"segments are [S, T, C], at least one, of 1 to {TILE_TOKENS} tokens and at least one channel, "
            f"got {list(shape)}"
        )


def _check_rows(raw_rows: Sequence[Sequence[int]], count: int, tokens: int) -> list[list[int]]:
    lists = [[int(r) for r in rows] for rows in raw_rows] or [[] for _ in range(count)]
    if len(lists) != count:
        raise LayoutError(f"{count} segments take a list of raw rows each, got {len(lists)}")
    for rows in lists:
        if rows != sorted(set(rows)) or len(rows) > MAX_RAW_ROWS or any(not 0 <= r < tokens for r in rows):
            raise LayoutError(f"raw rows are up to {MAX_RAW_ROWS} ascending rows below {tokens}, got {rows}")
    return lists


def _all_raw(source: Array, flags: SegmentFlags) -> CodedSegment:
    data = bytes([0, flags | SegmentFlags.ALL_RAW, len(source), 0]) + source.tobytes()
    return CodedSegment(data + bytes(-len(data) % 4), ())


def _head(k: int, multipliers: Array, flags: SegmentFlags, rows: list[int], raw: Array) -> bytes:
    nibbles = (multipliers - MULTIPLIERS[0]).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    head = bytes([k, flags, len(rows), 0, *rows]) + (nibbles[0::2] | nibbles[1::2] << 4).tobytes()
    head += raw.tobytes()
    return head + bytes(-len(head) % 4)


@dataclass(frozen=True, slots=True)
class _Head:
    k: int
    flags: SegmentFlags
    rows: list[int]
    multipliers: Array
    raw: Array


def _read_head(reader: Reader, tokens: int, channels: int, dtype: np.dtype[Any]) -> _Head:
    """Read a segment up to its tiles; everything must be there and mean something."""
    start = bytes(reader.take(4))
    k, bits, count, zero = start
    flags = SegmentFlags(bits & (SegmentFlags.UNROPED | SegmentFlags.ALL_RAW))
    all_raw = bool(flags & SegmentFlags.ALL_RAW)
    if bits != flags or zero or (count != tokens or k if all_raw else count > MAX_RAW_ROWS):
        raise CorruptFrameError(f"a segment's head {start.hex()} means nothing", reason="stream")
    rows = list(range(tokens)) if all_raw else list(reader.take(count))
    if rows != sorted(set(rows)) or (rows and rows[-1] >= tokens):
        raise CorruptFrameError(f"raw rows {rows} of a segment of {tokens} tokens", reason="stream")
    packed = reader.array(0 if all_raw else (tokens + 1) // 2, "u1")
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int64)
    if nibbles[tokens:].any():
        raise CorruptFrameError("padding of a segment is not zero", reason="stream")
    raw = reader.array(len(rows) * channels * dtype.itemsize, "u1").view(dtype).reshape(len(rows), channels)
    reader.pad(4)
    return _Head(k, flags, rows, nibbles[:tokens] + MULTIPLIERS[0], raw)
