"""Every layout of the KV caches in use, as cases: their tensors are built from extents, in memory with gaps.

The builder reads the layout string with the oracle's few lines, not with `kvcore.Layout`: that is part of the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvcore import Backend
from kvcore.dtypes import to_dtype
from kvcore_conformance.arena import GUARD_BYTES, Bound, arena, view
from kvcore_conformance.oracle.movement import parts_of, row_of, split
from kvcore_conformance.strategies import indices

__all__ = [
    "DENSE",
    "LAYOUTS",
    "LayoutCase",
    "Request",
    "bound",
    "caches",
    "chunk_case",
    "chunks_for",
    "requests",
    "supported",
]


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A layout string and what may vary under it.

    Parameters
    ----------
    name : str
        Who stores its cache like this.
    text : str
    dtypes : tuple of mappings
        Element types by part to choose from; the key ``""`` stands for all parts.
    fixed : mapping of str to int
        Extents that the case prescribes.
    """

    name: str
    text: str
    dtypes: tuple[dict[str, str], ...] = (
        {"": "bfloat16"},
        {"": "float16"},
        {"": "float32"},
        {"": "uint8"},
        {"": "float8_e4m3fn"},
        {"": "float8_e5m2"},
    )
    fixed: dict[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts."""
        return parts_of(self.text)


_MIXED = ({"K": "bfloat16", "V": "float8_e4m3fn"}, {"K": "float32", "V": "float16"}, {"": "bfloat16"})
_BYTES = ({"": "uint8"},)

LAYOUTS = (
    LayoutCase("flash-nhd", "L|KBNHD"),
    LayoutCase("flash-hnd", "L|KBHND"),
    LayoutCase("flashinfer-nhd", "L|BKNHD"),
    LayoutCase("flashinfer-hnd", "L|BKHND"),
    LayoutCase("fused-hnd", "L|BHN(KD)"),
    LayoutCase("fused-nhd", "L|BNH(KD)"),
    LayoutCase("mla", "L|BNC"),
    LayoutCase("mla-slots", "L|(BN)1C"),
    LayoutCase("cross-layer-nhd", "BLKNHD"),
    LayoutCase("cross-layer-hnd", "BLKHND"),
    LayoutCase("slots", "KL|(BN)HD"),
    LayoutCase("blocks", "KL|BNHD"),
    LayoutCase("tuples", "LK|BNHD"),
    LayoutCase("nameless", "L|BNHD"),
    LayoutCase("k-transposed", "L|BH[K:DN,V:ND]"),
    LayoutCase("k-v-widths", "L|KBH[K:ND,V:NE]", _MIXED),
    LayoutCase("k-v-planes", "L|KB[K:ND,V:NE]", _MIXED),
    LayoutCase("value-scale", "L|B[v:N128,s:N4]", _BYTES, {"N": 2}),
    LayoutCase("value-scale-odd", "L|B[v:N5,s:N3]", _BYTES),
    LayoutCase("opaque", "L|B*", _BYTES),
)
"""Paged caches: every row of the table of layouts, and two more."""

DENSE = (
    LayoutCase("chunk", "LKTHD"),
    LayoutCase("dynamic-cache", "LK|1HTD"),
    LayoutCase("heads-first", "KLHTD"),
    LayoutCase("tokens-first", "TLKHD"),
    LayoutCase("listed", "KL|THD"),
    LayoutCase("fused", "L|TH(KD)"),
)
"""Dense layouts of K and V of one shape; other caches have the canonical chunk."""


def bound(
    text: str, extents: dict[str, int], dtypes: dict[str, str], *, pads: tuple[int, ...] = (), seed: int = 0
) -> Bound:
    """Build the tensors of a layout in one arena, filled with the pattern.

    Parameters
    ----------
    text : str
    extents : dict of str to int
        Of every axis; ``*`` for the bytes of an opaque block.
    dtypes : dict of str to str
        By part.
    pads : tuple of int
        Elements left free behind each dim's run, outermost first; regions and opaque bytes stay dense.
    seed : int
        Of the pattern.
    """
    levels, dims, regions = split(text)
    types = {part: to_dtype(dtypes.get(part, dtypes.get(""))) for part in parts_of(text)}
    full = {**extents, "K": 2}
    shape = [math.prod(full[a] for a in dim.strip("()1")) for dim in dims]
    tail = [_region_bytes(text, regions, full, types)] if regions else []
    mixed = bool(regions) or "*" in dims
    item = 1 if mixed else next(iter(types.values())).itemsize
    extent_pads = [*pads, *[0] * len(shape)][: len(shape)]
    strides: list[int] = []
    step = tail[0] if tail else item
    for extent, pad in zip(reversed(shape), reversed(extent_pads), strict=True):
        strides.insert(0, step if "*" not in dims or strides else 1)
        step = step * max(extent, 1) + pad * item
    if tail:
        shape, strides = [*shape, *tail], [*strides, 1]
    span = -(-max(step, item) // 16) * 16 + 16
    tensors = math.prod(full[a] for a in levels)
    memory = arena(span * max(tensors, 1), seed)
    dtype = np.dtype(np.uint8) if mixed else next(iter(types.values()))

    def build(left: str, number: int) -> Any:
        if not left:
            return view(memory, GUARD_BYTES + number * span, shape, dtype, strides)
        return [build(left[1:], number * full[left[0]] + i) for i in range(full[left[0]])]

    axes = set("".join(dims).strip("1*")) | {a for _, r, _ in regions for a in r}
    declared = tuple(sorted((axes | set(levels)) & set("NDEHTC") & set(extents))) if regions or "(" in text else ()
    declared = tuple(a for a in declared if a in text)
    typed = bool(regions) and not any(size for _, _, size in regions)
    return Bound(text, extents, declared, types, build(levels, 0), typed)


def _region_bytes(text: str, regions: list[tuple[str, str, int]], full: dict[str, int], types: dict[str, Any]) -> int:
    """Return the bytes of one run of regions: their sum, or the widest side where K gives each its own."""
    sizes = [(size or types[label].itemsize) * math.prod(full[a] for a in axes) for label, axes, size in regions]
    shared = "K" in text.partition("[")[0]
    return max(sizes) if shared else sum(sizes)


@st.composite
def caches(draw: st.DrawFn, case: LayoutCase, dtypes: dict[str, str], *, max_blocks: int = 3) -> Bound:
    """Draw a paged cache of a case: 1 to 3 blocks, heads equal to the block size among others, odd widths, padding."""
    axes = set(case.text)
    tokens = draw(st.sampled_from((1, 2, 3, 4)))
    extents = {
        "L": draw(st.integers(1, 2)),
        "B": draw(st.sampled_from((2, 1, 3))) if max_blocks >= 3 else max_blocks,
        "N": tokens,
        "H": draw(st.sampled_from((tokens, 1, 2, 3))),
        "D": draw(st.sampled_from((3, 1, 2, 4, 5, 8))),
        "E": draw(st.sampled_from((2, 1, 7))),
        "C": draw(st.sampled_from((5, 1, 3, 9, 16))),
        "*": draw(st.sampled_from((7, 1, 16, 33))),
    }
    extents = {a: n for a, n in {**extents, **case.fixed}.items() if a in axes}
    pads = tuple(draw(st.lists(st.integers(0, 2), max_size=6)))
    return bound(case.text, extents, dtypes, pads=pads, seed=draw(st.integers(0, 3)))


def chunk_case(cache: Bound) -> tuple[str, dict[str, int]]:
    """Return layout string and extents (but T) of the canonical chunk of a cache."""
    parts = parts_of(cache.text)
    rows = {part: row_of(cache, part) for part in parts}
    heads, width = rows[parts[0]]
    layers = {"L": cache.extents.get("L", 1)}
    if parts == ("C",):
        return "LTC", {**layers, "C": width}
    if parts == ("X",):
        return "LTHD", {**layers, "H": heads, "D": width}
    if parts == ("K", "V"):
        if rows["K"] == rows["V"] and len(set(cache.dtypes.values())) == 1:
            return "LKTHD", {**layers, "H": heads, "D": width}
        return "L[K:THD,V:THE]", {**layers, "H": heads, "D": width, "E": rows["V"][1]}
    return "L[" + ",".join(f"{p}:T{rows[p][1]}" for p in parts) + "]", layers


@st.composite
def chunks_for(draw: st.DrawFn, cache: Bound, sizes: list[int]) -> list[Bound]:
    """Draw dense chunks that fit a cache, of the given tokens: canonical, or any dense layout if K and V are alike."""
    text, extents = chunk_case(cache)
    dtypes = {part: str(dtype) for part, dtype in cache.dtypes.items()}
    chunks = []
    for number, tokens in enumerate(sizes):
        chosen, padded = text, not text.endswith("]")
        if text == "LKTHD":
            chosen = draw(st.sampled_from(DENSE)).text
        pads = tuple(draw(st.lists(st.integers(0, 2), max_size=5))) if padded else ()
        chunks.append(bound(chosen, {**extents, "T": tokens}, dtypes, pads=pads, seed=10 + number))
    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What gather and scatter are asked: a cache, chunks, and which tokens go where."""

    cache: Bound
    chunks: list[Bound]
    index: Any
    unit: str
    skip_tokens: int


@st.composite
def requests(
    draw: st.DrawFn, case: LayoutCase, dtypes: dict[str, str], *, distinct: bool = False, bad: bool = False
) -> Request:
    """Draw a request: by slots or blocks, one to three chunks of odd sizes, some leading tokens skipped or all of them.

    Parameters
    ----------
    distinct : bool
        No two tokens have one target.
    bad : bool
        An index of a token that moves is out of range.
    """
    cache = draw(caches(case, dtypes))
    block_tokens = cache.extents.get("N", 1)
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 5, 0)), min_size=1, max_size=3))
    if bad and not sum(sizes):
        sizes.append(1)
    tokens = sum(sizes)
    unit = draw(st.sampled_from(("slot", "block")))
    count, limit = (tokens, cache.tokens) if unit == "slot" else (-(-tokens // block_tokens), cache.extents["B"])
    index = draw(indices(count, limit, distinct=distinct, bad=bad))
    skip = 0 if bad else draw(st.sampled_from((0, 0, 1, tokens // 2, tokens)))
    skip = min(skip, tokens)
    unread = skip if unit == "slot" else skip // block_tokens
    if unread and draw(st.booleans()):
        index[:unread] = draw(st.sampled_from((-7, limit, 2**40)))  # not looked at, so anything may stand there
    return Request(cache, draw(chunks_for(cache, sizes)), index, unit, skip)


def supported(backend: Backend, op: str, case: LayoutCase) -> list[dict[str, str]]:
    """Return the element types of a case that a backend claims for an op."""
    named = [(d, "/".join(dict.fromkeys(d.get(p, d.get("", "")) for p in case.parts))) for d in case.dtypes]
    return [d for d, name in named if backend.supports(op, dtype=name, layout=case.text)]
