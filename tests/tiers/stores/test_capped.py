"""`CappedStore`: never more than its capacity, and what it has is what the inner store has."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import FsStore, MemoryStore, StoreStats

from .capped_store import NAMESPACE, Chunk, Wrapped, capped, chunk, key, there


def refuse(number: int, *refused: int) -> Callable[..., None]:
    def call(name: Any, *frame: object) -> None:
        if not refused or name.digest[0] in refused:
            raise StoreError(number, os.strerror(number))

    return call


# What goes


def test_the_least_recently_used_goes() -> None:
    store = capped(100)
    for n in range(4):
        assert store.put(key(n), bytes(25)) == 25
    assert store.get(key(0)) == bytes(25)
    store.get_into(key(1), memoryview(bytearray(30)))
    store.put(key(4), bytes(26))
    assert there(store) == {0, 1, 4}
    assert (store.evicted, store.evicted_bytes) == (2, 50)
    assert store.get(key(2)) is None
    assert store.stats() == StoreStats(puts=5, hits=2, misses=1, put_bytes=126, hit_bytes=50), (
        "evictions are no deletes"
    )


def test_asking_is_no_use_of_a_frame() -> None:
    store = capped(100)
    for n in range(4):
        store.put(key(n), bytes(25))
    assert store.exists(key(0))
    assert store.stat(key(0)).nbytes == 25
    assert store.stat_batch([key(0)])[0].nbytes == 25
    assert len(list(store.list(NAMESPACE))) == 4
    store.put(key(4), bytes(25))
    assert there(store) == {1, 2, 3, 4}


def test_a_chunk_stays_as_long_as_one_that_follows_it() -> None:
    store = capped(100)
    store.put(chunk(1), bytes(25))
    store.put(chunk(2, parent=1), bytes(25))
    store.put(chunk(3, parent=2), bytes(25))
    store.put(chunk(9), bytes(25))
    for n in (3, 9):
        store.get(chunk(n))
    store.put(chunk(4, parent=3), bytes(25))
    assert there(store) == {1, 2, 3, 4}, "1 is the oldest, and has followers"
    store.put(Chunk(key(5).digest, parent=key(1).digest), bytes(25))
    assert there(store) == {1, 2, 3, 5}, "a parent may be a digest"


def test_a_key_that_is_read_tells_its_parent(tmp_path: Path) -> None:
    inner = MemoryStore()
    for n in (1, 2, 9):
        inner.put(key(n), bytes(25))
    store = capped(75, inner)
    for one in (chunk(1), chunk(2, parent=1), chunk(9)):
        store.get(one)
    store.put(chunk(3, parent=9), bytes(25))
    assert there(store) == {1, 3, 9}, "2 follows 1, which is older"


def test_tenants_above_their_quota_give_first() -> None:
    store = capped(100, quotas={"batch": 20})
    store.put(chunk(1, tenant="users"), bytes(30))
    store.put(chunk(2, tenant="batch"), bytes(30))
    store.put(chunk(3, tenant="users"), bytes(40))
    store.put(chunk(4, tenant="users"), bytes(10))
    assert there(store) == {1, 3, 4}


def test_what_has_expired_is_a_miss() -> None:
    now = 0.0
    store = capped(100, policy="ttl", policy_options={"ttl_s": 10.0, "renew": False}, clock=lambda: now)
    store.put(key(1), b"first")
    now = 6.0
    store.put(key(2), b"second")
    assert store.get(key(1)) == b"first"
    now = 11.0
    assert store.get_batch([key(1), key(2)]) == [None, b"second"]
    assert there(store) == {2}
    now = 20.0
    assert store.relieve() == 6
    assert there(store) == set()


def test_room_is_made_ahead_of_demand() -> None:
    store = capped(100)
    for n in range(8):
        store.put(key(n), bytes(10))
    assert store.relieve() == 0, "no more than 0.8 is used"
    store.put(key(8), bytes(10))
    assert store.relieve() == 20
    assert there(store) == {2, 3, 4, 5, 6, 7, 8}
    assert store.relieve(watermark=0.5, ratio=1) == 70
    with pytest.raises(ConfigError, match="watermark"):
        store.relieve(watermark=0)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "get", "delete", "quarantine", "batch"]),
            st.integers(0, 6),
            st.integers(0, 60),
        ),
        max_size=40,
    )
)
def test_any_sequence_of_calls_is_that_of_a_least_recently_used_dict(steps: list[tuple[str, int, int]]) -> None:
    store = capped(100)
    model: OrderedDict[int, bytes] = OrderedDict()

    def put(n: int, frame: bytes) -> None:
        old = len(model.pop(n, b"-") or b"-") if n in model else 0
        while model and sum(max(len(one), 1) for one in model.values()) + max(len(frame), 1, old and 1) > 100:
            model.popitem(last=False)
        model[n] = frame

    for step, (what, n, nbytes) in enumerate(steps):
        frame = bytes([step % 256]) * nbytes
        if what == "put":
            store.put(key(n), frame)
            put(n, frame)
        elif what == "get":
            assert store.get(key(n)) == model.get(n)
            if n in model:
                model.move_to_end(n)
        elif what == "batch":
            assert store.put_batch([(key(n), frame), (key(n), frame[:5])]) == [nbytes, min(nbytes, 5)]
            put(n, frame)
            put(n, frame[:5])
        else:
            done = store.delete(key(n)) if what == "delete" else store.quarantine(key(n), "digest")
            assert done == (model.pop(n, None) is not None)
        assert there(store) == set(model)


def test_a_chain_that_is_too_long_keeps_its_beginning() -> None:
    store = capped(100)
    store.put(chunk(9), bytes(25))
    store.put(chunk(1), bytes(25))
    for n in (2, 3, 4):
        store.put(chunk(n, parent=n - 1), bytes(25))
    assert there(store) == {1, 2, 3, 4}
    with pytest.raises(StoreError, match="it comes before this chunk") as caught:
        store.put(chunk(5, parent=4), bytes(25))
    assert caught.value.errno == errno.ENOSPC
    assert there(store) == {1, 2, 3, 4}
    store.put(chunk(8), bytes(25))
    assert there(store) == {1, 2, 3, 8}


def test_a_batch_for_which_there_is_no_room_as_a_whole_is_stored_as_far_as_there_is() -> None:
    store = capped(100)
    store.put(chunk(1), bytes(25))
    store.put(chunk(2, parent=1), bytes(25))
    outcomes = store.put_batch([(chunk(n, parent=n - 1), bytes(25)) for n in (3, 4, 5)])
    assert [getattr(one, "errno", one) for one in outcomes] == [25, 25, errno.ENOSPC]
    assert there(store) == {1, 2, 3, 4}


def test_an_eviction_while_the_counters_are_read_is_no_negative_delete() -> None:
    class Evicting(MemoryStore):
        def stats(self) -> StoreStats:
            found = super().stats()
            store.relieve(watermark=0.01, ratio=1)
            return found

    store = capped(100, Evicting())
    store.put(key(1), bytes(25))
    assert store.stats().deletes == 0
    assert store.evicted == 1


# What does not fit


def test_a_frame_beyond_the_capacity_is_refused_and_nothing_goes() -> None:
    store = capped(100)
    store.put(key(1), bytes(100))
    with pytest.raises(StoreError, match=r"101 bytes does not fit into the 100 .* raise the capacity") as caught:
        store.put(key(2), bytes(101))
    assert caught.value.errno == errno.EFBIG
    assert there(store) == {1}
    outcomes = store.put_batch([(key(3), bytes(10)), (key(2), bytes(101)), (key(4), bytes(10))])
    assert [getattr(one, "errno", one) for one in outcomes] == [10, errno.EFBIG, 10]
    assert there(store) == {3, 4}


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        capped(capacity)


def test_a_batch_is_one_batch_of_the_inner_store() -> None:
    batches: list[int] = []

    class Counting(MemoryStore):
        def put_batch(self, items: Any) -> Any:
            batches.append(len(items))
            return super().put_batch(items)

    store = capped(100, Counting())
    assert store.put_batch([(key(n), bytes(30)) for n in range(3)]) == [30] * 3
    assert store.put_batch([(key(n), bytes(30)) for n in range(5)]) == [30] * 5, "more than fits: one by one"
    assert store.put_batch([(key(7), b"a"), (key(7), b"bc")]) == [1, 2]
    assert batches == [3, 1, 1, 1, 1, 1, 1, 1]
    assert store.get(key(7)) == b"bc"
    assert store.put_batch([(key(n), b"") for n in range(101, 220)]) == [0] * 119, "empty frames count as one byte"
    assert len(there(store)) == 100


def test_what_means_nothing_is_refused_before_anything_is_written() -> None:
    store = capped(10)
    store.put(key(1), bytes(10))
    with pytest.raises(ConfigError, match="contiguous"):
        store.put(key(2), memoryview(bytes(10))[::2])
    with pytest.raises(ConfigError, match="follow itself"):
        store.put(chunk(2, parent=2), b"x")
    with pytest.raises(ConfigError, match="32 bytes"):
        store.put(Chunk(b"short"), b"x")
    with pytest.raises(ConfigError, match="32 bytes"):
        store.put(Chunk(key(2).digest, parent=b"short"), b"x")
    assert there(store) == {1}


# The inner store's truth


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), FsStore], ids=["memory", "fs"])
def test_a_frame_that_goes_while_it_is_read_stays_readable(tmp_path: Path, make: Callable[..., Any]) -> None:
    store = capped(100, make(tmp_path / "kv"))
    store.put(key(1), b"a" * 60)
    view = store.get(key(1))
    store.put(key(2), b"b" * 60)
    assert there(store) == {2}
    assert view == b"a" * 60


def test_two_stores_over_one_directory(tmp_path: Path) -> None:
    first, second = capped(100, FsStore(tmp_path)), capped(100, FsStore(tmp_path))
    for n in (1, 2, 3):
        first.put(key(n), bytes(30))
    assert second.used_bytes == 0, "its books lag"
    assert second.get(key(1)) == bytes(30)
    assert second.used_bytes == 30
    second.delete(key(2))
    assert first.get(key(2)) is None
    assert first.used_bytes == 60
    second.put(key(1), bytes(50))
    assert len(first.get(key(1))) == 50
    assert first.used_bytes == 80
    second.refresh()
    assert there(first) == there(second) == {1, 3}
    second.put(key(4), bytes(100))
    assert there(second) == {4}
    first.put(key(5), bytes(100))
    assert first.evicted == 0, "another one deleted what was to go"
    assert {name.digest[0] for name in first.list()} == {4, 5}, "together they may have more than one alone"
    first.refresh()
    assert len(there(first)) == 1


def test_a_miss_into_the_callers_memory_tells_gone_from_too_long() -> None:
    store = capped(100)
    for n in (1, 2, 3):
        store.put(key(n), bytes(30))
    store.inner.delete(key(2))
    small = memoryview(bytearray(10))
    assert store.get_batch_into([(key(n), small) for n in (1, 2)]) == [None, None]
    assert there(store) == {1, 3}
    assert store.get_into(key(1), small) is None
    store.inner.delete(key(3))
    assert store.get_into(key(3), small) is None
    assert there(store) == {1}


def test_a_full_medium_gives_one_round_of_eviction_and_one_more_try() -> None:
    store = capped(1000, MemoryStore(capacity_bytes=100))
    for n in range(4):
        store.put(key(n), bytes(25))
    assert store.put(key(4), bytes(20)) == 20
    assert there(store) == {2, 3, 4}, "twice as much as is missing goes"
    with pytest.raises(StoreError) as caught:
        store.put(key(5), bytes(101))
    assert caught.value.errno == errno.ENOSPC
    assert store.put_batch([(key(n), bytes(30)) for n in (6, 7)]) == [30, 30]
    assert store.get(key(6)) == store.get(key(7)) == bytes(30)


def test_other_failures_evict_nothing() -> None:
    store = capped(100, Wrapped(refuse(errno.EIO, 9)))
    store.put(key(1), bytes(50))
    with pytest.raises(StoreError) as caught:
        store.put(key(9), bytes(10))
    assert caught.value.errno == errno.EIO
    assert there(store) == {1}
    outcomes = store.put_batch([(key(2), bytes(10)), (key(9), bytes(10)), (key(3), bytes(10))])
    assert [getattr(one, "errno", one) for one in outcomes] == [10, errno.EIO, 10]
    assert there(store) == {1, 2, 3}
    assert store.put(key(4), bytes(30)) == 30, "the room that was set aside for 9 is free again"
    assert there(store) == {1, 2, 3, 4}


def test_what_cannot_be_deleted_stays_and_the_put_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    store = capped(100, Wrapped(before_delete=refuse(errno.EACCES)))
    store.put(key(1), bytes(60))
    with pytest.raises(StoreError, match="no room for 60 bytes") as caught:
        store.put(key(2), bytes(60))
    assert caught.value.errno == errno.ENOSPC
    assert "cannot evict 0101" in caplog.text
    assert there(store) == {1}
    assert store.put(key(1), bytes(90)) == 90, "the frame itself can be replaced"


def test_an_interrupted_call_leaves_the_books_right() -> None:
    def interrupt(name: Any, *frame: object) -> None:
        if name.digest[0] == 9:
            raise KeyboardInterrupt

    store = capped(100, Wrapped(interrupt, interrupt))
    with pytest.raises(KeyboardInterrupt):
        store.put(key(9), bytes(100))
    store.put(key(1), bytes(100))
    assert there(store) == {1}
    store.inner._before_put = None
    store.put(key(9), bytes(60))
    with pytest.raises(KeyboardInterrupt):
        store.put(key(2), bytes(100))
    assert there(store) == {9}
    store.inner._before_delete = None
    store.put(key(2), bytes(100))
    assert there(store) == {2}
