"""What a codec is: dense rows of some layers in, segments out, and back.

A codec knows no frame and no store. `kvcore.codecs.frame` puts segments into frames; `kvcore.codecs.get_codec` finds a
codec by its preset's name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.places import Array, copied, row_major
from kvcore.dtypes import to_dtype
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["Array", "Codec", "CodedSegment", "Layers", "join_layers", "omitted_parts", "part_arrays", "put_part_arrays"]


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """The bytes of a segment, and (mode, word count) of each of its tiles, which the frame's directory holds."""

    data: bytes | memoryview
    tiles: tuple[tuple[int, int], ...] = ()


Layers: TypeAlias = list[list[CodedSegment]]
"""Segments by layer; within a layer by part, then KV head: the stored order."""


class Codec(Protocol):
    """One preset of a codec.

    Attributes
    ----------
    name : str
        The preset, as users type it: ``"balanced"``.
    codec_id, preset : int
        What the frame's header records.
    chain : tuple of str
        What the frame's codec chain records.
    precision : int
        n of the tables, 0 without.
    tables : bytes
        The first 8 bytes of the table set's SHA-256; zeros without.
    lossless : bool
    on_device : bool, optional
        Whether `encode` and `decode` also take rows in a device's memory: then they bring no more than coded bytes,
        statistics and steps over the link. Without it a device's rows are copied over and coded on the host.
    omits : tuple of str, optional
        Names of parts that the frame does not hold: their segments have no bytes, `encode` does not read them, and
        `decode` leaves them as they are. See `omitted_parts`.
    """

    name: str
    codec_id: int
    preset: int
    chain: tuple[str, ...]
    precision: int
    tables: bytes
    lossless: bool

    def flags(self, group: GroupInfo) -> Flags:
        """Return the frame's flags for a group."""

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """Return the most that the segments of a layer can take, in (part, head) order: bytes, and tiles.

        Whatever the values are, and wherever in a sequence; of the tiles only their number means something. It is what
        they take where that does not depend on the values.
        """

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """Encode layers.

        Parameters
        ----------
        backend : Backend
        rows : RowLayout
            Dense: ``group.rows`` tokens of the group's parts, heads and layers.
        group : GroupInfo
            To code layer by layer, narrow it to the layers that `rows` holds: some codecs go by a layer's number.

        Raises
        ------
        QuantizationError
            A value that the codec cannot hold: NaN or an infinity in a lossy one.
        UnsupportedOpError
            The codec does not take the group's dtypes or parts.
        """

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """Decode layers into dense rows of as many layers.

        Raises
        ------
        CorruptFrameError
            The bytes are not what the encoder writes.
        """


def omitted_parts(codec: Codec, group: GroupInfo) -> tuple[str, ...]:
    """Return the names of a group's parts that a codec's frames do not hold."""
    omits: tuple[str, ...] = getattr(codec, "omits", ())
    return tuple(part.name for part in group.parts if part.name in omits)


def part_arrays(backend: Backend, rows: RowLayout, group: GroupInfo) -> dict[str, Array]:
    """Copy rows out to one contiguous array for each part, ``[layers, heads, T, width]``, where the backend computes.

    The parts ``C`` and ``R`` of an MLA group (latent, RoPE part) are two ranges of the rows' one part ``C``; they come
    as views of one array.
    """
    arrays: dict[str, Array] = {}
    for stored, parts in _stored_parts(group).items():
        desc = _part_desc(rows.layers, group, stored, parts)
        buffer = backend.runtime.empty((desc.nbytes,), np.dtype(np.uint8))
        backend.convert_layout(rows.select(parts=(stored,)), out=desc.bind(buffer))
        arrays.update(_split(buffer, rows.layers, group, parts))
    return arrays


def put_part_arrays(backend: Backend, arrays: dict[str, Array], group: GroupInfo, out: RowLayout) -> None:
    """Undo `part_arrays`: copy arrays ``[layers, heads, T, width]`` of the parts' dtypes into rows."""
    for stored, parts in _stored_parts(group).items():
        desc = _part_desc(out.layers, group, stored, parts)
        if len(parts) == 1 and row_major(arrays[stored]):
            buffer = arrays[stored].reshape(-1).view(np.uint8)
        else:
            buffer = backend.runtime.empty((desc.nbytes,), np.dtype(np.uint8))
            for name, view in _split(buffer, out.layers, group, parts).items():
                copied(backend, arrays[name], out=view)
        backend.convert_layout(desc.bind(buffer), out=out.select(parts=(stored,)))


def join_layers(by_part: Sequence[Sequence[CodedSegment]], layers: int, heads: int) -> Layers:
    """Order segments, given by part as ``[layers * heads]``, by layer, part and head."""
    return [
        [segment for part in by_part for segment in part[layer * heads : (layer + 1) * heads]]
        for layer in range(layers)
    ]


def _stored_parts(group: GroupInfo) -> dict[str, list[PartInfo]]:
    """The parts of a group by the part of the rows that holds them."""
    if [p.name for p in group.parts] == ["C", "R"]:
        return {"C": list(group.parts)}
    return {p.name: [p] for p in group.parts}


def _part_desc(layers: int, group: GroupInfo, stored: str, parts: list[PartInfo]) -> LayoutDesc:
    if len({p.dtype for p in parts}) > 1:
        raise LayoutError(f"parts {', '.join(p.name for p in parts)} share a row and must share a dtype")
    width = sum(p.width for p in parts)
    return _dense_desc(stored, layers, group.head_count, group.rows, width, parts[0].dtype)


@functools.lru_cache(maxsize=64)
def _dense_desc(stored: str, layers: int, heads: int, tokens: int, width: int, dtype: str) -> LayoutDesc:
    if stored == "C":
        layout = Layout(f"L[{stored}:TC]", L=layers, T=tokens, C=width)
    else:
        layout = Layout(f"L[{stored}:HTD]", L=layers, H=heads, T=tokens, D=width)
    return LayoutDesc(layout, {stored: to_dtype(dtype)})


def _split(buffer: Array, layers: int, group: GroupInfo, parts: list[PartInfo]) -> dict[str, Array]:
    whole = buffer.view(to_dtype(parts[0].dtype)).reshape(layers, group.head_count, group.rows, -1)
    views, start = {}, 0
    for part in parts:
        views[part.name] = whole[..., start : start + part.width]
        start += part.width
    return views
