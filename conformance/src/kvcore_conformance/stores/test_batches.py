"""Batches: an outcome for each key, in the order of the keys."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import Store, StoreStat, StoreStats
from kvcore_conformance.stores.space import Space, content


@pytest.mark.parametrize("count", [1, 2, 17, 150])
def test_a_batch_gives_for_each_key_what_the_call_gives(space: Space, store: Store, count: int) -> None:
    keys = space.keys(count)
    frames = [content(n * 37 % 3000, n) for n in range(count)]
    sizes = [len(frame) for frame in frames]
    assert store.put_batch(list(zip(keys, frames, strict=True))) == sizes
    assert space.listed() == sorted(keys)
    assert store.get_batch(keys) == frames
    assert store.stat_batch(keys) == [StoreStat(nbytes) for nbytes in sizes]
    total = sum(sizes)
    assert store.stats() == StoreStats(puts=count, hits=count, put_bytes=total, hit_bytes=total)
    assert store.delete_batch(keys) == [True] * count
    assert store.delete_batch(keys) == [False] * count
    assert store.get_batch(keys) == [None] * count
    assert store.stat_batch(keys) == [None] * count
    assert store.stats() == StoreStats(
        puts=count, hits=count, misses=count, deletes=count, put_bytes=total, hit_bytes=total
    )
    assert space.listed() == []


def test_an_empty_batch_does_nothing(store: Store) -> None:
    assert store.put_batch([]) == []
    assert store.get_batch([]) == []
    assert store.stat_batch([]) == []
    assert store.delete_batch([]) == []
    assert store.stats() == StoreStats()


def test_hits_and_misses_stand_where_their_keys_do(space: Space, store: Store) -> None:
    keys = space.keys(20)
    there = {key: key.digest for key in keys[::3]}
    store.put_batch(list(there.items()))
    assert store.get_batch(keys) == [there.get(key) for key in keys]
    assert store.stat_batch(keys[::-1]) == [StoreStat(32) if key in there else None for key in keys[::-1]]
    assert store.delete_batch(keys) == [key in there for key in keys]


def test_a_key_may_stand_in_a_batch_twice(space: Space, store: Store) -> None:
    key, other = space.keys(2)
    assert store.put_batch([(key, b"first"), (other, b"other"), (key, b"the last")]) == [5, 5, 8]
    assert store.get_batch([key, other, key]) == [b"the last", b"other", b"the last"]
    assert store.stat_batch([key, key]) == [StoreStat(8)] * 2
    assert store.delete_batch([key, key]) == [True, False]


def test_batches_cross_namespaces(space: Space, store: Store) -> None:
    keys = [space.key(n, namespace=n % 3) for n in range(9)]
    store.put_batch([(key, key.digest) for key in keys])
    assert store.get_batch(keys) == [key.digest for key in keys]
    assert sorted(store.list(space.namespace(1))) == sorted(keys[1::3])


def test_a_batch_of_large_frames(space: Space, store: Store) -> None:
    keys = space.keys(8)
    frames = [content(1 << 20, n) for n in range(len(keys))]
    assert store.put_batch(list(zip(keys, frames, strict=True))) == [1 << 20] * len(keys)
    assert store.get_batch(keys) == frames


def test_a_batch_takes_any_sequence(space: Space, store: Store) -> None:
    keys = space.keys(3)
    assert store.put_batch(tuple((key, b"frame") for key in keys)) == [5, 5, 5]
    assert store.get_batch(tuple(keys)) == [b"frame"] * 3
    assert isinstance(store.stat_batch(tuple(keys)), list)
    assert store.delete_batch(tuple(keys)) == [True] * 3


def test_what_is_no_frame_is_refused(space: Space, store: Store) -> None:
    keys = space.keys(3)
    bad: bytes = memoryview(b"abcdef")[::2]  # type: ignore[assignment]
    with pytest.raises(ConfigError):
        store.put_batch([(keys[0], b"frame"), (keys[1], bad), (keys[2], b"frame")])
    assert store.stat_batch(keys) == [None] * 3  # refused before anything was stored


def test_a_batch_of_a_closed_store_has_the_error_for_each_key(space: Space, store: Store) -> None:
    keys = space.keys(3)
    store.close()
    for outcomes in (
        store.put_batch([(key, b"frame") for key in keys]),
        store.get_batch(keys),
        store.get_batch_into([(key, memoryview(bytearray(8))) for key in keys]),
        store.stat_batch(keys),
        store.delete_batch(keys),
    ):
        assert len(outcomes) == len(keys)
        assert all(isinstance(outcome, StoreError) for outcome in outcomes)
