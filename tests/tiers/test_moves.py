"""Objects from tier to tier, tiers emptied and described: nothing is lost, nothing lossy is coded twice."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

import kvcore
from kvcore.errors import (
    ConfigError,
    CorruptFrameError,
    LayoutError,
    LeaseError,
    OutOfMemoryError,
    StoreError,
    UnsupportedOpError,
)
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc, MemoryPlan
from kvcore.tiers.config import open_tiers
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.stores import StoreKey, StoreUnavailableError

from .objects import DESC, PLAN, chain, content, fill, holds
from .test_tiered import SIZE

RAW = {"store": "memory:", "serde": "raw", "name": "raw"}
EXACT = {"store": "memory:", "serde": "lossless", "name": "exact"}
FP8 = {"store": "memory:", "serde": "fp8", "name": "fp8"}
INT8 = {"store": "memory:", "serde": "int8", "name": "int8"}
ANY = {"store": "memory:", "serde": {"type": "raw", "accept": ["raw", "fp8"]}, "name": "any"}


@pytest.fixture(scope="module")
def backend():
    return kvcore.open_backend("cpu_ref", fallback="error")


class Notes(TierObserver):
    def __init__(self):
        self.failures = []

    def failure(self, tier, operation, error):
        self.failures.append((tier, operation, type(error)))


@pytest.fixture
def opened(backend):
    caches = []

    def make(*tiers, chunks=16):
        notes = Notes()
        config = {"host_bytes": chunks * SIZE, "pinned": False, "tiers": list(tiers), "retry_seconds": 60}
        caches.append(open_tiers(config, backend, observer=notes))
        return caches[-1], notes

    yield make
    for cache in caches:
        cache.close()


def store_of(cache, name):
    return next(tier.store.store for tier in cache.tiers if tier.name == name)


def save(cache, keys, only=None):
    """Store objects; with `only` they are then in that tier alone."""
    leases = list(cache.reserve(dict.fromkeys(keys, PLAN)).values())
    for lease in leases:
        fill(lease.memory, lease.key)
    cache.stored(cache.commit(leases))
    if only is not None:
        for tier in cache.tiers:
            if tier.name != only:
                tier.store.store.delete_batch(keys)
        if only != "host":
            cache.host.clear()


def where(cache, key):
    there = [tier.name for tier in cache.tiers if tier.store.store.exists(key)]
    return (["host"] if key in cache.host else []) + there


def values(cache, key):
    """What a load gives, as float32."""
    (found,) = cache.load([key], [PLAN])
    assert isinstance(found, Found)
    data = found.lease.memory.bytes().view(np.float32).copy()
    cache.release(found)
    return data


@pytest.mark.parametrize("keep", [False, True])
def test_frames_go_from_store_to_store_as_they_are(opened, keep):
    cache, notes = opened(RAW, EXACT)
    keys = chain(20)
    save(cache, keys[:12], only="raw")
    frames = [bytes(store_of(cache, "raw").get(key)) for key in keys[:12]]
    moved = cache.move(keys, "raw", "exact", keep=keep)
    assert moved == [len(frame) for frame in frames] + [None] * 8
    assert [bytes(store_of(cache, "exact").get(key)) for key in keys[:12]] == frames
    assert where(cache, keys[0]) == (["raw", "exact"] if keep else ["exact"])
    assert (values(cache, keys[3]) == content(keys[3]).view(np.float32)).all()
    assert cache.stats()["exact"].stored >= 12
    assert notes.failures == []


def test_a_codec_that_the_other_tier_does_not_take_is_refused_and_stays(opened):
    cache, notes = opened(FP8, INT8, ANY)
    (key,) = chain(1)
    save(cache, [key], only="fp8")
    before = bytes(store_of(cache, "fp8").get(key))
    (refused,) = cache.move([key], "fp8", "int8")
    assert isinstance(refused, UnsupportedOpError)
    assert "is stored as fp8, and the other tier takes only int8, lossless, raw" in str(refused)
    assert refused.__traceback__ is None
    assert where(cache, key) == ["fp8"]
    assert notes.failures == [("fp8", "retrieve", UnsupportedOpError)]
    assert cache.move([key], "fp8", "any") == [len(before)]  # one that was told to take it
    assert bytes(store_of(cache, "any").get(key)) == before
    assert where(cache, key) == ["any"]


def test_what_an_engine_wrote_is_coded_for_a_store(opened):
    cache, _ = opened(FP8, RAW)
    keys = chain(10)
    save(cache, keys, only="host")
    moved = cache.move(keys, "host", "fp8")
    assert all(isinstance(nbytes, int) for nbytes in moved)
    assert moved[0] == len(store_of(cache, "fp8").get(keys[0]))
    assert [where(cache, key) for key in keys] == [["fp8"]] * 10
    assert np.allclose(values(cache, keys[2]), content(keys[2]).view(np.float32), atol=0.5)


def test_what_came_from_a_lossy_frame_is_not_coded_again_but_its_frame_is_copied(opened):
    cache, _ = opened(FP8, INT8, ANY)
    keys = chain(2)
    save(cache, keys, only="fp8")
    frames = [bytes(store_of(cache, "fp8").get(key)) for key in keys]
    for key in keys:
        values(cache, key)  # now it is in host memory, and no longer what it was
    (refused,) = cache.move(keys[:1], "host", "int8")
    assert isinstance(refused, UnsupportedOpError)
    assert cache.move(keys[:1], "host", "any") == [len(frames[0])]
    assert bytes(store_of(cache, "any").get(keys[0])) == frames[0]
    assert where(cache, keys[0]) == ["fp8", "any"]
    store_of(cache, "fp8").delete(keys[1])
    (refused,) = cache.move(keys[1:], "host", "any")
    assert isinstance(refused, UnsupportedOpError)
    assert "came from tier fp8, where its frame is gone" in str(refused)
    assert where(cache, keys[1]) == ["host"]


def test_what_is_written_anew_after_it_was_loaded_and_went_counts_as_new(opened):
    cache, _ = opened(FP8, INT8)
    (key,) = chain(1)
    save(cache, [key], only="fp8")
    values(cache, key)
    cache.host.clear()
    save(cache, [key], only="host")
    (moved,) = cache.move([key], "host", "int8")
    assert isinstance(moved, int)


def test_an_object_that_was_just_loaded_is_known_as_such_before_its_event_is_delivered(opened):
    """Events of host memory may be delivered by another thread, a moment later."""
    cache, _ = opened(FP8, RAW)
    (key, other) = chain(2)
    save(cache, [key], only="fp8")
    busy, go_on = threading.Event(), threading.Event()

    def hold(event):
        busy.set()
        assert go_on.wait(10)

    cache.host.add_listener(hold)
    reserved = []
    thread = threading.Thread(target=lambda: reserved.append(cache.reserve({other: PLAN})))
    thread.start()
    try:
        assert busy.wait(10)
        (found,) = cache.load([key], [PLAN])
        cache.release(found)
        cache.tiers[0].store.store.delete(key)
        (outcome,) = cache.move([key], "host", "raw")
    finally:
        go_on.set()
        thread.join()
    cache.cancel(reserved[0].values())
    assert isinstance(outcome, UnsupportedOpError), outcome


def test_what_came_from_an_exact_frame_is_coded_like_new(opened):
    cache, _ = opened(EXACT, INT8)
    (key,) = chain(1)
    save(cache, [key], only="exact")
    values(cache, key)
    store_of(cache, "exact").delete(key)
    assert isinstance(cache.move([key], "host", "int8")[0], int)
    assert where(cache, key) == ["int8"]


def test_back_to_where_it_came_from_there_is_nothing_to_do(opened):
    cache, _ = opened(FP8)
    (key,) = chain(1)
    save(cache, [key], only="fp8")
    values(cache, key)
    puts = store_of(cache, "fp8").stats().puts
    assert cache.move([key], "host", "fp8") == [store_of(cache, "fp8").stat(key).nbytes]
    assert where(cache, key) == ["fp8"]
    assert store_of(cache, "fp8").stats().puts == puts


@pytest.mark.parametrize("keep", [False, True])
def test_frames_are_loaded_into_host_memory(opened, keep):
    cache, _ = opened(RAW, EXACT)
    keys = chain(12)
    save(cache, keys[:10], only="exact")
    moved = cache.move(keys, "exact", "host", plans=[PLAN] * 12, keep=keep)
    assert moved == [SIZE] * 10 + [None] * 2
    assert where(cache, keys[9]) == (["host", "exact"] if keep else ["host"])
    found = cache.load(keys[:10], [PLAN] * 10)
    for key, one in zip(keys, found, strict=False):
        assert one.tier == "host"
        assert holds(one.lease.memory, key)
        cache.release(one)


def test_host_memory_keeps_what_it_has_and_takes_what_finds_room(opened):
    cache, _ = opened(EXACT, chunks=2)
    keys = chain(3)
    save(cache, keys[:1], only="exact")
    values(cache, keys[0])
    assert cache.move(keys[:1], "exact", "host", plans=[PLAN]) == [SIZE]
    assert where(cache, keys[0]) == ["host"]
    other = MemoryPlan.of([LayoutDesc(Layout("LKTHD", L=1, T=4, H=2, D=8), DESC.dtypes)])
    save(cache, keys[:1])
    store_of(cache, "exact").put(keys[0], b"whatever")
    (outcome,) = cache.move(keys[:1], "exact", "host", plans=[other])
    assert isinstance(outcome, LayoutError)
    assert where(cache, keys[0]) == ["host", "exact"]
    cache.host.clear()
    save(cache, keys[1:], only="exact")
    writing = cache.reserve({keys[1]: PLAN})
    (outcome,) = cache.move(keys[1:2], "exact", "host", plans=[PLAN])
    assert isinstance(outcome, LeaseError)
    (second,) = cache.reserve({keys[0]: PLAN}).values()
    (outcome,) = cache.move(keys[2:], "exact", "host", plans=[PLAN])
    assert isinstance(outcome, OutOfMemoryError)
    assert where(cache, keys[2]) == ["exact"]
    cache.cancel([*writing.values(), second])


def test_a_damaged_frame_is_not_moved(opened):
    cache, notes = opened(RAW, EXACT)
    keys = chain(4)
    save(cache, keys, only="raw")
    frame = bytearray(store_of(cache, "raw").get(keys[1]))
    frame[-1] ^= 1  # deep in the KV
    store_of(cache, "raw").put(keys[1], frame)
    store_of(cache, "raw").put(keys[2], frame)  # another one's
    moved = cache.move(keys, "raw", "exact")
    assert [one.reason for one in moved[1:3]] == ["digest", "identity"]
    assert all(isinstance(one, CorruptFrameError) for one in moved[1:3])
    assert where(cache, keys[1]) == ["raw"]
    assert where(cache, keys[3]) == ["exact"]
    assert len(notes.failures) == 2


def sealed(tmp_path, **options):
    key_file = tmp_path / "keys"
    key_file.write_text("42" * 32)
    key_file.chmod(0o600)
    return {"type": "chain", "steps": ["raw", {"type": "aesgcm", "key_file": str(key_file), **options}]}


def test_encrypted_frames_go_only_where_they_can_be_read_and_plain_ones_not_where_they_may_not_be(opened, tmp_path):
    one = {"store": "memory:", "serde": sealed(tmp_path), "name": "one"}
    cache, _ = opened(one, {**one, "name": "two"}, EXACT)
    secret, plain = chain(2)
    save(cache, [secret], only="one")
    save(cache, [plain], only="exact")
    (refused,) = cache.move([secret], "one", "exact")
    assert isinstance(refused, UnsupportedOpError)
    (refused,) = cache.move([plain], "exact", "two")
    assert isinstance(refused, UnsupportedOpError)
    assert where(cache, plain) == ["exact"]
    assert isinstance(cache.move([secret], "one", "two")[0], int)
    assert where(cache, secret) == ["two"]
    assert (values(cache, secret) == content(secret).view(np.float32)).all()


@pytest.mark.parametrize(
    ("plan", "code"),
    [("put.enospc=@9+10+11+12", errno.ENOSPC), ("put.short=@9+10+11+12", None), ("put.econnrefused=@9", None)],
)
def test_what_the_other_tier_did_not_take_stays(opened, plan, code):
    """Also where a store says yes and has less: the source is removed by what is there, not by what was said."""
    cache, _ = opened(RAW, {"store": f"fault:{plan}:memory:", "serde": "lossless", "name": "bad"})
    keys = chain(8)
    save(cache, keys, only="raw")
    moved = cache.move(keys[:4], "raw", "bad")
    bad = [key for key, one in zip(keys, moved, strict=False) if isinstance(one, Exception)]
    assert bad
    assert all(code is None or one.errno == code for one in moved if isinstance(one, Exception))
    assert all("raw" in where_up(cache, key) for key in bad)


def where_up(cache, key):
    """As `where`, of the stores that are not down."""
    return [t.name for t in cache.tiers if t.outage() is None and t.store.store.exists(key)]


def test_a_source_that_cannot_remove_still_gave_its_objects(opened):
    cache, notes = opened({"store": "fault:delete.erofs=1:memory:", "serde": "raw", "name": "stuck"}, RAW)
    keys = chain(2)
    save(cache, keys)
    store_of(cache, "raw").delete_batch(keys)
    assert all(isinstance(one, int) for one in cache.move(keys, "stuck", "raw"))
    assert where(cache, keys[0]) == ["host", "stuck", "raw"]
    assert notes.failures == [("stuck", "delete", StoreError)] * 2


def test_from_and_to_a_tier_that_is_down_nothing_moves(opened):
    cache, _ = opened({"store": "fault::memory:", "serde": "raw", "name": "near"}, RAW)
    keys = chain(2)
    save(cache, keys)
    store_of(cache, "near").inner.fail()
    store_of(cache, "near").stat_batch(keys)
    for outcome in [
        *cache.move(keys, "near", "raw"),
        *cache.move(keys, "raw", "near"),
        *cache.move(keys, "host", "near"),
        *cache.move(keys, "near", "host", plans=[PLAN] * 2),
    ]:
        assert isinstance(outcome, StoreUnavailableError)
    assert all(store_of(cache, "raw").exists(key) for key in keys)
    assert all(key in cache.host for key in keys)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c, k: c.move(k, "raw", "rawe"), "no tier 'rawe'; there are host, raw, fixed"),
        (lambda c, k: c.move(k, "row", "host"), "no tier 'row'"),
        (lambda c, k: c.move(k, "raw", "raw"), "got raw twice"),
        (lambda c, k: c.move(k, "raw", "fixed"), "fixed is read-only: nothing is stored"),
        (lambda c, k: c.move(k, "fixed", "raw"), "fixed is read-only: nothing is removed"),
        (lambda c, k: c.move(k, "raw", "host"), "a plan for each key"),
        (lambda c, k: c.move(k, "raw", "host", plans=[]), "a plan for each key"),
        (lambda c, k: c.clear(["fixed"]), "fixed is read-only: nothing is removed"),
        (lambda c, k: c.clear(["raw", "rawe"]), "no tier 'rawe'"),
    ],
)
def test_what_means_nothing_is_refused_and_moves_nothing(opened, call, match):
    cache, _ = opened(RAW, {"store": "memory:", "name": "fixed", "read_only": True})
    keys = chain(2)
    save(cache, keys)
    with pytest.raises(ConfigError, match=match):
        call(cache, keys)
    assert where(cache, keys[0]) == ["host", "raw"]


def test_of_a_read_only_tier_objects_are_copied(opened):
    cache, _ = opened(RAW, {"store": "memory:", "name": "fixed", "read_only": True})
    keys = chain(2)
    save(cache, keys)
    store_of(cache, "fixed").put(keys[0], store_of(cache, "raw").get(keys[0]))
    store_of(cache, "raw").delete_batch(keys)
    assert isinstance(cache.move(keys, "fixed", "raw", keep=True)[0], int)
    assert where(cache, keys[0]) == ["host", "raw", "fixed"]


# --- clear


def test_clear_removes_all_objects_and_tells_how_many_by_tier(opened):
    cache, _ = opened(RAW, EXACT, {"store": "memory:", "name": "fixed", "read_only": True})
    keys = chain(12)
    save(cache, keys)
    store_of(cache, "fixed").put(keys[0], b"frame")
    store_of(cache, "exact").delete_batch(keys[:4])
    assert cache.clear(["exact", "exact"]) == {"exact": 8}
    assert cache.clear() == {"host": 12, "raw": 12, "exact": 0}
    assert cache.lookup(keys[1:]) == []
    assert store_of(cache, "fixed").exists(keys[0])


def test_clear_of_a_namespace_leaves_the_others(opened):
    cache, _ = opened(RAW, EXACT)
    mine, other = chain(3, tenant="mine"), chain(2, tenant="other")
    save(cache, mine)
    save(cache, other)
    (held,) = cache.load(mine[:1], [PLAN])
    assert cache.clear(namespace=mine[0].namespace) == {"host": 2, "raw": 3, "exact": 3}  # one is being read
    assert holds(held.lease.memory, mine[0])
    cache.release(held)
    assert cache.lookup(other) == ["host"] * 2
    assert cache.clear(["host"], namespace=mine[0].namespace) == {"host": 1}


def test_clear_empties_what_it_can_and_then_says_what_it_could_not(opened):
    cache, notes = opened({"store": "fault::memory:", "name": "near"}, RAW)
    keys = chain(3)
    save(cache, keys)
    store_of(cache, "near").inner.fail(errno.EACCES)
    with pytest.raises(StoreError, match="Permission denied"):
        cache.clear()
    assert store_of(cache, "raw").usage().objects == 0
    assert ("near", "delete", StoreError) in notes.failures
    store_of(cache, "near").inner.heal()
    assert cache.clear(["near"]) == {"near": 3}


# --- describe


def test_describe_tells_what_tiers_are_and_hold(opened, tmp_path):
    kvs1 = {"type": "kvs1", "preset": "high"}
    cache, _ = opened(
        {"store": "capped:1MiB:memory:", "serde": kvs1, "name": "near"},
        {"store": f"fs:{tmp_path}/kv", "read_only": False, "serde": "raw"},
    )
    keys = chain(3)
    save(cache, keys)
    host, near, disk = cache.describe().values()
    assert (host.name, host.objects, host.nbytes, host.capacity_bytes) == ("host", 3, 3 * SIZE, 16 * SIZE)
    assert (near.serde, near.objects, near.capacity_bytes) == ("kvs1:high", 3, 1 << 20)
    assert near.nbytes == sum(store_of(cache, "near").stat(key).nbytes for key in keys)
    assert (disk.store, disk.objects, disk.nbytes, disk.capacity_bytes) == (f"fs:{tmp_path}/kv", None, None, None)
    assert disk.health.ok
    counted = cache.describe(count=True)["disk"]
    assert (counted.objects, counted.nbytes) == (3, sum(p.stat().st_size for p in tmp_path.glob("kv/*/*/*.kvf")))


def test_describe_and_health_of_a_tier_that_is_down(opened):
    cache, _ = opened({"store": "fault::memory:", "name": "near"})
    store_of(cache, "near").inner.fail()
    cache.lookup(chain(1))
    info = cache.describe(count=True)["near"]
    assert info.health == cache.health()["near"] or info.health.seconds <= cache.health()["near"].seconds
    assert info.health.state == "down"
    assert "Connection refused" in info.health.reason


def test_a_key_of_a_store_moves_as_an_engines_does(opened):
    cache, _ = opened(RAW, EXACT)
    keys = chain(2)
    save(cache, keys, only="raw")
    assert all(isinstance(one, int) for one in cache.move([StoreKey.of(key) for key in keys], "raw", "exact"))
