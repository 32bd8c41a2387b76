"""`CacheEngine`: what it gives back is what was stored, or it is a miss."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.engine.keys import ExtraKey
from kvcore.engine.kv import PagedKV
from kvcore.engine.parts import CachePart
from kvcore.errors import ConfigError, KVCoreError, LayoutError, StoreError
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc

from .world import (
    BLOCK,
    CHUNK,
    HEADS,
    LAYERS,
    WIDTH,
    Pages,
    backend,
    blocks_for,
    dense_part,
    engine,
    paged,
    tiers,
    value,
)

TOKENS = list(range(100, 100 + 3 * CHUNK + 5))


def whole() -> Pages:
    return Pages((0, 1), (0, HEADS))


def put(cache, pages, tokens, first=0, **changes):
    blocks = blocks_for(len(tokens), first)
    for one in pages:
        one.compute(tokens, blocks)
    return cache.store_keys(cache.keys(tokens), paged(pages, blocks), total=len(tokens), **changes)


def got(cache, pages, tokens, first=32, computed=0) -> int:
    """Look up and retrieve; return the hit, having checked that all of it is right and nothing else was touched."""
    keys = cache.keys(tokens)
    hit = cache.lookup_keys(keys, len(tokens), computed=computed)
    blocks = blocks_for(len(tokens), first)
    if hit <= computed:
        return hit
    assert cache.retrieve_keys(keys, paged(pages, blocks), start=computed, stop=hit) == hit
    for one in pages:
        assert all(one.right(tokens, blocks, range(computed, hit)))
        assert not any(one.right(tokens, blocks, range(hit, len(tokens))))
        assert not any(one.right(tokens, blocks, range(computed)))
    return hit


@pytest.fixture
def memory():
    with tiers("memory:") as over:
        yield over


def test_a_prefix_comes_back(memory):
    cache, pages = engine([whole().part()], memory), whole()
    report = put(cache, [pages], TOKENS)
    assert (report.tokens, report.chunks_written, report.chunks_present) == (3 * CHUNK, 3, 0)
    assert got(cache, [whole()], TOKENS) == 3 * CHUNK
    assert got(cache, [whole()], [*TOKENS[: 2 * CHUNK], 7, 7, 7]) == 2 * CHUNK
    assert got(cache, [whole()], [7, *TOKENS]) == 0
    assert put(cache, [pages], TOKENS).chunks_present == 3
    stats = cache.stats()
    assert (stats.lookups, stats.hit_tokens, stats.retrieved_tokens) == (3, 5 * CHUNK, 5 * CHUNK)
    assert stats.hit_rate == 5 * CHUNK / stats.lookup_tokens


def test_from_a_store_when_host_memory_is_empty(memory):
    cache = engine([whole().part()], memory)
    put(cache, [whole()], TOKENS)
    assert cache.flush(10)
    memory.host.clear()
    assert got(cache, [whole()], TOKENS) == 3 * CHUNK
    assert memory.stats()["memory"].hits == 3


@pytest.mark.parametrize("tokens", [2 * CHUNK, 2 * CHUNK + 1, CHUNK + BLOCK])
def test_one_token_at_least_is_left_to_compute(memory, tokens):
    cache = engine([whole().part()], memory)
    put(cache, [whole()], TOKENS)
    most = min(2 * CHUNK, tokens - 1, tokens // CHUNK * CHUNK)
    assert got(cache, [whole()], TOKENS[:tokens]) == most // BLOCK * BLOCK


def test_the_last_token_without_blocks(memory):
    cache = engine([dense_part()], memory, block_tokens=1)
    kv = np.stack([value(TOKENS, layer, range(HEADS)) for layer in range(LAYERS)])
    rows = Layout("LKTHD").bind(kv)
    assert cache.store(TOKENS[: 2 * CHUNK], rows.select(tokens=(0, 2 * CHUNK)), wait=True).tokens == 2 * CHUNK
    out = np.zeros_like(kv)
    mask = cache.retrieve(TOKENS[: 2 * CHUNK], Layout("LKTHD").bind(out))
    assert mask.tolist() == [True] * (2 * CHUNK - 1) + [False]
    assert np.array_equal(out[:, :, :15], kv[:, :, :15])
    assert not out[:, :, 15:].any()


def test_tokens_that_the_engine_has_are_not_touched(memory):
    cache = engine([whole().part()], memory)
    put(cache, [whole()], TOKENS)
    assert got(cache, [whole()], TOKENS, computed=CHUNK + BLOCK) == 3 * CHUNK


def test_few_tokens_are_no_hit(memory):
    cache = engine([whole().part()], memory, min_retrieve_tokens=2 * CHUNK)
    put(cache, [whole()], TOKENS)
    assert got(cache, [whole()], TOKENS[: 2 * CHUNK + 1]) == 2 * CHUNK
    assert got(cache, [whole()], TOKENS[: 2 * CHUNK]) == 0
    assert cache.lookup(TOKENS, computed=CHUNK + 1) == 0


def test_exact_lookups_want_all_or_nothing(memory):
    cache = engine([whole().part()], memory, lookup_strategy="exact")
    put(cache, [whole()], TOKENS[: 2 * CHUNK])
    assert cache.lookup(TOKENS) == 0
    assert cache.lookup(TOKENS[: 2 * CHUNK + 3]) == 2 * CHUNK


def test_a_chunk_that_is_not_full(memory):
    cache = engine([whole().part()], memory, save_partial_chunk=True, block_tokens=1)
    put(cache, [whole()], TOKENS)
    assert got(cache, [whole()], TOKENS) == len(TOKENS) - 1
    assert got(cache, [whole()], [*TOKENS, 1]) == 3 * CHUNK
    assert engine([whole().part()], memory).lookup(TOKENS) == 3 * CHUNK
    small = engine([whole().part()], memory, save_partial_chunk=True, block_tokens=1)
    put(small, [whole()], TOKENS[:5])
    assert got(small, [whole()], TOKENS[:5]) == 4


def test_who_a_request_belongs_to(memory):
    cache = engine([whole().part()], memory)
    pages, blocks = whole(), blocks_for(len(TOKENS))
    pages.compute(TOKENS, blocks)
    cache.store(TOKENS, paged([pages], blocks), adapter="lora", salt="tenant")
    for wrong in ({}, {"adapter": "lora"}, {"salt": "tenant"}, {"adapter": "other", "salt": "tenant"}):
        assert cache.lookup(TOKENS, **wrong) == 0
    image = [ExtraKey(CHUNK, CHUNK + 2, b"image")]
    assert cache.lookup(TOKENS, adapter="lora", salt="tenant") == 3 * CHUNK
    assert cache.lookup(TOKENS, adapter="lora", salt="tenant", extra_keys=image) == CHUNK


@pytest.mark.parametrize("layerwise", [False, True])
def test_layer_by_layer(memory, layerwise):
    cache, pages, blocks = engine([whole().part()], memory), whole(), blocks_for(len(TOKENS))
    slots = np.array([blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(len(TOKENS))])
    if layerwise:
        truth = whole()
        truth.compute(TOKENS, blocks)
        for layer in cache.store_layer(TOKENS, pages.rows, slots):
            pages.tensors[layer][...] = truth.tensors[layer]  # computed just before it is stored
    else:
        pages.compute(TOKENS, blocks)
        cache.store(TOKENS, pages.rows, slots)
    fresh = whole()
    *layers, mask = cache.retrieve_layer(TOKENS, fresh.rows, slots)
    assert layers == [0, 1]
    assert mask.sum() == 3 * CHUNK
    assert all(fresh.right(TOKENS, blocks, range(3 * CHUNK)))
    assert cache.flush(10)
    assert memory.host.stats().locked == 0


def test_a_layerwise_store_without_all_layers_stores_nothing(memory):
    cache, pages, blocks = engine([whole().part()], memory), whole(), blocks_for(len(TOKENS))
    pages.compute(TOKENS, blocks)
    store = cache.begin_store(cache.keys(TOKENS), paged([pages], blocks))
    store.layer(0, 1)
    with pytest.raises(KVCoreError, match="layers were not given"):
        store.finish()
    assert cache.lookup(TOKENS) == 0
    with cache.begin_store(cache.keys(TOKENS), paged([pages], blocks)) as store:
        store.layer(0, 0)
    assert put(cache, [pages], TOKENS).chunks_written == 3


def hybrid(window: int = 6) -> list[Pages]:
    return [Pages((0,), (0, HEADS)), Pages((1,), (0, HEADS))]


def hybrid_parts(window: int = 6) -> list[CachePart]:
    full, sliding = hybrid()
    return [full.part(), sliding.part(window=window)]


def test_a_window_needs_only_its_last_chunks(memory):
    cache = engine(hybrid_parts(), memory)
    put(cache, hybrid(), TOKENS)
    names = [cache._stored[1].key(key) for key in cache.keys(TOKENS)]
    memory.flush()
    memory.delete(names[:2])
    assert got_window(cache, TOKENS, 6) == 3 * CHUNK
    memory.delete(names[2:])
    assert cache.lookup(TOKENS) == 0
    assert put(cache, hybrid(), TOKENS).chunks_written == 3


def got_window(cache, tokens, window) -> int:
    hit = cache.lookup(tokens)
    pages, blocks = hybrid(), blocks_for(len(tokens), 32)
    assert cache.retrieve_keys(cache.keys(tokens), paged(pages, blocks), start=0, stop=hit) == hit
    assert all(pages[0].right(tokens, blocks, range(hit)))
    assert all(pages[1].right(tokens, blocks, range(max(hit - window + 1, 0), hit)))
    return hit


def test_what_a_window_has_slid_past_is_not_stored(memory):
    cache, pages = engine(hybrid_parts(), memory), hybrid()
    blocks = blocks_for(len(TOKENS))
    gone = [-1 if i < 3 else b for i, b in enumerate(blocks)]
    for one in pages:
        one.compute(TOKENS, blocks)
    kv = PagedKV.of_blocks(backend(), [one.rows for one in pages], [blocks, gone], missing=-1)
    assert cache.store_keys(cache.keys(TOKENS), kv).tokens == 3 * CHUNK
    assert got_window(cache, TOKENS, 6) == 3 * CHUNK
    assert cache.lookup(TOKENS[: 2 * CHUNK + 1]) == 0  # its window begins in a block that was gone


def test_recurrent_states_are_those_of_their_place(memory):
    page = 24
    desc = LayoutDesc(Layout(f"L[page:T{page}]", L=1, T=1), {"page": np.dtype(np.uint8)})
    attention = Pages((0,), (0, HEADS))
    state = CachePart(desc, (1,), kind="recurrent")
    cache = engine([attention.part(), state], memory)
    states = np.random.default_rng(1).integers(0, 255, (16, page), np.uint8)
    rows = Layout("L|B*").bind([states])
    blocks = blocks_for(len(TOKENS))
    attention.compute(TOKENS, blocks)
    kv = PagedKV.of_blocks(backend(), [attention.rows, rows], [blocks, [3, 1, 5]], block_tokens=[0, CHUNK], missing=-1)
    cache.store_keys(cache.keys(TOKENS), kv)
    assert cache.lookup(TOKENS) == 3 * CHUNK
    assert cache.lookup(TOKENS[: 3 * CHUNK]) == 2 * CHUNK  # no state but those at the ends of chunks
    target = np.zeros_like(states)
    there = PagedKV.of_blocks(
        backend(),
        [Pages((0,), (0, HEADS)).rows, Layout("L|B*").bind([target])],
        [blocks, [-1, 9, 9]],
        block_tokens=[0, CHUNK],
        missing=-1,
    )
    assert cache.retrieve_keys(cache.keys(TOKENS), there, start=0, stop=2 * CHUNK) == 2 * CHUNK
    assert np.array_equal(target[9], states[1])
    assert not np.delete(target, 9, 0).any()


@pytest.mark.parametrize("wrote", [1, 2, 4])
@pytest.mark.parametrize("reads", [1, 2, 4])
def test_another_tensor_parallel_degree(memory, wrote, reads):
    def ranks(degree):
        size = HEADS // degree
        return [Pages((0, 1), (r * size, (r + 1) * size)) for r in range(degree)]

    for pages in ranks(wrote):
        put(engine([pages.part()], memory), [pages], TOKENS)
    for pages in ranks(reads):
        cache = engine([pages.part()], memory)
        assert got(cache, [pages], TOKENS) == 3 * CHUNK
    if wrote != reads:
        strict = engine([ranks(reads)[0].part()], memory, reshard=False)
        assert strict.lookup(TOKENS) == 0


def test_a_rank_that_is_missing_is_a_miss(memory):
    half = Pages((0, 1), (0, HEADS // 2))
    put(engine([half.part()], memory), [half], TOKENS)
    assert engine([whole().part()], memory).lookup(TOKENS) == 0
    quarter = Pages((0, 1), (1, 2))
    assert got(engine([quarter.part()], memory), [quarter], TOKENS) == 3 * CHUNK


def test_a_corrupt_frame_ends_the_prefix_and_is_stored_again(tmp_path):
    with tiers(f"fs:{tmp_path}") as over:
        cache = engine([whole().part()], over)
        put(cache, [whole()], TOKENS, wait=True)
        over.host.clear()
        second = cache.keys(TOKENS)[1].digest.hex()
        (path,) = [p for p in tmp_path.rglob("*") if p.is_file() and second[:16] in p.name]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        pages, blocks = whole(), blocks_for(len(TOKENS))
        assert cache.lookup(TOKENS) == 3 * CHUNK
        upto = cache.retrieve_keys(cache.keys(TOKENS), paged([pages], blocks), start=0, stop=3 * CHUNK)
        assert upto == CHUNK
        assert all(pages.right(TOKENS, blocks, range(CHUNK)))
        assert cache.misses.total() == 1
        assert cache.lookup(TOKENS) == CHUNK
        assert put(cache, [whole()], TOKENS, wait=True).chunks_written == 1
        over.host.clear()
        assert got(cache, [whole()], TOKENS) == 3 * CHUNK


def test_a_store_that_fails_is_a_miss_unless_somebody_waits():
    with tiers("fault:put.enospc=1:memory:") as over:
        cache = engine([whole().part()], over)
        put(cache, [whole()], TOKENS)
        over.flush()
        assert cache.lookup(TOKENS) == 3 * CHUNK  # in host memory
        over.host.clear()
        assert cache.lookup(TOKENS) == 0
        with pytest.raises(StoreError):
            put(cache, [whole()], TOKENS, wait=True)


def test_without_room_in_host_memory_chunks_are_dropped():
    size = LAYERS * 2 * CHUNK * HEADS * WIDTH * 4
    with tiers(host_bytes=2 * (size + 255) // 256 * 256) as over:
        cache, pages, blocks = engine([whole().part()], over), whole(), blocks_for(len(TOKENS))
        report = put(cache, [whole()], TOKENS)
        assert report.chunks_dropped + report.chunks_written == 3
        assert report.chunks_written >= 1
        upto = cache.retrieve_keys(cache.keys(TOKENS), paged([pages], blocks), start=0, stop=3 * CHUNK)
        assert upto <= 2 * CHUNK
        assert all(pages.right(TOKENS, blocks, range(upto)))


def test_moving_clearing_prefetching(memory):
    cache = engine([whole().part()], memory)
    put(cache, [whole()], TOKENS, wait=True)
    memory.host.clear()
    assert cache.prefetch(TOKENS) == 3
    memory.flush()
    assert got(cache, [whole()], TOKENS) == 3 * CHUNK
    assert cache.move(TOKENS, "memory", "host") == 3
    assert memory.tiers[0].store.store.stat(cache.keys(TOKENS)[0]) is None
    assert cache.move(TOKENS, "host", "memory", keep=True) == 3
    memory.host.clear()
    assert got(cache, [whole()], TOKENS) == 3 * CHUNK
    assert cache.clear(tokens=TOKENS) == 3
    assert cache.lookup(TOKENS) == 0
    put(cache, [whole()], TOKENS, wait=True)
    assert cache.clear() >= 3
    assert cache.lookup(TOKENS) == 0
    assert cache.health().status == "ok"


def test_prefetching_has_its_limits(memory):
    put(engine([whole().part()], memory), [whole()], TOKENS, wait=True)
    memory.host.clear()
    assert engine([whole().part()], memory, prefetch_watermark=0.0).prefetch(TOKENS) == 0
    assert engine([whole().part()], memory, prefetch_chunks=2).prefetch(TOKENS) == 2


def test_what_means_nothing(memory):
    part = whole().part()
    for wrong in (
        {"lookup_strategy": "semantic"},
        {"block_tokens": 0},
        {"min_retrieve_tokens": -1},
        {"namespace": {"chunk_tokens": 16}},
    ):
        with pytest.raises(ConfigError):
            engine([part], memory, **wrong)
    with pytest.raises(ConfigError, match="at least one part"):
        engine([], memory)
    cache = engine([part], memory)
    with pytest.raises(ConfigError, match="slot_mapping"):
        cache.store(TOKENS, whole().rows)
    with pytest.raises(LayoutError, match="tokens 16:24"):
        cache.store_keys(cache.keys(TOKENS), paged([whole()], blocks_for(2 * CHUNK)))
    assert memory.host.stats().locked == 0
    with pytest.raises(LayoutError, match="heads 2:9"):
        whole().part(heads=(2, 9))


def test_a_fork_says_that_it_has_no_engine(memory):
    cache = engine([whole().part()], memory)
    child = os.fork()
    if child == 0:
        try:
            cache.lookup(TOKENS)
            os._exit(1)
        except KVCoreError as error:
            cache.close()
            os._exit(0 if "open an engine in this process" in str(error) else 2)
    assert os.waitpid(child, 0)[1] == 0
    put(cache, [whole()], TOKENS)
    assert got(cache, [whole()], TOKENS) == 3 * CHUNK


def test_engines_beside_one_another(memory):
    first, second = engine([whole().part()], memory), engine([whole().part()], memory, namespace={"revision": "2"})
    put(first, [whole()], TOKENS)
    assert (first.lookup(TOKENS), second.lookup(TOKENS)) == (3 * CHUNK, 0)
    with tiers("memory:") as other:
        assert engine([whole().part()], other).lookup(TOKENS) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_prompts_in_any_order(data):
    """Random prompts of few tokens, which share prefixes: hits are exactly the stored chunks, and right."""
    stored: set[tuple[int, ...]] = set()
    with tiers("memory:", host_bytes=1 << 19) as over:
        cache = engine([whole().part()], over)
        for _ in range(data.draw(st.integers(1, 6))):
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
            most = 0
            for n in range(CHUNK, len(tokens) + 1, CHUNK):
                if tuple(tokens[:n]) not in stored:
                    break
                most = n
            expected = min(most, len(tokens) - 1) // BLOCK * BLOCK
            assert got(cache, [whole()], tokens) == expected
            put(cache, [whole()], tokens, wait=True)
            stored.update(tuple(tokens[:n]) for n in range(CHUNK, len(tokens) + 1, CHUNK))
            if data.draw(st.booleans()):
                over.host.clear()
        assert over.host.stats().locked == 0
