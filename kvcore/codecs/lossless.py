"""Codec ``lossless`` (id 2): every bit comes back, NaN payloads, denormals and negative zeros included.

Sign and exponent of bfloat16, float16 and float32 are coded with the tables ``exponent``; the mantissa, in which there
is next to nothing to gain, is stored as it is. 8-bit floats are coded whole, with tables of their own.

A segment ``[T, C]`` has no head. Little-endian::

    tiles | high mantissa bits | low mantissa bytes

- Tiles as `kvcore.codecs.tiling` orders them, without offsets. Their values: ``sign << 8 | exponent field``; of an
  8-bit float its byte.
- A mantissa of M bits (bfloat16 7, float16 10, float32 23) is cut into its high ``M % 8`` and its low ``M // 8 * 8``
  bits. High bits: of all elements, token by token, in one string, least significant bit first, filled up with zeros to
  a whole byte. Low bytes: of all elements, token by token; in float32 two each, the lower one first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize
from kvcore.codecs.parts import Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import Array, copied, empty, fetched, filled, near, on_device
from kvcore.codecs.tables import table_set
from kvcore.codecs.tiling import decode_tiles, encode_tiles, max_tiles_size
from kvcore.dtypes import to_dtype
from kvcore.errors import CorruptFrameError, QuantizationError
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["Lossless"]


@dataclass(frozen=True, slots=True)
class _Form:
    """How an element type is cut up: its table set, and the bits of its exponent field and mantissa."""

    tables: str
    exponent: int = 0
    mantissa: int = 0

    @property
    def high(self) -> int:
        """Mantissa bits that are packed."""
        return self.mantissa % 8

    @property
    def bits(self) -> int:
        """Bits of the bytes that are not stored whole: from the highest down sign, exponent, high mantissa."""
        return 1 + self.exponent + self.high

    @property
    def value_bits(self) -> int:
        """Bits of the difference of two values of tiles."""
        return 9 if self.exponent else 8

    @property
    def low(self) -> int:
        """Mantissa bytes that are stored whole."""
        return self.mantissa // 8

    def fits(self, values: npt.NDArray[np.int16]) -> bool:
        """Whether values of tiles are such: nothing beyond sign and exponent field."""
        possible = 0x100 | ((1 << self.exponent) - 1) if self.exponent else 0xFF
        return not (values & ~possible).any()

    def split(self, words: Array) -> tuple[npt.NDArray[np.int16], Array]:
        """Return the values for tiles, and the mantissas, of elements seen as unsigned integers."""
        if not self.exponent:
            return words.astype(np.int16), words
        exponent = words >> self.mantissa & ((1 << self.exponent) - 1)
        sign = words >> (self.exponent + self.mantissa)
        return (sign << 8 | exponent).astype(np.int16), words & ((1 << self.mantissa) - 1)

    def join(self, values: npt.NDArray[np.int16], mantissas: Array) -> Array:
        """Undo `split`; the mantissas' dtype is the result's."""
        if not self.exponent:
            return values.astype(mantissas.dtype)
        wide = values.astype(mantissas.dtype)
        return wide >> 8 << (self.exponent + self.mantissa) | (wide & 0xFF) << self.mantissa | mantissas


_FORMS = {
    "bfloat16": _Form("exponent", 8, 7),
    "float16": _Form("exponent", 5, 10),
    "float32": _Form("exponent", 8, 23),
    "float8_e4m3fn": _Form("e4m3fn"),
    "float8_e5m2": _Form("e5m2"),
}
_TABLES = ("exponent", "e4m3fn", "e5m2")
_BEYOND = "a value of {} beyond its sign and exponent"
_SLAB_ELEMENTS = 1 << 22
"""Elements that a device takes apart at once: 64 MiB of bits."""


@dataclass(frozen=True, slots=True)
class Lossless:
    """Entropy-coded sign and exponent, mantissa as it is.

    Parameters
    ----------
    name : str
        ``"lossless"``.
    """

    name: str = "lossless"
    codec_id: int = field(default=2, init=False)
    preset: int = field(default=0, init=False)
    lossless: bool = field(default=True, init=False)
    chain: tuple[str, ...] = field(default=("lossless",), init=False)
    on_device: bool = field(default=True, init=False)

    @property
    def precision(self) -> int:
        """Bits of the frequency tables."""
        return table_set("exponent").bits

    @property
    def tables(self) -> bytes:
        """The table sets: of the SHA-256 over the three digests (exponent, e4m3fn, e5m2), the first 8 bytes."""
        return hashlib.sha256(b"".join(table_set(name).digest for name in _TABLES)).digest()[:8]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags(0)

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        check_dtypes(group, self.name, _FORMS)
        sizes: list[SegmentSize] = []
        for part in group.parts:
            form, count = _FORMS[part.dtype], group.rows * part.width
            nbytes, tiles = max_tiles_size(group.rows, part.width, form.value_bits)
            sizes += [(nbytes + -(-count * form.high // 8) + count * form.low, tiles)] * group.head_count
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`."""
        return encode_parts(
            backend, rows, group, lambda part, x: _encode(backend, part, x), codec=self.name, dtypes=_FORMS
        )

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""
        decode_parts(backend, layers, group, out, lambda part, s: _decode(backend, part, s, group))


def _encode(backend: Backend, part: PartInfo, x: Any) -> list[CodedSegment]:
    form = _FORMS[part.dtype]
    words = x.reshape(-1, *x.shape[2:])
    cut = _cut_on_device if on_device(x) else _cut
    values, high, low = cut(backend, form, words)
    mantissas = fetched(backend, [high, low])
    coded = encode_tiles(backend, values, table_set(form.tables))  # which waits, if there is anything to wait for
    return [
        CodedSegment(b"".join((c.data, h.tobytes(), w.tobytes())), c.tiles)
        for c, h, w in zip(coded, *mantissas, strict=True)
    ]


def _cut(backend: Backend, form: _Form, x: Array) -> tuple[Array, Array, Array]:
    """Return values for tiles ``[S, T, C]``, and by segment the bytes of the high mantissa bits and of the low ones."""
    values, mantissas = form.split(x.view(f"<u{x.dtype.itemsize}"))
    mantissas = mantissas.reshape(len(x), -1)
    high = np.empty((len(x), 0), np.uint8)
    if form.high:
        high = backend.pack_bits((mantissas >> 8 * form.low).astype(np.uint8), form.high)
    low = (mantissas & ((1 << 8 * form.low) - 1)).astype(f"<u{form.low}") if form.low else high[:, :0]
    return values, high, low


def _cut_on_device(backend: Backend, form: _Form, x: Any) -> tuple[Any, Any, Any]:
    """Do what `_cut` does by ops that move bits: each bit of sign, exponent and high mantissa becomes a byte."""
    count, tokens, channels = x.shape
    values = empty(backend, x.shape, np.int16)
    high = empty(backend, (count, -(-tokens * channels * form.high // 8)), np.uint8)
    low = empty(backend, (count, tokens, channels, form.low), np.uint8)
    for start, stop in _slabs(count, tokens * channels):
        parts, fields = _bytes(x[start:stop]), _bytes(values[start:stop])
        if not form.exponent:
            copied(backend, parts, out=fields[..., :1])
            copied(backend, filled(backend, 0, parts.shape, np.uint8), out=fields[..., 1:])
            continue
        bits = backend.unpack_bits(parts[..., form.low :], 1, form.bits)
        backend.pack_bits(bits[..., form.high : -1], 1, out=fields[..., :1])
        backend.pack_bits(bits[..., -1:], 1, out=fields[..., 1:])
        whole = backend.pack_bits(bits[..., : form.high], 1).reshape(stop - start, tokens * channels)
        backend.pack_bits(whole, form.high, out=high[start:stop])
        if form.low:
            copied(backend, parts[..., : form.low], out=low[start:stop])
    return values, high, low


def _decode(backend: Backend, part: PartInfo, layers: list[list[CodedSegment]], group: GroupInfo) -> Any:
    form, dtype = _FORMS.get(part.dtype), to_dtype(part.dtype)
    if form is None:
        raise CorruptFrameError(f"codec lossless does not write {part.dtype}", reason="layout")
    segments = [segment for layer in layers for segment in layer]
    readers = [Reader(segment.data) for segment in segments]
    values = decode_tiles(
        backend,
        readers,
        [segment.tiles for segment in segments],
        table_set(form.tables),
        tokens=group.rows,
        channels=part.width,
    )
    count = group.rows * part.width
    high = np.empty((len(readers), -(-count * form.high // 8)), np.uint8)
    low = np.empty((len(readers), count * form.low), np.uint8)
    for reader, packed, whole in zip(readers, high, low, strict=True):
        packed[:] = reader.array(packed.size, "u1")
        if form.high and packed[-1] >> (count * form.high - 1) % 8 + 1:
            raise CorruptFrameError("the bits after the last mantissa are not zero", reason="stream")
        whole[:] = reader.array(whole.size, "u1")
        reader.finish()
    join = _join_on_device if on_device(values) else _join
    x = join(backend, form, values, high, low, dtype)
    return x.reshape(len(layers), group.head_count, *values.shape[1:])


def _join(backend: Backend, form: _Form, values: Array, high: Array, low: Array, dtype: np.dtype[Any]) -> Array:
    """Undo `_cut`."""
    if not form.fits(values):
        raise CorruptFrameError(_BEYOND.format(dtype), reason="stream")
    mantissas = np.zeros(values.shape, f"<u{dtype.itemsize}")
    if form.high:
        bits = backend.unpack_bits(high, form.high, values[0].size).reshape(values.shape)
        mantissas |= bits.astype(mantissas.dtype) << 8 * form.low
    if form.low:
        mantissas |= low.view(f"<u{form.low}").reshape(values.shape)
    return form.join(values, mantissas).view(dtype)


def _join_on_device(backend: Backend, form: _Form, values: Any, high: Array, low: Array, dtype: np.dtype[Any]) -> Any:
    """Do what `_join` does by ops that move bits."""
    count, tokens, channels = values.shape
    x = empty(backend, values.shape, dtype)
    packed, whole = near(backend, high), near(backend, low.reshape(count, tokens, channels, form.low))
    for start, stop in _slabs(count, tokens * channels):
        parts, fields = _bytes(x[start:stop]), _bytes(values[start:stop])
        _check_fields(backend, form, fields)
        if not form.exponent:
            copied(backend, fields[..., :1], out=parts)
            continue
        bits = empty(backend, (*fields.shape[:-1], form.bits), np.uint8)
        mantissas = backend.unpack_bits(packed[start:stop], form.high, tokens * channels)
        mantissas = mantissas.reshape(stop - start, tokens, channels, 1)
        backend.unpack_bits(mantissas, 1, form.high, out=bits[..., : form.high])
        backend.unpack_bits(fields[..., :1], 1, form.exponent, out=bits[..., form.high : -1])
        backend.unpack_bits(fields[..., 1:], 1, 1, out=bits[..., -1:])
        backend.pack_bits(bits, 1, out=parts[..., form.low :])
        if form.low:
            copied(backend, whole[start:stop], out=parts[..., : form.low])
    try:
        backend.runtime.check()
    except QuantizationError as error:  # from `_check_fields`: nothing else here raises it
        raise CorruptFrameError(_BEYOND.format(dtype), reason="stream") from error
    return x


def _check_fields(backend: Backend, form: _Form, fields: Any) -> None:
    """Let a device find what `_Form.fits` refuses: packing reports what has more bits."""
    if form.exponent:
        if form.exponent < 8:
            backend.pack_bits(fields[..., 0], form.exponent)
        backend.pack_bits(fields[..., 1], 1)
        return
    backend.pack_bits(fields[..., 1], 1)  # 0 and 1 pass
    backend.pack_bits(fields[..., 1].view(np.int8), 1)  # 0 and -1 pass


def _bytes(x: Any) -> Any:
    """View elements ``[S, T, C]`` of a device as bytes ``[S, T, C, itemsize]``."""
    return x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def _slabs(count: int, elements: int) -> list[tuple[int, int]]:
    """Return ranges of segments of so many elements whose bits, a byte each, do not take too much memory at once."""
    step = max(1, _SLAB_ELEMENTS // max(1, elements))
    return [(start, min(start + step, count)) for start in range(0, count, step)]
