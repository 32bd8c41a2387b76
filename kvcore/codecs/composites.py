"""Between a paged cache and coded segments, in one call: gather and encode, decode and scatter.

The cache may be a device's: its tokens then cross the link as they are, and the device's ops are called with what the
codec composes on the host (`kvcore.ops.staging`).

A backend may supply either in one piece (`kvcore.hookspecs.composite`), so that only coded bytes leave the device. What
stands here defines what it must give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.codecs.chunk_rows import rows_desc
from kvcore.codecs.contract import Codec, CodedSegment, Layers
from kvcore.codecs.frame_values import GroupInfo
from kvcore.ops import Backend, fetch, on_host, send
from kvcore.rows import RowLayout

__all__ = ["decode_scatter", "gather_encode"]

_UINT8 = np.dtype(np.uint8)


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
    desc = rows_desc(group)
    chunk = backend.runtime.empty((desc.nbytes,), _UINT8)
    backend.gather_paged(src, index, unit=unit, out=desc.bind(chunk))
    host = on_host(backend)
    return codec.encode(host, desc.bind(chunk if host is backend else fetch(backend, chunk)), group)


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
    desc = rows_desc(group)
    chunk, host = np.empty(desc.nbytes, _UINT8), on_host(backend)
    codec.decode(host, layers, group, desc.bind(chunk))
    if host is backend:
        return backend.scatter_paged(desc.bind(chunk), index, unit=unit, out=out)
    backend.scatter_paged(desc.bind(send(backend, chunk)), index, unit=unit, out=out)
    backend.runtime.check()  # the copy reads `chunk`, which goes with this call
    return out
