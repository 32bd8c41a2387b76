"""A tier behind the host tier, what came from there, and what is known of frames that are there and of no use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.keys import Key, StoreKey
from kvcore.tiers.host_tier import HostKey, HostTier, host_key
from kvcore.tiers.l1 import L1Event
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.stores.contract import Outage

__all__ = ["Origins", "StoreTier", "Unusable"]


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A store and its serde, as one of several tiers.

    Parameters
    ----------
    name : str
        ``"disk"``, ``"remote"``: for metrics and messages.
    store : SerdeStore
    read_only : bool
        Nothing is stored here.
    promote : bool
        Frames that were found in a tier below are copied here, if that one shares this one's serde: lossy KV is never
        coded again.
    serde_name : str
        What its serde is called, for people.
    """

    name: str
    store: SerdeStore
    read_only: bool = False
    promote: bool = True
    serde_name: str = ""

    def outage(self) -> Outage | None:
        """Return why its store refuses calls, or None."""
        outage = self.store.store.outage()
        return outage if outage is not None and outage.refuses else None


class Unusable:
    """Frames that are stored and good, but that this process cannot read: sealed with a key that it does not have.

    They are misses, and stay where they are; storing their keys anew replaces them.

    Parameters
    ----------
    most : int
        How many to remember, the latest.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._names: OrderedDict[tuple[str, StoreKey], None] = OrderedDict()

    def add(self, tier: str, key: Key) -> None:
        """Note a frame."""
        with self._lock:
            self._names[tier, StoreKey.of(key)] = None
            while len(self._names) > self._most:
                self._names.popitem(last=False)

    def discard(self, tier: str, keys: Iterable[Key]) -> None:
        """Forget frames, which were replaced."""
        with self._lock:
            for key in keys:
                self._names.pop((tier, StoreKey.of(key)), None)

    def has(self, tier: str, key: Key) -> bool:
        """Whether a frame was noted."""
        return bool(self._names) and (tier, StoreKey.of(key)) in self._names


class Origins:
    """Which tier the objects in host memory came from: what was read from a frame that may have been lossy.

    Parameters
    ----------
    host : HostTier
        Its events say when an object is there and when it is gone, in the order in which that happened.
    """

    def __init__(self, host: HostTier) -> None:
        self._lock = threading.Lock()
        self._coming: dict[HostKey, str] = {}
        self._tiers: dict[HostKey, str] = {}
        host.add_listener(self._note)

    def coming(self, key: HostKey, tier: str) -> None:
        """Note that an object which is about to be made visible was read from a tier."""
        with self._lock:
            self._coming[key] = tier

    def forget(self, key: HostKey) -> None:
        """Take `coming` back."""
        with self._lock:
            self._coming.pop(key, None)

    def of(self, key: Key) -> str | None:
        """Return the tier that an object in host memory came from; None if an engine wrote it there."""
        name = host_key(key)
        with self._lock:
            # It can be read before its event is here, which another thread may be delivering.
            return self._coming.get(name) or self._tiers.get(name)

    def _note(self, event: L1Event[HostKey]) -> None:
        if event.kind not in ("ready", "removed"):
            return
        with self._lock:
            for key in event.objects:
                self._tiers.pop(key, None)
                if event.kind == "ready" and key in self._coming:
                    self._tiers[key] = self._coming.pop(key)
