"""A tier behind the host tier, and what is known of frames that are there and of no use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.keys import Key, StoreKey
from kvcore.tiers.serde_store import SerdeStore

__all__ = ["StoreTier", "Unusable"]


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
    """

    name: str
    store: SerdeStore
    read_only: bool = False
    promote: bool = True


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
