"""`PrefixCache` over tiers, and under several loads at a time: what is found where, and nothing that stays locked."""

from __future__ import annotations

import gc
import os
import threading

import pytest

import kvcore
from kvcore.engine.cache import WINDOW, PrefixCache
from kvcore.tiers.config import open_tiers
from kvcore.tiers.stores import MemoryStore

from .test_prefix_cache import CHUNK, HEADS, LAYERS, WIDTH, engine, expected, loaded, namespace, opened, source

MANY = list(range(4 * WINDOW * CHUNK + 1))


@pytest.fixture(scope="module")
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture
def tiers(backend, tmp_path):
    stores = [{"store": "memory:"}, {"store": f"fs:{tmp_path}/a"}]
    with open_tiers({"host_bytes": 1 << 20, "pinned": False, "tiers": stores}, backend) as tiers:
        yield tiers


def over(tiers, backend) -> PrefixCache:
    return PrefixCache(tiers, namespace(), layers=LAYERS, heads=HEADS, width=WIDTH, backend=backend)


def test_over_tiers_chunks_come_from_the_fastest(backend, tiers):
    kv, cache = engine(len(MANY)), over(tiers, backend)
    report = cache.save(MANY, source(kv))
    assert report.chunks_written == 4 * WINDOW
    assert loaded(cache, MANY)[1] == expected(kv, len(MANY) - 1)
    tiers.host.clear()
    assert loaded(cache, MANY)[1] == expected(kv, len(MANY) - 1)
    stats = tiers.stats()
    assert (stats["host"].hits, stats["memory"].hits, stats["disk"].hits) == (4 * WINDOW, 4 * WINDOW, 0)
    assert tiers.host.stats().locked == 0


def test_a_store_that_is_down_costs_neither_saves_nor_loads(backend, tiers, monkeypatch):
    kv, cache = engine(len(MANY)), over(tiers, backend)

    def down(*given):
        raise kvcore.StoreError(5, "down")

    for name in ("stat", "put", "get_into"):
        monkeypatch.setattr(tiers.tiers[0].store.store, name, down)
    assert cache.save(MANY, source(kv)).chunks_written == 4 * WINDOW
    tiers.host.clear()
    assert loaded(cache, MANY)[1] == expected(kv, len(MANY) - 1)
    assert tiers.stats()["disk"].hits == 4 * WINDOW
    assert tiers.stats()["memory"].failed > 0


def test_host_memory_without_room_for_a_chunk_is_refused(backend):
    with (
        open_tiers({"host_bytes": 512, "pinned": False}, backend) as tiers,
        pytest.raises(kvcore.ConfigError, match=r"a chunk of 8 tokens has .* nothing could be cached"),
    ):
        over(tiers, backend)


def test_loads_at_a_time_find_room_for_all(backend):
    store, kv = MemoryStore(), engine(len(MANY))
    with opened(backend, store) as cache:
        cache.save(MANY, source(kv))
        found: list = []
        threads = [threading.Thread(target=lambda: found.append(loaded(cache, MANY)[1])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected(kv, len(MANY) - 1)] * 4
        assert cache.misses == {}


def test_loads_that_are_given_up_lock_nothing(backend, tiers):
    cache = over(tiers, backend)
    cache.save(MANY, source(engine(len(MANY))))
    for taken in range(2 * WINDOW):
        chunks = cache.load(MANY)
        for _ in range(taken):
            next(chunks)
        chunks.close()
    assert tiers.flush(10)
    tiers._loads.close()  # once all is done
    assert tiers.host.stats().locked == 0
    with pytest.raises(kvcore.KVCoreError, match="closed"):
        next(cache.load(MANY))


def test_a_load_that_cannot_go_on_locks_nothing(backend, tiers, monkeypatch):
    cache = over(tiers, backend)
    cache.save(MANY, source(engine(len(MANY))))
    chunks, begin, begun = cache.load(MANY), tiers.begin_load, []

    def once(keys, plans):
        if begun:
            raise kvcore.KVCoreError("closed")
        begun.append(keys)
        return begin(keys, plans)

    monkeypatch.setattr(tiers, "begin_load", once)
    with pytest.raises(kvcore.KVCoreError, match="closed"):
        list(chunks)
    assert tiers.host.stats().locked == 0


def test_a_chunk_that_was_held_for_too_long_is_told(backend, tiers, monkeypatch):
    cache = over(tiers, backend)
    cache.save(MANY, source(engine(len(MANY))))
    chunks = cache.load(MANY)
    next(chunks)
    now = tiers.host._l1._clock()
    monkeypatch.setattr(tiers.host._l1, "_clock", lambda: now + 301)
    tiers.host.delete(cache.tiers.host._l1)
    with pytest.raises(kvcore.LeaseError, match="must not be used"):
        next(chunks)
    assert tiers.host.stats().locked == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_ten_thousand_saves_and_loads_leave_descriptors_threads_and_memory_as_they_were(backend):
    """Small chunks, so that what piles up is not the KV: of 1 KiB for each operation, 10 MiB would."""
    kv = engine(CHUNK + 1)
    config = {"host_bytes": 1 << 15, "pinned": False, "tiers": [{"store": "memory:", "serde": "raw"}]}
    with open_tiers(config, backend) as tiers:
        cache, rows = over(tiers, backend), source(kv)

        def run(operations: int) -> tuple[int, int]:
            for number in range(operations // 4):
                tokens = [number % 50] * (CHUNK + 1)
                cache.save(tokens, rows)
                assert len(list(cache.load(tokens))) == 1
                tiers.host.clear()
                assert len(list(cache.load(tokens))) == 1
                tiers.delete(cache._wanted(tokens, ()))
            gc.collect()
            with open("/proc/self/statm") as statm:
                return len(os.listdir("/proc/self/fd")), threading.active_count(), int(statm.read().split()[1])

        fds, threads, pages = run(2000)
        after = run(8000)
        assert after[:2] == (fds, threads)
        assert (after[2] - pages) * os.sysconf("SC_PAGESIZE") < 4 << 20
        assert tiers.host.stats().locked == tiers.host.stats().staging == 0
        assert len(tiers._loads._done) == len(tiers._stores._done) == 0
        assert tiers.host.arena.memcheck().ok
        tiers.host.clear()
        assert tiers.host.arena.live_leases == 0
