"""A store in this process's memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import numpy as np

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Ledger,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    StoreUsage,
    check_reason,
    flat_bytes,
)
from kvcore.tiers.stores.options import read_size, split_options

__all__ = ["MemoryStore", "open_memory"]


class MemoryStore(Store):
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
        self._frames: dict[StoreKey, bytes | memoryview] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._ledger = Ledger("memory:")

    @property
    def name(self) -> str:
        """See `Store.name`."""
        return self._ledger.name

    def put(self, key: Key, frame: Buffer) -> int:
        """Store a copy of the frame (of `bytes`, the object itself). See `Store.put`."""
        name = self._name(key)
        # NumPy asks for huge pages, of which a large frame takes a few: new memory at half the cost of that of `bytes`.
        data = frame if type(frame) is bytes else np.array(flat_bytes(frame), np.uint8).data.toreadonly()
        with self._lock:
            self._ledger.require_open()  # it may have been closed since, and would keep the frame
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

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """See `Store.get_into`."""
        data = self._frames.get(self._name(key))
        if data is None or len(data) > len(out):
            self._ledger.add(misses=1, torn=data is not None)
            return None
        out[: len(data)] = data
        self._ledger.add(hits=1, hit_bytes=len(data))
        return len(data)

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        data = self._frames.get(self._name(key))
        return None if data is None else StoreStat(len(data))

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

    def usage(self) -> StoreUsage:
        """See `Store.usage`."""
        with self._lock:
            return StoreUsage(len(self._frames), self._used, self._capacity)

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


def open_memory(rest: str) -> MemoryStore:
    """Open a store by what follows ``memory:`` in its URI.

    Parameters
    ----------
    rest : str
        Nothing, or ``"?capacity=1GiB"``.

    Raises
    ------
    ConfigError
        It is anything else.
    """
    path, options = split_options(rest, ("capacity",), scheme="memory")
    if path:
        raise ConfigError(f"a memory store has no path: write 'memory:', not 'memory:{path}'")
    return MemoryStore(read_size(options["capacity"], "capacity") if options else None)
