"""What tests of outages need: time that passes when told, probes that run at once, a store that fails when told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.tiers.stores import MemoryStore, StoreKey
from kvcore.tiers.stores.fault import FaultStore
from kvcore.tiers.stores.guarded import GuardedStore


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Probes:
    """Runs probes at once, or keeps them until they are let go."""

    def __init__(self, *, held: bool = False) -> None:
        self.held, self.count = held, 0
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, probe: Callable[[], None]) -> None:
        self.count += 1
        if self.held:
            self.waiting.append(probe)
        else:
            probe()


class Told:
    """Notes what a guarded store says of outages."""

    def __init__(self) -> None:
        self.down: list[str] = []
        self.up: list[float] = []


def guarded(inner: Any = None, **options: Any) -> tuple[GuardedStore, FaultStore, Clock, Told]:
    """Return a guarded store over one that fails when told, its clock, and what it says."""
    store = FaultStore(MemoryStore()) if inner is None else inner
    clock, told = Clock(), Told()
    options = {"spawn": Probes(), "label": "remote", **options}
    made = GuardedStore(
        lambda: store, "memory:", clock=clock, on_down=told.down.append, on_up=told.up.append, **options
    )
    return made, store, clock, told


def key(n: int) -> StoreKey:
    return StoreKey(b"n" * 32, n.to_bytes(32, "little"))


def lines(caplog: Any) -> list[str]:
    """The lines of the log about outages."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if " is down: " in line or " is back " in line]
