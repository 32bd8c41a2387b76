"""gather_paged and scatter_paged: every layout, both kinds of index, and not a byte beside the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend, BufferPool, KVMeta, Layout, LayoutDesc
from kvcore.errors import ConfigError, LayoutError
from kvcore_conformance.arena import Bound, clone, pattern, place, root
from kvcore_conformance.checks import Subject
from kvcore_conformance.layouts import LAYOUTS, LayoutCase, bound, chunk_case, requests, supported
from kvcore_conformance.oracle import ORACLE
from kvcore_conformance.profiles import explore

GATHER = pytest.mark.kvcore_op("gather_paged")
SCATTER = pytest.mark.kvcore_op("scatter_paged")
BOTH_OPS = pytest.mark.parametrize("op", [pytest.param(m.args[0], marks=m) for m in (GATHER, SCATTER)])
EVERY_LAYOUT = pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)


def _request(subject: Subject, op: str, case: LayoutCase, data: Any, **how: bool) -> Any:
    choices = supported(subject.backend, op, case)
    if not choices:
        pytest.skip(f"{subject.backend.name} has {op} not for {case.text}")
    return data.draw(requests(case, data.draw(st.sampled_from(choices)), **how))


def _one_or_many(chunks: list[Bound]) -> Any:
    return chunks[0] if len(chunks) == 1 else chunks


def _cache(tokens: int, *, heads: int = 1, width: int = 3, dtype: str = "float16", block: int = 16) -> Bound:
    blocks = tokens // block + 2
    return bound("L|KBNHD", {"L": 1, "B": blocks, "N": block, "H": heads, "D": width}, {"": dtype}, seed=1)


def _chunk(cache: Bound, tokens: int, seed: int = 2) -> Bound:
    text, extents = chunk_case(cache)
    return bound(text, {**extents, "T": tokens}, {p: str(d) for p, d in cache.dtypes.items()}, seed=seed)


def _scattered_slots(cache: Bound, count: int) -> Any:
    return place(np.random.default_rng(3).permutation(cache.tokens)[:count].astype(np.int64))


@GATHER
@EVERY_LAYOUT
@explore(data=st.data())
def test_gather(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "gather_paged", case, data)
    out = _one_or_many(r.chunks)
    subject.check("gather_paged", r.cache, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=out)


@SCATTER
@EVERY_LAYOUT
@explore(data=st.data())
def test_scatter(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "scatter_paged", case, data, distinct=True)
    chunks = _one_or_many(r.chunks)
    subject.check("scatter_paged", chunks, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.cache)


@SCATTER
@EVERY_LAYOUT
@explore(0.5, data=st.data())
def test_scatter_refuses_two_tokens_for_one_slot(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "scatter_paged", case, data)
    subject.check("scatter_paged", r.chunks, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.cache)


@SCATTER
@explore(data=st.data())
def test_scatter_unchecked_takes_one_of_equal_tokens(subject: Subject, data: Any) -> None:
    # Which token wins is unspecified. Where all are equal, the result is not.
    r = _request(subject, "scatter_paged", LAYOUTS[0], data)
    for chunk in r.chunks:
        root(chunk.tensors if isinstance(chunk.tensors, np.ndarray) else _first(chunk.tensors))[:] = 0x5A
    subject.check(
        "scatter_paged",
        r.chunks,
        r.index,
        unit=r.unit,
        skip_tokens=r.skip_tokens,
        check_duplicates=False,
        out=r.cache,
    )


def _first(tensors: Any) -> Any:
    return tensors if isinstance(tensors, np.ndarray) else _first(tensors[0])


@GATHER
@EVERY_LAYOUT
@explore(0.5, data=st.data())
def test_gather_refuses_an_index_out_of_range(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "gather_paged", case, data, bad=True)
    subject.check("gather_paged", r.cache, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.chunks)


@SCATTER
@EVERY_LAYOUT
@explore(0.5, data=st.data())
def test_scatter_refuses_an_index_out_of_range(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "scatter_paged", case, data, distinct=True, bad=True)
    subject.check("scatter_paged", r.chunks, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.cache)


@GATHER
@explore(data=st.data(), case=st.sampled_from(LAYOUTS))
def test_gather_planned(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "gather_paged", case, data)
    subject.check_plan("gather_paged", r.cache, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.chunks)


@SCATTER
@explore(data=st.data(), case=st.sampled_from(LAYOUTS))
def test_scatter_planned(subject: Subject, case: LayoutCase, data: Any) -> None:
    r = _request(subject, "scatter_paged", case, data, distinct=True)
    subject.check_plan("scatter_paged", r.chunks, r.index, unit=r.unit, skip_tokens=r.skip_tokens, out=r.cache)


@GATHER
def test_gather_allocates_the_canonical_chunk(subject: Subject) -> None:
    cache = _cache(20)
    subject.require("gather_paged", dtype="float16", layout="L|KBNHD")
    subject.check_fresh("gather_paged", cache, _scattered_slots(cache, 5), out=_chunk(cache, 5))


@GATHER
@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257])
def test_gather_around_a_chunk(subject: Subject, tokens: int) -> None:
    subject.require("gather_paged", dtype="float16", layout="L|KBNHD")
    cache = _cache(tokens)
    subject.check("gather_paged", cache, _scattered_slots(cache, tokens), out=_chunk(cache, tokens))


@SCATTER
@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257])
def test_scatter_around_a_chunk(subject: Subject, tokens: int) -> None:
    subject.require("scatter_paged", dtype="float16", layout="L|KBNHD")
    cache = _cache(tokens)
    subject.check("scatter_paged", _chunk(cache, tokens), _scattered_slots(cache, tokens), out=cache)


@BOTH_OPS
@pytest.mark.parametrize("width", [1, 3, 96, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_row_widths(subject: Subject, op: str, width: int, dtype: str) -> None:
    subject.require(op, dtype=dtype, layout="L|KBNHD")
    cache = _cache(6, heads=2, width=width, dtype=dtype, block=2)
    index, chunk = _scattered_slots(cache, 6), _chunk(cache, 6)
    src, out = (cache, chunk) if op == "gather_paged" else (chunk, cache)
    subject.check(op, src, index, out=out)


@BOTH_OPS
@EVERY_LAYOUT
@pytest.mark.parametrize("tokens", [255, 257])
def test_larger_requests_as_the_reference(
    subject: Subject, reference: Backend, op: str, case: LayoutCase, tokens: int
) -> None:
    choices = supported(subject.backend, op, case)
    if not choices:
        pytest.skip(f"{subject.backend.name} has {op} not for {case.text}")
    extents = {"L": 2, "N": 16, "H": 3, "D": 96, "E": 64, "C": 577, "*": 1000, **case.fixed}
    extents = {axis: n for axis, n in extents.items() if axis in case.text}
    extents["B"] = -(-tokens // extents.get("N", 1)) + 2
    cache = bound(case.text, extents, choices[0], pads=(0, 1, 0, 2), seed=1)
    index = _scattered_slots(cache, tokens)
    index[::7] = -1
    chunks = [_chunk(cache, 100), _chunk(cache, tokens - 100, seed=3)]
    src, out = (cache, chunks) if op == "gather_paged" else (chunks, cache)
    subject.check(op, src, index, skip_tokens=3, out=out, reference=reference)


@GATHER
def test_gather_into_one_group_of_an_object(subject: Subject) -> None:
    subject.require("gather_paged", dtype="float16", layout="L|KBNHD")
    first = LayoutDesc(Layout("LTC", L=1, T=3, C=7), {"C": np.dtype(np.uint8)})
    cache = _cache(9, width=5)
    text, extents = chunk_case(cache)
    extents = {**extents, "T": 3}
    middle = LayoutDesc(Layout(text, **extents), dict(cache.dtypes))
    with BufferPool(1 << 20).allocate([first, middle, first], KVMeta()) as obj:
        memory = obj.bytes()
        memory[:] = pattern(memory.size)
        shape = tuple(2 if axis == "K" else extents[axis] for axis in text)
        tensor = memory[obj.offsets[1] : obj.offsets[1] + middle.nbytes].view(np.float16).reshape(shape)
        index = _scattered_slots(cache, 3)
        wanted = clone(
            {"cache": cache, "index": index, "chunk": Bound(text, extents, (), cache.dtypes, tensor), "all": memory}
        )
        ORACLE["gather_paged"](wanted["cache"], wanted["index"], out=wanted["chunk"])
        subject.ops.gather_paged(cache.rows, index, out=obj.rows(1))
        subject.backend.runtime.check()
        assert memory.tobytes() == wanted["all"].tobytes(), "gather_paged: an object's other groups or padding changed"
        del memory, tensor


@GATHER
@SCATTER
def test_torch_tensors(subject: Subject) -> None:
    torch = pytest.importorskip("torch")
    cache = _cache(9, heads=2, dtype="float32", block=4)
    index = _scattered_slots(cache, 5)
    for op in ("gather_paged", "scatter_paged"):
        subject.require(op, dtype="float32", layout="L|KBNHD")
    chunk = _chunk(cache, 5)
    wanted, wanted_cache = clone(chunk), clone(cache)
    ORACLE["gather_paged"](cache, index, out=wanted)
    tensors = [torch.from_numpy(t) for t in cache.tensors]
    rows = Layout("L|KBNHD").bind(tensors)
    target = torch.from_numpy(chunk.tensors)
    out = Layout("LKTHD").bind(target)
    assert subject.ops.gather_paged(rows, torch.from_numpy(index), out=out) is out
    subject.backend.runtime.check()
    assert root(chunk.tensors).tobytes() == root(wanted.tensors).tobytes(), "gather_paged: torch tensors differ"
    ORACLE["scatter_paged"](wanted, _reverse(index, cache), out=wanted_cache)
    subject.ops.scatter_paged(out, torch.from_numpy(_reverse(index, cache)), out=rows)
    subject.backend.runtime.check()
    same = root(cache.tensors[0]).tobytes() == root(wanted_cache.tensors[0]).tobytes()
    assert same, "scatter_paged: torch tensors differ"


def _reverse(index: Any, cache: Bound) -> Any:
    return cache.tokens - 1 - index


@GATHER
@pytest.mark.parametrize(
    ("error", "change"),
    [
        (LayoutError, {"index": np.arange(4, dtype=np.int32)}),
        (LayoutError, {"index": np.arange(3, dtype=np.int64)}),
        (LayoutError, {"index": np.arange(8, dtype=np.int64)[::2]}),
        (LayoutError, {"index": np.zeros((2, 2), np.int64)}),
        (ConfigError, {"unit": "page"}),
        (ConfigError, {"skip_tokens": 5}),
        (ConfigError, {"skip_tokens": -1}),
    ],
    ids=["int32", "short", "strided", "2d", "unit", "skip-more", "skip-negative"],
)
def test_gather_refuses_bad_arguments(subject: Subject, error: Any, change: dict[str, Any]) -> None:
    cache = _cache(9)
    index = change.pop("index", np.arange(4, dtype=np.int64))
    subject.check_raises(error, "gather_paged", cache, index, out=_chunk(cache, 4), **change)


@GATHER
@SCATTER
def test_sides_that_do_not_fit_are_refused(subject: Subject) -> None:
    cache, index = _cache(9), place(np.arange(4, dtype=np.int64))
    wide = _chunk(_cache(9, width=4), 4)
    subject.check_raises(LayoutError, "gather_paged", cache, index, out=wide)
    subject.check_raises(LayoutError, "scatter_paged", wide, index, out=cache)
    other = _chunk(_cache(9, dtype="bfloat16"), 4)
    subject.check_raises(LayoutError, "gather_paged", cache, index, out=other)
    subject.check_raises(LayoutError, "scatter_paged", other, index, out=cache)
    subject.check_raises(LayoutError, "gather_paged", _chunk(cache, 4), index, out=_chunk(cache, 4))


@GATHER
@SCATTER
def test_read_only_targets_are_refused(subject: Subject) -> None:
    cache, index = _cache(9), place(np.arange(4, dtype=np.int64))
    chunk = _chunk(cache, 4)
    frozen = clone(chunk)
    frozen.tensors.flags.writeable = False
    subject.check_raises(LayoutError, "gather_paged", cache, index, out=frozen)
    subject.check("scatter_paged", frozen, index, out=cache)
    locked = clone(cache)
    locked.tensors[0].flags.writeable = False
    subject.check_raises(LayoutError, "scatter_paged", chunk, index, out=locked)
    subject.check("gather_paged", locked, index, out=chunk)
