"""Policies that order chunks by a rank: LRU, LFU, FIFO, MRU, and a time to live."""

from __future__ import annotations

import abc
import heapq
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvcore.errors import ConfigError
from kvcore.tiers.policies.contract import EvictionPolicy

__all__ = ["Entry", "Fifo", "Lfu", "Lru", "Mru", "RankedPolicy", "Ttl"]

_SLACK = 64  # stale items a heap may have beyond as many as there are chunks, before it is rebuilt


@dataclass(slots=True, eq=False)
class Entry:
    """What a policy knows of a resident chunk.

    Parameters
    ----------
    key : hashable
    nbytes : int
    parent : hashable or None
    tenant : str
    born, used : int
        When it was inserted, and last inserted or touched, in events that the policy has seen.
    born_at, used_at : float
        The same in seconds.
    uses : int
        1 at its insertion, and 1 more for each touch.
    rank : tuple of float
        Set by `RankedPolicy.place`: the smallest goes first.
    queue : int
        Set by `RankedPolicy.place`, for policies with more than one order.
    pins : int
    stamp : int
        Number of its valid place in the heaps; places with other numbers are stale.
    """

    key: Hashable
    nbytes: int
    parent: Hashable | None
    tenant: str
    born: int
    used: int
    born_at: float
    used_at: float
    uses: int = 1
    rank: tuple[float, ...] = ()
    queue: int = 0
    pins: int = 0
    stamp: int = 0


_Heap: TypeAlias = "list[tuple[tuple[float, ...], int, Entry]]"


class RankedPolicy(EvictionPolicy):
    """A policy that gives each chunk a rank when it is inserted and when it is touched.

    Only chunks that may go, the ends of their chains that nobody pins, are in the heaps; when a chunk goes, the one
    before it comes in. An entry's older places in a heap are not searched for but recognised by their stamp, and swept
    out when they are half of it. Each call costs O(log n) for each chunk that it names or changes, amortised.

    A policy of your own overrides `place`, and perhaps `choose` and `left`; with several queues also `queues`.
    """

    queues = 1

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._entries: dict[Hashable, Entry] = {}
        self._followers: dict[Hashable, int] = {}  # resident chunks behind a key; the key itself may be gone
        self._tenants: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._heaps: dict[tuple[int, str | None], _Heap] = {}  # of all tenants, and of each
        self._used_bytes = 0
        self._events = 0
        self._stamp = 0

    @abc.abstractmethod
    def place(self, entry: Entry, now: float) -> None:
        """Set the rank of a chunk that was inserted (``uses`` is 1) or touched; and its queue, if there are several."""

    def choose(self, tenant: str | None) -> Entry | None:
        """Return the chunk that goes next, or None; `tenant` as in `evict`."""
        return self.first(0, tenant)

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """Take note that a chunk is resident no longer: evicted, or removed."""

    def first(self, queue: int, tenant: str | None) -> Entry | None:
        """Return the chunk of a queue that has the smallest rank among those that may go, or None."""
        heap = self._heaps.get((queue, tenant), [])
        while heap and heap[0][2].stamp != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    @property
    def used_bytes(self) -> int:
        """Bytes of all resident chunks."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def tenants(self) -> Mapping[str, int]:  # noqa: D102
        return self._tenants

    def insert(  # noqa: D102
        self, key: Hashable, nbytes: int, *, parent: Hashable | None = None, tenant: str = "", now: float
    ) -> None:
        if nbytes < 1:
            raise ConfigError(f"chunk {key!r} cannot have {nbytes} bytes: the least is 1")
        if parent is not None and parent == key:
            raise ConfigError(f"chunk {key!r} cannot follow itself")
        pins = 0
        if key in self._entries:
            pins = self._entries[key].pins
            self._drop(self._entries[key], evicted=False)
        self._events += 1
        entry = Entry(key, nbytes, parent, tenant, self._events, self._events, now, now, pins=pins)
        self._entries[key] = entry
        self._used_bytes += nbytes
        self._tenants[tenant] = self._tenants.get(tenant, 0) + nbytes
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        if parent is not None:
            self._followers[parent] = self._followers.get(parent, 0) + 1
            if parent in self._entries:
                self._offer(self._entries[parent])
        self.place(entry, now)
        self._offer(entry)

    def touch(self, key: Hashable, *, now: float) -> bool:  # noqa: D102
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._events += 1
        entry.used, entry.used_at, entry.uses = self._events, now, entry.uses + 1
        self.place(entry, now)
        self._offer(entry)
        return True

    def remove(self, key: Hashable) -> bool:  # noqa: D102
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._drop(entry, evicted=False)
        return True

    def pin(self, key: Hashable) -> bool:  # noqa: D102
        return self._pin(key, 1)

    def unpin(self, key: Hashable) -> bool:  # noqa: D102
        return self._pin(key, -1)

    def evict(self, nbytes: int, *, now: float, tenant: str | None = None) -> list[Any]:  # noqa: D102
        evicted, freed = [], 0
        while freed < nbytes and (entry := self.choose(tenant)) is not None:
            freed += entry.nbytes
            evicted.append(entry.key)
            self._drop(entry, evicted=True)
        return evicted

    def expire(self, *, now: float) -> list[Any]:  # noqa: D102
        return []

    def _pin(self, key: Hashable, change: int) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.pins + change < 0:
            return False
        entry.pins += change
        self._offer(entry)
        return True

    def _offer(self, entry: Entry) -> None:
        """Give an entry its place in the heaps if it may go; make the places that it had stale in any case."""
        self._stamp += 1
        entry.stamp = self._stamp
        if entry.pins or entry.key in self._followers:
            return
        for tenant, count in ((None, len(self._entries)), (entry.tenant, self._counts[entry.tenant])):
            heap = self._heaps.setdefault((entry.queue, tenant), [])
            heapq.heappush(heap, (entry.rank, entry.stamp, entry))  # stamps differ: entries are never compared
            if len(heap) > 2 * count + _SLACK:
                heap[:] = [item for item in heap if item[1] == item[2].stamp]
                heapq.heapify(heap)

    def _drop(self, entry: Entry, *, evicted: bool) -> None:
        del self._entries[entry.key]
        entry.stamp = 0
        self._used_bytes -= entry.nbytes
        self._tenants[entry.tenant] -= entry.nbytes
        self._counts[entry.tenant] -= 1
        if not self._counts[entry.tenant]:
            del self._tenants[entry.tenant], self._counts[entry.tenant]
            for queue in range(self.queues):
                self._heaps.pop((queue, entry.tenant), None)
        if entry.parent is not None:
            self._followers[entry.parent] -= 1
            if not self._followers[entry.parent]:
                del self._followers[entry.parent]
                if entry.parent in self._entries:
                    self._offer(self._entries[entry.parent])
        self.left(entry, evicted=evicted)


class Lru(RankedPolicy):
    """The least recently used goes first."""

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        entry.rank = (entry.used,)


class Mru(RankedPolicy):
    """The most recently used goes first: best where everything is read in turn, and is more than fits."""

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        entry.rank = (-entry.used,)


class Fifo(RankedPolicy):
    """What was inserted first goes first, used or not."""

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        entry.rank = (entry.born,)


class Lfu(RankedPolicy):
    """The least frequently used while resident goes first; of equals, the least recently used."""

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        entry.rank = (entry.uses, entry.used)


class Ttl(RankedPolicy):
    """What expires first goes first; `expire` names what has expired.

    Parameters
    ----------
    capacity_bytes : int
    ttl_s : float
        Seconds that a chunk lives.
    renew : bool
        Whether a touch lets it live for as long again.

    Raises
    ------
    ConfigError
        `ttl_s` is not a finite number above 0.
    """

    def __init__(self, capacity_bytes: int, ttl_s: float = 600.0, *, renew: bool = True) -> None:
        super().__init__(capacity_bytes)
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise ConfigError(f"ttl_s={ttl_s!r} is no time to live: give seconds above 0")
        self._ttl_s, self._renew = ttl_s, renew

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        since, order = (entry.used_at, entry.used) if self._renew else (entry.born_at, entry.born)
        entry.rank = (since + self._ttl_s, order)

    def expire(self, *, now: float) -> list[Any]:  # noqa: D102
        expired = []
        while (entry := self.choose(None)) is not None and entry.rank[0] <= now:
            expired.append(entry.key)
            self._drop(entry, evicted=True)
        return expired
