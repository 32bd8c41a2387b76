"""What is measured: kvcore's codecs, and quantisers of others that they are compared with; `serdes` adds serdes.

A subject turns a chunk of KV into what a reader would get back, and says how many bytes lay in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import Codec, CodedSegment
from kvcore.codecs.frame_format import directory_size
from kvcore.codecs.frame_values import LAYER_ALIGN, SEGMENT_ALIGN, GroupInfo, PartInfo, SegmentSize, align
from kvcore.codecs.kvs1 import PRESETS as KVS1
from kvcore.codecs.registry import PRESETS, get_codec
from kvcore.codecs.segments import SegmentFlags
from kvcore.dtypes import BFLOAT16, FLOAT8_E4M3FN, dtype_name, finite_max
from kvcore.errors import ConfigError, QuantizationError
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.rope import RopeParams
from kvcore.rows import RowLayout

__all__ = [
    "BF16_BITS",
    "LEVELED",
    "Chunk",
    "Stored",
    "Subject",
    "bind_layers",
    "bytes_of",
    "leveled",
    "measured_levels",
    "subject_names",
    "subjects",
]

Array: TypeAlias = npt.NDArray[Any]

BF16_BITS = 8 * BFLOAT16.itemsize
"""Bits of an element before anything is done to it."""
LEVELED = "+levels"
"""Ends the name of a KVS1 preset that is given the model's level constants."""

_LAYERS = Layout("LK|HTD")
_GROUP = 32
_CODE_MAX = 15


@dataclass(frozen=True, slots=True)
class Chunk:
    """Keys and values of consecutive tokens.

    Parameters
    ----------
    k, v : bfloat16 arrays ``[layers, heads, T, width]``
    position : int
        Of the first token in its sequence.
    rope : RopeParams, optional
        How the keys are rotated.
    """

    k: Array
    v: Array
    position: int
    rope: RopeParams | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk after a round trip, and the bytes that its keys and values took.

    Parameters
    ----------
    k, v : bfloat16 arrays ``[layers, heads, T, width]``
    k_bytes, v_bytes : float
        What both need, they share.
    apart : bool
        Whether the two are told apart; if not, each has half of the bytes.
    """

    k: Array
    v: Array
    k_bytes: float
    v_bytes: float
    apart: bool = True


class Subject(Protocol):
    """Something that makes KV smaller."""

    @property
    def name(self) -> str:
        """What its row is called."""

    def store(self, backend: Backend, chunk: Chunk) -> Stored:
        """Encode a chunk and decode it again.

        Raises
        ------
        QuantizationError
            A value that it cannot hold.
        """


@dataclass(frozen=True, slots=True)
class CodecSubject:
    """A codec of kvcore. Bytes are those of a frame: segments, alignment, the directory's entries."""

    name: str
    codec: Codec

    def store(self, backend: Backend, chunk: Chunk) -> Stored:
        """See `Subject.store`."""
        group = _group(chunk)
        layers = self.codec.encode(backend, bind_layers(chunk.k, chunk.v), group)
        k, v = np.empty_like(chunk.k), np.empty_like(chunk.v)
        self.codec.decode(backend, layers, group, bind_layers(k, v))
        k_bytes = v_bytes = 0.0
        for layer in layers:
            keys, values = (_sizes(part) for part in (layer[: group.head_count], layer[group.head_count :]))
            # What the layer as a whole takes, its parts share: the padding after it, and its digest.
            placed = _placed(keys) + _placed(values)
            shared = (align(placed, LAYER_ALIGN) - placed + directory_size([[]])) / 2
            k_bytes += bytes_of(keys) + shared
            v_bytes += bytes_of(values) + shared
        return Stored(k, v, k_bytes, v_bytes)


@dataclass(frozen=True, slots=True)
class CastFp8:
    """The cast to e4m3fn that engines call an fp8 KV cache: no scale, saturating, 8 bits."""

    name: str = "fp8"

    def store(self, backend: Backend, chunk: Chunk) -> Stored:
        """See `Subject.store`."""
        most = finite_max(FLOAT8_E4M3FN)
        k, v = (
            np.clip(x.astype(np.float32), -most, most).astype(FLOAT8_E4M3FN).astype(np.float32).astype(x.dtype)
            for x in (chunk.k, chunk.v)
        )
        return Stored(k, v, float(k.size), float(v.size))


@dataclass(frozen=True, slots=True)
class Kivi:
    """KIVI at 4 bits: keys per channel, values per token, in groups of 32 with minimum and scale in float16.

    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024. Without its window of
    recent tokens in full precision, which a stored prefix does not have.
    """

    name: str = "kivi"

    def store(self, backend: Backend, chunk: Chunk) -> Stored:
        """See `Subject.store`."""
        k, k_bytes = _affine(chunk.k, 2)
        v, v_bytes = _affine(chunk.v, 3)
        return Stored(k, v, k_bytes, v_bytes)


def subject_names() -> list[str]:
    """Return all names that `subjects` takes."""
    whole = [name for name in PRESETS if not getattr(get_codec(name), "omits", ())]  # with keys as well as values
    return [name for name in whole if name != "fp8"] + ["fp8", "fp8_scaled", "kivi"]


def subjects(names: Sequence[str]) -> list[Subject]:
    """Return what the names stand for.

    Presets are codecs by their names, but ``fp8`` is the plain cast; kvcore's own fp8 codec, which scales, is
    ``fp8_scaled``. ``kivi`` is a quantiser that kvcore does not have.

    Raises
    ------
    ConfigError
        No name, a name that stands for nothing, or one given twice.
    """
    known = subject_names()
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        why = f"there is no codec {unknown[0]!r}" if unknown else "name each codec once"
        raise ConfigError(f"--codec {','.join(names)}: {why}; there are {', '.join(known)}")
    baselines: dict[str, Subject] = {"fp8": CastFp8(), "kivi": Kivi()}
    own = {name: "fp8" if name == "fp8_scaled" else name for name in names if name not in baselines}
    return [baselines[n] if n in baselines else CodecSubject(n, get_codec(own[n])) for n in names]


def leveled(chosen: Sequence[Subject], levels: tuple[int, int]) -> list[Subject]:
    """Return the KVS1 presets among some subjects once more, with a model's level constants."""
    return [
        CodecSubject(subject.name + LEVELED, get_codec(subject.name, levels=levels))
        for subject in chosen
        if subject.name in KVS1
    ]


def measured_levels(backend: Backend, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Measure a model's level constants: the geometric mean of R over all segments, keys then values.

    R is the root mean square about the channel means (of keys without RoPE). Constants are in eighths of an octave.

    Raises
    ------
    ConfigError
        No chunk has enough tokens, or everything is zero.
    """
    codec, constant = get_codec("balanced"), KVS1["balanced"].constant
    found: tuple[list[int], list[int]] = ([], [])
    for chunk in chunks:
        group = _group(chunk)
        for layer in codec.encode(backend, bind_layers(chunk.k, chunk.v), group):
            for index, segment in enumerate(layer):
                # Bytes 0 and 1 are k and flags. A k of 0 is an all-zero segment: it has no R.
                if segment.data[0] and not segment.data[1] & SegmentFlags.ALL_RAW:
                    found[index // group.head_count].append(segment.data[0] - 128 - constant)
    if not all(found):
        raise ConfigError("these documents have too few tokens to measure level constants; give --levels C_K,C_V")
    # R is rounded up to the grid, by half a step in the mean.
    c_k, c_v = (int(np.rint(np.mean(values) - 0.5)) for values in found)
    return c_k, c_v


def bind_layers(k: Array, v: Array) -> RowLayout:
    """Bind arrays ``[layers, heads, T, width]`` as the rows of a chunk, where they lie."""
    return _LAYERS.bind([list(pair) for pair in zip(k, v, strict=True)])


def bytes_of(sizes: Sequence[SegmentSize]) -> float:
    """Return the bytes that segments of one layer take in a frame: where they lie, and in the directory."""
    return _placed(sizes) + directory_size([sizes]) - directory_size([[]])


def _group(chunk: Chunk) -> GroupInfo:
    layers, heads, tokens, _ = chunk.k.shape
    parts = tuple(PartInfo(n, dtype_name(x.dtype), x.shape[3]) for n, x in (("K", chunk.k), ("V", chunk.v)))
    return GroupInfo(
        "LKHTD",
        tuple(range(layers)),
        parts,
        rows=tokens,
        head_count=heads,
        base_position=chunk.position,
        rope=chunk.rope,
    )


def _sizes(segments: Sequence[CodedSegment]) -> list[SegmentSize]:
    return [(len(segment.data), segment.tiles) for segment in segments]


def _placed(sizes: Sequence[SegmentSize]) -> int:
    """Bytes of segments where they lie."""
    return sum(align(nbytes, SEGMENT_ALIGN) for nbytes, _ in sizes)


def _affine(x: Array, axis: int) -> tuple[Array, float]:
    """Quantise groups along an axis to 4 bits between their extremes; return what comes back, and the bytes."""
    values, back, groups = x.astype(np.float32), np.empty(x.shape, np.float32), 0
    if np.abs(values).max(initial=0) > finite_max(np.dtype(np.float16)):
        raise QuantizationError("kivi keeps minima in float16, which these values are beyond")
    for start in range(0, x.shape[axis], _GROUP):
        piece = (slice(None),) * axis + (slice(start, start + _GROUP),)
        low = values[piece].min(axis, keepdims=True)
        scale = (values[piece].max(axis, keepdims=True) - low) / _CODE_MAX
        low, scale = low.astype(np.float16).astype(np.float32), scale.astype(np.float16).astype(np.float32)
        safe = np.where(scale > 0, scale, np.float32(1))
        back[piece] = np.clip(np.rint((values[piece] - low) / safe), 0, _CODE_MAX) * scale + low
        groups += low.size
    return back.astype(x.dtype), x.size / 2 + groups * 4
