"""Stores keep frames. `open_store` opens one by its URI; docs/stores.md says which to choose."""

from __future__ import annotations

from kvcore.tiers.stores.contract import (
    Outage,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    StoreUnavailableError,
    StoreUsage,
)
from kvcore.tiers.stores.fs import FsStore
from kvcore.tiers.stores.memory import MemoryStore
from kvcore.tiers.stores.registry import ENTRY_POINT_GROUP, open_store, register_store, store_schemes

__all__ = [
    "ENTRY_POINT_GROUP",
    "FsStore",
    "MemoryStore",
    "Outage",
    "Store",
    "StoreKey",
    "StoreStat",
    "StoreStats",
    "StoreUnavailableError",
    "StoreUsage",
    "open_store",
    "register_store",
    "store_schemes",
]
