"""`CacheEngine` when stores, host memory or an engine's memory fail: misses, nothing locked, nothing wrong."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from kvcore.engine.kv import PagedKV
from kvcore.errors import ConfigError, KVCoreError, LayoutError, LeaseError, StoreError
from kvcore.layout import Layout

from .world import CHUNK, HEADS, LAYERS, WIDTH, Pages, backend, blocks_for, engine, paged, tiers

TOKENS = list(range(100, 100 + 3 * CHUNK + 5))
SLOTS = np.arange(len(TOKENS))
SIZE = LAYERS * 2 * CHUNK * HEADS * WIDTH * 4


def whole() -> Pages:
    return Pages((0, 1), (0, HEADS))


def hybrid() -> list[Pages]:
    return [Pages((0,), (0, HEADS)), Pages((1,), (0, HEADS))]


def computed(tokens=TOKENS) -> PagedKV:
    pages, blocks = whole(), blocks_for(len(tokens))
    pages.compute(tokens, blocks)
    return paged([pages], blocks)


def fresh() -> PagedKV:
    return paged([whole()], blocks_for(len(TOKENS)))


def free(over) -> bool:
    """Whether nothing is locked or reserved once all is done."""
    over.flush(10)
    over._loads.close()
    stats = over.host.stats()
    return stats.locked == stats.staging == 0


@pytest.fixture
def memory():
    with tiers("memory:") as over:
        yield over


@pytest.fixture
def cache(memory):
    made = engine([whole().part()], memory)
    made.store_keys(made.keys(TOKENS), computed(), wait=True)
    return made


# --- stores


@pytest.mark.parametrize("error", [StoreError(5, "broken"), RuntimeError("unforeseen"), KeyError("k"), MemoryError()])
@pytest.mark.parametrize("broken", [("stat",), ("put",), ("get_into",), ("stat", "put", "get_into", "delete")])
def test_no_failure_of_a_store_gets_out(cache, memory, monkeypatch, error, broken):
    def fail(*given, **named):
        raise error

    for name in broken:
        monkeypatch.setattr(memory.tiers[0].store.store.inner, name, fail)
    memory.host.clear()
    other = [7] * (2 * CHUNK + 1)
    assert cache.store_keys(cache.keys(other), computed(other)).chunks_written == 2
    for layer in cache.store_layer([8, *other], whole().rows, np.arange(2 * CHUNK + 2)):
        assert layer < LAYERS
    assert cache.flush(10)
    memory.host.clear()
    hit = cache.lookup(TOKENS)
    cache.prefetch(TOKENS)
    found = [cache.retrieve(TOKENS, whole().rows, SLOTS).sum()]
    memory.host.clear()
    found.append(list(cache.retrieve_layer(TOKENS, whole().rows, SLOTS))[-1].sum())
    found.append(cache.retrieve_keys(cache.keys(TOKENS), fresh(), start=0, stop=3 * CHUNK))
    if not isinstance(error, StoreError):  # after which a tier counts as empty for a while
        assert hit == (0 if "stat" in broken else 3 * CHUNK)
        assert found == [3 * CHUNK if broken == ("put",) else 0] * 3
    elif broken != ("put",):
        assert found == [0] * 3
    assert free(memory)


def test_two_ways_that_cannot_be_had_do_not_take_turns_for_ever(memory, monkeypatch):
    for heads in ((0, 2), (2, 4), (0, 4)):
        pages, blocks = Pages((0, 1), heads), blocks_for(len(TOKENS))
        one = engine([pages.part()], memory)
        one.store_keys(one.keys(TOKENS), paged([pages], blocks), wait=True)
    cache, tried = engine([whole().part()], memory), []

    def loaded(task):
        memory.forget_load(task)
        tried.append(task)
        if len(tried) > 10:
            pytest.fail("it is tried for ever")
        return [None]

    monkeypatch.setattr(memory, "loaded", loaded)
    assert cache.retrieve_keys(cache.keys(TOKENS), fresh(), start=0, stop=3 * CHUNK) == 0
    assert cache.misses == {"absent": 1}


# --- an engine's memory


class Breaks:
    """An engine's memory whose calls fail from some call on."""

    def __init__(self, kv: PagedKV, calls: int) -> None:
        self.kv, self.left = kv, calls

    def read(self, *given, **named) -> bool:
        self._step()
        return self.kv.read(*given, **named)

    def write(self, *given, **named) -> None:
        self._step()
        self.kv.write(*given, **named)

    def _step(self) -> None:
        if not self.left:
            raise RuntimeError("the engine is gone")
        self.left -= 1


@pytest.mark.parametrize("calls", range(3))
@pytest.mark.parametrize("wait", [False, True])
def test_memory_that_cannot_be_read_locks_nothing(memory, calls, wait):
    cache = engine([whole().part()], memory)
    with pytest.raises(RuntimeError, match="gone"):
        cache.store_keys(cache.keys(TOKENS), Breaks(computed(), calls), wait=wait)
    with cache.begin_store(cache.keys(TOKENS), Breaks(computed(), calls)) as store, contextlib.suppress(RuntimeError):
        for layer in range(LAYERS):
            store.layer(0, layer)
    assert free(memory)
    assert cache.store_keys(cache.keys(TOKENS), computed()).tokens == 3 * CHUNK


@pytest.mark.parametrize("calls", range(3))
def test_memory_that_cannot_be_written_locks_nothing(cache, memory, calls):
    with pytest.raises(RuntimeError, match="gone"):
        cache.retrieve(TOKENS, Breaks(fresh(), calls))
    with pytest.raises(RuntimeError, match="gone"):
        list(cache.retrieve_layer(TOKENS, Breaks(fresh(), calls)))
    assert free(memory)


def test_a_layerwise_store_that_cannot_begin_locks_nothing(memory, monkeypatch):
    cache, reserve, reserved = engine([whole().part()], memory), memory.reserve, []

    def twice(plans):
        if len(reserved) == 2:
            raise KVCoreError("closed")
        reserved.append(plans)
        return reserve(plans)

    monkeypatch.setattr(memory, "reserve", twice)
    with pytest.raises(KVCoreError, match="closed"):
        cache.begin_store(cache.keys(TOKENS), computed())
    assert free(memory)


# --- locks that outlive their time


def stand_still(memory, monkeypatch) -> None:
    """Let more time pass than a read may take, and somebody else need the memory."""
    l1 = memory.host._l1
    now = l1._clock()
    monkeypatch.setattr(l1, "_clock", lambda: now + 301)
    memory.host.clear()
    memory.host.relieve()


def test_what_was_loaded_too_long_ago_is_a_miss(cache, memory, monkeypatch):
    loaded = memory.loaded

    def late(task):
        found = loaded(task)
        stand_still(memory, monkeypatch)
        return found

    monkeypatch.setattr(memory, "loaded", late)
    assert not cache.retrieve(TOKENS, whole().rows, SLOTS).any()
    assert cache.misses == {"lease": 1}


def test_layers_that_come_too_late_are_a_miss(cache, memory, monkeypatch):
    with cache.begin_retrieve(cache.keys(TOKENS), fresh(), start=0, stop=3 * CHUNK) as load:
        load.layer(0, 0)
        stand_still(memory, monkeypatch)
        load.layer(0, 1)
        assert load.finish() == 0
    assert cache.misses == {"lease": 1}


# --- little host memory


def test_where_there_is_room_for_few_chunks_the_first_are_stored():
    tokens = list(range(10 * CHUNK + 1))
    with tiers("memory:", host_bytes=3 * SIZE) as over:
        cache = engine([whole().part()], over)
        report = cache.store_keys(cache.keys(tokens), computed(tokens))
        assert over.flush(10)
        assert report.chunks_written >= 1
        assert report.chunks_written + report.chunks_dropped == 10
        assert cache.lookup(tokens) == report.tokens == report.tokens_written == report.chunks_written * CHUNK


@pytest.mark.parametrize("layerwise", [False, True])
def test_chunks_that_are_there_are_not_dropped(layerwise):
    with tiers("memory:", host_bytes=SIZE) as over:
        cache = engine([whole().part()], over)
        keys, (other,) = cache.keys(TOKENS), cache.keys([9] * CHUNK)
        cache.store_keys(keys, computed(), wait=True)
        over.delete(keys[:1])
        over.host.clear()
        held = over.reserve({other: whole().part().plan(other, cache.namespace)})
        if layerwise:
            with cache.begin_store(keys, computed()) as store:
                report = store.finish()
        else:
            report = cache.store_keys(keys, computed())
        over.cancel(held.values())
        del held
        assert (report.tokens, report.chunks_dropped, report.chunks_present) == (0, 1, 2)


def test_tokens_of_a_chunk_that_is_not_full_are_counted_as_they_are(memory):
    cache = engine([whole().part()], memory, save_partial_chunk=True)
    for stop in (3 * CHUNK, len(TOKENS)):
        cache.store_keys(cache.keys(TOKENS[:stop]), computed(TOKENS[:stop]))
    assert cache.stats().stored_tokens == len(TOKENS)


def test_prefetching_leaves_out_what_a_window_does_not_need(memory):
    pages, blocks = hybrid(), blocks_for(len(TOKENS))
    cache = engine([pages[0].part(), pages[1].part(window=6)], memory)
    slid = [-1 if i < 4 else block for i, block in enumerate(blocks)]
    for one in pages:
        one.compute(TOKENS, blocks)
    kv = PagedKV.of_blocks(backend(), [one.rows for one in pages], [blocks, slid], missing=-1)
    cache.store_keys(cache.keys(TOKENS), kv)
    assert cache.flush(10)
    memory.host.clear()
    assert cache.lookup(TOKENS) == 3 * CHUNK
    assert cache.prefetch(TOKENS) == 4  # three chunks of the one, and the last of the other
    assert cache.prefetch([]) == 0


# --- bad input


def test_kv_of_other_parts_than_the_engines_is_refused(memory):
    one, two = hybrid()
    cache = engine([one.part(), two.part()], memory)
    dense = Layout("LKTHD").bind(np.zeros((1, 2, len(TOKENS), HEADS, WIDTH), np.float32))
    for kv, slots in ((dense, None), ([one.rows], SLOTS), ([one.rows] * 3, SLOTS)):
        with pytest.raises(LayoutError, match="2 parts needs the KV of each"):
            cache.store(TOKENS, kv, slots)
        with pytest.raises(LayoutError, match="2 parts needs the KV of each"):
            cache.retrieve(TOKENS, kv, slots)
    with pytest.raises(ConfigError, match="parts 0 and 1 both are layers"):
        engine([one.part(), one.part()], memory)


@pytest.mark.parametrize("slots", [SLOTS + 0.5, SLOTS[:, None], np.array(3), np.ones(len(TOKENS), np.bool_)])
def test_slots_that_are_none(memory, slots):
    with pytest.raises(LayoutError, match="slot mapping of part 0"):
        engine([whole().part()], memory).store(TOKENS, whole().rows, slots)


@pytest.mark.parametrize(("keys", "start", "stop"), [(1, 0, 24), (0, 0, 8), (3, -3, 24), (3, 9, 8), (-1, 0, 16)])
def test_tokens_without_keys_are_not_said_to_be_there(cache, keys, start, stop):
    given = cache.keys(TOKENS)[1:] if keys < 0 else cache.keys(TOKENS)[:keys]
    with pytest.raises(LayoutError, match=f"tokens {start}:{stop} are wanted"):
        cache.retrieve_keys(given, fresh(), start=start, stop=stop)
    with pytest.raises(LayoutError, match=f"tokens {start}:{stop} are wanted"):
        cache.begin_retrieve(given, fresh(), start=start, stop=stop)
    with pytest.raises(LayoutError, match=r"tokens -3:24"):
        cache.retrieve(TOKENS, whole().rows, SLOTS, skip_tokens=-3)


# --- the end


@pytest.mark.parametrize("call", ["lookup", "retrieve", "store", "prefetch"])
def test_a_closed_engine_says_so(call):
    cache = engine([whole().part()], tiers("memory:"), own=True)
    cache.close()
    cache.close()
    given = (whole().rows, SLOTS) if call in ("retrieve", "store") else ()
    with pytest.raises(KVCoreError, match="this engine is closed"):
        getattr(cache, call)(TOKENS, *given)


def test_an_engine_that_could_not_be_closed_can_be_later():
    over = tiers("memory:")
    cache = engine([whole().part()], over, own=True)
    keys = cache.keys(TOKENS)
    cache.store_keys(keys, computed(), wait=True)
    reading = over.host.reserve_read(keys[:1])
    with pytest.raises(LeaseError):
        cache.close()
    for lease in reading.values():
        over.host.finish_read(lease)
    del reading, lease
    cache.close()
    with pytest.raises(LeaseError, match="arena is closed"):
        over.reserve({keys[0]: whole().part().plan(keys[0], cache.namespace)})


def test_no_call_of_a_fork_passes_for_a_miss(memory):
    cache = engine([whole().part()], memory)
    child = os.fork()
    if child == 0:
        said = 0
        for call in (
            lambda: cache.retrieve(TOKENS, whole().rows, SLOTS),
            lambda: list(cache.retrieve_layer(TOKENS, whole().rows, SLOTS)),
            lambda: cache.prefetch(TOKENS),
            lambda: cache.store(TOKENS, whole().rows, SLOTS),
        ):
            try:
                call()
            except KVCoreError as error:
                said += "open an engine in this process" in str(error)
        os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_a_prefix_longer_than_host_memory_comes_back_whole():
    """Chunks pass through it in windows that leave room for others, and a load waits for room a moment."""
    tokens = list(range(40 * CHUNK + 1))
    size = -(-LAYERS * 2 * CHUNK * HEADS * WIDTH * 4 // 256) * 256
    with tiers("memory:", host_bytes=4 * size) as over:
        pages, blocks = Pages((0, 1), (0, HEADS), blocks=200), blocks_for(len(tokens))
        pages.compute(tokens, blocks)
        cache = engine([pages.part()], over)
        for key in cache.keys(tokens):
            assert cache.store_keys([key], paged([pages], blocks), wait=True).chunks_written == 1
        target = Pages((0, 1), (0, HEADS), blocks=200)
        hit = cache.lookup(tokens)
        assert hit == 40 * CHUNK
        assert cache.retrieve_keys(cache.keys(tokens), paged([target], blocks), start=0, stop=hit) == hit
        assert all(target.right(tokens, blocks, range(hit)))
