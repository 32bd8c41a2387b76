"""Codecs that code each part of a group on its own: what is the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvcore.codecs.contract import Array, CodedSegment, Layers, join_layers, part_arrays, put_part_arrays
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.codecs.places import empty, on_device
from kvcore.dtypes import to_dtype
from kvcore.errors import CorruptFrameError, QuantizationError, UnsupportedOpError
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["FLOAT_DTYPES", "DecodePart", "EncodePart", "Reader", "check_dtypes", "decode_parts", "encode_parts"]

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
"""What lossy codecs take."""

EncodePart: TypeAlias = Callable[[PartInfo, Any], Sequence[CodedSegment]]
"""A part and its array ``[layers, heads, T, width]`` in; segments by layer, then head, out.

On a device the array may be a view of wider rows."""
DecodePart: TypeAlias = Callable[[PartInfo, list[list[CodedSegment]]], Any]
"""A part and its segments by layer, then head, in; an array ``[layers, heads, T, width]`` of the part's dtype out."""


def check_dtypes(group: GroupInfo, codec: str, dtypes: Collection[str]) -> None:
    """Raise `UnsupportedOpError` where a codec does not take the element type of a part."""
    for part in group.parts:
        if part.dtype not in dtypes:
            other = "raw" if codec == "lossless" else "lossless"
            raise UnsupportedOpError(
                f"codec {codec} takes {', '.join(dtypes)}; part {part.name} is {part.dtype}: {other} may take it"
            )


def encode_parts(
    backend: Backend, rows: RowLayout, group: GroupInfo, encode: EncodePart, *, codec: str, dtypes: Collection[str]
) -> Layers:
    """Encode the parts of a group one by one.

    Parameters
    ----------
    backend : Backend
    rows : RowLayout
    group : GroupInfo
    encode : callable
        See `EncodePart`.
    codec : str
        The codec's name, for errors.
    dtypes : collection of str
        The element types that the codec takes.

    Raises
    ------
    UnsupportedOpError
        A part has another element type.
    QuantizationError
        From `encode`; the part is named.
    """
    check_dtypes(group, codec, dtypes)
    arrays, coded = part_arrays(backend, rows, group), []
    for part in group.parts:
        try:
            array = arrays[part.name]
            coded.append(encode(part, array if on_device(array) else np.ascontiguousarray(array)))
        except QuantizationError as error:
            raise QuantizationError(
                f"codec {codec} cannot hold part {part.name} [layer, head, token, channel]: {error}; "
                "codec lossless or raw takes every value"
            ) from error
    return join_layers(coded, rows.layers, group.head_count)


def decode_parts(
    backend: Backend,
    layers: Sequence[Sequence[CodedSegment]],
    group: GroupInfo,
    out: RowLayout,
    decode: DecodePart,
) -> None:
    """Decode the parts of a group one by one into rows.

    Raises
    ------
    CorruptFrameError
        A layer has not a segment for each part and head; or from `decode`.
    """
    arrays, heads = {}, group.head_count
    for layer in layers:
        if len(layer) != group.segment_count:
            raise CorruptFrameError(f"a layer of {len(layer)} segments, not {group.segment_count}", reason="length")
    for index, part in enumerate(group.parts):
        segments = [list(layer[index * heads : (index + 1) * heads]) for layer in layers]
        shape = (len(layers), heads, group.rows, part.width)
        arrays[part.name] = decode(part, segments) if segments else empty(backend, shape, to_dtype(part.dtype))
    put_part_arrays(backend, arrays, group, out)


class Reader:
    """Takes a segment's bytes apart from front to back; whatever is missing or left over is an error.

    Parameters
    ----------
    data : bytes or memoryview
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._view, self._at = memoryview(data), 0

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes; `CorruptFrameError` if there are fewer."""
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self._view):
            raise CorruptFrameError(f"a segment of {len(self._view)} bytes ends before its parts do", reason="length")
        return self._view[start : self._at]

    def array(self, count: int, dtype: str) -> Array:
        """Return the next `count` elements of a little-endian dtype such as ``"<u2"``, read-only."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), kind)

    def pad(self, to: int) -> None:
        """Skip bytes, which must be zero, up to a multiple of `to`."""
        if any(self.take(-self._at % to)):
            raise CorruptFrameError("padding of a segment is not zero", reason="stream")

    def finish(self) -> None:
        """Raise `CorruptFrameError` if bytes are left."""
        if self._at != len(self._view):
            raise CorruptFrameError(f"{len(self._view) - self._at} bytes follow a segment's last part", reason="length")
