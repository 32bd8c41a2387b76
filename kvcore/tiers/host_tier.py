"""`HostTier`: the host arena, its cache L1, and the eviction policy that makes room in it, put together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from kvcore.errors import LeaseError
from kvcore.keys import Key, StoreKey, TempKey
from kvcore.memory import MemoryPlan
from kvcore.tiers.arena import HostArena
from kvcore.tiers.l1 import READ_TTL, WRITE_TTL, L1Cache, L1Event, L1Stats, ReadLease, WriteLease
from kvcore.tiers.policies import EvictionPolicy, create_policy

__all__ = ["HostKey", "HostTier", "host_key"]

HostKey: TypeAlias = StoreKey | TempKey
"""What objects are filed under in host memory; a `TempKey` for those that nobody finds."""


class HostTier:
    """Memory objects in host memory, the most useful of them.

    Parameters
    ----------
    arena : HostArena
        Its `reclaim` is set: where there is no room, the policy's victims go.
    policy : str or EvictionPolicy
        By name, over the arena's capacity; or one that nobody else uses.
    watermark, ratio : float
        Shares of the capacity and of what is used: `relieve` evicts above the one as much as the other says.
    write_ttl, read_ttl : float
        Seconds that a lease holds. See `L1Cache`.
    clock : callable
        Seconds, never backwards.

    Notes
    -----
    Thread-safe. Keys are anything with two digests. `parent` and `tenant` of a `ChunkKey` tell the policy which chunk
    comes before it, and whose quota it counts on.
    """

    def __init__(
        self,
        arena: HostArena,
        *,
        policy: str | EvictionPolicy = "lru",
        watermark: float = 0.8,
        ratio: float = 0.2,
        write_ttl: float = WRITE_TTL,
        read_ttl: float = READ_TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self._policy = create_policy(policy, arena.capacity_bytes) if isinstance(policy, str) else policy
        self._watermark, self._ratio, self._clock = watermark, ratio, clock
        self._books = threading.Lock()  # of the policy, which has no lock of its own, and of the lineage
        self._lineage: dict[HostKey, tuple[StoreKey | None, str]] = {}
        self._reads: dict[HostKey, int] = {}  # under way, by the events: pins of an object that the policy takes back
        self._changed = threading.Condition()
        self._changes = 0
        self._policy.relieve(now=clock(), watermark=watermark, ratio=ratio)  # refuses shares that make no sense
        self._l1: L1Cache[HostKey] = L1Cache(
            arena, victims=self._victims, write_ttl=write_ttl, read_ttl=read_ttl, clock=clock
        )
        self._l1.add_listener(self._note)
        arena.reclaim = self._reclaim
        self.on_evict: Callable[[int, int], None] | None = None
        """Called with how many objects, and bytes, have left to make room."""
        self._condemned: set[HostKey] = set()

    def reserve_write(
        self, plans: Mapping[Key, MemoryPlan], *, temporary: bool = False, timeout: float = 0.0
    ) -> dict[HostKey, WriteLease[HostKey]]:
        """Reserve objects that are to be written. See `L1Cache.reserve_write`."""
        leases = self._l1.reserve_write(
            {host_key(key): plan for key, plan in plans.items()}, temporary=temporary, timeout=timeout
        )
        with self._books:
            for key in plans:
                if host_key(key) in leases:  # not ready before we return: the policy has not seen it yet
                    parent = getattr(key, "parent", None)
                    before = None if parent is None else StoreKey(bytes(key.namespace), parent)
                    self._lineage[host_key(key)] = before, str(getattr(key, "tenant", ""))
        return leases

    def finish_write(self, lease: WriteLease[HostKey]) -> None:
        """Make an object visible. See `L1Cache.finish_write`."""
        self._l1.finish_write(lease)

    def finish_write_and_reserve_read(self, lease: WriteLease[HostKey]) -> ReadLease[HostKey]:
        """Make an object visible, and lock it for reading. See `L1Cache.finish_write_and_reserve_read`."""
        return self._l1.finish_write_and_reserve_read(lease)

    def cancel_write(self, lease: WriteLease[HostKey]) -> None:
        """Give a reservation up; one that is void already is none."""
        with contextlib.suppress(LeaseError):
            self._l1.cancel_write(lease)

    def reserve_read(self, keys: Iterable[Key]) -> dict[HostKey, ReadLease[HostKey]]:
        """Lock objects for reading. See `L1Cache.reserve_read`."""
        return self._l1.reserve_read(map(host_key, keys))

    def finish_read(self, lease: ReadLease[HostKey]) -> None:
        """End a read. See `L1Cache.finish_read`."""
        self._l1.finish_read(lease)

    def __contains__(self, key: Key) -> bool:
        """Whether an object is ready."""
        return host_key(key) in self._l1

    def __len__(self) -> int:
        return len(self._l1)

    def __iter__(self) -> Iterator[HostKey]:
        """The keys of the objects that are ready, as they are now."""
        return iter(self._l1)

    def nbytes(self, key: Key) -> int:
        """Return the bytes that an object takes here, ready or still being written; 0 if there is none."""
        return self._l1.nbytes(host_key(key))

    def touch(self, keys: Iterable[Key]) -> None:
        """Tell the policy that objects are wanted."""
        self._l1.touch(map(host_key, keys))

    def delete(self, keys: Iterable[Key]) -> set[HostKey]:
        """Remove objects that nobody is using; return which."""
        return self._l1.delete(map(host_key, keys))

    def clear(self) -> int:
        """Remove everything; return the number of objects."""
        return self._l1.clear()

    def wait_ready(self, keys: Iterable[Key], timeout: float) -> None:
        """Wait until none of these objects is being written, `timeout` seconds at most."""
        names, until = [host_key(key) for key in keys], self._clock() + timeout
        while True:
            with self._changed:
                seen = self._changes
            if all(self._l1.state(name) != "staging" for name in names):
                return
            with self._changed:
                left = until - self._clock()
                if left <= 0:
                    return
                if self._changes == seen:
                    self._changed.wait(min(left, 1.0))

    def relieve(self) -> int:
        """Reclaim ahead of demand: what has expired, and above the watermark a share of the rest.

        Returns
        -------
        int
            Bytes that went.
        """
        freed = self._l1.expire()
        now, before = self._clock(), self.arena.live_bytes
        with self._books:
            names = self._policy.expire(now=now)
            names += self._policy.relieve(now=now, watermark=self._watermark, ratio=self._ratio)
            self._condemned.update(names)
        gone = self._l1.delete(names)
        self._keep(name for name in names if name not in gone)
        return freed + max(before - self.arena.live_bytes, 0)

    def stats(self) -> L1Stats:
        """Count. See `L1Cache.stats`."""
        return self._l1.stats()

    def add_listener(self, listener: Callable[[L1Event[HostKey]], None]) -> None:
        """Call something for each event. See `L1Cache.add_listener`."""
        self._l1.add_listener(listener)

    def _reclaim(self, nbytes: int) -> int:
        # Victims that somebody has just begun to read are kept. The policy knows by now, and names others.
        return self._l1.reclaim(nbytes) or self._l1.reclaim(nbytes)

    def _victims(self, nbytes: int) -> list[HostKey]:
        with self._books:
            names: list[HostKey] = self._policy.evict(nbytes, now=self._clock())
            self._condemned.update(names)
        return names

    def _keep(self, names: Iterable[HostKey]) -> None:
        """Take back victims that are locked."""
        with self._books:
            for name in names:
                self._condemned.discard(name)
                nbytes = self._l1.nbytes(name)
                if nbytes:
                    self._take_back(name, nbytes)

    def _take_back(self, name: HostKey, nbytes: int) -> None:
        if name not in self._policy:
            self._insert(name, nbytes)
            for _ in range(self._reads.get(name, 0)):
                self._policy.pin(name)

    def _insert(self, name: HostKey, nbytes: int) -> None:
        parent, tenant = self._lineage.get(name, (None, ""))
        self._policy.insert(name, nbytes, parent=parent, tenant=tenant, now=self._clock())

    def _note(self, event: L1Event[HostKey]) -> None:
        """Keep the policy's books, event by event in the order of the changes."""
        now = self._clock()
        evicted = evicted_bytes = 0
        with self._books:
            for name, nbytes in event.objects.items():
                if event.kind in ("kept", "removed") and name in self._condemned:
                    self._condemned.discard(name)
                    evicted += event.kind == "removed"
                    evicted_bytes += nbytes if event.kind == "removed" else 0
                if event.kind == "ready":
                    self._insert(name, nbytes)
                elif event.kind == "kept":
                    self._take_back(name, nbytes)
                elif event.kind == "read":
                    self._reads[name] = self._reads.get(name, 0) + 1
                    self._policy.touch(name, now=now)
                    self._policy.pin(name)
                elif event.kind == "finished":
                    self._reads[name] -= 1
                    if not self._reads[name]:
                        del self._reads[name]
                    self._policy.unpin(name)
                elif event.kind == "touched":
                    self._policy.touch(name, now=now)
                elif event.kind == "removed":
                    self._reads.pop(name, None)
                    self._policy.remove(name)
                    if self._l1.state(name) == "none":  # it may have been reserved anew meanwhile
                        self._lineage.pop(name, None)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted, evicted_bytes)
        if event.kind in ("ready", "removed"):
            with self._changed:
                self._changes += 1
                self._changed.notify_all()


def host_key(key: Key) -> HostKey:
    """Return what a key is called in host memory."""
    return key if isinstance(key, TempKey) else StoreKey.of(key)
