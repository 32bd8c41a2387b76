"""`RowLayout`: where every byte of a KV cache or chunk lies, as base addresses and byte strides.

A layout string bound to memory becomes this and nothing else; ops, kernels and backends see only `RowLayout`. A paged
cache and a dense chunk have one form: a dense chunk is one block whose tokens are all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, cast

import numpy as np

from kvcore.arrays import ArrayRef, bytes_at
from kvcore.dtypes import dtype_name
from kvcore.errors import LayoutError

__all__ = ["NativeRows", "RowLayout", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Parts of a layout that share strides, extents and element type.

    Element ``[part, layer, block, token, head, channel]`` lies at ``bases[part][layer] + block*block_stride +
    token*token_stride + head*head_stride + channel*dim_stride``. All strides are in bytes and fit int64; extents
    count elements.

    Parameters
    ----------
    parts : tuple of str
        Names of the parts it holds: ``K`` and ``V``, ``C`` (packed rows), ``X`` (a cache with one nameless part),
        ``page`` (opaque pages), or the labels of the layout's regions.
    dtype : numpy.dtype
    bases : tuple of tuple of int
        Address by part and layer.
    block_stride, token_stride, head_stride, dim_stride : int
    heads, width : int
        KV heads, and channels of a head (or of a packed row). A unit `dim_stride` (equal to the item size) is the
        fast path: whole rows move.
    """

    parts: tuple[str, ...]
    dtype: np.dtype[Any]
    bases: tuple[tuple[int, ...], ...]
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int
    heads: int
    width: int

    @property
    def contiguous_rows(self) -> bool:
        """Whether the channels of one head are adjacent in memory."""
        return self.dim_stride == self.dtype.itemsize or self.width == 1


class NativeRows(NamedTuple):
    """Tables of a `RowLayout` for native kernels, and their addresses.

    ``planes``, int64 ``[parts * layers, 5]``: base address, then the strides of block, token, head and dim of every
    plane (one part of one layer); parts in order of their names, each with all its layers, so that two layouts of one
    signature have their planes in the same order. ``parts``, int32 ``[parts, 4]``: heads, width, item size and 0.
    ``tokens``, int64 ``[2]``: 0 and the tokens of a block.
    """

    planes: np.ndarray[Any, np.dtype[np.int64]]
    parts: np.ndarray[Any, np.dtype[np.int32]]
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    planes_at: int
    parts_at: int
    tokens_at: int


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """A layout bound to memory. Made by `Layout.bind` and `LayoutDesc.bind`, never by hand.

    Parameters
    ----------
    text : str
        The layout string it came from.
    segments : tuple of Segment
    blocks, block_tokens : int
        Number of blocks and tokens in each; a dense chunk has one block.
    layers : int
    device : str
    readonly : bool
    owner : object
        What keeps the memory alive.
    paged : bool
        False for dense chunks (``T`` in the layout string).
    """

    text: str
    segments: tuple[Segment, ...]
    blocks: int
    block_tokens: int
    layers: int
    device: str
    readonly: bool
    owner: object
    paged: bool
    signature: tuple[Any, ...] = field(init=False)
    dtypes: str = field(init=False)
    _write_refusal: str | None = field(init=False)
    _native: NativeRows | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = [(p, dtype_name(s.dtype), s.heads, s.width) for s in self.segments for p in s.parts]
        # What two layouts must agree on for bytes to move between them; compared on every checked call.
        object.__setattr__(self, "signature", (self.layers, tuple(sorted(rows))))
        object.__setattr__(self, "dtypes", "/".join(dict.fromkeys(r[1] for r in rows)))
        object.__setattr__(self, "_write_refusal", self._why_not_writable())
        object.__setattr__(self, "_native", None)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts, in stored order."""
        return tuple(p for s in self.segments for p in s.parts)

    @property
    def tokens(self) -> int:
        """Tokens that fit: slots of a paged cache, tokens of a dense chunk."""
        return self.blocks * self.block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the layout addresses, padding left out."""
        per_token = sum(len(s.parts) * s.heads * s.width * s.dtype.itemsize for s in self.segments)
        return per_token * self.tokens * self.layers

    def planes(self) -> Iterator[tuple[str, int]]:
        """Yield (part, layer) in stored order: layer 0's parts, then layer 1's, ..."""
        for layer in range(self.layers):
            for part in self.parts:
                yield part, layer

    def segment(self, part: str) -> tuple[Segment, int]:
        """Return the segment that holds a part, and the part's index in it.

        Raises
        ------
        LayoutError
            There is no such part.
        """
        for candidate in self.segments:
            if part in candidate.parts:
                return candidate, candidate.parts.index(part)
        raise LayoutError(f"{self.text} has no part {part!r}; it has {', '.join(self.parts)}")

    def native(self) -> NativeRows:
        """Return the layout as native kernels take it; made once, since making it would dominate small calls."""
        if self._native is None:
            parts = [self.segment(name) for name in sorted(self.parts)]
            planes = [
                (base, s.block_stride, s.token_stride, s.head_stride, s.dim_stride)
                for s, i in parts
                for base in s.bases[i]
            ]
            tables = (
                np.array(planes, np.int64).reshape(-1, 5),
                np.array([(s.heads, s.width, s.dtype.itemsize, 0) for s, _ in parts], np.int32).reshape(-1, 4),
                np.array([0, self.block_tokens], np.int64),
            )
            object.__setattr__(self, "_native", NativeRows(*tables, *(t.ctypes.data for t in tables)))
        return cast(NativeRows, self._native)

    def bytes_view(self, part: str, layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return one part of one layer as uint8 ``[blocks, block_tokens, heads, width, itemsize]``, host memory only.

        This is the definition of what a `RowLayout` addresses; kernels compute the same addresses themselves.
        """
        s, i = self.segment(part)
        ref = ArrayRef(s.bases[i][layer], (), (), s.dtype, self.device, self.readonly, self.owner)
        shape = (self.blocks, self.block_tokens, s.heads, s.width)
        strides = (s.block_stride, s.token_stride, s.head_stride, s.dim_stride)
        return bytes_at(ref, shape, strides, ref.address)

    def array(self, part: str, layer: int) -> np.ndarray[Any, Any]:
        """Return one part of one layer as ``[blocks, block_tokens, heads, width]`` of its dtype, host memory only."""
        return self.bytes_view(part, layer).view(self.segment(part)[0].dtype)[..., 0]

    def select(
        self,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
        parts: Sequence[str] | None = None,
    ) -> RowLayout:
        """Return the same memory narrowed to half-open ranges of layers, KV heads, (dense chunks) tokens, or to parts.

        Raises
        ------
        LayoutError
            A range that does not lie within the layout, tokens of a paged cache, or a part that there is not.
        """
        first, last = _range("layers", layers, self.layers)
        if tokens is not None and self.paged:
            raise LayoutError(f"{self.text} is paged: its tokens are chosen by slots, not by a range")
        start, stop = _range("tokens", tokens, self.block_tokens)
        narrowed = []
        for name in parts or ():
            self.segment(name)
        for s in self.segments if parts is None else _of_parts(self.segments, parts):
            low, high = _range("heads", heads, s.heads)
            shift = low * s.head_stride + start * s.token_stride
            bases = tuple(tuple(b + shift for b in row[first:last]) for row in s.bases)
            narrowed.append(replace(s, bases=bases, heads=high - low))
        return RowLayout(
            self.text,
            tuple(narrowed),
            self.blocks,
            stop - start,
            last - first,
            self.device,
            self.readonly,
            self.owner,
            self.paged,
        )

    def moved(self, shift: int, *, device: str, readonly: bool, owner: object) -> RowLayout:
        """Return the same layout of other memory, `shift` bytes further on."""
        segments = tuple(
            replace(s, bases=tuple(tuple(base + shift for base in row) for row in s.bases)) for s in self.segments
        )
        return replace(self, segments=segments, device=device, readonly=readonly, owner=owner)

    def __reduce__(self) -> tuple[Any, ...]:
        # Tables made by `native` hold addresses of their own memory, which a copy has elsewhere: it makes its own.
        return RowLayout, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowLayout:
        """Return another view of the same memory, which the same owner keeps alive: addresses cannot be copied."""
        return copy(self)

    def check_writable(self) -> None:
        """Raise `LayoutError` unless every element has its own, writable bytes."""
        if self._write_refusal is not None:
            raise LayoutError(f"{self.text}: {self._write_refusal}")

    def _why_not_writable(self) -> str | None:
        if self.readonly:
            return "the memory is read-only and cannot be written"
        bases = [base for s in self.segments for row in s.bases for base in row]
        if self.nbytes and len(set(bases)) < len(bases):
            return "two parts or layers are the same memory; writing needs each to have its own"
        for s in self.segments:
            if 0 in (self.blocks, self.block_tokens, s.heads, s.width):
                continue  # no elements, so none share bytes
            dims = sorted(
                (abs(stride), extent)
                for stride, extent in (
                    (s.block_stride, self.blocks),
                    (s.token_stride, self.block_tokens),
                    (s.head_stride, s.heads),
                    (s.dim_stride, s.width),
                )
                if extent > 1
            )
            span = s.dtype.itemsize
            for stride, extent in dims:
                if stride < span:
                    return (
                        f"elements of part {'/'.join(s.parts)} share bytes (a stride of {stride} B over elements "
                        f"that span {span} B); writing needs memory without broadcasting"
                    )
                span = stride * (extent - 1) + span
        return None

    def __repr__(self) -> str:
        size = f"{self.blocks}x{self.block_tokens}" if self.paged else f"{self.block_tokens}"
        rows = ", ".join(f"{'/'.join(s.parts)}[{s.heads}x{s.width}] {dtype_name(s.dtype)}" for s in self.segments)
        return f"RowLayout({self.text!r}, {self.layers} layers, {size} tokens, {rows}, {self.device})"


def _of_parts(segments: Sequence[Segment], parts: Sequence[str]) -> Iterator[Segment]:
    for s in segments:
        chosen = [i for i, part in enumerate(s.parts) if part in parts]
        if chosen:
            yield replace(s, parts=tuple(s.parts[i] for i in chosen), bases=tuple(s.bases[i] for i in chosen))


def _range(what: str, wanted: tuple[int, int] | None, extent: int) -> tuple[int, int]:
    if wanted is None:
        return 0, extent
    start, stop = wanted
    if not 0 <= start <= stop <= extent:
        raise LayoutError(f"{what} {start}:{stop} do not lie within 0:{extent}")
    return start, stop
