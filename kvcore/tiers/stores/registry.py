"""Stores by the scheme of their URI: those of kvcore, those a program registers, and those that packages bring."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from kvcore.errors import ConfigError
from kvcore.registry import Registry
from kvcore.tiers.stores.contract import Store

__all__ = ["ENTRY_POINT_GROUP", "open_store", "register_store", "store_schemes"]

ENTRY_POINT_GROUP = "kvcore.stores"
"""Group of the entry points by which a package brings stores: the scheme, and the factory."""


def _with_scheme(target: str, scheme: str) -> Callable[[str], Store]:
    """Return a factory for a store of which several schemes are kinds: it is given the URI as a whole."""

    def open_it(rest: str) -> Store:
        module, _, function = target.partition(":")
        store: Store = getattr(importlib.import_module(module), function)(f"{scheme}:{rest}")
        return store

    return open_it


_RESP = "kvcore.tiers.stores.resp:open_resp"
_STORES: Registry[Callable[[str], Store]] = Registry(
    "kind of store",
    ENTRY_POINT_GROUP,
    {
        "memory": "kvcore.tiers.stores.memory:open_memory",
        "fs": "kvcore.tiers.stores.fs:open_fs",
        "resp": _with_scheme(_RESP, "resp"),
        "resps": _with_scheme(_RESP, "resps"),
        "resp+unix": _with_scheme(_RESP, "resp+unix"),
        "s3": _with_scheme("kvcore.tiers.stores.s3:open_s3", "s3"),
        "capped": "kvcore.tiers.stores.capped:open_capped",
        "fault": "kvcore.tiers.stores.fault:open_fault",
    },
)


def register_store(scheme: str, factory: Callable[[str], Store]) -> None:
    """Make a kind of store known in this process.

    Parameters
    ----------
    scheme : str
        What its URIs begin with, before the colon.
    factory : callable
        Called with what follows the colon; returns the open store, or raises `ConfigError` for what means nothing and
        `StoreError` for what cannot be opened.

    Raises
    ------
    ConfigError
        The scheme is taken, or has a colon in it.
    """
    if not scheme or ":" in scheme:
        raise ConfigError(f"a scheme is what stands before the colon of a URI, such as 'fs'; got {scheme!r}")
    _STORES.register(scheme, factory)


def store_schemes() -> tuple[str, ...]:
    """Return the schemes that `open_store` knows, of installed packages too. Imports none of those."""
    return _STORES.names()


def open_store(uri: str) -> Store:
    """Open a store.

    Parameters
    ----------
    uri : str
        A scheme, a colon, and what the store makes of the rest: ``"memory:"``, ``"fs:/var/cache/kvcore"``,
        ``"resp://host:6379"``, ``"s3://bucket/prefix"``. docs/stores.md lists them.

    Raises
    ------
    ConfigError
        The URI names no kind of store or means nothing to it, or the package that the store needs is missing.
    StoreError
        The store cannot be opened.
    """
    scheme, colon, rest = uri.partition(":")
    if not colon:
        forms = ", ".join(f"{known}:" for known in store_schemes())
        raise ConfigError(
            f"{uri!r} is not the URI of a store: it begins with none of {forms}; for a directory write 'fs:{uri}'"
        )
    return _STORES.find(scheme)(rest)
