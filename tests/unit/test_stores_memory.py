"""What only the memory store does: its capacity."""

from __future__ import annotations

import errno

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import MemoryStore, StoreKey


def key(n: int) -> StoreKey:
    return StoreKey(bytes(32), bytes([n]) * 32)


def test_a_full_store_refuses_and_stays_as_it_was() -> None:
    store = MemoryStore(capacity_bytes=10)
    store.put(key(1), bytes(6))
    with pytest.raises(StoreError, match="5 bytes does not fit: 6 of 10") as caught:
        store.put(key(2), bytes(5))
    assert caught.value.errno == errno.ENOSPC
    assert list(store.list()) == [key(1)]
    store.put(key(2), bytes(4))
    with pytest.raises(StoreError):
        store.put(key(2), bytes(5))
    assert store.get(key(2)) == bytes(4)


def test_replacing_and_removing_give_the_space_back() -> None:
    store = MemoryStore(capacity_bytes=10)
    for _ in range(3):
        store.put(key(1), bytes(10))
    store.delete(key(1))
    store.put(key(2), bytes(10))
    store.quarantine(key(2), "crc")
    store.put(key(3), bytes(10))
    assert store.get(key(3)) == bytes(10)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        MemoryStore(capacity_bytes=-1)
