"""Codec ``fp8`` (id 4): 8-bit floats with one scale for each segment.

A segment ``[T, C]``, little-endian: scale float32, then the codes, one byte each, token by token. That is exactly one
byte for each element, and 4 for each segment. Values come back as code times scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.codecs.contract import CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.nonfinite import check_policy
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import fetched, near, on_device
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import ConfigError, CorruptFrameError
from kvcore.ops import Backend
from kvcore.quant import SCALE_MAX, SCALE_MIN, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["Fp8"]

_PRESETS = {"fp8": (0, "float8_e4m3fn"), "fp8_e5m2": (1, "float8_e5m2")}
_AXES = (2, 3)  # of [layers, heads, T, width]: a scale for each segment


@dataclass(frozen=True, slots=True)
class Fp8:
    """8-bit floats, saturating.

    Parameters
    ----------
    name : {"fp8", "fp8_e5m2"}
        e4m3fn, or e5m2.
    scaled : bool
        Scale each segment so that its largest magnitude becomes the largest code. Without, values are cast as they are
        (scale 1; beyond 448 they saturate): what engines with an unscaled fp8 cache do.
    nonfinite : {"error", "saturate"}
        What becomes of a NaN or infinity: `QuantizationError`, or NaN is read as zero and an infinity as the largest
        finite value of the element type with its sign.
    """

    name: str = "fp8"
    scaled: bool = True
    nonfinite: str = "error"
    codec_id: int = field(default=4, init=False)
    chain: tuple[str, ...] = field(default=("fp8",), init=False)
    on_device: bool = field(default=True, init=False)
    precision: int = field(default=0, init=False)
    tables: bytes = field(default=bytes(8), init=False)
    lossless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.name not in _PRESETS:
            raise ConfigError(f"there is no fp8 preset {self.name!r}; there are {', '.join(_PRESETS)}")
        check_policy(self.name, self.nonfinite)

    @property
    def preset(self) -> int:
        """The preset's number in the header."""
        return _PRESETS[self.name][0]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        check_dtypes(group, self.name, FLOAT_DTYPES)
        return [(4 + group.rows * part.width, ()) for part in group.parts for _ in range(group.head_count)]

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`."""
        spec = QuantSpec.fp8(_PRESETS[self.name][1], _AXES)

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            given = None if self.scaled else near(backend, np.ones((*x.shape[:2], 1, 1), np.float32))
            quantised = backend.quantize(x, spec, scale=given, nonfinite=self.nonfinite)
            scale, codes = fetched(backend, [quantised.scale, quantised.codes])
            if on_device(x):
                backend.runtime.check()
            size = x.shape[2] * x.shape[3]
            return [
                CodedSegment(s.astype("<f4").tobytes() + c.tobytes())
                for s, c in zip(scale.reshape(-1), codes.reshape(-1, size), strict=True)
            ]

        return encode_parts(backend, rows, group, segments, codec=self.name, dtypes=FLOAT_DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""
        spec = QuantSpec.fp8(_PRESETS[self.name][1], _AXES)
        largest = np.asarray(spec.code_max, spec.code_dtype).view(np.uint8)

        def values(part: PartInfo, segments: list[list[CodedSegment]]) -> Any:
            shape = (len(segments), group.head_count, group.rows, part.width)
            codes, scale = np.empty(shape, np.uint8), np.empty((*shape[:2], 1, 1), np.float32)
            for place in np.ndindex(shape[:2]):
                segment = segments[place[0]][place[1]]
                reader = Reader(segment.data)
                scale[place] = reader.array(1, "<f4")[0]
                codes[place] = reader.array(shape[2] * shape[3], "u1").reshape(shape[2:])
                reader.finish()
                if segment.tiles:
                    raise CorruptFrameError("an fp8 segment has no tiles", reason="stream")
            if not ((scale >= SCALE_MIN) & (scale <= SCALE_MAX)).all():
                raise CorruptFrameError("a scale outside 2**-100 .. 2**125", reason="stream")
            # Without their sign, codes are in the order of their values: what is not finite comes after the largest.
            if codes.size and (codes & 0x7F).max() > largest:
                raise CorruptFrameError(f"a code of {dtype_name(spec.code_dtype)} that is not finite", reason="stream")
            quantised = Quantized(near(backend, codes.view(spec.code_dtype)), near(backend, scale))
            return backend.dequantize(quantised, spec, dtype=to_dtype(part.dtype))

        decode_parts(backend, layers, group, out, values)
