"""Writing frames, the one stored form of a chunk. `FrameReader` reads them; docs/frame.md is the format.

A writer knows the exact size before it allocates, and hands out the layers' places in the one allocation, so
that a cache is gathered straight into its frame.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcore.codecs import raw
from kvcore.codecs.contract import Codec, CodedSegment
from kvcore.codecs.frame_format import (
    CRC_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAJOR,
    MINOR,
    FrameHeader,
    Varlen,
    crc32c,
    directory_size,
    pack_directory,
    pack_levels,
    pack_varlen,
)
from kvcore.codecs.frame_reader import FrameReader
from kvcore.codecs.frame_stream import stream_layers
from kvcore.codecs.frame_values import (
    LAYER_ALIGN,
    SEGMENT_ALIGN,
    Buffer,
    Digest,
    Flags,
    GroupInfo,
    LayerEntry,
    PartInfo,
    Segment,
    SegmentSize,
    byte_view,
    place_layers,
    stored_order,
)
from kvcore.codecs.registry import get_codec
from kvcore.errors import ConfigError, LayoutError
from kvcore.ops import Backend, on_host
from kvcore.rows import RowLayout

__all__ = [
    "HEADER_BYTES",
    "LAYER_ALIGN",
    "MAGIC",
    "MAJOR",
    "MINOR",
    "SEGMENT_ALIGN",
    "Buffer",
    "Digest",
    "Flags",
    "FrameHeader",
    "FramePlan",
    "FrameReader",
    "FrameWriter",
    "GroupInfo",
    "LayerEntry",
    "PartInfo",
    "Segment",
    "encode_frame",
    "frame_bound",
    "plan_frame",
    "stream_layers",
    "write_frame",
]


@dataclass(frozen=True, slots=True)
class FramePlan:
    """A frame before its bytes: everything but the layers and their digests.

    Parameters
    ----------
    header : FrameHeader
    groups : tuple of GroupInfo
    varlen : bytes
        The encoded varlen part.
    layers : tuple of LayerEntry
        Where every stored layer and segment goes.
    """

    header: FrameHeader
    groups: tuple[GroupInfo, ...]
    varlen: bytes
    layers: tuple[LayerEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole frame."""
        return self.header.stored_bytes


def plan_frame(
    groups: Sequence[GroupInfo],
    *,
    tokens: int,
    namespace: bytes,
    key: bytes,
    codec: Codec | str = "raw",
    sizes: Sequence[Sequence[SegmentSize]] | None = None,
) -> FramePlan:
    """Lay out a frame, without allocating it.

    Parameters
    ----------
    groups : sequence of GroupInfo
    tokens : int
        Tokens of the chunk, at least 1.
    namespace, key : bytes
        32-byte digests.
    codec : Codec or str
        Or its preset's name.
    sizes : sequence of sequences of (bytes, tiles), optional
        Of the segments, in (part, head) order for every stored layer. Those of codec raw follow from the groups.

    Raises
    ------
    ConfigError
        An unknown codec, no tokens, a digest that has not 32 bytes, or a level constant out of range.
    LayoutError
        More layers than a frame holds, not as many segments as the groups have, or one of 4 GiB or more.
    """
    groups, codec = tuple(groups), get_codec(codec) if isinstance(codec, str) else codec
    if not 1 <= tokens < 2**32:
        raise ConfigError(f"a frame holds 1 to 2**32 - 1 tokens, got {tokens}")
    layer_count = sum(len(group.layers) for group in groups)
    if not 1 <= layer_count <= 0xFFFF:
        raise LayoutError(f"a frame holds 1 to {0xFFFF} layers, got {layer_count} in {len(groups)} groups")
    if sizes is None:
        if codec.codec_id:
            raise LayoutError(f"the sizes of segments of codec {codec.name} do not follow from the groups; give them")
        varlen = pack_varlen(Varlen(namespace, key, codec.chain, groups))
        return replace(_raw_plan(tuple(map(_anywhere, groups)), tokens), groups=groups, varlen=varlen)
    _check_segments(groups, sizes)
    varlen = pack_varlen(Varlen(namespace, key, codec.chain, groups))
    levels: tuple[int, int] | None = getattr(codec, "levels", None)
    header = FrameHeader(
        tokens=tokens,
        layers=layer_count,
        groups=len(groups),
        varlen_bytes=len(varlen),
        directory_bytes=directory_size(sizes),
        raw_bytes=sum(group.raw_bytes for group in groups),
        stored_bytes=0,
        codec_id=codec.codec_id,
        preset=codec.preset,
        precision=codec.precision,
        flags=_flags(codec, groups),
        tables=codec.tables,
        reserved=pack_levels(levels),
    )
    layers = place_layers(groups, [(0, layer) for layer in sizes], header.head_bytes)
    return FramePlan(replace(header, stored_bytes=layers[-1].stop), groups, varlen, layers)


def _anywhere(group: GroupInfo) -> GroupInfo:
    return group if group.base_position == 0 else replace(group, base_position=0)


@functools.lru_cache(maxsize=64)
def _raw_plan(groups: tuple[GroupInfo, ...], tokens: int) -> FramePlan:
    """The plan of a raw frame at position 0 under no key: but for that, the chunks of a model are alike."""
    by_group = [raw.segment_sizes(group) for group in groups]
    sizes = [by_group[index] for _, index in stored_order(groups)]
    return plan_frame(groups, tokens=tokens, namespace=bytes(32), key=bytes(32), sizes=sizes)


def frame_bound(groups: Sequence[GroupInfo], *, tokens: int, codec: Codec | str) -> int:
    """Return the most bytes that a frame of a codec takes, whatever its values are; exact where they do not matter.

    Raises
    ------
    ConfigError, LayoutError
        As `plan_frame` does.
    UnsupportedOpError
        The codec does not take an element type.
    """
    codec = get_codec(codec) if isinstance(codec, str) else codec
    if codec.codec_id == 0:
        return plan_frame(groups, tokens=tokens, namespace=bytes(32), key=bytes(32), codec=codec).nbytes
    by_group = [codec.max_sizes(group) for group in groups]
    sizes = [by_group[index] for _, index in stored_order(groups)]
    return plan_frame(groups, tokens=tokens, namespace=bytes(32), key=bytes(32), codec=codec, sizes=sizes).nbytes


def _flags(codec: Codec, groups: Sequence[GroupInfo]) -> int:
    flags = Flags(0)
    for group in groups:
        flags |= codec.flags(group)
    return int(flags)


def _check_segments(groups: Sequence[GroupInfo], sizes: Sequence[Sequence[SegmentSize]]) -> None:
    """Raise `LayoutError` unless there are as many segments as the groups say, each of a size that can be stored."""
    wanted = [groups[index].segment_count for _, index in stored_order(groups)]
    given = [len(layer) for layer in sizes]
    if given != wanted:
        raise LayoutError(f"{given} segments by layer do not fit groups that have {wanted}")
    for layer in sizes:
        for nbytes, tiles in layer:
            if nbytes >= 2**32 or len(tiles) > 0xFFFF:
                raise LayoutError(
                    f"a segment of {nbytes} bytes in {len(tiles)} tiles is 4 GiB or more, or {0x10000} tiles or more; "
                    "use shorter chunks"
                )


class FrameWriter:
    """Fills a planned frame in place.

    Parameters
    ----------
    plan : FramePlan
    out : writable bytes-like, optional
        Where the frame is written: its first ``plan.nbytes`` bytes. They may hold anything; of what is not filled
        only the bytes between layers and segments are cleared. Without it the frame is allocated here, once, zeroed.

    Raises
    ------
    LayoutError
        `out` is too small, read-only or not contiguous. Nothing has been written.
    """

    __slots__ = ("_frame", "_plan", "_view")

    def __init__(self, plan: FramePlan, out: Buffer | None = None) -> None:
        self._plan = plan
        if out is None:
            self._frame: bytearray | memoryview = bytearray(plan.nbytes)
            self._view = memoryview(self._frame)
            return
        view = byte_view(out)
        if view.readonly or len(view) < plan.nbytes:
            what = "is read-only" if view.readonly else f"has {len(view)} B"
            raise LayoutError(f"the frame takes {plan.nbytes} B, the memory that it shall be written to {what}")
        self._frame = self._view = view[: plan.nbytes]
        self._clear_gaps()

    def layer_view(self, index: int) -> memoryview:
        """Return the place of a stored layer, a writable view; leave the bytes between its segments zero."""
        entry = self._plan.layers[index]
        return self._view[entry.start : entry.stop]

    def finish(self, digest: Digest) -> bytearray | memoryview:
        """Digest the layers in one call, write the head, return the frame: the buffer itself, not a copy."""
        plan = self._plan
        digests = digest([self.layer_view(index) for index in range(len(plan.layers))])
        head = plan.header.pack() + plan.varlen + pack_directory(plan.layers, map(int, digests))
        self._view[: len(head)] = head
        self._view[len(head) : len(head) + CRC_BYTES] = crc32c(head).to_bytes(CRC_BYTES, "little")
        return self._frame

    def _clear_gaps(self) -> None:
        end = self._plan.header.head_bytes
        for entry in self._plan.layers:
            for segment in entry.segments:
                if end < segment.offset:
                    self._view[end : segment.offset] = bytes(segment.offset - end)
                end = segment.offset + segment.nbytes


def write_frame(
    groups: Sequence[GroupInfo],
    layers: Sequence[Sequence[CodedSegment | Buffer]],
    *,
    tokens: int,
    namespace: bytes,
    key: bytes,
    codec: Codec | str = "raw",
    digest: Digest,
    out: Buffer | None = None,
) -> bytearray | memoryview:
    """Write a frame from segments that already exist, one copy each. `FrameWriter` saves that copy.

    Parameters
    ----------
    groups : sequence of GroupInfo
    layers : sequence of sequences of CodedSegment or bytes-like
        Segments in (part, head) order, for every stored layer in ascending order of the model's layers. Bytes alone
        are a segment without tiles.
    tokens, namespace, key, codec
        As in `plan_frame`.
    digest : callable
        The backend's `digest` op.
    out : writable bytes-like, optional
        Where to write it: see `FrameWriter`. What is returned is then a view of the frame there.

    Raises
    ------
    ConfigError
        As `plan_frame` does.
    LayoutError
        The segments are not as many, or (raw) not as long, as the groups say, or `out` is too small for them. Nothing
        has been written.
    """
    segments = [[s if isinstance(s, CodedSegment) else CodedSegment(memoryview(s)) for s in layer] for layer in layers]
    views = [[byte_view(s.data) for s in layer] for layer in segments]
    sizes: list[list[SegmentSize]] = [
        [(len(view), s.tiles) for view, s in zip(*pair, strict=True)] for pair in zip(views, segments, strict=True)
    ]
    codec = get_codec(codec) if isinstance(codec, str) else codec
    plan = plan_frame(groups, tokens=tokens, namespace=namespace, key=key, codec=codec, sizes=sizes)
    if codec.codec_id == 0:
        given = [[nbytes for nbytes, _ in layer] for layer in sizes]
        wanted = [[nbytes for nbytes, _ in raw.segment_sizes(groups[index])] for _, index in stored_order(groups)]
        if given != wanted:
            raise LayoutError(f"segments of {given} bytes do not fit groups that need {wanted}, per layer")
    writer = FrameWriter(plan, out)
    for index, entry in enumerate(plan.layers):
        target = writer.layer_view(index)
        for segment, view in zip(entry.segments, views[index], strict=True):
            target[segment.offset - entry.start :][: segment.nbytes] = view
    return writer.finish(digest)


def encode_frame(
    backend: Backend,
    groups: Sequence[GroupInfo],
    rows: Sequence[RowLayout],
    *,
    tokens: int,
    namespace: bytes,
    key: bytes,
    codec: Codec | str,
    out: Buffer | None = None,
) -> bytearray | memoryview:
    """Encode a chunk and write its frame.

    Parameters
    ----------
    backend : Backend
        With the ops of the codec, and `digest`.
    groups : sequence of GroupInfo
    rows : sequence of RowLayout
        For each group the dense rows of all its layers.
    tokens, namespace, key, codec
        As in `plan_frame`.
    out : writable bytes-like, optional
        As in `write_frame`.

    Raises
    ------
    QuantizationError
        A value that the codec cannot hold. Nothing has been written.
    ConfigError, LayoutError, UnsupportedOpError
        The codec, the groups and the rows do not go together.
    """
    codec = get_codec(codec) if isinstance(codec, str) else codec
    if len(rows) != len(groups):
        raise LayoutError(f"{len(groups)} groups, but rows of {len(rows)}")
    for group, one in zip(groups, rows, strict=True):
        if (one.layers, one.tokens) != (len(group.layers), group.rows):
            raise LayoutError(
                f"the group has {len(group.layers)} layers of {group.rows} tokens, its rows {one.layers} x {one.tokens}"
            )
    backend = on_host(backend)
    coded = [iter(codec.encode(backend, one, group)) for group, one in zip(groups, rows, strict=True)]
    layers = [next(coded[index]) for _, index in stored_order(groups)]
    return write_frame(
        groups, layers, tokens=tokens, namespace=namespace, key=key, codec=codec, digest=backend.digest, out=out
    )
