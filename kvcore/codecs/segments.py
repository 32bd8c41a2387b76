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
from kvcore.codecs.nonfinite import check_finite, largest_by_row
from kvcore.codecs.parts import Reader
from kvcore.codecs.quantizer import MULTIPLIERS, TARGET_BITS, fit_codes, rms_exponent, steps, token_multipliers
from kvcore.codecs.tiling import decode_tiles, encode_tiles, host, tile_count
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
class StepRule:
    """How a preset turns R into a step.

    Parameters
    ----------
    constant : int
        Eighths of an octave: the step is ``R * 2**(constant / 8)``.
    level : int, optional
        The model's level c on the same grid; then the step is ``sqrt(R * 2**(c/8)) * 2**(constant / 8)``.
    """

    constant: int
    level: int | None = None

    def k(self, j: int) -> int:
        """Return k for an R of ``2**(j/8)``."""
        return 128 + self.constant + (j if self.level is None else -(-(j + self.level) // 2))


@dataclass(frozen=True, slots=True)
class Decoded:
    """A chunk of S segments.

    Parameters
    ----------
    values : float32 array ``[S, T, C]``
        Still without RoPE if `unroped`. Raw rows hold nothing of use.
    rows : list of list of int
        Numbers of each segment's raw rows.
    raw : list of array ``[rows of the segment, C]``
        Each segment's raw rows, to be put in place at the very end.
    unroped : bool
    tiles : list of int
        Tiles that each segment took from its directory: none where all rows are raw.
    """

    values: Array
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
        T of 1 to 256. With `unroped` it is keys with RoPE taken off. Raw rows may hold anything, NaN too.
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
    source = host(x if raw_values is None else raw_values)
    names = names or [f"segment {s}" for s in range(count)]
    quantised = [s for s in range(count) if tokens > MAX_RAW_ROWS and tokens - len(rows[s]) >= 2]
    segments: dict[int, CodedSegment] = {}
    if quantised:
        skip = np.zeros((len(quantised), tokens), np.bool_)
        for i, s in enumerate(quantised):
            skip[i, rows[s]] = True
        if skip.any() or len(quantised) < count:
            x = x[quantised]
            x[skip] = 0
        k, multipliers = _choose_steps(backend, x, skip, rule, [names[s] for s in quantised])
        scale = steps(k[:, None] + 2 * multipliers)[:, :, None]
        values = host(backend.quantize(x, _SPEC, scale=scale).codes)
        made = encode_tiles(backend, values, tables, use_offsets=True, skip=skip.astype(np.uint8))
        for i, s in enumerate(quantised):
            head = _head(int(k[i]), multipliers[i], flags, rows[s], source[s])
            segments[s] = CodedSegment(head + made[i].data, made[i].tiles)
    return [segments[s] if s in segments else _all_raw(source[s], flags) for s in range(count)]


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
    values, taken = np.zeros((len(heads), tokens, channels), np.float32), [0] * len(heads)
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
        decoded = host(backend.dequantize(Quantized(y, steps(index)[:, :, None]), _SPEC))
        if len(coded) == len(heads):
            values = decoded
        else:
            values[coded] = decoded
        for s in coded:
            taken[s] = count
    return Decoded(values, [h.rows for h in heads], [h.raw for h in heads], unroped.pop(), taken)


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


def _choose_steps(
    backend: Backend, x: Any, skip: npt.NDArray[np.bool_], rule: StepRule, names: Sequence[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return k ``[S]`` and the multipliers ``[S, T]``, 0 for raw rows: those of `skip`, which are zeros in `x`."""
    count, tokens, channels = x.shape
    largest = largest_by_row(backend, x)
    check_finite(largest, names)
    top = largest.max(axis=1)
    exponent = np.where(top > 0, TARGET_BITS - np.frexp(top)[1], 0).astype(np.int32)
    by_channel = host(backend.reduce_moments(x, exponent[:, None, None], (1,)))[:, :, 0]
    by_token = host(backend.reduce_moments(x, exponent[:, None, None], (2,)))[1, :, :, 0]
    kept = tokens - skip.sum(axis=1)
    # T * sum of squares stays below 2**45 for a channel, and so does the sum over channels below 2**63.
    spread = (kept[:, None] * by_channel[1] - by_channel[0] ** 2).sum(axis=-1)
    k, multipliers = np.zeros(count, np.int64), np.zeros((count, tokens), np.int64)
    for s in np.flatnonzero(top):
        j = rms_exponent(int(spread[s]), int(kept[s]), channels)
        k[s] = rule.k(j - 8 * int(exponent[s]))
        multipliers[s] = token_multipliers(by_token[s], j, channels)
    multipliers[skip] = 0
    return fit_codes(k, multipliers, largest, names), multipliers


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


def _head(k: int, multipliers: Array, flags: SegmentFlags, rows: list[int], source: Array) -> bytes:
    nibbles = (multipliers - MULTIPLIERS[0]).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    head = bytes([k, flags, len(rows), 0, *rows]) + (nibbles[0::2] | nibbles[1::2] << 4).tobytes()
    head += source[rows].tobytes()
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
