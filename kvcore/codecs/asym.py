"""Codec ``asym`` (id 7): keys bit for bit, values as 8-bit floats, as attention forgives errors of values sooner.

``asym_k16_v8`` stores the parts K and V, or the one of them that there is. ``asym_k_elsewhere_v8`` is for keys that are
kept, or made, in another place: a frame of a group of K and V holds V alone, the segments of K have no bytes, and
decoding leaves the K of its output as it is.

A segment of K is its rows as they are, ``[T, C]``. A segment of V, little-endian: scope u16 (0 ``"tensor"``, 1
``"head"``, 2 ``"page"``), tokens of a page u16 (0 for the other scopes), scales float32 (one, or one for each page),
then the codes e4m3fn, one byte each, token by token. Values come back as code times scale. With scope ``"tensor"`` each
head of a layer holds the layer's scale, so that heads can be read alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import ELEMENTS_OF_A_BYTE, Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.nonfinite import check_policy
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, decode_parts, encode_parts
from kvcore.codecs.places import host, near
from kvcore.codecs.raw import rows_of_segments
from kvcore.dtypes import DTYPES, FLOAT8_E4M3FN, to_dtype
from kvcore.errors import ConfigError, CorruptFrameError, UnsupportedOpError
from kvcore.ops import Backend
from kvcore.quant import SCALE_MAX, SCALE_MIN, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["SCOPES", "Asym"]

SCOPES = ("tensor", "head", "page")
"""What shares a scale: a layer; a layer and head; so many tokens of a layer and head. The order is their number."""
_PRESETS: dict[str, tuple[int, tuple[str, ...]]] = {"asym_k16_v8": (0, ()), "asym_k_elsewhere_v8": (1, ("K",))}
_GROUPS = (["K", "V"], ["V"], ["K"])
_PAGE_MAX = 0xFFFF
_SPEC = QuantSpec.fp8("float8_e4m3fn", (3,))  # of [layers, heads, T, width]: scopes are spelled out token by token


@dataclass(frozen=True, slots=True)
class Asym:
    """Keys as they are, values as e4m3fn with scales, saturating.

    Parameters
    ----------
    name : {"asym_k16_v8", "asym_k_elsewhere_v8"}
        Whether K is in the frame.
    scope : {"tensor", "head", "page"}
        What shares a scale. Segments say it, so decoding needs no option.
    page_tokens : int, optional
        Tokens of a page, 1 .. 65535; with scope ``"page"`` only, and needed there. The last page may be shorter.
    nonfinite : {"error", "saturate"}
        What becomes of a NaN or infinity in V: `QuantizationError`, or NaN is read as zero and an infinity as the
        largest finite value of the element type with its sign. In K they are stored like any other value.
    """

    name: str = "asym_k16_v8"
    scope: str = "head"
    page_tokens: int | None = None
    nonfinite: str = "error"
    codec_id: int = field(default=7, init=False)
    chain: tuple[str, ...] = field(default=("asym",), init=False)
    on_device: bool = field(default=True, init=False)
    precision: int = field(default=0, init=False)
    tables: bytes = field(default=bytes(8), init=False)
    lossless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.name not in _PRESETS:
            raise ConfigError(f"there is no asymmetric preset {self.name!r}; there are {', '.join(_PRESETS)}")
        if self.scope not in SCOPES:
            raise ConfigError(f"codec {self.name} has no scope {self.scope!r}; it has {', '.join(SCOPES)}")
        if (self.scope == "page") != (self.page_tokens is not None):
            raise ConfigError(
                f"codec {self.name} got scope={self.scope!r} and page_tokens={self.page_tokens!r}; page_tokens goes "
                "with scope='page', and with no other"
            )
        if self.page_tokens is not None and not 1 <= self.page_tokens <= _PAGE_MAX:
            raise ConfigError(f"a page has 1 to {_PAGE_MAX} tokens, not {self.page_tokens}")
        check_policy(self.name, self.nonfinite)

    @property
    def preset(self) -> int:
        """The preset's number in the header."""
        return _PRESETS[self.name][0]

    @property
    def omits(self) -> tuple[str, ...]:
        """The parts that are not in the frame: see `Codec`."""
        return _PRESETS[self.name][1]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`; `UnsupportedOpError` as in `encode`."""
        self._taken(group)
        sizes: list[SegmentSize] = []
        for part in group.parts:
            nbytes = 0 if part.name in self.omits else group.rows * part.row_bytes
            if part.name == "V":
                nbytes = 4 + 4 * -(-group.rows // (self.page_tokens or group.rows)) + group.rows * part.width
            sizes += [(nbytes, ())] * group.head_count
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`. A part that the frame omits is not read.

        Raises
        ------
        QuantizationError
            A NaN or infinity in V under policy ``"error"``.
        UnsupportedOpError
            The group's parts are not K and V, or one of them; V is not float16, bfloat16 or float32.
        """
        stored = self._taken(group)

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            return self._encode_values(backend, x) if part.name == "V" else _rows_as_they_are(backend, x)

        layers = encode_parts(backend, rows, stored, segments, codec=self.name, dtypes=DTYPES)
        empty = [CodedSegment(b"")] * (group.segment_count - stored.segment_count)
        return [empty + layer for layer in layers]

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`. A part that the frame omits is left as it is in `out`."""
        stored = self._stored(group)
        if stored is None:
            raise CorruptFrameError(f"codec {self.name} does not write such groups", reason="layout")
        omitted = group.segment_count - stored.segment_count
        for layer in layers:
            if len(layer) != group.segment_count:
                raise CorruptFrameError(f"a layer of {len(layer)} segments, not {group.segment_count}", reason="length")
            if any(len(segment.data) or segment.tiles for segment in layer[:omitted]):
                raise CorruptFrameError("a segment of keys that are elsewhere has bytes", reason="length")

        def values(part: PartInfo, segments: list[list[CodedSegment]]) -> Any:
            if part.name == "V":
                return _decode_values(backend, part, segments, group)
            return near(backend, rows_of_segments(part, segments, group))

        decode_parts(backend, [layer[omitted:] for layer in layers], stored, out, values)

    def _stored(self, group: GroupInfo) -> GroupInfo | None:
        """Return a group without the parts that the frame omits; None if it is no group of keys and values."""
        parts = tuple(part for part in group.parts if part.name not in self.omits)
        if [part.name for part in group.parts] not in _GROUPS or not parts:
            return None
        return replace(group, parts=parts)

    def _taken(self, group: GroupInfo) -> GroupInfo:
        """Return a group without the parts that the frame omits; `UnsupportedOpError` if it cannot be encoded."""
        stored = self._stored(group)
        if stored is None or not _bounded(group, stored):
            raise UnsupportedOpError(
                f"codec {self.name} takes parts K and V, or one that it stores, of like widths; the group has "
                f"{', '.join(f'{p.name} of {p.width}' for p in group.parts)}: lossless or raw takes it"
            )
        for part in stored.parts:
            if part.name == "V" and part.dtype not in FLOAT_DTYPES:
                raise UnsupportedOpError(
                    f"codec {self.name} takes values of {', '.join(FLOAT_DTYPES)}; part V is {part.dtype}: lossless "
                    "may take it"
                )
        return stored

    def _encode_values(self, backend: Backend, x: Any) -> list[CodedSegment]:
        """Encode V, ``[layers, heads, T, width]``: segments by layer, then head."""
        layers, heads, tokens, width = x.shape
        by_row = host(backend, backend.reduce_absmax(x, (3,), nonfinite=self.nonfinite))[..., 0]
        page = self.page_tokens or tokens
        largest = np.maximum.reduceat(by_row, np.arange(0, tokens, page), axis=2)
        if self.scope == "tensor":
            largest = np.broadcast_to(largest.max(axis=1, keepdims=True), largest.shape)
        scale = _scales(largest)
        given = near(backend, _by_token(scale, page, tokens))
        codes = host(backend, backend.quantize(x, _SPEC, scale=given, nonfinite=self.nonfinite).codes)
        head = np.array([SCOPES.index(self.scope), self.page_tokens or 0], "<u2").tobytes()
        rows = codes.reshape(layers * heads, tokens * width)
        sides = scale.astype("<f4").reshape(layers * heads, -1)
        return [CodedSegment(head + s.tobytes() + row.tobytes()) for s, row in zip(sides, rows, strict=True)]


def _rows_as_they_are(backend: Backend, x: Any) -> list[CodedSegment]:
    """Encode K: segments by layer, then head."""
    return [CodedSegment(head.tobytes()) for layer in host(backend, x) for head in layer]


def _bounded(group: GroupInfo, stored: GroupInfo) -> bool:
    """Whether the parts that are stored, a byte or more an element, vouch for those that are not: a reader asks."""
    whole, held = (sum(part.width for part in one.parts) for one in (group, stored))
    return whole <= ELEMENTS_OF_A_BYTE * held


def _scales(largest: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the scales that bring magnitudes to the largest code, as op `quantize` chooses them."""
    wanted = largest * (np.float32(1) / np.float32(_SPEC.code_max))
    return np.where(wanted < SCALE_MIN, np.float32(1), np.minimum(wanted, np.float32(SCALE_MAX))).astype(np.float32)


def _by_token(scale: Array, page: int, tokens: int) -> Array:
    """Spell scales of pages ``[..., pages]`` out, ``[..., T, 1]``."""
    return np.ascontiguousarray(np.repeat(scale, min(page, tokens), axis=-1)[..., :tokens, None])


def _decode_values(backend: Backend, part: PartInfo, layers: list[list[CodedSegment]], group: GroupInfo) -> Any:
    if part.dtype not in FLOAT_DTYPES:
        raise CorruptFrameError(f"codec asym does not write values of {part.dtype}", reason="layout")
    shape = (len(layers), group.head_count, group.rows, part.width)
    codes, scale = np.empty(shape, FLOAT8_E4M3FN), np.empty((*shape[:3], 1), np.float32)
    for index, layer in enumerate(layers):
        heads: set[bytes] = set()
        for h, segment in enumerate(layer):
            reader = Reader(segment.data)
            heads.add(_read_values(reader, scale[index, h], codes[index, h]))
            if segment.tiles:
                raise CorruptFrameError("a segment of codec asym has no tiles", reason="stream")
        if len(heads) > 1:
            raise CorruptFrameError(
                f"the heads of a layer differ in what shares a scale, or in the layer's scale: {len(heads)} kinds",
                reason="stream",
            )
    if not ((scale >= SCALE_MIN) & (scale <= SCALE_MAX)).all():
        raise CorruptFrameError("a scale outside 2**-100 .. 2**125", reason="stream")
    if (codes.view(np.uint8) & 0x7F == 0x7F).any():
        raise CorruptFrameError("a code of float8_e4m3fn that is not finite", reason="stream")
    return backend.dequantize(Quantized(near(backend, codes), near(backend, scale)), _SPEC, dtype=to_dtype(part.dtype))


def _read_values(reader: Reader, scale: Array, codes: Array) -> bytes:
    """Fill scales ``[T, 1]`` and codes ``[T, width]`` of a segment; return what all heads of its layer must share."""
    tokens, _ = codes.shape
    scope, page = (int(number) for number in reader.array(2, "<u2"))
    if scope >= len(SCOPES) or (SCOPES[scope] == "page") != (page > 0):
        raise CorruptFrameError(f"a segment of scope {scope} with pages of {page} tokens", reason="stream")
    stored = reader.array(-(-tokens // (page or tokens)), "<f4")
    scale[...] = _by_token(stored, page or tokens, tokens)
    codes[...] = reader.array(codes.size, "u1").view(codes.dtype).reshape(codes.shape)
    reader.finish()
    return bytes([scope, *page.to_bytes(2, "little")]) + (stored.tobytes() if SCOPES[scope] == "tensor" else b"")
