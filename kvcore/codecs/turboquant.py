"""Codec ``turboquant`` (id 6): rows are rotated, and each coordinate is rounded to the best levels for a normal one.

Source: Zandieh, Daliri, Hadian and Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion
Rate", 2025, arXiv 2504.19874, the variant for mean squared error. A random rotation spreads a row's energy evenly, so
each of its C coordinates is close to normal with deviation norm / sqrt(C) whatever the row was; the Lloyd-Max levels of
the normal distribution, times that deviation, are then the best scalar quantiser there is. Here the rotation is a
randomised Hadamard matrix (op `rotate`), and 8-bit codes are plain integers, whose scale is the largest coordinate.

The Hadamard matrix has a power of two of channels, m: the largest that the row has, up to 1024. Where that is not all
of them the first m are rotated, then the last m, then the first m again, so that every channel reaches nearly every
coordinate and a row still has one scale.

A segment ``[T, C]``, little-endian: scales bfloat16 ``[T]``, zero for rows that come back as zeros; codes, token by
token, in one string of bits, least significant first, filled up with zeros to a whole byte. A code of 3 or 4 bits is
the number of a level, ascending; one of 8 bits is an integer of -127 .. 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.nonfinite import check_policy, largest_by_row, with_saturated_rows
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import copied, empty, host, near
from kvcore.dtypes import BFLOAT16, to_dtype
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError, UnsupportedOpError
from kvcore.ops import Backend
from kvcore.quant import SCALE_MIN, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["LEVELS", "MAX_WIDTH", "SCALES", "TurboQuant"]

_PRESETS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit": (4, 4),
    "turboquant_k3v4": (3, 4),
    "turboquant_3bit": (3, 3),
}  # bits of keys, of values
_KEYS = ("K", "R")

LEVELS = {
    3: (0.24509418, 0.75600528, 1.3439093, 2.1519457),
    4: (0.12839503, 0.3880483, 0.65675912, 0.94234046, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
"""By bits, the positive levels of the Lloyd-Max quantiser of N(0, 1); the others are their negatives.

Each level is the mean of the values that are nearest to it. Lloyd, "Least Squares Quantization in PCM", 1982; Max,
"Quantizing for Minimum Distortion", 1960."""

SCALES = (2.0**-80, 2.0**80)
"""Least and largest scale. With them no intermediate value leaves what `rotate` takes, whatever the codes are."""
_SEED = 0
_BLOCK_MAX = 1024
MAX_WIDTH = 2 * _BLOCK_MAX - 1
"""Channels of a row, at most: what two overlapping rotations reach."""
_ROW = (3,)  # of [layers, heads, T, width]: a scale for each token


@dataclass(frozen=True, slots=True)
class TurboQuant:
    """Rotated rows, each with a scale, in the levels of a normal distribution.

    Parameters
    ----------
    name : {"turboquant_k8v4", "turboquant_4bit", "turboquant_k3v4", "turboquant_3bit"}
        How many bits keys and values take. Parts ``K`` and ``R`` count as keys.
    nonfinite : {"error", "saturate"}
        What becomes of a NaN or infinity: `QuantizationError`, or NaN is read as zero and an infinity as the largest
        finite value of the element type with its sign, which is beyond the scales unless the type is float16.
    """

    name: str = "turboquant_4bit"
    nonfinite: str = "error"
    codec_id: int = field(default=6, init=False)
    chain: tuple[str, ...] = field(default=("turboquant",), init=False)
    on_device: bool = field(default=True, init=False)
    precision: int = field(default=0, init=False)
    tables: bytes = field(default=bytes(8), init=False)
    lossless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.name not in _PRESETS:
            raise ConfigError(f"there is no TurboQuant preset {self.name!r}; there are {', '.join(_PRESETS)}")
        check_policy(self.name, self.nonfinite)

    @property
    def preset(self) -> int:
        """The preset's number in the header: 16 times the bits of keys, and those of values."""
        keys, values = _PRESETS[self.name]
        return 16 * keys + values

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`; `UnsupportedOpError` as in `encode`."""
        check_dtypes(group, self.name, FLOAT_DTYPES)
        self._check_widths(group)
        sizes: list[SegmentSize] = []
        for part in group.parts:
            codes = -(-group.rows * part.width * self._bits(part) // 8)
            sizes += [(2 * group.rows + codes, ())] * group.head_count
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`.

        Raises
        ------
        QuantizationError
            A NaN or infinity under policy ``"error"``, or a row that needs a scale beyond 2**80.
        UnsupportedOpError
            An element type that is not float16, bfloat16 or float32, or rows of more than 2047 channels.
        """
        self._check_widths(group)

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            if self.nonfinite == "saturate":
                x = _held(backend, x)
            return _encode(backend, x, self._bits(part))

        return encode_parts(backend, rows, group, segments, codec=self.name, dtypes=FLOAT_DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""

        def values(part: PartInfo, segments: list[list[CodedSegment]]) -> Any:
            if part.dtype not in FLOAT_DTYPES or part.width > MAX_WIDTH:
                raise CorruptFrameError(f"TurboQuant does not write {part.width} x {part.dtype}", reason="layout")
            return _decode(backend, segments, self._bits(part), (group.rows, part.width), part.dtype)

        decode_parts(backend, layers, group, out, values)

    def _check_widths(self, group: GroupInfo) -> None:
        for part in group.parts:
            if part.width > MAX_WIDTH:
                raise UnsupportedOpError(
                    f"codec {self.name} rotates rows of up to {MAX_WIDTH} channels; part {part.name} has {part.width}: "
                    "codecs lossless, fp8 and int4 take rows of any width"
                )

    def _bits(self, part: PartInfo) -> int:
        keys, values = _PRESETS[self.name]
        return keys if part.name in _KEYS else values


def _spec(bits: int) -> QuantSpec:
    """Return the quantiser of a row ``[layers, heads, T, C]`` for scales that are given."""
    if bits not in LEVELS:
        return QuantSpec.symmetric(bits, _ROW)
    positive = LEVELS[bits]
    return QuantSpec.codebook((*(-level for level in reversed(positive)), *positive), _ROW)


def _encode(backend: Backend, x: Any, bits: int) -> list[CodedSegment]:
    """Encode a part ``[layers, heads, T, C]``: segments by layer, then head."""
    layers, heads, tokens, width = x.shape
    spec, turned = _spec(bits), _rotated(backend, x)
    if spec.kind == "int":
        size, reciprocal = backend.reduce_absmax(turned, _ROW), np.float32(1) / np.float32(spec.code_max)
    else:
        size, reciprocal = backend.reduce_norm(turned, _ROW), np.float32(1 / np.sqrt(np.float64(width)))
    scale = _scales(host(backend, size), reciprocal)
    zero = scale == 0
    given = np.where(zero, np.float32(1), scale.astype(np.float32))
    codes = backend.quantize(turned, spec, scale=near(backend, given)).codes
    packed = host(backend, backend.pack_bits(codes.reshape(layers * heads, tokens * width), bits))
    sides = scale.reshape(layers * heads, tokens)
    return [CodedSegment(side.tobytes() + row.tobytes()) for side, row in zip(sides, packed, strict=True)]


def _scales(size: npt.NDArray[np.float32], reciprocal: np.float32) -> Array:
    """Return the scales of rows, as they are stored, from their norms or largest magnitudes.

    Rounding them to bfloat16 costs next to nothing: codes are chosen with the scale that is stored.
    """
    low, high = SCALES
    with np.errstate(over="ignore"):  # what overflows is refused
        wanted = size * reciprocal
    if (wanted > high).any():
        raise QuantizationError(f"a row of norm or magnitude {size.max():.3g} needs a scale beyond 2**80")
    scale = wanted.astype(BFLOAT16)
    scale[wanted < low] = 0
    return scale


def _decode(backend: Backend, layers: list[list[CodedSegment]], bits: int, shape: tuple[int, int], dtype: str) -> Any:
    """Decode segments by layer, then head, into a part ``[layers, heads, T, C]``."""
    segments = [segment for layer in layers for segment in layer]
    tokens, elements = shape[0], shape[0] * shape[1]
    scale = np.empty((len(segments), tokens), np.float32)
    packed = np.empty((len(segments), -(-elements * bits // 8)), np.uint8)
    for s, segment in enumerate(segments):
        reader = Reader(segment.data)
        scale[s] = reader.array(tokens, "<u2").view(BFLOAT16)
        packed[s] = reader.array(packed.shape[1], "u1")
        reader.finish()
        if segment.tiles:
            raise CorruptFrameError("a segment of TurboQuant has no tiles", reason="stream")
    _check(scale, packed, bits, elements)
    # A row of zeros: its levels times the least scale are so small that `rotate` reads them as zero.
    scale[scale == 0] = SCALE_MIN
    spec, whole = _spec(bits), (len(layers), -1, *shape)
    codes = backend.unpack_bits(near(backend, packed), bits, elements, dtype=spec.code_dtype).reshape(*whole)
    given = near(backend, scale.reshape(len(layers), -1, tokens, 1))
    return _rotated_back(backend, backend.dequantize(Quantized(codes, given), spec), dtype)


def _check(scale: npt.NDArray[np.float32], packed: npt.NDArray[np.uint8], bits: int, elements: int) -> None:
    low, high = SCALES
    if not ((scale >= low) & (scale <= high) | (scale.view(np.uint32) == 0)).all():
        raise CorruptFrameError("a scale that is not zero and outside 2**-80 .. 2**80", reason="stream")
    if (packed[:, -1] >> (elements * bits - 1) % 8 + 1).any():
        raise CorruptFrameError("the bits after the last code are not zero", reason="stream")
    if bits == 8 and (packed == 0x80).any():
        raise CorruptFrameError("a code of -128, which no value is rounded to", reason="stream")


def _windows(width: int) -> tuple[int, tuple[int, ...]]:
    """Return how many channels are rotated at once, and where each rotation begins, in order."""
    block = min(1 << width.bit_length() - 1, _BLOCK_MAX)
    return block, (0,) if block == width else (0, width - block, 0)


def _rotated(backend: Backend, x: Any) -> Any:
    """Rotate rows ``[..., C]``; return float32."""
    block, starts = _windows(x.shape[-1])
    if len(starts) == 1:
        return backend.rotate(x, seed=_SEED, block=block)
    turned = backend.rotate(x, seed=_SEED, block=1)  # signs alone: a copy as float32 that the windows can lie in
    for start in starts:
        window = turned[..., start : start + block]
        copied(backend, backend.rotate(window, seed=_SEED, block=block), out=window)
    return turned


def _rotated_back(backend: Backend, turned: Any, dtype: str) -> Any:
    """Undo `_rotated`, in place where it can, and round to an element type."""
    block, starts = _windows(turned.shape[-1])
    target = empty(backend, turned.shape, to_dtype(dtype))
    if len(starts) == 1:
        return backend.rotate(turned, seed=_SEED, block=block, inverse=True, out=target)
    for start in reversed(starts):
        window = turned[..., start : start + block]
        copied(backend, backend.rotate(window, seed=_SEED, block=block, inverse=True), out=window)
    return backend.rotate(turned, seed=_SEED, block=1, inverse=True, out=target)


def _held(backend: Backend, x: Any) -> Any:
    """Return a part with other values in place of NaN and infinities; itself if it has none."""
    flat = x.reshape(-1, *x.shape[2:])
    bad = ~np.isfinite(largest_by_row(backend, flat))
    return with_saturated_rows(backend, flat, bad).reshape(*x.shape) if bad.any() else x
