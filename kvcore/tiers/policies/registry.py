"""Policies by name: those of kvcore, those a program registers, and those that packages bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.errors import ConfigError
from kvcore.registry import Registry
from kvcore.tiers.policies.arc import Arc
from kvcore.tiers.policies.contract import EvictionPolicy
from kvcore.tiers.policies.ranked import Fifo, Lfu, Lru, Mru, Ttl

__all__ = ["ENTRY_POINT_GROUP", "create_policy", "policy_names", "register_policy"]

ENTRY_POINT_GROUP = "kvcore.policies"
"""Group of the entry points by which a package brings policies: the name, and the factory."""

_POLICIES: Registry[Callable[..., EvictionPolicy]] = Registry(
    "policy",
    ENTRY_POINT_GROUP,
    {"lru": Lru, "lfu": Lfu, "fifo": Fifo, "mru": Mru, "arc": Arc, "ttl": Ttl},
)


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
    _POLICIES.register(name, factory)


def policy_names() -> tuple[str, ...]:
    """Return the names that `create_policy` knows, of installed packages too. Imports none of those."""
    return _POLICIES.names()


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
    factory = _POLICIES.find(name)
    try:
        policy = factory(capacity_bytes, **options)
    except TypeError as error:
        raise ConfigError(f"policy {name}: {error}") from error
    return policy
