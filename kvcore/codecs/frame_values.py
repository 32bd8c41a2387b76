"""What a frame says about itself, as values: groups of layers, their parts, and where every segment lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TypeAlias

from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import LayoutError
from kvcore.rope import RopeParams

__all__ = [
    "ELEMENTS_OF_A_BYTE",
    "LAYER_ALIGN",
    "SEGMENT_ALIGN",
    "Buffer",
    "Digest",
    "Flags",
    "GroupInfo",
    "LayerEntry",
    "PartInfo",
    "Segment",
    "SegmentSize",
    "Tiles",
    "align",
    "byte_view",
    "place_layers",
    "stored_order",
]

LAYER_ALIGN = 256
SEGMENT_ALIGN = 16
ELEMENTS_OF_A_BYTE = 8
"""What a stored byte stands for, at most, outside tiles: what lets a reader believe a group's shape."""

Buffer: TypeAlias = bytes | bytearray | memoryview
Digest: TypeAlias = Callable[[Sequence[memoryview]], Sequence[int]]
"""The backend's `digest` op, as frames take it: byte buffers in, one 64-bit integer for each out."""
Tiles: TypeAlias = tuple[tuple[int, int], ...]
"""(mode, word count) of each tile of a segment; empty for codec raw."""
SegmentSize: TypeAlias = tuple[int, Tiles]
"""A segment before it has a place: stored bytes, tiles."""

_U32_MAX = 2**32 - 1


class Flags(IntFlag):
    """Bits of the header's flags. A bit that a reader does not know is an error.

    No codec sets ENCRYPTED: it comes with the last step of the chain, see `kvcore.codecs.encryption`.
    """

    UNROPED = 1
    OFFSET = 2
    LEVELS = 4
    ENCRYPTED = 8


def align(nbytes: int, to: int) -> int:
    """Round up to a multiple of `to`."""
    return -(-nbytes // to) * to


def byte_view(buffer: Buffer) -> memoryview:
    """View the buffer as flat bytes, without a copy; `LayoutError` where its memory is not contiguous."""
    view = memoryview(buffer)
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise LayoutError(f"a frame takes contiguous bytes, got shape {view.shape} with strides {view.strides}")
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True, slots=True)
class PartInfo:
    """One part of a layer: ``K``, ``V``, or MLA's ``C``.

    Parameters
    ----------
    name : str
    dtype : str
        Canonical element type name (see `kvcore.dtypes`); aliases are replaced by it.
    width : int
        Elements of one row of one head: the D, E or C extent.
    """

    name: str
    dtype: str
    width: int

    def __post_init__(self) -> None:
        _check_text("part name", self.name)
        _check_range("part width", self.width, 1, _U32_MAX)
        object.__setattr__(self, "dtype", dtype_name(to_dtype(self.dtype)))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head, uncompressed."""
        return self.width * _itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group of layers that look alike, as a frame describes it.

    Parameters
    ----------
    layout : str
        Axis string of the chunk, such as ``LKHTD``, ``LTC``, ``L*``.
    layers : tuple of int
        The model's layer numbers, ascending; any sequence, a range too. Groups of one frame may interleave.
    parts : tuple of PartInfo
        In stored order.
    rows : int
        Rows per head and layer: the T extent. The chunk's tokens for attention, 1 for a recurrent state.
    head_count, head_start : int
        Which of the model's KV heads are here.
    base_position : int
        Position of the first row in its sequence.
    rope : RopeParams, optional
        How the keys are rotated; None where unknown or not at all.

    Raises
    ------
    LayoutError
        A field does not fit the format.
    """

    layout: str
    layers: tuple[int, ...]
    parts: tuple[PartInfo, ...]
    rows: int
    head_count: int = 1
    head_start: int = 0
    base_position: int = 0
    rope: RopeParams | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "parts", tuple(self.parts))
        _check_text("layout", self.layout)
        _check_range("number of layers", len(self.layers), 1, 0xFFFF)
        _check_range("number of parts", len(self.parts), 1, 0xFF)
        _check_range("first layer", self.layers[0], 0, _U32_MAX)
        _check_range("last layer", self.layers[-1], 0, _U32_MAX)
        _check_range("rows", self.rows, 1, _U32_MAX)
        _check_range("head_count", self.head_count, 1, _U32_MAX)
        _check_range("head_start", self.head_start, 0, _U32_MAX)
        _check_range("base_position", self.base_position, -(2**63), 2**63 - 1)
        if any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise LayoutError(f"layers of a group must ascend, got {self.layers}")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise LayoutError(f"parts of a group need different names, got {[part.name for part in self.parts]}")

    @property
    def segment_count(self) -> int:
        """Segments of one layer: parts times heads."""
        return len(self.parts) * self.head_count

    @property
    def raw_bytes(self) -> int:
        """Uncompressed bytes of all layers of the group."""
        return len(self.layers) * self.head_count * self.rows * sum(part.row_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """One (layer, part, head): where its bytes are in the frame, and its tiles."""

    offset: int
    nbytes: int
    tiles: Tiles = ()


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One stored layer: bytes ``[start, stop)`` of the frame, to the end of its last segment."""

    layer: int
    group: int
    start: int
    stop: int
    segments: tuple[Segment, ...]
    digest: int = 0


@functools.lru_cache(maxsize=64)
def _itemsize(dtype: str) -> int:
    return to_dtype(dtype).itemsize


def stored_order(groups: Sequence[GroupInfo]) -> list[tuple[int, int]]:
    """(model layer, group index) as stored: by layer, so that hybrid models too can be loaded in order."""
    return sorted((layer, index) for index, group in enumerate(groups) for layer in group.layers)


def place_layers(
    groups: Sequence[GroupInfo], directory: Iterable[tuple[int, Iterable[SegmentSize]]], head_bytes: int
) -> tuple[LayerEntry, ...]:
    """Give every segment its offset.

    Parameters
    ----------
    groups : sequence of GroupInfo
    directory
        (digest, segment sizes) of each stored layer, in stored order.
    head_bytes : int
        Where the head ends.
    """
    entries, end = [], head_bytes
    for (layer, group), (digest, sizes) in zip(stored_order(groups), directory, strict=True):
        start = end = align(end, LAYER_ALIGN)
        segments = []
        for nbytes, tiles in sizes:
            offset = align(end, SEGMENT_ALIGN)
            segments.append(Segment(offset, nbytes, tiles))
            end = offset + nbytes
        entries.append(LayerEntry(layer, group, start, end, tuple(segments), digest))
    return tuple(entries)


def _check_text(what: str, text: str) -> None:
    if not (text.isascii() and text.isprintable() and 1 <= len(text) <= 255):
        raise LayoutError(f"the {what} must be 1 to 255 printable ASCII characters, got {text!r}")


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"the {what} must be in {low}..{high}, got {value}")
