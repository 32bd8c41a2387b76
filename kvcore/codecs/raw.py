"""Codec ``raw`` (id 0): segments are rows as they are, so a layer is dense ``[part, head, row, channel]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import SEGMENT_ALIGN, Flags, GroupInfo, PartInfo, SegmentSize, align
from kvcore.codecs.parts import decode_parts, encode_parts
from kvcore.dtypes import DTYPES, to_dtype
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.ops import Backend
from kvcore.rows import RowLayout, Segment

__all__ = ["Raw", "bind_layers", "layer_arrays", "layer_bytes", "rows_of_segments", "segment_sizes"]


def segment_sizes(group: GroupInfo) -> list[SegmentSize]:
    """Return the sizes of one layer's segments, in stored order (part, then head)."""
    return [size for part in group.parts for size in [(group.rows * part.row_bytes, ())] * group.head_count]


def layer_bytes(group: GroupInfo) -> int:
    """Return the stored bytes of one layer, from its boundary to the end of its last segment."""
    end = 0
    for part in group.parts:
        nbytes = group.rows * part.row_bytes
        end = align(end, SEGMENT_ALIGN) + (group.head_count - 1) * align(nbytes, SEGMENT_ALIGN) + nbytes
    return end


def layer_arrays(group: GroupInfo, layer: memoryview) -> tuple[npt.NDArray[Any], ...]:
    """View a stored layer as arrays: one ``[head_count, rows, width]`` for each part, without a copy.

    Parameters
    ----------
    group : GroupInfo
    layer : memoryview of `layer_bytes` bytes
        From `FrameWriter.layer_view` (the arrays are writable: gather straight into the frame) or
        `FrameReader.layer` (they are read-only). Heads lie 16-byte aligned, so the head stride may exceed the
        rows.

    Raises
    ------
    LayoutError
        The view has another size.
    """
    if layer.nbytes != layer_bytes(group):
        raise LayoutError(f"a raw layer of this group has {layer_bytes(group)} bytes, the view has {layer.nbytes}")
    arrays, offset = [], 0
    for part in group.parts:
        dtype, head_stride = to_dtype(part.dtype), align(group.rows * part.row_bytes, SEGMENT_ALIGN)
        shape = (group.head_count, group.rows, part.width)
        strides = (head_stride, part.row_bytes, dtype.itemsize)
        arrays.append(np.ndarray(shape, dtype, buffer=layer, offset=offset, strides=strides))
        offset += group.head_count * head_stride
    return tuple(arrays)


def bind_layers(group: GroupInfo, layers: Sequence[memoryview]) -> RowLayout:
    """Bind stored layers as one dense chunk, in place, whatever the group's parts are.

    Parameters
    ----------
    group : GroupInfo
    layers : sequence of memoryview
        As `layer_arrays` takes one. The chunk is read-only if one of them is.

    Raises
    ------
    LayoutError
        A view has another size.
    """
    size = layer_bytes(group)
    for layer in layers:
        if layer.nbytes != size:
            raise LayoutError(f"a raw layer of this group has {size} bytes, the view has {layer.nbytes}")
    buffers = [np.frombuffer(layer, np.uint8) for layer in layers]
    starts = [buffer.__array_interface__["data"][0] for buffer in buffers]
    segments, offset = [], 0
    for part in group.parts:
        dtype, head_stride = to_dtype(part.dtype), align(group.rows * part.row_bytes, SEGMENT_ALIGN)
        bases = (tuple(start + offset for start in starts),)
        strides = (group.rows * part.row_bytes, part.row_bytes, head_stride, dtype.itemsize)
        segments.append(Segment((part.name,), dtype, bases, *strides, group.head_count, part.width))
        offset += group.head_count * head_stride
    readonly = any(layer.readonly for layer in layers)
    return RowLayout(
        group.layout, tuple(segments), 1, group.rows, len(layers), "cpu", readonly, tuple(buffers), paged=False
    )


@dataclass(frozen=True, slots=True)
class Raw:
    """Rows as they are, of every element type: a segment is ``[T, width]``.

    Frames of this codec need not go through it: `layer_arrays` lets a backend gather straight into one.

    Parameters
    ----------
    name : str
        ``"raw"``.
    """

    name: str = "raw"
    codec_id: int = field(default=0, init=False)
    preset: int = field(default=0, init=False)
    chain: tuple[str, ...] = field(default=("raw",), init=False)
    precision: int = field(default=0, init=False)
    tables: bytes = field(default=bytes(8), init=False)
    lossless: bool = field(default=True, init=False)

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        return segment_sizes(group)

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`."""
        return encode_parts(backend, rows, group, _segments, codec=self.name, dtypes=DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""
        decode_parts(backend, layers, group, out, lambda part, segments: rows_of_segments(part, segments, group))


def _segments(part: PartInfo, x: Array) -> list[CodedSegment]:
    return [CodedSegment(head.tobytes()) for layer in x for head in layer]


def rows_of_segments(part: PartInfo, layers: list[list[CodedSegment]], group: GroupInfo) -> Array:
    """Return what segments of rows as they are hold, ``[layers, heads, T, width]``, read-only.

    Raises
    ------
    CorruptFrameError
        A segment has another size, or tiles.
    """
    for segment in (segment for layer in layers for segment in layer):
        if len(segment.data) != group.rows * part.row_bytes or segment.tiles:
            raise CorruptFrameError(
                f"a raw segment of {len(segment.data)} bytes and {len(segment.tiles)} tiles, "
                f"not of {group.rows * part.row_bytes} bytes",
                reason="length",
            )
    data = b"".join(segment.data for layer in layers for segment in layer)
    return np.frombuffer(data, to_dtype(part.dtype)).reshape(len(layers), -1, group.rows, part.width)
