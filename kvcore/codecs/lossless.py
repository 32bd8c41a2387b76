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

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo
from kvcore.codecs.parts import Reader, decode_parts, encode_parts
from kvcore.codecs.tables import table_set
from kvcore.codecs.tiling import decode_tiles, encode_tiles, host
from kvcore.dtypes import to_dtype
from kvcore.errors import CorruptFrameError
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


def _encode(backend: Backend, part: PartInfo, x: Array) -> list[CodedSegment]:
    form = _FORMS[part.dtype]
    words = x.reshape(-1, *x.shape[2:]).view(f"<u{x.dtype.itemsize}")
    values, mantissas = form.split(words)
    coded = encode_tiles(backend, values, table_set(form.tables))
    mantissas = mantissas.reshape(len(words), -1)
    high = np.empty((len(words), 0), np.uint8)
    if form.high:
        high = host(backend.pack_bits((mantissas >> 8 * form.low).astype(np.uint8), form.high))
    low = (mantissas & ((1 << 8 * form.low) - 1)).astype(f"<u{form.low}") if form.low else high[:, :0]
    return [
        CodedSegment(b"".join((c.data, h.tobytes(), w.tobytes())), c.tiles)
        for c, h, w in zip(coded, high, low, strict=True)
    ]


def _decode(backend: Backend, part: PartInfo, layers: list[list[CodedSegment]], group: GroupInfo) -> Array:
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
    if not form.fits(values):
        raise CorruptFrameError(f"a value of {part.dtype} beyond its sign and exponent", reason="stream")
    count = group.rows * part.width
    mantissas = np.zeros((len(readers), count), f"<u{dtype.itemsize}")
    for mantissa, reader in zip(mantissas, readers, strict=True):
        if form.high:
            packed = reader.array(-(-count * form.high // 8), "u1")
            if packed[-1] >> (count * form.high - 1) % 8 + 1:
                raise CorruptFrameError("the bits after the last mantissa are not zero", reason="stream")
            high = host(backend.unpack_bits(packed[None], form.high, count))[0]
            mantissa |= high.astype(mantissa.dtype) << 8 * form.low
        if form.low:
            mantissa |= reader.array(count, f"<u{form.low}")
        reader.finish()
    words = form.join(values, mantissas.reshape(values.shape))
    return words.view(dtype).reshape(len(layers), group.head_count, *values.shape[1:])
