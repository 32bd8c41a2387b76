"""Where an element of a layout lies, read from the layout string alone; and moving one element at a time.

`kvcore.layout` and `kvcore.binding` are not used: they are part of what is tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from kvcore.errors import SlotError
from kvcore_conformance.arena import Bound, offset_in, root

__all__ = ["Element", "convert_layout", "gather_paged", "locate", "parts_of", "row_of", "scatter_paged", "split"]

Array = npt.NDArray[Any]
Element = tuple[Array, int, int]
"""Arena, byte offset, size."""

_REGION = re.compile(r"(\w+):([A-Z]+)(\d*)")


def split(text: str) -> tuple[str, list[str], list[tuple[str, str, int]]]:
    """Return list levels, dims, and regions (label, axes, bytes of an entry or 0)."""
    levels, _, dims = text.rpartition("|")
    bracket = re.search(r"\[(.*)\]$", dims)
    regions = [(m[1], m[2], int(m[3] or 0)) for m in _REGION.finditer(bracket[1])] if bracket else []
    return levels, re.findall(r"\([A-Z]+\)|[A-Z]|1|\*", re.sub(r"\[.*", "", dims)), regions


def parts_of(text: str) -> tuple[str, ...]:
    """Return the names of a layout's parts."""
    levels, dims, regions = split(text)
    if regions:
        return tuple(label for label, _, _ in regions)
    axes = levels + "".join(dims)
    return ("K", "V") if "K" in axes else ("page",) if "*" in axes else ("C",) if "C" in axes else ("X",)


def row_of(bound: Bound, part: str) -> tuple[int, int]:
    """Return heads and width (channels) of a part."""
    levels, dims, regions = split(bound.text)
    region = next((r for r in regions if r[0] == part), None)
    axes = levels + "".join(dims) + (region[1] if region else "")
    if region and region[2]:
        return 1, region[2]
    if "*" in axes:
        return 1, bound.extents["*"]
    return bound.extents["H"] if "H" in axes else 1, next(bound.extents[a] for a in "DEC" if a in axes)


def locate(bound: Bound, part: str, layer: int, slot: int, head: int, channel: int) -> Element:
    """Return where one element lies."""
    levels, dims, regions = split(bound.text)
    side = parts_of(bound.text).index(part)
    block_tokens = bound.extents.get("N", 1)
    at = {"L": layer, "K": side, "T": slot, "H": head, "D": channel, "E": channel, "C": channel}
    at["B"], at["N"] = divmod(slot, block_tokens)
    extents = {**bound.extents, "K": 2}
    tensor = bound.tensors
    for axis in levels:
        tensor = tensor[at[axis]]
    offset = offset_in(tensor, root(tensor))
    size = bound.dtypes[part].itemsize
    for dim, stride in zip(dims, tensor.strides, strict=False):
        if dim == "*":
            return root(tensor), offset + channel, 1
        index = 0
        for axis in dim.strip("()1"):
            index = index * extents[axis] + at[axis]
        offset += index * stride
    for number, (label, axes, nbytes) in enumerate(regions):
        entry = nbytes or bound.dtypes[label].itemsize
        if number == side:
            index = 0
            for axis in axes:
                index = index * extents[axis] + at[axis]
            return root(tensor), offset + index * entry + (channel if nbytes else 0), size
        if "K" not in levels + "".join(dims):  # regions follow one another, unless K gives each a side of its own
            for axis in axes:
                entry *= extents[axis]
            offset += entry
    return root(tensor), offset, size


def _rows(bound: Bound) -> Iterator[tuple[str, int, int, int]]:
    for part in parts_of(bound.text):
        heads, width = row_of(bound, part)
        for layer in range(bound.extents.get("L", 1)):
            for head in range(heads):
                for channel in range(width):
                    yield part, layer, head, channel


def _copy(source: Element, target: Element) -> None:
    memory, offset, size = source
    into, at, _ = target
    into[at : at + size] = memory[offset : offset + size]


def _slots(cache: Bound, index: Array, unit: str, skip_tokens: int, tokens: int) -> dict[int, int]:
    """Return the slot of each token that moves."""
    block_tokens = cache.extents.get("N", 1)
    slots = {}
    for t in range(skip_tokens, tokens):
        entry = int(index[t] if unit == "slot" else index[t // block_tokens])
        limit = cache.extents["B"] * (block_tokens if unit == "slot" else 1)
        if not -1 <= entry < limit:
            raise SlotError(f"token {t} has {unit} {entry}, outside -1 .. {limit - 1}")
        if entry >= 0:
            slots[t] = entry if unit == "slot" else entry * block_tokens + t % block_tokens
    return slots


def _chunks(chunks: Bound | Sequence[Bound]) -> list[tuple[Bound, int]]:
    """Return for each token of the request its chunk and its place in it."""
    several = (chunks,) if isinstance(chunks, Bound) else chunks
    return [(chunk, t) for chunk in several for t in range(chunk.extents["T"])]


def gather_paged(
    src: Bound, index: Array, *, unit: str = "slot", skip_tokens: int = 0, out: Bound | Sequence[Bound]
) -> None:
    """Cache to chunks."""
    tokens = _chunks(out)
    for t, slot in _slots(src, index, unit, skip_tokens, len(tokens)).items():
        chunk, place = tokens[t]
        for part, layer, head, channel in _rows(src):
            _copy(locate(src, part, layer, slot, head, channel), locate(chunk, part, layer, place, head, channel))


def scatter_paged(
    src: Bound | Sequence[Bound],
    index: Array,
    *,
    unit: str = "slot",
    skip_tokens: int = 0,
    check_duplicates: bool = True,
    out: Bound,
) -> None:
    """Chunks to cache."""
    tokens = _chunks(src)
    slots = _slots(out, index, unit, skip_tokens, len(tokens))
    if check_duplicates and len(set(slots.values())) < len(slots):
        raise SlotError("two tokens have one target")
    for t, slot in slots.items():
        chunk, place = tokens[t]
        for part, layer, head, channel in _rows(out):
            _copy(locate(chunk, part, layer, place, head, channel), locate(out, part, layer, slot, head, channel))


def convert_layout(src: Bound, *, out: Bound) -> None:
    """Chunk to chunk."""
    for t in range(src.extents["T"]):
        for part, layer, head, channel in _rows(src):
            _copy(locate(src, part, layer, t, head, channel), locate(out, part, layer, t, head, channel))
