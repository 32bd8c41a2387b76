"""The books of a capped store: which frames there are, in what order they go, and which are about to change.

No bytes are moved here. A key is *busy* while one call alone may change it, which is the call that writes or deletes
it, or the one that evicts it: so a frame is never deleted under a writer who has just been told that it is stored.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import Key, StoreKey
from kvcore.tiers.policies import EvictionPolicy
from kvcore.tiers.stores.fs_scan import Scanned

__all__ = ["Asked", "Books", "Entry", "Leaving", "entry_of"]

_BURST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a frame.

    Parameters
    ----------
    nbytes : int
        Its bytes, at least 1: an empty frame has a price too.
    parent : StoreKey, optional
        The chunk that it follows.
    tenant : str
    """

    nbytes: int
    parent: StoreKey | None = None
    tenant: str = ""


Leaving: TypeAlias = "list[tuple[StoreKey, Entry]]"
"""Frames that are out of the books and busy, to be deleted and then given to `Books.gone`, in this order."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A frame that is about to be read, and what the books had before.

    Parameters
    ----------
    key : StoreKey
    told : Entry
        What the caller's key tells, without a size.
    before : Entry, optional
    """

    key: StoreKey
    told: Entry
    before: Entry | None


def entry_of(key: Key, nbytes: int) -> tuple[StoreKey, Entry]:
    """Return a key as stores have it, and what its attributes ``parent`` and ``tenant`` tell, if it has them.

    Raises
    ------
    ConfigError
        The key's digests, or those of its parent, have not 32 bytes, or it is its own parent.
    """
    name = StoreKey.of(key)
    parent = getattr(key, "parent", None)
    if parent is not None:
        parent = StoreKey(name.namespace, parent) if isinstance(parent, bytes) else StoreKey.of(parent)
    if parent == name:
        raise ConfigError(f"chunk {name.digest.hex()} cannot follow itself")
    return name, Entry(max(nbytes, 1), parent, str(getattr(key, "tenant", "")))


class Books:
    """Entries under an eviction policy. Thread-safe.

    Parameters
    ----------
    policy : EvictionPolicy
        Without chunks; it belongs to the books.
    clock : callable
        Seconds that do not run backwards.

    Attributes
    ----------
    evicted, evicted_bytes : int
        Frames that were deleted to make room, and their bytes.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._entries: dict[StoreKey, Entry] = {}
        self._busy: set[StoreKey] = set()
        self._granted: set[StoreKey] = set()  # of the busy ones, those that have room and are being written
        self._pending = 0  # bytes that have room, and are not in the books yet
        self._leaving = 0  # bytes that are out of the books, and not deleted yet
        self.evicted = self.evicted_bytes = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that there are for frames."""
        return self._policy.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return self._policy.used_bytes

    @contextlib.contextmanager
    def alone(self, names: Collection[StoreKey]) -> Iterator[None]:
        """Be the only one who changes these keys; they are not evicted meanwhile."""
        with self._changed:
            while not self._busy.isdisjoint(names):
                self._changed.wait()
            self._busy.update(names)
            for name in names:
                self._policy.pin(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.difference_update(names)
                self._granted.difference_update(names)
                for name in names:
                    self._policy.unpin(name)
                self._changed.notify_all()

    def reserve(
        self, names: Sequence[StoreKey], parents: Sequence[StoreKey], nbytes: int
    ) -> tuple[int | None, Leaving]:
        """Ask for room for frames that take the place of what these keys have; the caller is `alone` with them.

        Waits while other calls write so much that it does not fit beside. What the frames follow, `parents`, does not
        go for them: without it they would be of no use, and a chain that is too long would eat its own beginning.

        Returns
        -------
        tuple of (int or None, list)
            The bytes that are now set aside, until `settle`. Or None and what is to be deleted before asking again,
            which is nothing where no more can be evicted.
        """
        with self._changed:
            while True:
                leaving = self._take_out(self._policy.expire(now=self._clock()))
                more = max(0, nbytes - sum(self._entries[name].nbytes for name in names if name in self._entries))
                missing = self.used_bytes + self._pending + more - self.capacity_bytes
                if missing > 0:
                    leaving += self.evict(missing, parents)
                if leaving:
                    return None, leaving
                if missing + self._leaving <= 0:
                    self._pending += more
                    self._granted.update(names)
                    return more, []
                if missing > 0 and not self._granted:
                    return None, []
                # Until others have deleted what they evict, or have written what may go then: neither of them waits.
                self._changed.wait()

    def settle(self, reserved: int, stored: Iterable[tuple[StoreKey, Entry]]) -> None:
        """Give room back, and enter the frames that were stored in it; the caller is still `alone` with them."""
        with self._changed:
            self._pending -= reserved
            for name, entry in stored:
                pinned = name in self._policy
                self._enter(name, entry)
                if not pinned:
                    self._policy.pin(name)  # as `alone` would have, had it been there
            self._changed.notify_all()

    def forget(self, name: StoreKey) -> None:
        """Take out a frame that is gone."""
        with self._changed:
            self._policy.remove(name)
            self._entries.pop(name, None)

    def ask(self, key: Key) -> Asked:
        """Note what the books have, before a frame is read. Raises as `entry_of` does."""
        name, told = entry_of(key, 0)
        return Asked(name, told, self._entries.get(name))

    def was_read(self, asked: Asked, nbytes: int | None) -> None:
        """Note that a frame was read, with its size, or that it is not there; what has changed since stands."""
        name, told, before = asked.key, asked.told, asked.before
        with self._changed:
            if name in self._busy or self._entries.get(name) is not before:
                return
            if nbytes is None:
                self.forget(name)
                return
            known = before or Entry(1)
            entry = Entry(max(nbytes, 1), told.parent or known.parent, told.tenant or known.tenant)
            if entry != before:
                self._enter(name, entry)
            self._policy.touch(name, now=self._clock())

    def expired(self) -> Leaving:
        """Take out what has outlived its time."""
        with self._changed:
            return self._take_out(self._policy.expire(now=self._clock()))

    def surplus(self) -> Leaving:
        """Take out what is beyond the capacity: others may have stored it, or the books have just learned of it."""
        with self._changed:
            over = self.used_bytes + self._pending - self.capacity_bytes
            return self.evict(over) if over > 0 else []

    def evict(self, nbytes: int, parents: Sequence[StoreKey] = ()) -> Leaving:
        """Take out so much, or all that may go; `parents` and what is before them may not."""
        with self._changed:
            held = [name for name in parents if self._policy.pin(name)]
            victims = self._policy.evict(nbytes, now=self._clock())
            for name in held:
                self._policy.unpin(name)
            return self._take_out(victims)

    def relieve(self, watermark: float, ratio: float) -> Leaving:
        """Take out a share: see `EvictionPolicy.relieve`."""
        with self._changed:
            victims = self._policy.relieve(now=self._clock(), watermark=watermark, ratio=ratio)
            return self._take_out(victims)

    def gone(self, leaving: Sequence[tuple[StoreKey, Entry]], outcomes: Sequence[bool | StoreError]) -> int:
        """End an eviction; return the bytes that are free. What could not be deleted is in the books again."""
        freed = 0
        with self._changed:
            for (name, entry), outcome in zip(leaving, outcomes, strict=True):
                self._leaving -= entry.nbytes
                if isinstance(outcome, StoreError):
                    self._enter(name, entry)
                    continue
                freed += entry.nbytes
                self.evicted += outcome
                self.evicted_bytes += entry.nbytes * outcome
            self._busy.difference_update(name for name, _ in leaving)
            self._changed.notify_all()
        return freed

    def snapshot(self) -> dict[StoreKey, Entry]:
        """Return the entries, before the store is listed."""
        with self._changed:
            return dict(self._entries)

    def refresh(self, before: dict[StoreKey, Entry], found: Iterable[Scanned]) -> None:
        """Bring the books in line with what a listing found; what has changed since `before` stands.

        New entries go in the order of their times, and of those written within a minute the one that is farthest into
        its sequence first: whose parent is whose, a listing does not tell.
        """
        listed = sorted(found, key=lambda one: (one.mtime // _BURST_SECONDS, -one.position))
        there = {one.key for one in listed}
        with self._changed:
            for name, entry in before.items():
                if name not in there and self._entries.get(name) is entry and name not in self._busy:
                    self.forget(name)
            for one in listed:
                known = before.get(one.key)
                if one.key in self._busy or self._entries.get(one.key) is not known:
                    continue
                entry = replace(known or Entry(1), nbytes=max(one.nbytes, 1))
                if entry != known:
                    self._enter(one.key, entry)

    def _enter(self, name: StoreKey, entry: Entry) -> None:
        self._policy.insert(name, entry.nbytes, parent=entry.parent, tenant=entry.tenant, now=self._clock())
        self._entries[name] = entry

    def _take_out(self, victims: Iterable[StoreKey]) -> Leaving:
        leaving = [(name, self._entries.pop(name)) for name in victims]
        self._leaving += sum(entry.nbytes for _, entry in leaving)
        self._busy.update(name for name, _ in leaving)
        return leaving
