"""Host memory in front of stores: where objects go, where they are found, and what happens when something fails."""

import threading
import time

import pytest

import kvcore
from kvcore.errors import ConfigError, CorruptFrameError, OutOfMemoryError, StoreError
from kvcore.memory import BufferPool, align_up
from kvcore.runtime import HostRuntime
from kvcore.serde import create_serde_processor
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.store_tier import StoreTier
from kvcore.tiers.stores import MemoryStore
from kvcore.tiers.tiered import TieredCache

from .objects import PLAN, chain, fill, holds, raw_serde

SIZE = align_up(PLAN.nbytes)


class Stack:
    """Tiers over memory stores that can be made to fail."""

    def __init__(self, *names, serde=None, chunks=8, stores=None, host=None, **options):
        self.arena = HostArena(HostRuntime(), chunks * SIZE, pinned=False)
        self.serde = serde or raw_serde()
        self.pool = BufferPool(1 << 20)
        self.stores = {name: Flaky() for name in names} if stores is None else stores
        self.serde_stores = [SerdeStore(store, self.serde, self.pool) for store in self.stores.values()]
        tiers = [StoreTier(name, s) for name, s in zip(self.stores, self.serde_stores, strict=True)]
        self.host = HostTier(self.arena, watermark=1.0, **(host or {}))
        self.cache = TieredCache(self.host, tiers, **options)

    def put(self, keys):
        for key in keys:
            leases = self.cache.reserve({key: PLAN})
            for lease in leases.values():
                fill(lease.memory, key)
            yield self.cache.commit(list(leases.values()))

    def save(self, keys):
        outcomes = [self.cache.stored(task)[0] for task in self.put(keys)]
        assert self.cache.flush(10)
        return outcomes

    def load(self, keys):
        """Load a prefix, check every byte of it, give it back; return the tiers and what ended it."""
        found = self.cache.load(keys, [PLAN] * len(keys))
        places = []
        for key, one in zip(keys, found, strict=False):
            if isinstance(one, Found):
                assert holds(one.lease.memory, key)
                places.append(one.tier)
                self.cache.release(one)
            else:
                places.append(one)
        return places

    def close(self):
        self.cache.close()
        for store in self.serde_stores:
            store.close()
        self.serde.close()
        assert self.pool.live_leases == 0
        assert self.host.stats().locked == 0
        assert self.host.stats().staging == 0
        self.host.clear()
        assert self.arena.live_leases == 0
        self.arena.close()


class Flaky(MemoryStore):
    """Fails while `down` is set, and counts how often frames are asked for."""

    def __init__(self):
        super().__init__()
        self.down = False
        self.gets = 0

    def _name(self, key):
        if self.down:
            raise StoreError(111, "nobody answers")
        return super()._name(key)

    def get_batch_into(self, items):
        self.gets += len(items)
        return super().get_batch_into(items)


@pytest.fixture
def stack():
    stacks = []

    def make(*names, **options):
        stacks.append(Stack(*names, **options))
        return stacks[-1]

    yield make
    for one in stacks:
        one.close()


def test_what_is_saved_is_found_in_host_memory_and_goes_to_all_stores(stack):
    tiers = stack("disk", "remote")
    keys = chain(3)
    for outcome in tiers.save(keys):
        assert outcome.error is None
        assert set(outcome.tiers) == {"disk", "remote"}
    assert tiers.load(keys) == ["host"] * 3
    assert all(store.exists(key) for store in tiers.stores.values() for key in keys)
    disk, remote = (tiers.stores[name] for name in ("disk", "remote"))
    assert [bytes(disk.get(key)) for key in keys] == [bytes(remote.get(key)) for key in keys]


def test_the_fastest_tier_that_has_an_object_is_asked(stack):
    tiers = stack("disk", "remote")
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    tiers.stores["disk"].delete(keys[1])
    assert tiers.cache.lookup(keys) == ["disk", "remote", "disk"]
    assert tiers.load(keys) == ["disk", "remote", "disk"]
    assert tiers.load(keys) == ["host"] * 3


def test_a_prefix_ends_with_the_first_object_that_is_nowhere(stack):
    tiers = stack("disk")
    keys = chain(4)
    tiers.save([keys[0], keys[1], keys[3]])
    tiers.host.clear()
    assert tiers.cache.lookup(keys) == ["disk", "disk"]
    assert tiers.cache.missing(keys) == [2]
    assert tiers.load(keys) == ["disk", "disk", None]


def test_a_hit_below_is_promoted_with_the_same_bytes(stack):
    tiers = stack("disk", "remote")
    keys = chain(2)
    tiers.save(keys)
    disk, remote = (tiers.stores[name] for name in ("disk", "remote"))
    frames = [bytes(remote.get(key)) for key in keys]
    for key in keys:
        disk.delete(key)
    tiers.host.clear()
    assert tiers.load(keys) == ["remote"] * 2
    assert tiers.cache.flush(10)
    assert [bytes(disk.get(key)) for key in keys] == frames


def test_tiers_of_different_serdes_get_their_own_frames_and_no_promotion(stack):
    tiers = stack("disk")
    coarse, store = raw_serde("fp8"), MemoryStore()
    second = SerdeStore(store, coarse, tiers.pool)
    cache = TieredCache(tiers.host, [*tiers.cache.tiers, StoreTier("remote", second)])
    (key,) = chain(1)
    leases = list(cache.reserve({key: PLAN}).values())
    fill(leases[0].memory, key)
    (outcome,) = cache.stored(cache.commit(leases))
    assert outcome.tiers["remote"] < outcome.tiers["disk"]
    tiers.host.clear()
    tiers.stores["disk"].delete(key)
    (found,) = cache.load([key], [PLAN])
    assert found.tier == "remote"
    cache.release(found)
    assert cache.flush(10)
    assert not tiers.stores["disk"].exists(key)  # lossy KV is never coded again
    cache.close()
    second.close()
    coarse.close()


def test_a_tier_that_fails_is_passed_over_and_counted(stack):
    tiers = stack("disk", "remote")
    keys = chain(2)
    tiers.save(keys)
    tiers.host.clear()
    tiers.stores["disk"].down = True
    assert tiers.load(keys) == ["remote"] * 2
    assert tiers.cache.stats()["disk"].failed > 0
    (new,) = chain(1, "new")
    (outcome,) = tiers.save([new])
    assert isinstance(outcome.tiers["disk"], StoreError)
    assert outcome.error is None  # the other one has it
    tiers.stores["disk"].down = False
    assert tiers.load([new]) == ["host"]


def test_a_corrupt_frame_is_looked_for_in_the_next_tier_and_can_be_stored_again(stack):
    tiers = stack("disk", "remote")
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    disk = tiers.stores["disk"]
    frame = bytearray(disk.get(keys[1]))
    frame[-1] ^= 1
    disk.put(keys[1], frame)
    assert tiers.load(keys) == ["disk", "remote", "disk"]
    assert tiers.cache.flush(10)
    assert disk.exists(keys[1])  # promoted in the bad one's place
    tiers.host.clear()
    for store in tiers.stores.values():
        store.put(keys[0], b"nothing")
    outcomes = tiers.load(keys)
    assert len(outcomes) == 1
    assert isinstance(outcomes[0], CorruptFrameError)
    assert tiers.cache.missing(keys) == [0]
    tiers.save(keys[:1])
    assert tiers.load(keys) == ["host", "host", "host"]


def test_two_loads_of_one_object_read_it_once(stack):
    class Slow(Flaky):
        def get_batch_into(self, items):
            time.sleep(0.05)
            return super().get_batch_into(items)

    tiers = stack(stores={"disk": Slow()})
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    tiers.stores["disk"].gets = 0
    loads = []
    threads = [threading.Thread(target=lambda: loads.append(tiers.load(keys))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loads) == [["disk"] * 3] + [["host"] * 3] * 3
    assert tiers.stores["disk"].gets == 3


def test_prefetched_objects_are_in_host_memory(stack):
    tiers = stack("disk", max_in_flight=2)
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    task = tiers.cache.prefetch(keys, [PLAN] * 3)
    assert tiers.cache.prefetched(task, timeout=10) == (Found("disk"),) * 3
    assert tiers.load(keys) == ["host"] * 3
    tiers.cache.forget_load(tiers.cache.prefetch(keys, [PLAN] * 3))


def test_write_through_waits_for_the_stores(stack):
    class Slow(Flaky):
        def put(self, key, frame):
            time.sleep(0.05)
            return super().put(key, frame)

    tiers = stack(stores={"disk": Slow()}, store_policy="write_through")
    (key,) = chain(1)
    (task,) = tiers.put([key])
    assert tiers.stores["disk"].exists(key)
    assert tiers.cache.stored(task, timeout=0)[0].tiers["disk"] > 0


def test_buffer_only_keeps_nothing_in_host_memory(stack):
    tiers = stack("disk", store_policy="buffer_only")
    keys = chain(3)
    tiers.save(keys)
    assert len(tiers.host) == 0
    assert tiers.load(keys) == ["disk"] * 3
    assert len(tiers.host) == 0


def test_what_waits_to_be_stored_is_not_evicted(stack):
    entered, go = threading.Event(), threading.Event()

    class Slow(Flaky):
        def put(self, key, frame):
            entered.set()
            go.wait(10)
            return super().put(key, frame)

    tiers = stack(stores={"disk": Slow()}, chunks=2)
    keys = chain(3)
    tasks = list(tiers.put(keys[:2]))
    entered.wait(10)
    with pytest.raises(OutOfMemoryError):
        tiers.cache.reserve({keys[2]: PLAN})
    go.set()
    assert all(tiers.cache.stored(task)[0].error is None for task in tasks)
    assert tiers.save(keys[2:])[0].error is None
    assert tiers.load(keys[:1]) == ["host"]
    assert tiers.load(keys[2:]) == ["host"]


def test_without_room_in_host_memory_a_load_is_an_error_and_leaks_nothing(stack):
    tiers = stack("disk", chunks=2)
    keys = chain(2)
    tiers.save(keys)
    others = chain(2, "other")
    tiers.save(others)
    held = tiers.cache.load(others, [PLAN] * 2)
    assert all(isinstance(found, Found) for found in held)
    (outcome,) = tiers.load(keys)[:1]
    assert isinstance(outcome, OutOfMemoryError)
    for found in held:
        tiers.cache.release(found)
    assert tiers.load(keys) == ["disk"] * 2


def test_host_memory_alone_is_a_cache_too(stack):
    tiers = stack()
    keys = chain(2)
    assert [outcome.tiers for outcome in tiers.save(keys)] == [{}, {}]
    assert tiers.load(keys) == ["host"] * 2


def test_deleted_objects_are_nowhere(stack):
    tiers = stack("disk")
    keys = chain(2)
    tiers.save(keys)
    tiers.cache.delete(keys[:1])
    assert tiers.cache.missing(keys) == [0]


def test_counters_by_tier(stack):
    tiers = stack("disk")
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    tiers.load(keys)
    tiers.load(keys)
    stats = tiers.cache.stats()
    assert (stats["host"].hits, stats["host"].misses) == (3, 3)
    assert (stats["disk"].hits, stats["disk"].misses, stats["disk"].stored) == (3, 0, 3)
    assert stats["disk"].hit_bytes == stats["host"].hit_bytes == 3 * PLAN.nbytes
    assert tiers.cache.lookup(chain(4)) == ["host"] * 3
    stats = tiers.cache.stats()
    assert (stats["host"].lookup_hits, stats["host"].lookup_misses) == (3, 1)
    assert (stats["disk"].lookup_hits, stats["disk"].lookup_misses) == (0, 1)
    assert (stats["disk"].hits, stats["disk"].misses) == (3, 0)
    assert stats["disk"].stored_bytes == sum(tiers.stores["disk"].stat(key).nbytes for key in keys)


def test_bad_configurations_are_refused(stack):
    tiers = stack("disk")
    disk = tiers.cache.tiers[0]
    backend = kvcore.open_backend("cpu_ref", fallback="error")
    grouped, partial = (
        SerdeStore(MemoryStore(), create_serde_processor({"type": "asym_k16_v8", **options}, backend), tiers.pool)
        for options in ({"slots": True}, {"mode": "k_elsewhere"})
    )
    for match, given, options in (
        ("names of their own", [disk, disk], {}),
        ("names of their own", [StoreTier("host", disk.store)], {}),
        ("no store policy 'buffer'", [disk], {"store_policy": "buffer"}),
        ("needs a store", [], {"store_policy": "buffer_only"}),
        ("needs a store", [StoreTier("disk", disk.store, read_only=True)], {"store_policy": "buffer_only"}),
        ("max_workers=0", [disk], {"max_in_flight": 0}),
        ("groups of 2", [StoreTier("groups", grouped)], {}),
        ("leaves parts", [StoreTier("part", partial)], {}),
    ):
        with pytest.raises(ConfigError, match=match):
            TieredCache(tiers.host, given, **options)
    for store in (grouped, partial):
        store.close()
        store.serde.close()
