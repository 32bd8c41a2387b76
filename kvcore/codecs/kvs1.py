"""The lossy presets of KVS1: `high`, `balanced`, `small`. A chunk's rows to segments, and back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.codecs.contract import CodedSegment, Layers
from kvcore.codecs.frame_format import pack_levels
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.nonfinite import TOO_LARGE, check_finite, check_policy, largest_by_row, with_saturated_rows
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import copied, empty, near, on_device, put_rows
from kvcore.codecs.segments import (
    MAX_RAW_ROWS,
    Decoded,
    StepRule,
    chunks_of,
    decode_segments,
    encode_segments,
    max_segment_size,
)
from kvcore.codecs.tables import table_set
from kvcore.dtypes import to_dtype
from kvcore.entropy import TILE_TOKENS
from kvcore.errors import CorruptFrameError, QuantizationError, UnsupportedOpError
from kvcore.ops import Backend, of_all_streams
from kvcore.rope import RopeParams, rope_table
from kvcore.rows import RowLayout

__all__ = ["PRESETS", "Kvs1", "Preset"]

logger = logging.getLogger("kvcore")

_KEYS = ("K", "R")  # the parts that carry RoPE: keys, and the RoPE part of an MLA row
_MAX_POSITION, _MAX_FREQUENCY = 1 << 20, 1e3  # what `rope_table` rotates by, and to what angles it is exact


@dataclass(frozen=True, slots=True)
class Preset:
    """A point between size and fidelity: its number, and the step's constant without and with level constants."""

    number: int
    constant: int
    leveled: int


PRESETS = {"high": Preset(1, -23, -22), "balanced": Preset(2, -14, -13), "small": Preset(3, -8, -8)}


@dataclass(frozen=True, slots=True)
class Kvs1:
    """KVS1 at one preset. It codes in a device's memory, whatever the policy.

    Parameters
    ----------
    name : str
        Of `PRESETS`.
    levels : tuple of int, optional
        The model's level constants for keys and values, in eighths of an octave; None: the step follows R alone.
    nonfinite : {"error", "saturate", "raw"}
        What becomes of a NaN or infinity. Error: `QuantizationError`, wherever it is. Saturate: NaN is read as zero, an
        infinity as the largest finite value of the element type with its sign, before anything else is done; rows that
        are raw anyway (at position 0, or in a chunk of up to 4 tokens) keep theirs. Raw: token rows with one are
        stored as they are, bit for bit, for each part, layer and head on its own: up to 4 rows of 256 tokens, with that
        at position 0. The largest finite value of bfloat16 and float32 is beyond what any step reaches: there, saturate
        holds NaN only. Decoding needs no policy.
    """

    name: str
    levels: tuple[int, int] | None = None
    nonfinite: str = "error"
    codec_id: int = field(default=1, init=False)
    lossless: bool = field(default=False, init=False)
    chain: tuple[str, ...] = field(default=("kvs1",), init=False)
    on_device: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_policy(self.name, self.nonfinite, raw_rows=True)
        pack_levels(self.levels)  # which says what they must be, before anything is encoded

    @property
    def preset(self) -> int:
        """The preset's number in the header."""
        return PRESETS[self.name].number

    @property
    def precision(self) -> int:
        """Bits of the frequency tables."""
        return table_set("gauss").bits

    @property
    def tables(self) -> bytes:
        """The table set, as the header names it."""
        return table_set("gauss").digest[:8]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        flags = Flags.OFFSET
        if self.levels is not None:
            flags |= Flags.LEVELS
        if _rotation(group) is not None:
            flags |= Flags.UNROPED
        return flags

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        check_dtypes(group, self.name, FLOAT_DTYPES)
        raw_rows, sizes = MAX_RAW_ROWS if self.nonfinite == "raw" else 1, []
        for part in group.parts:
            chunks = [max_segment_size(stop - start, part, raw_rows) for start, stop in _chunks(group.rows)]
            size = sum(nbytes for nbytes, _ in chunks), tuple(tile for _, tiles in chunks for tile in tiles)
            sizes += [size] * group.head_count
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`. A row at position 0 of a sequence is stored as it is."""
        rotation = _rotation(group)

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            flat = x.reshape(-1, *x.shape[2:])
            return self._encode_part(backend, part, flat, group, rotation if part.name in _KEYS else None)

        return encode_parts(backend, rows, group, segments, codec=self.name, dtypes=FLOAT_DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""

        def values(part: PartInfo, segments: list[list[CodedSegment]]) -> Any:
            flat = _decode_part(backend, part, [s for layer in segments for s in layer], group)
            return flat.reshape(len(segments), -1, *flat.shape[1:])

        decode_parts(backend, layers, group, out, values)

    def _rule(self, part: PartInfo) -> StepRule:
        preset = PRESETS[self.name]
        if self.levels is None:
            return StepRule(preset.constant)
        return StepRule(preset.leveled, self.levels[0 if part.name in _KEYS else 1])

    def _encode_part(
        self, backend: Backend, part: PartInfo, x: Any, group: GroupInfo, rotation: RopeParams | None
    ) -> list[CodedSegment]:
        """Encode one part, ``[layers * heads, T, width]``: 256 tokens at a time, all layers and heads at once."""
        heads = group.head_count
        owners = [f"layer {group.layers[i // heads]}, head {group.head_start + i % heads}" for i in range(x.shape[0])]
        pieces = []
        for start, stop in _chunks(group.rows):
            piece, position = x[:, start:stop], group.base_position + start
            names = [f"{owner}, tokens {start}:{stop}" for owner in owners]
            held, raw_rows = self._without_nonfinite(backend, piece, position == 0, names)
            pieces.append(
                encode_segments(
                    backend,
                    held if rotation is None else _turn(backend, held, rotation, -1, position),
                    tables=table_set("gauss"),
                    rule=self._rule(part),
                    raw_rows=raw_rows,
                    raw_values=piece,
                    unroped=rotation is not None,
                    names=names,
                )
            )
        return [
            CodedSegment(b"".join(p.data for p in parts), tuple(t for p in parts for t in p.tiles))
            for parts in zip(*pieces, strict=True)
        ]

    def _without_nonfinite(
        self, backend: Backend, x: Any, first_raw: bool, names: Sequence[str]
    ) -> tuple[Any, list[list[int]]]:
        """Return a chunk ``[S, T, C]`` as it is quantised, and each segment's raw rows, as the policy has it."""
        tokens, first = x.shape[1], [0] if first_raw else []
        anyway = tokens if tokens <= MAX_RAW_ROWS else len(first)  # rows from 0 on that are raw whatever they hold
        if self.nonfinite == "error":
            if anyway:  # of all others `encode_segments` tells
                check_finite(largest_by_row(backend, x[:, :anyway]), names)
            return x, [first] * x.shape[0]
        largest = largest_by_row(backend, x)
        bad = ~np.isfinite(largest) if self.nonfinite == "saturate" else ~(largest < TOO_LARGE)
        if not bad.any():
            return x, [first] * x.shape[0]
        if self.nonfinite == "saturate":
            return with_saturated_rows(backend, x, bad), [first] * x.shape[0]
        held, places = copied(backend, x), [(int(s), int(t)) for s, t in np.argwhere(bad)]
        put_rows(backend, held, places, np.zeros((1, x.shape[2]), x.dtype))
        rows = [sorted({*first, *np.flatnonzero(one).tolist()}) for one in bad]
        for s, chosen in enumerate(rows):
            if len(chosen) > MAX_RAW_ROWS:
                listed = ", ".join(map(str, chosen[:8])) + ", ..." * (len(chosen) > 8)
                raise QuantizationError(
                    f"{names[s]} has {len(chosen)} rows to store as they are ({listed}), and takes {MAX_RAW_ROWS}: "
                    "those with a NaN, an infinity or a value of 2**29 and more, and that at position 0; "
                    "nonfinite='saturate' stores other values"
                )
        return held, rows


def _decode_part(backend: Backend, part: PartInfo, segments: Sequence[CodedSegment], group: GroupInfo) -> Any:
    dtype = to_dtype(part.dtype)
    if part.dtype not in FLOAT_DTYPES:
        raise CorruptFrameError(f"KVS1 does not write {part.dtype}", reason="layout")
    result = empty(backend, (len(segments), group.rows, part.width), dtype)
    fused = backend.fused("decode_segments")
    if fused is not None:
        static: dict[str, Any] = {"tables": table_set("gauss"), "channels": part.width, "dtype": dtype}
        whole = group.rows <= TILE_TOKENS
        pieces = [[s] if whole else chunks_of(s, tokens=group.rows, **static) for s in segments]
        for (start, stop), chunk in zip(_chunks(group.rows), zip(*pieces, strict=True), strict=True):
            decoded = fused(chunk, tokens=stop - start, **static)
            _put_back(backend, part, decoded, group, start, result[:, start:stop])
        return result
    readers, taken = [Reader(s.data) for s in segments], [0] * len(segments)
    for start, stop in _chunks(group.rows):
        decoded = decode_segments(
            backend,
            readers,
            [segment.tiles[before:] for segment, before in zip(segments, taken, strict=True)],
            tables=table_set("gauss"),
            tokens=stop - start,
            channels=part.width,
            dtype=dtype,
        )
        taken = [before + more for before, more in zip(taken, decoded.tiles, strict=True)]
        _put_back(backend, part, decoded, group, start, result[:, start:stop])
    for reader, segment, count in zip(readers, segments, taken, strict=True):
        reader.finish()
        if len(segment.tiles) != count:
            raise CorruptFrameError(f"a segment has {len(segment.tiles)} tiles, {count} were expected", reason="length")
    return result


def _put_back(backend: Backend, part: PartInfo, decoded: Decoded, group: GroupInfo, start: int, target: Any) -> None:
    """Turn decoded values ``[S, T, C]`` into elements: RoPE put on where it was taken off, rounding, raw rows."""
    if decoded.unroped:
        rotation = _rotation(group)
        if rotation is None or part.name not in _KEYS:
            raise CorruptFrameError(f"part {part.name} has RoPE taken off, but no RoPE to put on", reason="stream")
        _turn(backend, decoded.values, rotation, 1, group.base_position + start, out=target)
    else:
        still = empty(backend, (target.shape[1], 0), np.float32)  # turned by nothing: rounded, saturating
        backend.shift_rope(decoded.values[:, :, None], still, still, out=target[:, :, None])
    places = [(s, row) for s, rows in enumerate(decoded.rows) for row in rows]
    if places:
        put_rows(backend, target, places, np.concatenate([raw for raw in decoded.raw if len(raw)]))


def _chunks(tokens: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens that are coded together."""
    return [(start, min(start + TILE_TOKENS, tokens)) for start in range(0, tokens, TILE_TOKENS)]


def _turn(backend: Backend, x: Any, rotation: RopeParams, sign: int, position: int, *, out: Any = None) -> Any:
    """Rotate keys ``[S, T, C]`` by their positions, forwards (1) or back (-1)."""
    table = _placed_table(backend, x, rotation, sign, position)
    target = empty(backend, x.shape, np.float32) if out is None else out
    backend.shift_rope(x[:, :, None], *table, interleaved=rotation.interleaved, out=target[:, :, None])
    return target


def _placed_table(backend: Backend, x: Any, rotation: RopeParams, sign: int, start: int) -> tuple[Any, Any]:
    """Return `rope_table` for the positions of tokens ``[S, T, C]``, from one on, where they are."""
    stop = start + x.shape[1]
    if not on_device(x):
        return rope_table(rotation, sign * np.arange(start, stop, dtype=np.int64))
    cos, sin, sent = _sent_table(of_all_streams(backend), x.device, rotation, sign, start, stop)
    backend.runtime.wait(sent)
    return cos, sin


@functools.lru_cache(maxsize=64)
def _sent_table(
    backend: Backend, device: str, rotation: RopeParams, sign: int, start: int, stop: int
) -> tuple[Any, Any, Any]:
    """Send a table to a device, which is the current one, and return it with the event after which it is there.

    It is kept, since a chunk that is coded layer by layer would send it with each, and it is as large as a head's keys.
    """
    cos, sin = rope_table(rotation, sign * np.arange(start, stop, dtype=np.int64))
    return near(backend, cos), near(backend, sin), backend.runtime.record()


_warned: set[str] = set()


def _rotation(group: GroupInfo) -> RopeParams | None:
    """Return the rotation that is taken off a group's keys: None where it is unknown, or unsupported (warned once)."""
    if group.rope is None or group.base_position < 0:
        return None
    try:
        _check_rotation(group, group.rope)
    except UnsupportedOpError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            logger.warning("keys keep their RoPE in stored KV, which then is less exact at a size: %s", error)
        return None
    return group.rope


def _check_rotation(group: GroupInfo, rope: RopeParams) -> None:
    """Raise unless keys can be rotated back; a frame's parameters may be anything."""
    width = min((part.width for part in group.parts if part.name in _KEYS), default=0)
    if rope.rotary_dims > width:
        raise UnsupportedOpError(f"{rope.rotary_dims} rotary channels of keys that have {width}")
    if group.base_position + group.rows > _MAX_POSITION:
        raise UnsupportedOpError("positions beyond 2**20 are not rotated")
    frequencies = rope.frequencies()
    if not (np.isfinite(frequencies).all() and np.abs(frequencies).max() <= _MAX_FREQUENCY):
        raise UnsupportedOpError(f"RoPE frequencies beyond {_MAX_FREQUENCY} radians a token are not rotated")
