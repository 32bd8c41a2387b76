"""Writing frames, the one stored form of a chunk. `FrameReader` reads them; docs/frame.md is the format.

A writer knows the exact size before it allocates, and hands out the layers' places in the one allocation, so
that a cache is gathered straight into its frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcore.codecs import raw
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
    pack_varlen,
)
from kvcore.codecs.frame_reader import FrameReader
from kvcore.codecs.frame_values import (
    CODECS,
    LAYER_ALIGN,
    SEGMENT_ALIGN,
    Buffer,
    Digest,
    Flags,
    GroupInfo,
    LayerEntry,
    PartInfo,
    Segment,
    byte_view,
    place_layers,
    stored_order,
)
from kvcore.errors import ConfigError, LayoutError

__all__ = [
    "CODECS",
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
    "plan_frame",
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
    codec: str = "raw",
) -> FramePlan:
    """Lay out a frame, without allocating it.

    Parameters
    ----------
    groups : sequence of GroupInfo
    tokens : int
        Tokens of the chunk, at least 1.
    namespace, key : bytes
        32-byte digests.
    codec : str
        A name of `CODECS`.

    Raises
    ------
    ConfigError
        An unknown codec, no tokens, or a digest that has not 32 bytes.
    LayoutError
        More layers than a frame holds, or a segment of 4 GiB or more.
    """
    groups = tuple(groups)
    if codec not in CODECS:
        raise ConfigError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    if not 1 <= tokens < 2**32:
        raise ConfigError(f"a frame holds 1 to 2**32 - 1 tokens, got {tokens}")
    layer_count = sum(len(group.layers) for group in groups)
    if not 1 <= layer_count <= 0xFFFF:
        raise LayoutError(f"a frame holds 1 to {0xFFFF} layers, got {layer_count} in {len(groups)} groups")
    for group in groups:
        if (largest := max(nbytes for nbytes, _ in raw.segment_sizes(group))) >= 2**32:
            raise LayoutError(f"a segment of {largest} bytes is 4 GiB or more; use shorter chunks")
    varlen = pack_varlen(Varlen(namespace, key, (codec,), groups))
    sizes = [raw.segment_sizes(groups[index]) for _, index in stored_order(groups)]
    header = FrameHeader(
        tokens=tokens,
        layers=layer_count,
        groups=len(groups),
        varlen_bytes=len(varlen),
        directory_bytes=directory_size(sizes),
        raw_bytes=sum(group.raw_bytes for group in groups),
        stored_bytes=0,
        codec_id=CODECS[codec],
    )
    layers = place_layers(groups, [(0, layer) for layer in sizes], header.head_bytes)
    return FramePlan(replace(header, stored_bytes=layers[-1].stop), groups, varlen, layers)


class FrameWriter:
    """Fills a planned frame in place.

    Parameters
    ----------
    plan : FramePlan
        The frame is allocated here, once, zeroed.
    """

    __slots__ = ("_frame", "_plan", "_view")

    def __init__(self, plan: FramePlan) -> None:
        self._plan = plan
        self._frame = bytearray(plan.nbytes)
        self._view = memoryview(self._frame)

    def layer_view(self, index: int) -> memoryview:
        """Return the place of a stored layer, a writable view; leave the bytes between its segments zero."""
        entry = self._plan.layers[index]
        return self._view[entry.start : entry.stop]

    def finish(self, digest: Digest) -> bytearray:
        """Digest the layers in one call, write the head, return the frame: the buffer itself, not a copy."""
        plan = self._plan
        digests = digest([self.layer_view(index) for index in range(len(plan.layers))])
        head = plan.header.pack() + plan.varlen + pack_directory(plan.layers, map(int, digests))
        self._view[: len(head)] = head
        self._view[len(head) : len(head) + CRC_BYTES] = crc32c(head).to_bytes(CRC_BYTES, "little")
        return self._frame


def write_frame(
    groups: Sequence[GroupInfo],
    layers: Sequence[Sequence[Buffer]],
    *,
    tokens: int,
    namespace: bytes,
    key: bytes,
    codec: str = "raw",
    digest: Digest,
) -> bytearray:
    """Write a frame from segments that already exist, one copy each. `FrameWriter` saves that copy.

    Parameters
    ----------
    groups : sequence of GroupInfo
    layers : sequence of sequences of bytes-like
        Segments in (part, head) order, for every stored layer in ascending order of the model's layers.
    tokens, namespace, key, codec
        As in `plan_frame`.
    digest : callable
        The backend's `digest` op.

    Raises
    ------
    LayoutError
        The segments are not as many, or not as long, as the groups say. Nothing has been written.
    """
    plan = plan_frame(groups, tokens=tokens, namespace=namespace, key=key, codec=codec)
    views = [[byte_view(segment) for segment in layer] for layer in layers]
    given = [[len(view) for view in layer] for layer in views]
    wanted = [[segment.nbytes for segment in entry.segments] for entry in plan.layers]
    if given != wanted:
        raise LayoutError(f"segments of {given} bytes do not fit groups that need {wanted}, per layer")
    writer = FrameWriter(plan)
    for index, entry in enumerate(plan.layers):
        target = writer.layer_view(index)
        for segment, view in zip(entry.segments, views[index], strict=True):
            target[segment.offset - entry.start :][: segment.nbytes] = view
    return writer.finish(digest)
