"""Between a paged cache and coded segments, in one call: gather and encode, decode and scatter.

A backend may supply either in one piece (`kvcore.hookspecs.composite`), so that only coded bytes leave the device. What
stands here defines what it must give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.contract import Codec, CodedSegment, Layers
from kvcore.codecs.frame_values import GroupInfo
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["decode_scatter", "gather_encode"]


def gather_encode(
    backend: Backend, codec: Codec, src: RowLayout, index: Any, group: GroupInfo, *, unit: str = "slot"
) -> Layers:
    """Encode tokens of a paged cache.

    Parameters
    ----------
    backend : Backend
    codec : Codec
    src : RowLayout
        The cache: the group's layers, heads and parts (an MLA group's parts C and R are its part C).
    index : int64 array ``[n]``
        Slots or block ids of the ``group.rows`` tokens, none of them -1.
    group : GroupInfo
    unit : {"slot", "block"}

    Returns
    -------
    list of list of CodedSegment
        By layer, in stored order.

    Raises
    ------
    SlotError, LayoutError
        As `gather_paged`.
    QuantizationError, UnsupportedOpError
        As `Codec.encode`.
    """
    fused = backend.fused("gather_encode")
    if fused is not None:
        layers: Layers | None = fused(src, index, codec=codec, group=group, unit=unit)
        if layers is not None:
            return layers
    chunk = allocate_rows(group)
    backend.gather_paged(src, index, unit=unit, out=chunk)
    return codec.encode(backend, chunk, group)


def decode_scatter(
    backend: Backend,
    codec: Codec,
    layers: Sequence[Sequence[CodedSegment]],
    index: Any,
    group: GroupInfo,
    out: RowLayout,
    *,
    unit: str = "slot",
) -> RowLayout:
    """Decode segments into tokens of a paged cache: the reverse of `gather_encode`.

    An index of -1 leaves its token out. Nothing is written if the bytes are not what the codec writes.

    Raises
    ------
    CorruptFrameError
        As `Codec.decode`.
    SlotError, LayoutError
        As `scatter_paged`.
    """
    fused = backend.fused("decode_scatter")
    if fused is not None and fused(layers, index, codec=codec, group=group, unit=unit, out=out) is not None:
        return out
    chunk = allocate_rows(group)
    codec.decode(backend, layers, group, chunk)
    return backend.scatter_paged(chunk, index, unit=unit, out=out)
