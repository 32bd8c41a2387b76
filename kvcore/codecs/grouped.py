"""Codec of grouped integers (id 3): ``int8``, ``int4``, ``int2``, each group with a scale and a zero point of its own.

Keys have channels that are large at every token, so their groups are 32 tokens of one channel (the last group of a
channel may be shorter); values have none, so theirs are 32 channels of one token (the last group of a token may be
narrower). Parts ``K`` and ``R`` count as keys. A scale and a zero point take 32 bits: 1 bit for each element where
groups are full, so int8 takes 9 bits an element, int4 5, int2 3; short groups take more.

With q = ``2**bits - 1`` and the group's least and largest values lo, hi, the scale is
``max((hi - lo) / q, absmax * 2**-14)``, rounded up to a bfloat16 and 1 where it would be below ``2**-100``. Values are
divided by it and rounded to integers, which fit 16 bits; the zero point is the least of them, a code what is above it.
A value comes back as ``(zero + code) * scale``: off by half a scale, and the rounding of its element type, at most.

A segment ``[T, C]``, little-endian: scales bfloat16 ``[ceil(T/32), C]`` (keys) or ``[T, ceil(C/32)]``; zero points
int16 of the same shape; codes, token by token, in one string of bits, least significant first, filled up with zeros to
a whole byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.nonfinite import check_policy
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import copied, empty, filled, host, near, on_device
from kvcore.dtypes import BFLOAT16, to_dtype
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError
from kvcore.ops import Backend
from kvcore.quant import SCALE_MAX, SCALE_MIN, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["GROUP", "Grouped"]

GROUP = 32
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_KEYS = ("K", "R")
_FLOOR = 2.0**-14  # of absmax: then codes stay within int16, whatever the group's offset


@dataclass(frozen=True, slots=True)
class Grouped:
    """Affine integers in groups of 32: keys by channel, values by token.

    Parameters
    ----------
    name : {"int8", "int4", "int2"}
    nonfinite : {"error", "saturate"}
        What becomes of a NaN or infinity: `QuantizationError`, or NaN is read as zero and an infinity as the largest
        finite value of the element type with its sign.
    """

    name: str
    nonfinite: str = "error"
    codec_id: int = field(default=3, init=False)
    chain: tuple[str, ...] = field(default=("grouped",), init=False)
    on_device: bool = field(default=True, init=False)
    precision: int = field(default=0, init=False)
    tables: bytes = field(default=bytes(8), init=False)
    lossless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.name not in _BITS:
            raise ConfigError(f"there are no grouped integers {self.name!r}; there are {', '.join(_BITS)}")
        check_policy(self.name, self.nonfinite)

    @property
    def preset(self) -> int:
        """The preset's number in the header: bits of a code."""
        return _BITS[self.name]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        check_dtypes(group, self.name, FLOAT_DTYPES)
        sizes: list[SegmentSize] = []
        for part in group.parts:
            scales = math.prod(_scale_shape(group.rows, part.width, part.name in _KEYS))
            sizes += [(4 * scales + -(-group.rows * part.width * self.preset // 8), ())] * group.head_count
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`."""

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            return _encode(backend, x.reshape(-1, *x.shape[2:]), self.preset, part.name in _KEYS, self.nonfinite)

        return encode_parts(backend, rows, group, segments, codec=self.name, dtypes=FLOAT_DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""

        def values(part: PartInfo, segments: list[list[CodedSegment]]) -> Any:
            shape = (group.rows, part.width)
            flat = [segment for layer in segments for segment in layer]
            x = _decode(backend, flat, self.preset, part.name in _KEYS, shape, part.dtype)
            return x.reshape(len(segments), -1, *shape)

        decode_parts(backend, layers, group, out, values)


def _cuts(tokens: int, channels: int, by_channel: bool) -> Iterator[tuple[slice, slice, slice, slice, int]]:
    """Yield, for the full groups and for the last ones, tokens and channels, rows and columns of scales, group size."""
    extent = tokens if by_channel else channels
    full = extent - extent % GROUP
    for start, stop, size in ((0, full, GROUP), (full, extent, extent % GROUP)):
        if start < stop:
            inside, scales = slice(start, stop), slice(start // GROUP, -(-stop // GROUP))
            everything = slice(None)
            if by_channel:
                yield inside, everything, scales, everything, size
            else:
                yield everything, inside, everything, scales, size


def _scale_shape(tokens: int, channels: int, by_channel: bool) -> tuple[int, int]:
    return (-(-tokens // GROUP), channels) if by_channel else (tokens, -(-channels // GROUP))


def _grouped(x: Any, size: int, by_channel: bool) -> tuple[Any, int]:
    """View ``[S, T, C]`` as groups of `size`, and return the axis along which a group's elements lie."""
    segments, tokens, channels = x.shape
    if by_channel:
        return x.reshape(segments, tokens // size, size, channels), 2
    return x.reshape(segments, tokens, channels // size, size), 3


def _encode(backend: Backend, x: Any, bits: int, by_channel: bool, nonfinite: str) -> list[CodedSegment]:
    count, tokens, channels = x.shape
    codes = empty(backend, x.shape, np.uint8)
    scales = np.empty((count, *_scale_shape(tokens, channels, by_channel)), BFLOAT16)
    zeros = np.empty(scales.shape, "<i2")
    for t, c, row, column, size in _cuts(tokens, channels, by_channel):
        piece, axis = _grouped(x[:, t, c] if on_device(x) else np.ascontiguousarray(x[:, t, c]), size, by_channel)
        low, high = host(backend, backend.reduce_minmax(piece, (axis,), nonfinite=nonfinite))
        scale = _scales(low, high, bits)
        wide, spec = scale.astype(np.float32), QuantSpec.symmetric(16, (axis,))
        integers = backend.quantize(piece, spec, scale=near(backend, wide), nonfinite=nonfinite).codes
        # Rounding keeps order: the least and the largest integer are those of the least and the largest value.
        zero, last = (np.rint(end * (np.float32(1) / wide)).astype(np.int32) for end in (low, high))
        target, _ = _grouped(codes[:, t, c], size, by_channel)
        _store_codes(backend, integers, zero, last, (1 << bits) - 1, target)
        scales[:, row, column], zeros[:, row, column] = scale.squeeze(axis), zero.squeeze(axis)
    packed = host(backend, backend.pack_bits(codes.reshape(count, -1), bits))
    return [CodedSegment(b"".join(a[s].tobytes() for a in (scales, zeros, packed))) for s in range(count)]


def _store_codes(
    backend: Backend, integers: Any, zero: npt.NDArray[np.int32], last: npt.NDArray[np.int32], q: int, out: Any
) -> None:
    """Write what integers are above the zero point of their group, as uint8, to `out`."""
    # The last code may be one too many where both ends of a group were halves: held, it is off by no more.
    held = bool((last - zero > q).any())
    if held or not on_device(integers):
        codes = host(backend, integers) - zero.astype(np.int16)  # 0 to q + 1, whatever the two are
        copied(backend, near(backend, np.minimum(codes, q, out=codes).astype(np.uint8)), out=out)
        return
    # A device subtracts where it dequantises, from bytes: the lowest byte of their difference is the code.
    there, low = near(backend, zero & 0xFF), _low_bytes(integers)
    axes = tuple(i for i, (n, z) in enumerate(zip(integers.shape, zero.shape, strict=True)) if n != z)
    one = filled(backend, 1, zero.shape, np.float32)
    difference = backend.dequantize(Quantized(low, one, there), QuantSpec.affine(8, axes))
    exact = backend.quantize(difference, QuantSpec.symmetric(16, axes), scale=one).codes
    copied(backend, _low_bytes(exact), out=out)


def _low_bytes(integers: Any) -> Any:
    """View the lowest byte of each int16 of a device."""
    return integers.view(np.uint8).reshape(*integers.shape, 2)[..., 0]


def _scales(low: npt.NDArray[np.float32], high: npt.NDArray[np.float32], bits: int) -> Array:
    """Return bfloat16 scales, rounded up."""
    q = np.float32((1 << bits) - 1)
    floor = np.maximum(np.abs(low), np.abs(high)) * np.float32(_FLOOR)
    wanted = np.maximum(high / q - low / q, floor)
    scale = wanted.astype(BFLOAT16)
    below = scale.astype(np.float32) < wanted
    scale[below] = (scale[below].view(np.uint16) + 1).view(BFLOAT16)
    scale[scale.astype(np.float32) < SCALE_MIN] = 1
    if (scale.astype(np.float32) > SCALE_MAX).any():
        raise QuantizationError(f"values from {low.min()} to {high.max()} need a scale beyond 2**125")
    return scale


def _decode(
    backend: Backend, segments: list[CodedSegment], bits: int, by_channel: bool, shape: tuple[int, int], dtype: str
) -> Any:
    elements, groups = shape[0] * shape[1], _scale_shape(*shape, by_channel)
    scales, zeros = np.empty((len(segments), *groups), np.float32), np.empty((len(segments), *groups), np.int32)
    packed = np.empty((len(segments), -(-elements * bits // 8)), np.uint8)
    for s, segment in enumerate(segments):
        reader = Reader(segment.data)
        scales[s] = reader.array(groups[0] * groups[1], "<u2").view(BFLOAT16).reshape(groups)
        zeros[s] = reader.array(groups[0] * groups[1], "<i2").reshape(groups)
        packed[s] = reader.array(packed.shape[1], "u1")
        reader.finish()
        if segment.tiles:
            raise CorruptFrameError("a segment of grouped integers has no tiles", reason="stream")
    if (packed[:, -1] >> (elements * bits - 1) % 8 + 1).any():
        raise CorruptFrameError("the bits after the last code are not zero", reason="stream")
    if not ((scales >= SCALE_MIN) & (scales <= SCALE_MAX)).all():
        raise CorruptFrameError("a scale outside 2**-100 .. 2**125", reason="stream")
    if zeros.max() > np.iinfo(np.int16).max - (1 << bits) + 1:
        raise CorruptFrameError(f"a zero point of {zeros.max()} is beyond those of 16-bit codes", reason="stream")
    codes = backend.unpack_bits(near(backend, packed), bits, elements).reshape(-1, *shape)
    x = empty(backend, codes.shape, to_dtype(dtype))
    for t, c, row, column, size in _cuts(*shape, by_channel):
        piece, axis = _grouped(codes[:, t, c], size, by_channel)
        target, _ = _grouped(x[:, t, c], size, by_channel)
        scale, negative = (near(backend, np.expand_dims(a[:, row, column], axis)) for a in (scales, -zeros))
        backend.dequantize(Quantized(piece, scale, negative), QuantSpec.affine(8, (axis,)), out=target)
    return x
