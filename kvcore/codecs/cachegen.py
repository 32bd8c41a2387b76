"""Codec ``cachegen`` (id 5): the quantiser of LMCache's CacheGen, with symbols coded in the tiles of KVS1.

It is here for parity; `balanced` is better in size and in fidelity. A layer has a number of bins, by a
`CacheGenConfig`; with ``MAX = bins // 2 - 1`` a token's values are divided by ``absmax / MAX`` and rounded, so no value
is off by more than ``absmax / (2 * MAX)`` and the rounding of its element type. (In a token whose scale would be below
``2**-100``, all values become 0.)

absmax is that of a token over all KV heads of the frame, as in LMCache, or of a token and a head (`per_head`). Shared
ones are stored once, with the first head of each layer and part: the frame's other heads need that segment too. Stored
with every head they would cost as much as scales per head, which are more precise. RoPE stays on, no row is raw.

A segment ``[T, C]``, little-endian::

    bins u16 | flags u8 | 0 | absmax [T] in the part's element type, where flagged | zero pad to 4 | tiles

Flag 1: absmax is here; else it is in the first head's segment. Tiles as `kvcore.codecs.tiling` orders them, with tables
``gauss`` and offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Array, CodedSegment, Layers
from kvcore.codecs.frame_values import Flags, GroupInfo, PartInfo, SegmentSize, align
from kvcore.codecs.nonfinite import check_policy
from kvcore.codecs.parts import FLOAT_DTYPES, Reader, check_dtypes, decode_parts, encode_parts
from kvcore.codecs.places import host, near, on_device
from kvcore.codecs.tables import table_set
from kvcore.codecs.tiling import decode_tiles, encode_tiles, max_tiles_size
from kvcore.dtypes import to_dtype
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError, QuantizationError
from kvcore.ops import Backend
from kvcore.quant import SCALE_MAX, SCALE_MIN, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["FAMILIES", "CacheGen", "CacheGenConfig", "QuantizationSpec"]

BINS = (4, 256)
"""Fewest and most bins: MAX of 1, and of 127."""
FAMILIES = {
    "mistral-7b-instruct-v0.2": 32,
    "longchat-7b-16k": 32,
    "qwen-7b": 32,
    "llama-3.1-8b-instruct": 32,
    "glm-4-9b-chat": 40,
}
"""Layers of the models whose number need not be given."""

_FINE, _COARSE = 32, 16
_FINE_KEYS, _FINE_VALUES = 10, 2  # layers with fine bins
_SHALLOW = 10  # a model with fewer layers has fine bins everywhere
_HAS_SCALES = 1
_AXES = {False: (1, 3), True: (3,)}  # of [layers, heads, T, width]: what shares an absmax, by per_head


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Bins of a range of layers.

    Parameters
    ----------
    start_layer, end_layer : int
        First layer, and the one after the last.
    bins : int
        4 to 256.
    """

    start_layer: int
    end_layer: int
    bins: int

    def __post_init__(self) -> None:
        if not 0 <= self.start_layer < self.end_layer:
            raise ConfigError(f"layers {self.start_layer}:{self.end_layer} are no range of layers")
        if not BINS[0] <= self.bins <= BINS[1]:
            raise ConfigError(f"bins must be {BINS[0]} to {BINS[1]}, got {self.bins}")


@dataclass(frozen=True, slots=True)
class CacheGenConfig:
    """Bins of every layer of a model.

    Parameters
    ----------
    nlayers : int
    kspecs, vspecs : tuple of QuantizationSpec
        For keys (and for MLA's rows), and for values; together they cover each layer once.
    """

    nlayers: int
    kspecs: tuple[QuantizationSpec, ...]
    vspecs: tuple[QuantizationSpec, ...]

    def __post_init__(self) -> None:
        for what in ("kspecs", "vspecs"):
            specs = tuple(getattr(self, what))
            object.__setattr__(self, what, specs)
            ordered = sorted(specs, key=lambda spec: spec.start_layer)
            ends = [0, *(spec.end_layer for spec in ordered)]
            if ends != [*(spec.start_layer for spec in ordered), self.nlayers]:
                raise ConfigError(f"{what} {specs} must cover each of the layers 0 to {self.nlayers - 1} once")

    @classmethod
    def for_model(cls, model: str = "", nlayers: int | None = None) -> CacheGenConfig:
        """Return the default bins of a model.

        Parameters
        ----------
        model : str
            Its name or hub id; of `FAMILIES`, it tells the number of layers.
        nlayers : int, optional
            Given, it counts.

        Raises
        ------
        ConfigError
            No number of layers is given, and the model's is not known.
        """
        if nlayers is None:
            nlayers = FAMILIES.get(model.rpartition("/")[2].lower())
        if nlayers is None or nlayers < 1:
            raise ConfigError(
                f"how many layers has model {model!r}? give nlayers of at least 1 (known are {', '.join(FAMILIES)})"
            )
        if nlayers < _SHALLOW:
            fine = (QuantizationSpec(0, nlayers, _FINE),)
            return cls(nlayers, fine, fine)
        return cls(nlayers, _two_ranges(_FINE_KEYS, nlayers), _two_ranges(_FINE_VALUES, nlayers))

    def bins(self, part: str, layer: int) -> int:
        """Return the bins of a part of a layer; `ConfigError` if the model has no such layer."""
        for spec in self.vspecs if part == "V" else self.kspecs:
            if spec.start_layer <= layer < spec.end_layer:
                return spec.bins
        raise ConfigError(f"there are bins for layers 0 to {self.nlayers - 1}, none for layer {layer}")


def _two_ranges(fine: int, nlayers: int) -> tuple[QuantizationSpec, ...]:
    specs = [QuantizationSpec(0, fine, _FINE)]
    if fine < nlayers:
        specs.append(QuantizationSpec(fine, nlayers, _COARSE))
    return tuple(specs)


@dataclass(frozen=True, slots=True)
class CacheGen:
    """CacheGen's bins in KVS1's tiles.

    Parameters
    ----------
    name : str
        ``"cachegen"``.
    config : CacheGenConfig, optional
        Without: 32 bins for keys of layers 0 to 9 and values of layers 0 and 1, else 16, as for any model of at least
        10 layers. Models with fewer need ``CacheGenConfig.for_model(nlayers=...)`` to get LMCache's bins. Only encoding
        takes it: segments know their bins.
    per_head : bool
        A scale for each token and head: larger, better.
    nonfinite : {"error", "saturate"}
        What becomes of a NaN or infinity: `QuantizationError`, or NaN is read as zero and an infinity as the largest
        finite value of the element type with its sign.
    """

    name: str = "cachegen"
    config: CacheGenConfig | None = None
    per_head: bool = False
    nonfinite: str = "error"
    codec_id: int = field(default=5, init=False)
    preset: int = field(default=0, init=False)
    chain: tuple[str, ...] = field(default=("cachegen",), init=False)
    on_device: bool = field(default=True, init=False)
    lossless: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_policy(self.name, self.nonfinite)

    @property
    def precision(self) -> int:
        """Bits of the frequency tables."""
        return table_set("gauss").bits

    @property
    def tables(self) -> bytes:
        """The table set, as the header names it."""
        return table_set("gauss").digest[:8]

    def flags(self, group: GroupInfo) -> Flags:
        """See `Codec.flags`."""
        return Flags.OFFSET

    def max_sizes(self, group: GroupInfo) -> list[SegmentSize]:
        """See `Codec.max_sizes`."""
        check_dtypes(group, self.name, FLOAT_DTYPES)
        sizes: list[SegmentSize] = []
        for part in group.parts:
            bins = max(self._bins(part.name, layer) for layer in group.layers)
            bits = (2 * (bins // 2 - 1)).bit_length()
            nbytes, tiles = max_tiles_size(group.rows, part.width, bits)
            side = align(4 + group.rows * to_dtype(part.dtype).itemsize, 4)
            sizes += [(nbytes + (side if self.per_head or head == 0 else 4), tiles) for head in range(group.head_count)]
        return sizes

    def encode(self, backend: Backend, rows: RowLayout, group: GroupInfo) -> Layers:
        """See `Codec.encode`. The group's layers are those of the rows: their numbers decide the bins.

        Raises
        ------
        QuantizationError
            A NaN or infinity under policy ``"error"``, or values beyond 2**125.
        LayoutError
            The rows have another number of layers than the group.
        ConfigError
            The configuration has no bins for a layer.
        """
        if rows.layers != len(group.layers):
            raise LayoutError(
                f"codec {self.name} takes bins by layer: the group names {len(group.layers)} layers, "
                f"the rows have {rows.layers}"
            )

        def segments(part: PartInfo, x: Any) -> list[CodedSegment]:
            bins = np.array([self._bins(part.name, layer) for layer in group.layers])
            return _encode(backend, x, bins, self.per_head, self.nonfinite)

        return encode_parts(backend, rows, group, segments, codec=self.name, dtypes=FLOAT_DTYPES)

    def decode(
        self, backend: Backend, layers: Sequence[Sequence[CodedSegment]], group: GroupInfo, out: RowLayout
    ) -> None:
        """See `Codec.decode`."""
        decode_parts(backend, layers, group, out, lambda part, s: _decode(backend, part, s, group))

    def _bins(self, part: str, layer: int) -> int:
        if self.config is not None:
            return self.config.bins(part, layer)
        return _FINE if layer < (_FINE_VALUES if part == "V" else _FINE_KEYS) else _COARSE


def _encode(
    backend: Backend, x: Any, bins: npt.NDArray[np.int64], per_head: bool, nonfinite: str
) -> list[CodedSegment]:
    _, heads, tokens, width = x.shape
    axes = _AXES[per_head]
    largest = host(backend, backend.reduce_absmax(x, axes, nonfinite=nonfinite))
    scale = _scales(largest, bins)
    if (scale > SCALE_MAX).any():
        raise QuantizationError(f"values up to {largest.max()} need a scale beyond 2**125")
    placed = near(backend, scale)
    values = backend.quantize(x, QuantSpec.symmetric(16, axes), scale=placed, nonfinite=nonfinite).codes
    coded = encode_tiles(backend, values.reshape(-1, tokens, width), table_set("gauss"), use_offsets=True)
    segments = []
    for index, tiles in enumerate(coded):
        layer, head = divmod(index, heads)
        here = per_head or head == 0
        side = largest[layer, head].astype(x.dtype).tobytes() if here else b""
        head_bytes = int(bins[layer]).to_bytes(2, "little") + bytes([_HAS_SCALES * here, 0]) + side
        segments.append(CodedSegment(head_bytes + bytes(-len(head_bytes) % 4) + tiles.data, tiles.tiles))
    return segments


def _scales(largest: npt.NDArray[np.float32], bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Scales of tokens from their absmax ``[layers, ..., T, 1]``; 1 where too small to matter."""
    reciprocal = np.float32(1) / (bins // 2 - 1).astype(np.float32)
    scale = largest * reciprocal[:, None, None, None]
    return np.where(scale < SCALE_MIN, np.float32(1), scale)


def _decode(backend: Backend, part: PartInfo, layers: list[list[CodedSegment]], group: GroupInfo) -> Any:
    dtype, tokens, tables = to_dtype(part.dtype), group.rows, table_set("gauss")
    segments = [segment for layer in layers for segment in layer]
    readers = [Reader(segment.data) for segment in segments]
    heads = [_Head.read(reader, tokens, dtype) for reader in readers]
    shape = (len(layers), group.head_count)
    bins = np.array([head.bins for head in heads]).reshape(shape)
    present = np.array([head.absmax is not None for head in heads]).reshape(shape)
    per_head = bool(present.all())
    if (bins != bins[:, :1]).any() or not (per_head or (present == (np.arange(shape[1]) == 0)).all()):
        raise CorruptFrameError("heads differ in their bins, or in whether they have scales", reason="stream")
    scales = np.stack([head.absmax for head in heads if head.absmax is not None])
    scale = _scales(scales.reshape(shape[0], -1, tokens, 1), bins[:, 0])
    if not (scale <= SCALE_MAX).all():
        raise CorruptFrameError("a scale beyond 2**125", reason="stream")
    values = decode_tiles(
        backend, readers, [s.tiles for s in segments], tables, tokens=tokens, channels=part.width, use_offsets=True
    )
    for reader in readers:
        reader.finish()
    codes = values.reshape(*shape, tokens, part.width)
    if (_largest(backend, codes) > bins // 2 - 1).any():
        raise CorruptFrameError("a symbol outside the bins", reason="stream")
    spec = QuantSpec.symmetric(16, _AXES[per_head])
    return backend.dequantize(Quantized(codes, near(backend, scale)), spec, dtype=dtype)


def _largest(backend: Backend, codes: Any) -> Array:
    """Return the largest magnitude of each segment's codes, ``[layers, heads]``."""
    if not on_device(codes):
        found: Array = np.abs(codes.astype(np.int32)).max(axis=(2, 3), initial=0)
        return found
    one = near(backend, np.ones((1, 1, 1, 1), np.float32))
    values = backend.dequantize(Quantized(codes, one), QuantSpec.symmetric(16, (0, 1, 2, 3)))
    return host(backend, backend.reduce_absmax(values, (2, 3)))[:, :, 0, 0]


@dataclass(frozen=True, slots=True)
class _Head:
    """What precedes a segment's tiles."""

    bins: int
    absmax: npt.NDArray[np.float32] | None

    @classmethod
    def read(cls, reader: Reader, tokens: int, dtype: np.dtype[Any]) -> _Head:
        bins, flags, zero = int(reader.array(1, "<u2")[0]), *reader.take(2)
        if not BINS[0] <= bins <= BINS[1] or flags & ~_HAS_SCALES or zero:
            raise CorruptFrameError(f"a segment of {bins} bins with flags {flags}", reason="stream")
        absmax = None
        if flags:
            absmax = np.frombuffer(reader.take(tokens * dtype.itemsize), dtype).astype(np.float32)
            if not (np.isfinite(absmax) & ~np.signbit(absmax)).all():
                raise CorruptFrameError("an absmax that is negative or not finite", reason="stream")
        reader.pad(4)
        return cls(bins, absmax)
