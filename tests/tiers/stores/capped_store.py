"""A capped store over one in memory, its keys, and what it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcore.keys import StoreKey
from kvcore.tiers.stores import MemoryStore
from kvcore.tiers.stores.capped import CappedStore

NAMESPACE = b"n" * 32


@dataclass(frozen=True)
class Chunk:
    """A key as an engine has it: with the chunk before, and whose it is."""

    digest: bytes
    parent: Any = None
    tenant: str = ""
    namespace: bytes = NAMESPACE


def key(n: int) -> StoreKey:
    return StoreKey(NAMESPACE, bytes([n]) * 32)


def chunk(n: int, parent: int | None = None, tenant: str = "") -> Chunk:
    return Chunk(key(n).digest, None if parent is None else key(parent), tenant)


def capped(capacity: int, inner: Any = None, policy: str = "lru", **options: Any) -> CappedStore:
    return CappedStore(MemoryStore() if inner is None else inner, capacity, policy, check=None, **options)


def there(store: CappedStore) -> set[int]:
    """The numbers of the keys that the inner store has; the books say the same."""
    keys = list(store.inner.list())
    assert store.used_bytes == sum(max(store.inner.stat(name).nbytes, 1) for name in keys)
    assert store.used_bytes <= store.capacity_bytes
    return {name.digest[0] for name in keys}


class Wrapped(MemoryStore):
    """A store in memory that calls a function before each put, and one before each delete."""

    def __init__(self, before_put: Callable[..., Any] | None = None, before_delete: Callable[..., Any] | None = None):
        super().__init__()
        self._before_put, self._before_delete = before_put, before_delete

    def put(self, key: Any, frame: Any) -> int:
        if self._before_put:
            self._before_put(key, frame)
        return super().put(key, frame)

    def delete(self, key: Any) -> bool:
        if self._before_delete:
            self._before_delete(key)
        return super().delete(key)
