"""The bytes of a frame's head: header, varlen part, directory.

Here is the one place that knows the encoding; `frame` writes with it, `frame_reader` reads with it, and
docs/frame.md is its description. Everything is little-endian. Parsing is bounded by the bytes at hand: no
count that was read is believed before it has been compared with what is left.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

from kvcore.codecs.frame_values import (
    Buffer,
    Flags,
    GroupInfo,
    LayerEntry,
    PartInfo,
    SegmentSize,
    byte_view,
    stored_order,
)
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError
from kvcore.rope import SCALING_PARAMETERS, RopeParams

__all__ = [
    "CRC_BYTES",
    "ENCRYPTION_STEP",
    "ENVELOPE_BYTES",
    "HEADER_BYTES",
    "MAGIC",
    "MAJOR",
    "MINOR",
    "FrameHeader",
    "Varlen",
    "crc32c",
    "digest_places",
    "directory_size",
    "pack_directory",
    "pack_levels",
    "pack_rope",
    "pack_varlen",
    "parse_directory",
    "parse_varlen",
]

MAGIC = b"KVS1"
MAJOR, MINOR = 1, 0
HEADER_BYTES = 72
CRC_BYTES = 4
DIGEST_BYTES = 32
ENCRYPTION_STEP = "aesgcm"
ENVELOPE_BYTES = {1: 29, 2: 33}
"""Version of the envelope -> what it adds to the body of a frame: its version, key id, IV and tag."""
_U8, _U16, _U32 = (struct.Struct("<" + code) for code in "BHI")
_U32X2, _I64, _F64 = struct.Struct("<II"), struct.Struct("<q"), struct.Struct("<d")
_HEADER = struct.Struct("<4sHHIHHB3sIHHIIQQ8s8sI")
_LAYER, _SEGMENT, _TILE = struct.Struct("<Q"), struct.Struct("<IH"), struct.Struct("<BH")
_ROPE = struct.Struct("<IBdd")
_LEVELS = struct.Struct("<bb")
_PLAIN, _TABLE, _SCALED = range(3)  # what the numbers after a rope's scaling are: none, frequencies, its parameters


def crc32c(data: bytes) -> int:
    """Return the CRC32C (Castagnoli) of `data`."""
    import google_crc32c  # a native library: loaded by the first frame, not by `import kvcore`

    return int(google_crc32c.value(data))


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The 72 bytes a frame begins with; fields in the order and meaning of docs/frame.md.

    Parameters
    ----------
    tokens : int
        Tokens of the chunk.
    layers, groups : int
        Stored layers (of all groups) and groups.
    varlen_bytes, directory_bytes : int
        Sizes of the two parts that follow the header.
    raw_bytes, stored_bytes : int
        Uncompressed K/V bytes, and the size of the whole frame.
    reserved : bytes
        The 3 bytes after `precision`, of which flag LEVELS uses two, and the 4 at the end.
    """

    tokens: int
    layers: int
    groups: int
    varlen_bytes: int
    directory_bytes: int
    raw_bytes: int
    stored_bytes: int
    codec_id: int = 0
    preset: int = 0
    precision: int = 0
    flags: int = 0
    tables: bytes = bytes(8)
    profile: bytes = bytes(8)
    major: int = MAJOR
    minor: int = MINOR
    reserved: bytes = bytes(7)

    @property
    def head_bytes(self) -> int:
        """Bytes from the frame's start to the end of the head's CRC."""
        return HEADER_BYTES + self.varlen_bytes + self.directory_bytes + CRC_BYTES

    @property
    def encrypted(self) -> bool:
        """Whether flag ENCRYPTED is set: the layers cannot be read before the frame is opened with its key."""
        return bool(self.flags & Flags.ENCRYPTED)

    @property
    def plain_head_bytes(self) -> int:
        """`head_bytes` of the frame before it was encrypted, from which the places of its layers follow."""
        return self.head_bytes - (_U8.size + len(ENCRYPTION_STEP)) * self.encrypted

    @property
    def levels(self) -> tuple[int, int] | None:
        """The level constants of keys and values, in eighths of an octave; None without flag LEVELS."""
        if not self.flags & Flags.LEVELS:
            return None
        keys, values = _LEVELS.unpack_from(self.reserved)
        return keys, values

    @property
    def unused(self) -> bytes:
        """The reserved bytes that nothing uses: zeros, unless a newer minor version wrote them."""
        return self.reserved[_LEVELS.size :] if self.flags & Flags.LEVELS else self.reserved

    def pack(self) -> bytes:
        """Return the 72 bytes."""
        return _HEADER.pack(
            MAGIC, self.major, self.minor, self.flags, self.codec_id, self.preset, self.precision,
            self.reserved[:3], self.tokens, self.layers, self.groups, self.varlen_bytes, self.directory_bytes,
            self.raw_bytes, self.stored_bytes, self.tables, self.profile, _U32.unpack(self.reserved[3:])[0],
        )  # fmt: skip

    @classmethod
    def parse(cls, buffer: Buffer) -> FrameHeader:
        """Read the header at the start of `buffer`: checks magic and major version; sizes are the reader's.

        Raises
        ------
        CorruptFrameError
            reason ``"foreign"``, ``"version"`` or ``"truncated"``.
        """
        view = byte_view(buffer)
        magic = bytes(view[:4])
        if magic != MAGIC[: len(magic)]:
            raise CorruptFrameError(f"not a frame: starts with {magic!r}, not {MAGIC!r}", reason="foreign")
        if len(view) >= 6 and (major := _U16.unpack_from(view, 4)[0]) != MAJOR:
            raise CorruptFrameError(
                f"the frame has format {major}, this build reads format {MAJOR}; upgrade kvcore",
                reason="version",
            )
        if len(view) < HEADER_BYTES:
            raise CorruptFrameError(f"{len(view)} bytes are no whole header of {HEADER_BYTES}", reason="truncated")
        (
            _, major, minor, flags, codec, preset, precision, pad, tokens, layers, groups, varlen, directory,
            raw, stored, tables, profile, tail,
        ) = _HEADER.unpack_from(view)  # fmt: skip
        return cls(
            tokens, layers, groups, varlen, directory, raw, stored, codec, preset, precision, flags, tables,
            profile, major, minor, pad + _U32.pack(tail),
        )  # fmt: skip


def pack_levels(levels: tuple[int, int] | None) -> bytes:
    """Return the header's 7 reserved bytes with the level constants in front.

    Raises
    ------
    ConfigError
        They are not two integers of -128 .. 127.
    """
    if levels is None:
        return bytes(7)
    if len(levels) != 2 or not all(isinstance(level, Integral) and -128 <= level <= 127 for level in levels):
        raise ConfigError(f"level constants are two integers in -128..127, eighths of an octave, got {levels}")
    return _LEVELS.pack(*levels) + bytes(7 - _LEVELS.size)


@dataclass(frozen=True, slots=True)
class Varlen:
    """The variable part of the head: whose bytes these are, how coded, and their groups."""

    namespace: bytes
    key: bytes
    codecs: tuple[str, ...]
    groups: tuple[GroupInfo, ...]


def pack_rope(rope: RopeParams | None) -> bytes:
    """Return the one encoding of rope parameters, in frames as in namespace digests."""
    if rope is None:
        return b"\x00"
    form, numbers = _PLAIN, tuple(rope.parameters.values())
    if rope.inv_freq is not None:
        form, numbers = _TABLE, rope.inv_freq
    elif numbers:
        form = _SCALED
    fixed = _ROPE.pack(rope.rotary_dims, rope.interleaved, rope.theta, rope.factor)
    return b"\x01" + fixed + _pack_text(rope.scaling) + struct.pack(f"<BI{len(numbers)}d", form, len(numbers), *numbers)


def pack_varlen(varlen: Varlen) -> bytes:
    """Return the varlen part. Raises `ConfigError` unless both digests have 32 bytes."""
    for name, digest in (("namespace", varlen.namespace), ("key", varlen.key)):
        if len(digest) != DIGEST_BYTES:
            raise ConfigError(f"a {name} digest has {DIGEST_BYTES} bytes, got {len(digest)}")
    chain = _U8.pack(len(varlen.codecs)) + b"".join(map(_pack_text, varlen.codecs))
    groups = (_pack_group(group) for group in varlen.groups)
    return varlen.namespace + varlen.key + chain + b"".join(_U32.pack(len(g)) + g for g in groups)


def parse_varlen(data: memoryview, header: FrameHeader) -> Varlen:
    """Read the varlen part; `CorruptFrameError` where it is malformed though its CRC was right."""
    cursor = _Cursor(data)
    namespace, key = bytes(cursor.take(DIGEST_BYTES)), bytes(cursor.take(DIGEST_BYTES))
    codecs = tuple(cursor.text() for _ in range(cursor.read(_U8)))
    groups, layers_left = [], header.layers
    for _ in range(header.groups):
        inner = _Cursor(cursor.take(cursor.read(_U32)))
        groups.append(_parse_group(inner, layers_left))
        layers_left -= len(groups[-1].layers)
        inner.finish(header)
    cursor.finish(header)
    if layers_left or not groups:
        raise CorruptFrameError(
            f"the header counts {header.layers} layers, the groups have {header.layers - layers_left}",
            reason="length",
        )
    return Varlen(namespace, key, codecs, tuple(groups))


def digest_places(directory: Buffer, groups: Sequence[GroupInfo]) -> list[int]:
    """Return where in a directory the layers' digests stand, 8 bytes each; `CorruptFrameError` past its end."""
    counts = [groups[group].segment_count for _, group in stored_order(groups)]
    if len(directory) == sum(_LAYER.size + _SEGMENT.size * count for count in counts):
        # No segment has tiles, and nothing has to be read. Frames of codec raw have the most bytes to encrypt.
        starts = accumulate(counts, lambda at, count: at + _LAYER.size + _SEGMENT.size * count, initial=0)
        return list(starts)[:-1]
    places, at = [], 0
    try:
        for count in counts:
            places.append(at)
            at += _LAYER.size
            for _ in range(count):
                at += _SEGMENT.size + _TILE.size * _SEGMENT.unpack_from(directory, at)[1]
    except struct.error:
        at = len(directory) + 1
    if at > len(directory):
        raise CorruptFrameError(f"the directory ends after {len(directory)} bytes, its layers do not", reason="length")
    return places


def directory_size(sizes: Iterable[Iterable[SegmentSize]]) -> int:
    """Bytes of the directory of these layers."""
    return sum(_LAYER.size + sum(_SEGMENT.size + _TILE.size * len(tiles) for _, tiles in layer) for layer in sizes)


def pack_directory(layers: Iterable[LayerEntry], digests: Iterable[int]) -> bytes:
    """Return the directory of placed layers."""
    out = bytearray()
    for entry, digest in zip(layers, digests, strict=True):
        out += _LAYER.pack(digest)
        for segment in entry.segments:
            out += _SEGMENT.pack(segment.nbytes, len(segment.tiles))
            for tile in segment.tiles:
                out += _TILE.pack(*tile)
    return bytes(out)


def parse_directory(
    data: memoryview, groups: Sequence[GroupInfo], header: FrameHeader
) -> list[tuple[int, list[SegmentSize]]]:
    """Read the directory: (digest, segment sizes) of each stored layer."""
    cursor, directory = _Cursor(data), []
    for _, group in stored_order(groups):
        digest, count = cursor.read(_LAYER), groups[group].segment_count
        directory.append((digest, _sizes_without_tiles(cursor, count) or _sizes(cursor, count)))
    cursor.finish(header)
    return directory


def _sizes(cursor: _Cursor, count: int) -> list[SegmentSize]:
    sizes: list[SegmentSize] = []
    for _ in range(count):
        nbytes, tiles = _SEGMENT.unpack(cursor.take(_SEGMENT.size))
        sizes.append((nbytes, tuple(_TILE.iter_unpack(cursor.take(tiles * _TILE.size))) if tiles else ()))
    return sizes


def _sizes_without_tiles(cursor: _Cursor, count: int) -> list[SegmentSize] | None:
    """Read segments all at once, as those of codecs without tiles can be; None, and nothing is read, for others."""
    data = cursor.peek(count * _SEGMENT.size)
    if len(data) < count * _SEGMENT.size:
        return None
    found = list(_SEGMENT.iter_unpack(data))
    if any(tiles for _, tiles in found):
        return None
    cursor.take(len(data))
    return [(nbytes, ()) for nbytes, _ in found]


def _pack_group(group: GroupInfo) -> bytes:
    runs = list(_runs(group.layers))
    return b"".join(
        (
            _pack_text(group.layout),
            _I64.pack(group.base_position),
            _U32.pack(group.rows),
            _U32X2.pack(group.head_start, group.head_count),
            _U16.pack(len(runs)),
            *(_U32X2.pack(*run) for run in runs),
            _U8.pack(len(group.parts)),
            *(_pack_text(p.name) + _pack_text(p.dtype) + _U32.pack(p.width) for p in group.parts),
            pack_rope(group.rope),
        )
    )


def _parse_group(cursor: _Cursor, most_layers: int) -> GroupInfo:
    layout = cursor.text()
    base_position, rows = cursor.read(_I64), cursor.read(_U32)
    head_start, head_count = _U32X2.unpack(cursor.take(_U32X2.size))
    layers: list[int] = []
    for start, count in _U32X2.iter_unpack(cursor.take(cursor.read(_U16) * _U32X2.size)):
        if len(layers) + count > most_layers:
            raise CorruptFrameError("the groups have more layers than the header", reason="length")
        layers.extend(range(start, start + count))
    part_fields = [(cursor.text(), cursor.text(), cursor.read(_U32)) for _ in range(cursor.read(_U8))]
    try:
        parts = tuple(PartInfo(*fields) for fields in part_fields)
        rope = _parse_rope(cursor)
        return GroupInfo(layout, tuple(layers), parts, rows, head_count, head_start, base_position, rope)
    except (ConfigError, LayoutError) as error:
        raise CorruptFrameError(f"a group of the frame means nothing: {error}", reason="layout") from error


def _parse_rope(cursor: _Cursor) -> RopeParams | None:
    if not cursor.read(_U8):
        return None
    rotary_dims, interleaved, theta, factor = _ROPE.unpack(cursor.take(_ROPE.size))
    scaling, form, count = cursor.text(), cursor.read(_U8), cursor.read(_U32)
    numbers = tuple(value for (value,) in _F64.iter_unpack(cursor.take(count * _F64.size)))
    names = SCALING_PARAMETERS.get(scaling, ())
    if form not in (_PLAIN, _TABLE, _SCALED) or (form == _PLAIN and count):
        raise CorruptFrameError(f"rope parameters of form {form} with {count} numbers mean nothing", reason="layout")
    if form == _SCALED and (not names or count != len(names)):
        raise CorruptFrameError(f"RoPE scaling {scaling!r} has {len(names)} numbers, not {count}", reason="layout")
    named: dict[str, Any] = dict(zip(names, numbers, strict=True)) if form == _SCALED else {}
    return RopeParams(
        rotary_dims, theta, bool(interleaved), scaling, factor, numbers if form == _TABLE else None, **named
    )


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (start, count) of consecutive ones."""
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or layers[i] != layers[i - 1] + 1:
            yield layers[start], i - start
            start = i


def _pack_text(text: str) -> bytes:
    data = text.encode("ascii")
    return _U8.pack(len(data)) + data


class _Cursor:
    """Reads a view from front to back and never past its end."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        at, end = self._at, self._at + nbytes
        if end > len(self._view):
            raise CorruptFrameError(
                f"a field of {nbytes} bytes does not fit the {len(self._view) - at} left in its part",
                reason="length",
            )
        self._at = end
        return self._view[at:end]

    def peek(self, nbytes: int) -> memoryview:
        """Return the next bytes without taking them: fewer where the view ends."""
        return self._view[self._at : self._at + nbytes]

    def read(self, one: struct.Struct) -> Any:
        return one.unpack(self.take(one.size))[0]

    def text(self) -> str:
        data = bytes(self.take(self.read(_U8)))
        if not data.isascii():
            raise CorruptFrameError(f"the frame has a name that is not ASCII: {data!r}", reason="layout")
        return data.decode("ascii")

    def finish(self, header: FrameHeader) -> None:
        """Everything must have been read, unless a newer minor version may have appended fields."""
        left = len(self._view) - self._at
        if left and header.minor <= MINOR:
            raise CorruptFrameError(f"{left} bytes follow the last field of a part", reason="length")
