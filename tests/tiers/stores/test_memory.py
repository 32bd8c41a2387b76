"""What is special about memory: its capacity, and that frames of `bytes` are not copied."""

from __future__ import annotations

import errno

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import MemoryStore, StoreKey, open_store


def key(n):
    return StoreKey(bytes(32), bytes([n]) * 32)


def test_a_full_store_refuses_and_keeps_what_it_has():
    with MemoryStore(capacity_bytes=10) as store:
        store.put(key(1), b"123456")
        with pytest.raises(StoreError, match=r"5 bytes does not fit: 6 of 10") as caught:
            store.put(key(2), b"12345")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(StoreError, match="does not fit"):
            store.put(key(1), bytes(11))
        assert store.get(key(1)) == b"123456"
        assert store.put(key(1), bytes(10)) == 10  # the frame that it replaces makes room
        assert store.delete(key(1))
        assert store.put(key(2), bytes(10)) == 10
        assert store.quarantine(key(2), "crc")
        assert store.put(key(3), bytes(10)) == 10


def test_one_frame_that_does_not_fit_does_not_keep_the_others_out():
    with MemoryStore(capacity_bytes=10) as store:
        first, second, third = store.put_batch([(key(1), bytes(4)), (key(2), bytes(11)), (key(3), bytes(6))])
        assert (first, third) == (4, 6)
        assert isinstance(second, StoreError)
        assert second.errno == errno.ENOSPC


def test_a_frame_of_bytes_is_not_copied():
    frame = b"frame"
    with MemoryStore() as store:
        store.put(key(1), frame)
        view = store.get(key(1))
        assert view is not None
        assert view.obj is frame


def test_a_frame_that_grew_since_it_was_looked_up_is_torn():
    with MemoryStore() as store:
        store.put(key(1), b"longer than it was")
        assert store.get_into(key(1), memoryview(bytearray(4))) is None
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.torn) == (0, 1, 1)


def test_capacity_in_the_uri():
    with open_store("memory:?capacity=1KiB") as store:
        assert store.put(key(1), bytes(1024)) == 1024
        with pytest.raises(StoreError, match="does not fit"):
            store.put(key(2), b"1")
    for uri, match in (
        ("memory:?capacity=big", "not a size"),
        ("memory:?size=1", "no option 'size'; there are capacity"),
    ):
        with pytest.raises(ConfigError, match=match):
            open_store(uri)
    with pytest.raises(ConfigError, match="negative"):
        MemoryStore(-1)
