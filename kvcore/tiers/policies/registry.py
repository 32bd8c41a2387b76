"""Policies by name: those of kvcore, those a program registers, and those that packages bring."""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from kvcore.errors import ConfigError
from kvcore.tiers.policies.arc import Arc
from kvcore.tiers.policies.contract import EvictionPolicy
from kvcore.tiers.policies.ranked import Fifo, Lfu, Lru, Mru, Ttl

__all__ = ["ENTRY_POINT_GROUP", "create_policy", "policy_names", "register_policy"]

ENTRY_POINT_GROUP = "kvcore.policies"
"""Group of the entry points by which a package brings policies: the name, and the factory."""

_FACTORIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "mru": Mru,
    "arc": Arc,
    "ttl": Ttl,
}


def register_policy(name: str, factory: Callable[..., EvictionPolicy]) -> None:
    """Make a policy known in this process.

    Parameters
    ----------
    name : str
    factory : callable
        Called with the capacity in bytes, and with the options of `create_policy` as keyword arguments.

    Raises
    ------
    ConfigError
        There is a policy of that name.
    """
    names = policy_names()
    if name in names:
        raise ConfigError(f"there is a policy {name!r} already; choose a name other than {', '.join(names)}")
    _FACTORIES[name] = factory


def policy_names() -> tuple[str, ...]:
    """Return the names that `create_policy` knows, of installed packages too. Imports none of those."""
    return tuple(dict.fromkeys([*_FACTORIES, *sorted(point.name for point in _points())]))


def create_policy(name: str, capacity_bytes: int, **options: Any) -> EvictionPolicy:
    """Return a new policy, without chunks.

    Parameters
    ----------
    name : str
        ``"lru"``, ``"lfu"``, ``"fifo"``, ``"mru"``, ``"arc"``, ``"ttl"``, a name that was registered, or that of an
        entry point. A name of kvcore or a registered one comes before an entry point of that name.
    capacity_bytes : int
        Bytes that the tier holds.
    **options
        Of the policy: ``ttl`` takes ``ttl_s`` and ``renew``.

    Raises
    ------
    ConfigError
        There is no such policy, or two packages bring it, or it cannot be loaded, or an option means nothing to it.
    """
    factory = _FACTORIES.get(name) or _load(name)
    try:
        policy = factory(capacity_bytes, **options)
    except TypeError as error:
        raise ConfigError(f"policy {name}: {error}") from error
    return policy


def _points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load(name: str) -> Callable[..., EvictionPolicy]:
    found = {point.value: point for point in _points() if point.name == name}
    if not found:
        names = policy_names()
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no policy {name!r}; {hint}there are {', '.join(names)}")
    if len(found) > 1:
        raise ConfigError(
            f"several packages bring a policy {name!r}: {', '.join(sorted(found))}; uninstall all but one"
        )
    value, point = found.popitem()
    try:
        factory: Callable[..., EvictionPolicy] = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {name} cannot be loaded from {value}: {error}") from error
    return factory
