"""A store in this process's memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Ledger,
    StoreKey,
    StoreStat,
    StoreStats,
    check_reason,
    flat_bytes,
)

__all__ = ["MemoryStore"]


class MemoryStore:
    """Frames in a dict. It evicts nothing: a full store refuses.

    Parameters
    ----------
    capacity_bytes : int, optional
        Most bytes of frames it may hold; a `put` beyond raises `StoreError` (ENOSPC) with the figures.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes must not be negative, got {capacity_bytes}")
        self._capacity = capacity_bytes
        self._frames: dict[StoreKey, bytes] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._ledger = Ledger("memory:")

    def put(self, key: Key, frame: Buffer) -> int:
        """Store a copy of the frame (of `bytes`, the object itself). See `Store.put`."""
        name = self._name(key)
        data = frame if type(frame) is bytes else bytes(flat_bytes(frame))
        with self._lock:
            used = self._used - len(self._frames.get(name, b"")) + len(data)
            if self._capacity is not None and used > self._capacity:
                raise StoreError(
                    errno.ENOSPC,
                    f"a frame of {len(data)} bytes does not fit: {self._used} of {self._capacity} bytes are "
                    "used; delete frames or give the store a larger capacity_bytes",
                )
            self._frames[name] = data
            self._used = used
        self._ledger.add(puts=1, put_bytes=len(data))
        return len(data)

    def get(self, key: Key) -> memoryview | None:
        """Return the stored frame, without a copy. See `Store.get`."""
        data = self._frames.get(self._name(key))
        if data is None:
            self._ledger.add(misses=1)
            return None
        self._ledger.add(hits=1, hit_bytes=len(data))
        return memoryview(data)

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        data = self._frames.get(self._name(key))
        return None if data is None else StoreStat(len(data))

    def exists(self, key: Key) -> bool:
        """See `Store.exists`."""
        return self._name(key) in self._frames

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        found = self._drop(self._name(key))
        self._ledger.add(deletes=found)
        return found

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. The keys are those of the moment of the call."""
        self._ledger.require_open()
        with self._lock:
            names = tuple(self._frames)
        return (name for name in names if namespace is None or name.namespace == namespace)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Drop the frame: memory is too dear to keep bad ones. See `Store.quarantine`."""
        check_reason(reason)
        found = self._drop(self._name(key))
        self._ledger.add(quarantined=found)
        return found

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._ledger.stats()

    def close(self) -> None:
        """Drop all frames. See `Store.close`."""
        self._ledger.close()
        with self._lock:
            self._frames.clear()
            self._used = 0

    def _name(self, key: Key) -> StoreKey:
        self._ledger.require_open()
        return StoreKey.of(key)

    def _drop(self, name: StoreKey) -> bool:
        with self._lock:
            data = self._frames.pop(name, None)
            self._used -= len(data or b"")
        return data is not None
