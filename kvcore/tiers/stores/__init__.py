"""Stores keep frames. `open_store` opens one by its URI; docs/stores.md says which to choose."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvcore.errors import ConfigError
from kvcore.tiers.stores.contract import Store, StoreKey, StoreStat, StoreStats
from kvcore.tiers.stores.fs import FsStore
from kvcore.tiers.stores.memory import MemoryStore

__all__ = ["FsStore", "MemoryStore", "Store", "StoreKey", "StoreStat", "StoreStats", "open_store"]


def _open_memory(rest: str) -> Store:
    if rest:
        raise ConfigError(f"a memory store has no path: write 'memory:', not 'memory:{rest}'")
    return MemoryStore()


def _open_fs(rest: str) -> Store:
    if not rest:
        raise ConfigError("a file system store needs a directory, for example fs:/var/cache/kvcore")
    return FsStore(rest)


_SCHEMES: dict[str, Callable[[str], Store]] = {"fs": _open_fs, "memory": _open_memory}


def open_store(uri: str) -> Store:
    """Open a store.

    Parameters
    ----------
    uri : str
        ``"memory:"``, or ``"fs:"`` and a directory, absolute or relative to the working directory.

    Raises
    ------
    ConfigError
        The URI names no kind of store.
    StoreError
        The store cannot be opened.
    """
    scheme, colon, rest = uri.partition(":")
    if colon and scheme in _SCHEMES:
        return _SCHEMES[scheme](rest)
    forms = "memory: and fs:DIRECTORY"
    if not colon:
        raise ConfigError(f"{uri!r} is not the URI of a store ({forms}); for a directory write 'fs:{uri}'")
    near = difflib.get_close_matches(scheme.lower(), _SCHEMES, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown kind of store {scheme!r}; {hint}Known are {forms}")
