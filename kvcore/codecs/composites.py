"""Between a paged cache and coded segments, in one call: gather and encode, decode and scatter.

The cache may be a device's. A codec that says so (`Codec.on_device`) is then run on the device's memory by the device's
ops, and what crosses the link is coded bytes, with statistics and steps, which are a small part of those. Rows of other
codecs cross as they are: of `raw`, whose coded bytes they are, and of codecs that need an op which the device lacks.
Those are coded on the host, by the device's ops as far as it has them (`kvcore.ops.staging`).

A backend may supply either in one piece (`kvcore.hookspecs.composite`). What stands here defines what it must give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvcore.codecs.chunk_rows import rows_desc
from kvcore.codecs.contract import Codec, CodedSegment, Layers, omitted_parts
from kvcore.codecs.frame_values import GroupInfo
from kvcore.errors import KVCoreError, UnsupportedOpError
from kvcore.ops import Backend, fetch, on_host, on_stream, send
from kvcore.rows import RowLayout

__all__ = ["decode_scatter", "gather_encode"]

_UINT8 = np.dtype(np.uint8)
_CODER_OPS = (
    "choose_classes",
    "convert_layout",
    "copy_batch",
    "decode_symbols",
    "dequantize",
    "encode_symbols",
    "pack_bits",
    "quantize",
    "reduce_absmax",
    "reduce_minmax",
    "reduce_moments",
    "reduce_norm",
    "rotate",
    "shift_rope",
    "unpack_bits",
)
"""What codecs call, or may, beside gather and scatter."""


def gather_encode(
    backend: Backend,
    codec: Codec,
    src: RowLayout,
    index: Any,
    group: GroupInfo,
    *,
    unit: str = "slot",
    stream: Any = None,
) -> Layers:
    """Encode tokens of a paged cache; it is done when it returns.

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
    stream : stream, optional
        What all is queued on, and waited for: the device's default stream if None.

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
    backend = on_stream(backend, stream)
    fused = backend.fused("gather_encode")
    if fused is not None:
        layers: Layers | None = fused(src, index, codec=codec, group=group, unit=unit)
        if layers is not None:
            return layers
    with _current(backend, src):
        return _gathered(backend, codec, src, index, group, unit)


def _gathered(backend: Backend, codec: Codec, src: RowLayout, index: Any, group: GroupInfo, unit: str) -> Layers:
    """Encode tokens by way of a dense chunk."""
    desc = rows_desc(group)
    chunk = backend.runtime.empty((desc.nbytes,), _UINT8)
    backend.gather_paged(src, index, unit=unit, out=desc.bind(chunk))
    if _may_code(backend, codec):
        try:
            with _settled(backend):
                return codec.encode(backend, desc.bind(chunk), group)
        except UnsupportedOpError:
            pass  # an op does not do this element type there: the host may, or says so
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
    stream: Any = None,
) -> RowLayout:
    """Decode segments into tokens of a paged cache: the reverse of `gather_encode`; it is done when it returns.

    An index of -1 leaves its token out. Nothing is written if the bytes are not what the codec writes. A part that the
    codec's frames do not hold stays as it is.

    Raises
    ------
    CorruptFrameError
        As `Codec.decode`.
    SlotError, LayoutError
        As `scatter_paged`.
    """
    backend = on_stream(backend, stream)
    fused = backend.fused("decode_scatter")
    if fused is not None and fused(layers, index, codec=codec, group=group, unit=unit, out=out) is not None:
        return out
    with _current(backend, out):
        chunk, target = _decoded(backend, codec, layers, group), out
        if omitted := omitted_parts(codec, group):
            held = tuple(part.name for part in group.parts if part.name not in omitted)
            chunk, target = chunk.select(parts=held), out.select(parts=held)
        backend.scatter_paged(chunk, index, unit=unit, out=target)
        backend.runtime.check()
    return out


def _decoded(backend: Backend, codec: Codec, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo) -> RowLayout:
    """Decode segments into a dense chunk in a backend's memory."""
    desc = rows_desc(group)
    if _may_code(backend, codec):
        chunk = desc.bind(backend.runtime.empty((desc.nbytes,), _UINT8))
        try:
            with _settled(backend):
                codec.decode(backend, layers, group, chunk)
                backend.runtime.check()  # whether the bytes were such: before anything is scattered
        except UnsupportedOpError:
            pass  # as above
        else:
            return chunk
    host, held = on_host(backend), np.empty(desc.nbytes, _UINT8)
    codec.decode(host, layers, group, desc.bind(held))
    return desc.bind(held if host is backend else send(backend, held))


def _current(backend: Backend, rows: RowLayout) -> contextlib.AbstractContextManager[None]:
    """Allocate and queue on the device of some rows, where a runtime has several."""
    if not hasattr(backend.runtime, "on"):
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[None] = backend.runtime.on(rows.device)
    return made


@contextlib.contextmanager
def _settled(backend: Backend) -> Iterator[None]:
    """Leave no error of queued work behind for the stream's next user where another one is raised.

    That an op does not do something is no failure, as another way is tried: then what the queued work found is raised.
    """
    try:
        yield
    except UnsupportedOpError:
        backend.runtime.check()
        raise
    except BaseException:
        with contextlib.suppress(KVCoreError):
            backend.runtime.check()
        raise


def _may_code(backend: Backend, codec: Codec) -> bool:
    """Whether a codec may be run on the memory of a device, as far as can be told before."""
    device = "cpu" not in backend.spec.device_types
    return device and getattr(codec, "on_device", False) and all(backend.supports(op) for op in _CODER_OPS)
