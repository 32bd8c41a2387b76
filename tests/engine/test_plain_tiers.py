"""A plain engine over tiers, and under several loads at a time: what is found where, and nothing that stays locked."""

from __future__ import annotations

import gc
import os
import threading

import pytest

import kvcore
from kvcore.engine.engine import CacheEngine
from kvcore.engine.kv import DenseKV
from kvcore.engine.transfer import WINDOW
from kvcore.tiers.config import open_tiers
from kvcore.tiers.stores import MemoryStore

from .plain import CHUNK, arrays, expected, loaded, opened, rows_of

MANY = list(range(4 * WINDOW * CHUNK + 1))


@pytest.fixture(scope="module")
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture
def tiers(backend, tmp_path):
    stores = [{"store": "memory:"}, {"store": f"fs:{tmp_path}/a"}]
    with open_tiers({"host_bytes": 1 << 20, "pinned": False, "tiers": stores}, backend) as tiers:
        yield tiers


def stored(engine: CacheEngine) -> list:
    """Store many chunks; return the arrays that they came from."""
    kv = arrays(len(MANY))
    assert engine.store(MANY, rows_of(kv), wait=True).chunks_written == 4 * WINDOW
    return kv


def test_chunks_come_from_the_fastest_tier(backend, tiers):
    engine = opened(backend, tiers)
    kv = stored(engine)
    assert loaded(engine, MANY)[1] == expected(kv, len(MANY) - 1)
    tiers.host.clear()
    assert loaded(engine, MANY)[1] == expected(kv, len(MANY) - 1)
    stats = tiers.stats()
    assert (stats["host"].hits, stats["memory"].hits, stats["disk"].hits) == (4 * WINDOW, 4 * WINDOW, 0)
    assert tiers.host.stats().locked == 0


def test_a_store_that_is_down_costs_neither_saves_nor_loads(backend, tiers, monkeypatch):
    def down(*given):
        raise kvcore.StoreError(5, "down")

    engine = opened(backend, tiers)
    for name in ("stat", "put", "get_into"):
        monkeypatch.setattr(tiers.tiers[0].store.store.inner, name, down)
    kv = stored(engine)
    tiers.host.clear()
    assert loaded(engine, MANY)[1] == expected(kv, len(MANY) - 1)
    assert tiers.stats()["disk"].hits == 4 * WINDOW
    assert tiers.stats()["memory"].failed > 0


def test_host_memory_without_room_for_a_chunk_is_refused(backend):
    with (
        open_tiers({"host_bytes": 512, "pinned": False}, backend) as tiers,
        pytest.raises(kvcore.ConfigError, match=r"a chunk of 8 tokens has .* nothing could be cached"),
    ):
        opened(backend, tiers)


@pytest.mark.parametrize("coding", [{"codec": "raw"}, {"codecs": ["raw"]}])
def test_tiers_have_serdes_of_their_own(backend, tiers, coding):
    with pytest.raises(kvcore.ConfigError, match="tiers have serdes of their own"):
        opened(backend, tiers, **coding)


def test_tiers_that_were_given_stay_open(backend, tiers):
    engine = opened(backend, tiers)
    stored(engine)
    engine.close()
    assert opened(backend, tiers).lookup(MANY) == 4 * WINDOW * CHUNK


def test_loads_at_a_time_find_room_for_all(backend):
    store = MemoryStore()
    with opened(backend, store) as engine:
        kv = stored(engine)
        found: list = []
        threads = [threading.Thread(target=lambda: found.append(loaded(engine, MANY)[1])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected(kv, len(MANY) - 1)] * 4
        assert engine.misses == {}


class Stops(DenseKV):
    """An engine's memory that gives up after some chunks."""

    def __init__(self, backend: kvcore.Backend, chunks: int) -> None:
        super().__init__(backend, rows_of(arrays(len(MANY))))
        self.left = chunks

    def write(self, *given, **named) -> None:
        if not self.left:
            raise kvcore.LayoutError("given up")
        self.left -= 1
        super().write(*given, **named)


def test_loads_that_are_given_up_lock_nothing(backend, tiers):
    engine = opened(backend, tiers)
    stored(engine)
    for taken in range(2 * WINDOW):
        with pytest.raises(kvcore.LayoutError, match="given up"):
            engine.retrieve(MANY, Stops(backend, taken))
    assert tiers.flush(10)
    tiers._loads.close()  # once all is done
    assert tiers.host.stats().locked == 0
    with pytest.raises(kvcore.KVCoreError, match="closed"):
        loaded(engine, MANY)


def test_a_load_that_cannot_go_on_locks_nothing(backend, tiers, monkeypatch):
    engine = opened(backend, tiers)
    stored(engine)
    begin, begun = tiers.begin_load, []

    def once(keys, plans):
        if begun:
            raise kvcore.KVCoreError("closed")
        begun.append(keys)
        return begin(keys, plans)

    monkeypatch.setattr(tiers, "begin_load", once)
    with pytest.raises(kvcore.KVCoreError, match="closed"):
        loaded(engine, MANY)
    assert tiers.host.stats().locked == 0


class Late(DenseKV):
    """An engine's memory in a machine that stands still for minutes while the second chunk is copied."""

    def __init__(self, backend: kvcore.Backend, tiers, monkeypatch) -> None:
        super().__init__(backend, rows_of(arrays(len(MANY))))
        self.tiers, self.patch, self.copied = tiers, monkeypatch, 0

    def write(self, *given, **named) -> None:
        super().write(*given, **named)
        self.copied += 1
        if self.copied == 2:
            l1 = self.tiers.host._l1
            now = l1._clock()
            self.patch.setattr(l1, "_clock", lambda: now + 301)
            self.tiers.host.relieve()


def test_a_chunk_that_was_held_for_too_long_is_not_used(backend, tiers, monkeypatch):
    engine = opened(backend, tiers)
    stored(engine)
    mask = engine.retrieve(MANY, Late(backend, tiers, monkeypatch))
    assert mask.sum() == CHUNK
    assert engine.misses == {"lease": 1}
    assert tiers.host.stats().locked == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_ten_thousand_stores_and_loads_leave_descriptors_threads_and_memory_as_they_were(backend):
    """Small chunks, so that what piles up is not the KV: of 1 KiB for each operation, 10 MiB would."""
    config = {"host_bytes": 1 << 15, "pinned": False, "tiers": [{"store": "memory:", "serde": "raw"}]}
    with open_tiers(config, backend) as tiers:
        engine, rows, room = opened(backend, tiers), rows_of(arrays(CHUNK + 1)), rows_of(arrays(CHUNK + 1))

        def run(operations: int) -> tuple[int, int, int]:
            for number in range(operations // 4):
                tokens = [number % 50] * (CHUNK + 1)
                engine.store(tokens, rows, wait=True)
                assert engine.retrieve(tokens, room).sum() == CHUNK
                tiers.host.clear()
                assert engine.retrieve(tokens, room).sum() == CHUNK
                assert engine.clear(tokens=tokens) == 1
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


def test_an_engine_that_nobody_has_any_more_frees_what_it_had_opened(backend):
    before = threading.active_count()
    engine = opened(backend, MemoryStore())
    stored(engine)
    assert loaded(engine, MANY)[0] == len(MANY) - 1
    assert threading.active_count() > before
    del engine
    gc.collect()
    assert threading.active_count() == before
