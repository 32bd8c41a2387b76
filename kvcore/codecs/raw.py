"""Codec ``raw`` (id 0): segments are rows as they are, so a layer is dense ``[part, head, row, channel]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.frame_values import (
    SEGMENT_ALIGN,
    GroupInfo,
    SegmentSize,
    align,
)
from kvcore.dtypes import to_dtype
from kvcore.errors import LayoutError

__all__ = ["layer_arrays", "layer_bytes", "segment_sizes"]


def segment_sizes(group: GroupInfo) -> list[SegmentSize]:
    """Return the sizes of one layer's segments, in stored order (part, then head)."""
    return [(group.rows * part.row_bytes, ()) for part in group.parts for _ in range(group.head_count)]


def layer_bytes(group: GroupInfo) -> int:
    """Return the stored bytes of one layer, from its boundary to the end of its last segment."""
    end = 0
    for nbytes, _ in segment_sizes(group):
        end = align(end, SEGMENT_ALIGN) + nbytes
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
