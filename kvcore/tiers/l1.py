"""L1, the host cache: who may write and who may read which object of the arena, and until when.

An object goes ``none -> staging -> ready <-> read-locked(n)``, and back to ``none``. Each reservation is a lease with a
time to live. A lease that has outlived it holds until somebody else needs the object, or `L1Cache.expire` is called;
then it is void, and its owner is told so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from kvcore.errors import ConfigError, LeaseError
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.tiers.arena import HostArena

__all__ = ["READ_TTL", "WRITE_TTL", "L1Cache", "L1Event", "L1Stats", "ReadLease", "WriteLease"]

WRITE_TTL = 600.0
READ_TTL = 300.0

K = TypeVar("K", bound=Hashable)
State = Literal["none", "staging", "ready", "read-locked"]
EventKind = Literal["reserved", "ready", "read", "finished", "touched", "kept", "removed"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteLease(Generic[K]):
    """The right to fill an object that nobody else sees.

    Parameters
    ----------
    key
    memory : MemoryObj
        To be written. It belongs to the cache, which frees it.
    generation : int
        That of the object; another reservation of the key has another.
    """

    key: K
    memory: MemoryObj
    generation: int


@dataclass(frozen=True, slots=True)
class ReadLease(Generic[K]):
    """The right to read an object, which stays as it is meanwhile.

    Parameters
    ----------
    key
    memory : MemoryObj
        To be read. It belongs to the cache, which frees it.
    generation : int
        That of the object.
    number : int
        That of the lease: each is finished once.
    """

    key: K
    memory: MemoryObj
    generation: int
    number: int


@dataclass(frozen=True, slots=True)
class L1Event(Generic[K]):
    """What happened to some objects.

    Parameters
    ----------
    kind : str
        ``"reserved"``, ``"ready"`` (written, and visible), ``"read"`` (a read was reserved), ``"finished"`` (a read has
        ended, or expired), ``"touched"``, ``"kept"`` (named as victims, but locked) or ``"removed"`` (also of objects
        that never became ready, and instead of ``"finished"`` for their reads).
    objects : mapping of key to int
        Their sizes in bytes, as the arena counts them.
    """

    kind: EventKind
    objects: Mapping[K, int]


@dataclass(frozen=True, slots=True)
class L1Stats:
    """How many objects are in which state, and their bytes in the arena.

    Parameters
    ----------
    staging, ready, locked : int
        Objects being written; ready, with and without readers; of these, with readers.
    nbytes : int
        Bytes of all of these.
    detached_bytes : int
        Bytes of objects that are no longer in the cache, and wait for the end of somebody's lease.
    hits, misses : int
        Reads that were reserved, and that found nothing.
    expired : int
        Leases that outlived their time, and became void.
    """

    staging: int
    ready: int
    locked: int
    nbytes: int
    detached_bytes: int
    hits: int
    misses: int
    expired: int


@dataclass(slots=True, eq=False)
class _Entry(Generic[K]):
    key: K
    memory: MemoryObj
    nbytes: int
    generation: int
    temporary: bool
    deadline: float
    """Until when it may be written."""
    staging: bool = True
    attached: bool = True
    """Whether the key leads to it."""
    readers: dict[int, float] = field(default_factory=dict)
    """Deadlines by the number of the lease."""


class L1Cache(Generic[K]):
    """Objects in a host arena, by key.

    Parameters
    ----------
    arena : HostArena
        Where they lie; others may use it too.
    victims : callable, optional
        From a number of bytes to keys in the order in which they should go, as eviction policies give them. Called
        outside of the lock, like listeners.
    write_ttl, read_ttl : float
        Seconds that a reservation holds.
    clock : callable
        Seconds, never backwards.

    Raises
    ------
    ConfigError
        A time to live is not above 0.

    Notes
    -----
    Thread-safe. The memory of an expired write reservation is kept for one more `write_ttl` before it serves somebody
    else, as its owner may be slow, not dead, and could still write into it.
    """

    def __init__(
        self,
        arena: HostArena,
        *,
        victims: Callable[[int], Iterable[K]] | None = None,
        write_ttl: float = WRITE_TTL,
        read_ttl: float = READ_TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (write_ttl > 0 and read_ttl > 0):
            raise ConfigError(f"a time to live is above 0 s, got {write_ttl=}, {read_ttl=}")
        self.arena = arena
        self._victims = victims
        self._write_ttl = write_ttl
        self._read_ttl = read_ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[K, _Entry[K]] = {}
        self._detached: dict[int, _Entry[K]] = {}  # by generation
        self._generation = 0
        self._next_end = float("inf")
        """Before then no lease outlives its time: `expire` need not look at any."""
        self._hits = self._misses = self._expired = 0
        self._listeners: list[Callable[[L1Event[K]], None]] = []
        self._events: deque[L1Event[K]] = deque()
        self._delivering = threading.Lock()

    # --- writing

    def reserve_write(
        self, plans: Mapping[K, MemoryPlan], *, temporary: bool = False, timeout: float = 0.0
    ) -> dict[K, WriteLease[K]]:
        """Reserve objects that are to be written.

        Parameters
        ----------
        plans : mapping of key to MemoryPlan
        temporary : bool
            They vanish when their last reader has finished.
        timeout : float
            Seconds to wait for room in the arena.

        Returns
        -------
        dict of key to WriteLease
            Keys that are there already, or that somebody else is writing, are left out.

        Raises
        ------
        OutOfMemoryError
            The arena has no room for all of them; none is reserved then.
        """
        with self._lock:
            free = [key for key in plans if self._reservable(key)]
        # Outside of the lock: the arena may come back for memory, through `reclaim`.
        memory = self.arena.allocate_batch([plans[key] for key in free], timeout=timeout)
        leases: dict[K, WriteLease[K]] = {}
        with self._lock:
            for key, obj in zip(free, memory, strict=True):
                if not self._reservable(key):  # somebody was faster
                    obj.free()
                    continue
                old = self._entries.get(key)
                if old is not None:
                    self._detach(old)
                self._generation += 1
                deadline = self._ends(self._write_ttl)
                self._entries[key] = _Entry(key, obj, plans[key].size, self._generation, temporary, deadline)
                leases[key] = WriteLease(key, obj, self._generation)
            self._emit("reserved", {key: plans[key].size for key in leases})
        self._deliver()
        return leases

    def finish_write(self, lease: WriteLease[K]) -> None:
        """Make an object visible to readers.

        Raises
        ------
        LeaseError
            The reservation is void: it was finished or cancelled, cleared, or it expired and was handed over.
        """
        try:
            with self._lock:
                self._finish_write(lease)
        finally:
            self._deliver()

    def finish_write_and_reserve_read(self, lease: WriteLease[K]) -> ReadLease[K]:
        """Make an object visible, and lock it for reading in the same step; raises as `finish_write` does."""
        try:
            with self._lock:
                entry = self._finish_write(lease)
                self._emit("read", {entry.key: entry.nbytes})
                return self._reserve_read(entry)
        finally:
            self._deliver()

    def cancel_write(self, lease: WriteLease[K]) -> None:
        """Give a reservation up, as after an error: the key can be reserved again at once.

        Raises
        ------
        LeaseError
            The reservation is void.
        """
        try:
            with self._lock:
                self._detach(self._writing(lease), done=True)
        finally:
            self._deliver()

    # --- reading

    def reserve_read(self, keys: Iterable[K]) -> dict[K, ReadLease[K]]:
        """Lock objects for reading.

        Returns
        -------
        dict of key to ReadLease
            Keys that are not ready are left out: they are misses.
        """
        leases: dict[K, ReadLease[K]] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                entry = self._entries.get(key)
                if entry is None or entry.staging:
                    self._misses += 1
                else:
                    self._hits += 1
                    leases[key] = self._reserve_read(entry)
            self._emit("read", {key: self._entries[key].nbytes for key in leases})
        self._deliver()
        return leases

    def finish_read(self, lease: ReadLease[K]) -> None:
        """End a read. The last one of a temporary object removes it.

        Raises
        ------
        LeaseError
            The lease is void: it was finished before, or it expired and the object was given up. **What was read
            under it may be somebody else's bytes, and must not be used.**
        """
        try:
            with self._lock:
                entry = self._find(lease.key, lease.generation)
                if entry is None or lease.number not in entry.readers:
                    raise LeaseError(
                        f"read lease {lease.number} of {lease.key!r} is void: it was finished before, or held for more "
                        f"than {self._read_ttl:g} s and given up; what was read under it must not be used"
                    )
                self._end_read(entry, lease.number)
                if entry.attached and entry.temporary and not entry.readers:
                    self._detach(entry)
                elif not entry.attached:
                    self._release_if_over(entry)
        finally:
            self._deliver()

    # --- the rest

    def __contains__(self, key: K) -> bool:
        """Whether an object is ready. Changes nothing, and counts as nothing."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not entry.staging

    def __len__(self) -> int:
        with self._lock:
            return sum(not entry.staging for entry in self._entries.values())

    def __iter__(self) -> Iterator[K]:
        """The keys that are ready, as they are now."""
        with self._lock:
            return iter([key for key, entry in self._entries.items() if not entry.staging])

    def state(self, key: K) -> State:
        """Return what state an object is in; ``"read-locked"`` while anybody reads it. Changes nothing."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return "none"
            return "staging" if entry.staging else "read-locked" if entry.readers else "ready"

    def nbytes(self, key: K) -> int:
        """Return the bytes that an object takes in the arena; 0 if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            return 0 if entry is None else entry.nbytes

    def touch(self, keys: Iterable[K]) -> None:
        """Tell the listeners that objects are wanted, without reading them."""
        with self._lock:
            entries = [self._entries[key] for key in dict.fromkeys(keys) if key in self._entries]
            self._emit("touched", {entry.key: entry.nbytes for entry in entries if not entry.staging})
        self._deliver()

    def delete(self, keys: Iterable[K]) -> set[K]:
        """Remove objects that nobody is writing or reading.

        Returns
        -------
        set of keys
            Those removed. Locked ones stay; expired leases lock nothing.
        """
        with self._lock:
            found = [self._entries[key] for key in dict.fromkeys(keys) if key in self._entries]
            gone = [entry for entry in found if self._deletable(entry)]
            for entry in gone:
                self._detach(entry)
        self._deliver()
        return {entry.key for entry in gone}

    def clear(self) -> int:
        """Remove everything; return the number of objects.

        Reads that are under way end undisturbed, and writes in vain: their memory is freed when they finish.
        """
        with self._lock:
            gone = list(self._entries.values())
            for entry in gone:
                self._detach(entry)
        self._deliver()
        return len(gone)

    def expire(self) -> int:
        """End all leases that have outlived their time; return the bytes freed.

        Write reservations that were not finished in time go, temporary objects whose last reader ran out of time, and
        the memory that was kept for such leases.
        """
        with self._lock:
            freed, now = 0, self._clock()
            if now < self._next_end:
                return 0
            for entry in list(self._entries.values()):
                read = bool(entry.readers)
                for number in [number for number, deadline in entry.readers.items() if deadline <= now]:
                    self._end_read(entry, number)
                    self._expired += 1
                if (entry.deadline <= now) if entry.staging else (entry.temporary and read and not entry.readers):
                    freed += self._detach(entry)
            for entry in list(self._detached.values()):
                freed += self._release_if_over(entry)
            ends = [end for entry in self._entries.values() for end in entry.readers.values()]
            ends += [entry.deadline for entry in self._entries.values() if entry.staging]
            ends += [self._kept_until(entry) for entry in self._detached.values()]
            self._next_end = min(ends, default=float("inf"))
        self._deliver()
        return freed

    def reclaim(self, nbytes: int) -> int:
        """Free memory: what has expired, then the policy's victims until there is enough.

        Made for `HostArena.reclaim`. Returns the bytes freed, which may be fewer.
        """
        freed = self.expire()
        if freed < nbytes and self._victims is not None:
            for key in tuple(self._victims(nbytes - freed)):
                with self._lock:
                    entry = self._entries.get(key)
                    if entry is not None and self._deletable(entry):
                        freed += self._detach(entry)
                    elif entry is not None and not entry.staging:
                        self._emit("kept", {key: entry.nbytes})
                if freed >= nbytes:
                    break
        self._deliver()
        return freed

    def stats(self) -> L1Stats:
        """Count."""
        with self._lock:
            entries = self._entries.values()
            return L1Stats(
                staging=sum(entry.staging for entry in entries),
                ready=sum(not entry.staging for entry in entries),
                locked=sum(bool(entry.readers) for entry in entries),
                nbytes=sum(entry.nbytes for entry in entries),
                detached_bytes=sum(entry.nbytes for entry in self._detached.values()),
                hits=self._hits,
                misses=self._misses,
                expired=self._expired,
            )

    def add_listener(self, listener: Callable[[L1Event[K]], None]) -> None:
        """Call something for each event.

        Events come one at a time, in the order of the changes, outside of the lock, on a thread that is in the cache:
        listeners may use it. Their exceptions are logged, and change nothing.
        """
        with self._lock:
            self._listeners.append(listener)

    # --- under the lock

    def _reservable(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is None or (entry.staging and entry.deadline <= self._clock())

    def _deletable(self, entry: _Entry[K]) -> bool:
        now = self._clock()
        if entry.staging:
            return entry.deadline <= now
        return all(deadline <= now for deadline in entry.readers.values())

    def _find(self, key: K, generation: int) -> _Entry[K] | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.generation == generation else self._detached.get(generation)

    def _writing(self, lease: WriteLease[K]) -> _Entry[K]:
        entry = self._find(lease.key, lease.generation)
        if entry is not None and entry.staging and entry.attached:
            return entry
        if entry is not None and entry.staging:  # its owner is done with the memory: nobody writes into it any more
            self._release(entry)
        raise LeaseError(
            f"write reservation {lease.generation} of {lease.key!r} is void: it was finished, cancelled or cleared, or "
            f"expired after {self._write_ttl:g} s and was given to somebody else; what was written under it is dropped"
        )

    def _finish_write(self, lease: WriteLease[K]) -> _Entry[K]:
        entry = self._writing(lease)
        entry.staging = False
        self._emit("ready", {entry.key: entry.nbytes})
        return entry

    def _reserve_read(self, entry: _Entry[K]) -> ReadLease[K]:
        self._generation += 1  # leases of readers are numbered from the same counter
        entry.readers[self._generation] = self._ends(self._read_ttl)
        return ReadLease(entry.key, entry.memory, entry.generation, self._generation)

    def _end_read(self, entry: _Entry[K], number: int) -> None:
        del entry.readers[number]
        if entry.attached:
            self._emit("finished", {entry.key: entry.nbytes})

    def _detach(self, entry: _Entry[K], *, done: bool = False) -> int:
        """Take an object out of the cache; return the bytes freed, none if somebody may still be using its memory."""
        entry.attached = False
        del self._entries[entry.key]
        self._detached[entry.generation] = entry
        if entry.staging and not done:
            self._expired += entry.deadline <= self._clock()
        self._emit("removed", {entry.key: entry.nbytes})
        return self._release(entry) if done else self._release_if_over(entry)

    def _release_if_over(self, entry: _Entry[K]) -> int:
        """Free a detached object once nobody writes or reads it any more, or ought to."""
        if self._kept_until(entry) > self._clock():
            return 0
        self._expired += len(entry.readers)
        return self._release(entry)

    def _kept_until(self, entry: _Entry[K]) -> float:
        """Return when nobody uses the memory of a detached object any more, or ought to."""
        if entry.staging:
            return entry.deadline + self._write_ttl
        return max(entry.readers.values(), default=float("-inf"))

    def _ends(self, ttl: float) -> float:
        end = self._clock() + ttl
        self._next_end = min(self._next_end, end)
        return end

    def _release(self, entry: _Entry[K]) -> int:
        del self._detached[entry.generation]
        try:
            entry.memory.free()
        except LeaseError:
            _log.exception("the memory of %r was freed by somebody else than its cache", entry.key)
            return 0
        return entry.nbytes

    def _emit(self, kind: EventKind, objects: Mapping[K, int]) -> None:
        if objects and self._listeners:
            self._events.append(L1Event(kind, objects))

    # --- outside of the lock

    def _deliver(self) -> None:
        """Hand out events, unless somebody is at it: then they hand out ours too, after theirs."""
        while self._events and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    for listener in tuple(self._listeners):
                        try:
                            listener(event)
                        except Exception:  # noqa: BLE001  # theirs, whatever it is: the state is ours
                            _log.exception("a listener failed at %r", event)
            finally:
                self._delivering.release()
