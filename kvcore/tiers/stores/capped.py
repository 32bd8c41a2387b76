"""A store with a capacity: any store, and an eviction policy that says what goes when it is full.

The books are in memory. The inner store's truth wins over them: what it does not have is a miss, and what the books do
not know is entered when it is read. So several processes may share the inner store, each with books of its own.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.policies import TenantQuotas, create_policy
from kvcore.tiers.stores.capped_books import Asked, Books, Entry, Leaving, entry_of
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Outcomes,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    StoreUsage,
    flat_bytes,
    result_of,
)
from kvcore.tiers.stores.fs_scan import HeadCheck, Scanned, check_frame_head
from kvcore.tiers.stores.options import read_flag, read_size, read_time

__all__ = ["CappedStore", "open_capped"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_STAT_BATCH = 256

_log = logging.getLogger("kvcore")


class CappedStore(Store):
    """A store that holds at most so many bytes of frames, in any other store.

    Parameters
    ----------
    inner : Store
        Where the frames are. It belongs to this store, which closes it.
    capacity_bytes : int
        Most bytes of frames; at least 1. An empty frame counts as one byte.
    policy : str
        A policy's name (docs/eviction.md). A key's attribute ``parent`` (a key, or 32 bytes: a digest of the same
        namespace) says which chunk it follows, so that this one is not evicted first; its ``tenant`` whose quota it
        counts on. Keys without them have no parent, and are of tenant ``""``.
    policy_options : mapping, optional
        Of the policy: ``{"ttl_s": 600.0}``.
    quotas : mapping of str to int, optional
        Bytes by tenant: see `TenantQuotas`.
    check : callable, optional
        What an inner store that can ``scan`` looks at heads with when the books are made; None for a store of other
        bytes than frames.
    clock : callable
        Seconds that do not run backwards.

    Raises
    ------
    ConfigError
        There is no such policy, the capacity is below 1 byte, or an option means nothing.
    StoreError
        The inner store cannot be listed.

    Notes
    -----
    An eviction deletes in the inner store; views that readers have stay as they are. Where the inner store itself turns
    out to be full (ENOSPC), one round of eviction and one more try follow. Opening makes the books from what the inner
    store has: see `refresh`.
    """

    def __init__(
        self,
        inner: Store,
        capacity_bytes: int,
        policy: str = "lru",
        *,
        policy_options: Mapping[str, Any] | None = None,
        quotas: Mapping[str, int] | None = None,
        check: HeadCheck | None = check_frame_head,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chosen = create_policy(policy, capacity_bytes, **(policy_options or {}))
        self._books = Books(TenantQuotas(chosen, quotas) if quotas else chosen, clock)
        self._name = f"capped:{capacity_bytes},policy={policy}:{inner.name}"
        self._inner = inner
        self.refresh(check)

    @property
    def name(self) -> str:
        """See `Store.name`."""
        return self._name

    @property
    def inner(self) -> Store:
        """The store that has the frames."""
        return self._inner

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of frames."""
        return self._books.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames in the books."""
        return self._books.used_bytes

    @property
    def evicted(self) -> int:
        """Frames that were evicted; they are not counted as deletes."""
        return self._books.evicted

    @property
    def evicted_bytes(self) -> int:
        """Their bytes."""
        return self._books.evicted_bytes

    def put(self, key: Key, frame: Buffer) -> int:
        """Make room, then store. See `Store.put`.

        Raises
        ------
        StoreError
            EFBIG where the frame is larger than the capacity. ENOSPC where no more can be evicted, because what is left
            is what comes before this chunk, is being changed, or is not deleted by the inner store; and where the inner
            store stays full.
        """
        return result_of(self._put_one(key, frame))

    def put_batch(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int]:
        """Store as one batch of the inner store what has room together, else one by one. See `Store.put_batch`."""
        entries = [_entry(item) for item in items]
        distinct = len({name for name, _ in entries}) == len(items)
        if len(items) > 1 and distinct and sum(entry.nbytes for _, entry in entries) <= self.capacity_bytes:
            outcomes = self._put(items)
            if outcomes is not None:
                return outcomes
        return [self._put_one(key, frame) for key, frame in items]

    def get(self, key: Key) -> memoryview | None:
        """See `Store.get`."""
        asked = self._ask([key])
        found = self._inner.get(key)
        self._note(asked, [found])
        return found

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """See `Store.get_into`."""
        asked = self._ask([key])
        found = self._inner.get_into(key, out)
        self._note(asked, [found], sure=False)
        return found

    def get_batch(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """See `Store.get_batch`."""
        asked = self._ask(keys)
        found = self._inner.get_batch(keys)
        self._note(asked, found)
        return found

    def get_batch_into(self, items: Sequence[tuple[Key, memoryview]]) -> Outcomes[int | None]:
        """See `Store.get_batch_into`."""
        asked = self._ask([key for key, _ in items])
        found = self._inner.get_batch_into(items)
        self._note(asked, found, sure=False)
        return found

    def stat(self, key: Key) -> StoreStat | None:
        """Ask the inner store, and leave the books as they are. See `Store.stat`."""
        return self._inner.stat(key)

    def stat_batch(self, keys: Sequence[Key]) -> Outcomes[StoreStat | None]:
        """See `Store.stat_batch`."""
        return self._inner.stat_batch(keys)

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        name = StoreKey.of(key)
        with self._books.alone([name]):
            found = self._inner.delete(name)
            self._books.forget(name)
        return found

    def delete_batch(self, keys: Sequence[Key]) -> Outcomes[bool]:
        """See `Store.delete_batch`."""
        names = [StoreKey.of(key) for key in keys]
        with self._books.alone(set(names)):
            outcomes = self._inner.delete_batch(names)
            for name, outcome in zip(names, outcomes, strict=True):
                if not isinstance(outcome, StoreError):
                    self._books.forget(name)
        return outcomes

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`."""
        return self._inner.list(namespace)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Move a frame aside in the inner store, where it counts no longer. See `Store.quarantine`."""
        name = StoreKey.of(key)
        with self._books.alone([name]):
            found = self._inner.quarantine(name, reason)
            self._books.forget(name)
        return found

    def stats(self) -> StoreStats:
        """Return the inner store's counters, less the evictions. See `Store.stats`."""
        evicted = self.evicted  # first: one that ends meanwhile must not be taken off what it is not in
        stats = self._inner.stats()
        return replace(stats, deletes=stats.deletes - evicted)

    def usage(self) -> StoreUsage:
        """Return what the books have. See `Store.usage`."""
        return StoreUsage(len(self._books), self.used_bytes, self.capacity_bytes)

    def close(self) -> None:
        """Close the inner store. See `Store.close`."""
        self._inner.close()

    def relieve(self, watermark: float = 0.8, ratio: float = 0.2) -> int:
        """Reclaim ahead of demand, so that a `put` need not; return the bytes freed.

        What has expired goes; then, if more than the share `watermark` of the capacity is used, the share `ratio` of
        what is used. `ConfigError` where a share is not above 0 and at most 1.
        """
        return self._drop(self._books.expired()) + self._drop(self._books.relieve(watermark, ratio))

    def refresh(self, check: HeadCheck | None = None) -> None:
        """Bring the books in line with the inner store: with what others stored, replaced and deleted.

        Frames that the books did not know go as their times say, the oldest first; of those written within a minute,
        the one that is farthest into its sequence first. Whose parent is whose, a key tells when it is used.

        Parameters
        ----------
        check : callable, optional
            What an inner store that can ``scan`` looks at heads with; the names alone are believed without it.

        Raises
        ------
        StoreError
            The inner store cannot be listed; the books are as they were.
        """
        before = self._books.snapshot()
        scan = getattr(self._inner, "scan", None)
        found = [*(_listed(self._inner) if scan is None else scan(check))]
        self._books.refresh(before, found)
        self._drop(self._books.surplus())

    def _put_one(self, key: Key, frame: Buffer) -> int | StoreError:
        nbytes = _entry((key, frame))[1].nbytes
        if nbytes > self.capacity_bytes:
            return StoreError(
                errno.EFBIG,
                f"a frame of {nbytes:,} bytes does not fit into the {self.capacity_bytes:,} of {self.name} even "
                "when all else is evicted: raise the capacity above one chunk, or make chunks smaller",
            )
        outcomes = self._put([(key, frame)])
        if outcomes is None:
            return StoreError(
                errno.ENOSPC,
                f"no room for {nbytes:,} bytes in {self.name}: what is there cannot be evicted: it comes before "
                "this chunk, is about to be changed, or is not deleted by the inner store; raise the capacity",
            )
        return outcomes[0]

    def _put(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int] | None:
        """Store frames of different keys that the capacity is enough for; None if no room can be made for all."""
        entries = [_entry(item) for item in items]
        names, nbytes = [name for name, _ in entries], sum(entry.nbytes for _, entry in entries)
        with self._books.alone(names):
            reserved = self._make_room(names, _parents(entries), nbytes)
            if reserved is None:
                return None
            stored: list[tuple[StoreKey, Entry]] = []
            try:
                outcomes = self._inner_put(entries, [frame for _, frame in items])
                stored = [e for e, found in zip(entries, outcomes, strict=True) if not isinstance(found, StoreError)]
            finally:
                self._books.settle(reserved, stored)
        return outcomes

    def _make_room(self, names: Sequence[StoreKey], parents: Sequence[StoreKey], nbytes: int) -> int | None:
        """Evict until there is room; return the bytes set aside, or None where no more can be evicted."""
        while True:
            reserved, leaving = self._books.reserve(names, parents, nbytes)
            if reserved is not None or not leaving or not self._drop(leaving):
                return reserved

    def _inner_put(self, entries: Sequence[tuple[StoreKey, Entry]], frames: Sequence[Buffer]) -> Outcomes[int]:
        """Store; where the inner store turns out to be full, evict one round and try these once more."""
        items = [(name, frame) for (name, _), frame in zip(entries, frames, strict=True)]
        outcomes: Outcomes[int] = [*self._inner.put_batch(items)]
        full = [i for i, found in enumerate(outcomes) if isinstance(found, StoreError) and found.errno in _FULL]
        if full:
            # Twice what is missing: media round sizes up, and others write too.
            missing = 2 * sum(entries[i][1].nbytes for i in full)
            freed = self._drop(self._books.evict(missing, _parents(entries)))
            _log.info("%s: the inner store is full; %d bytes were evicted", self.name, freed)
            if freed:
                for i, outcome in zip(full, self._inner.put_batch([items[i] for i in full]), strict=True):
                    outcomes[i] = outcome
        return outcomes

    def _ask(self, keys: Sequence[Key]) -> Sequence[Asked]:
        """Note what the books have, before frames are read; what has expired is a miss."""
        self._drop(self._books.expired())
        return [self._books.ask(key) for key in keys]

    def _note(
        self, asked: Sequence[Asked], found: Sequence[memoryview | int | StoreError | None], *, sure: bool = True
    ) -> None:
        """Note what was read, and what the inner store does not have; a miss may be a frame too long if not `sure`."""
        there: set[StoreKey] = set()
        missing = [one.key for one, data in zip(asked, found, strict=True) if data is None and one.before is not None]
        if missing and not sure:
            known = self._inner.stat_batch(missing)
            there.update(name for name, stat in zip(missing, known, strict=True) if stat is not None)
        for one, data in zip(asked, found, strict=True):
            if not isinstance(data, StoreError) and one.key not in there:
                self._books.was_read(one, len(data) if isinstance(data, memoryview) else data)
        self._drop(self._books.surplus())

    def _drop(self, leaving: Leaving) -> int:
        """Delete what is leaving; return the bytes that are free. What cannot be deleted stays."""
        if not leaving:
            return 0
        outcomes: list[bool | StoreError] = [StoreError(errno.EIO, "it was not tried")] * len(leaving)
        try:
            outcomes = [*self._inner.delete_batch([name for name, _ in leaving])]
        finally:
            freed = self._books.gone(leaving, outcomes)
        for (name, _), outcome in zip(leaving, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                _log.warning("%s: cannot evict %s: %s", self.name, name.digest.hex(), outcome)
        return freed


def open_capped(rest: str) -> CappedStore:
    """Open what stands behind ``capped:`` in the URI of a store: ``SIZE[,NAME=VALUE...]:INNER``.

    Parameters
    ----------
    rest : str
        The capacity, options, and the URI of the inner store: ``10GiB:fs:/path``,
        ``10GiB,policy=ttl,ttl=1h:fs:/path``. Options are ``policy`` (``lru``), ``ttl`` (seconds that a frame lives, of
        policy ``ttl``), and ``check=0`` for a store of other bytes than frames.

    Raises
    ------
    ConfigError
        What is written means nothing; the inner store was not opened then.
    StoreError
        The inner store cannot be opened or listed.
    """
    from kvcore.tiers.stores.registry import open_store

    first, colon, inner_uri = rest.partition(":")
    size, *pairs = first.split(",")
    if not colon or not inner_uri:
        raise ConfigError(
            f"a capped store is written capped:SIZE:INNER, such as capped:10GiB:fs:/var/cache/kvcore, got capped:{rest}"
        )
    capacity = read_size(size, "capacity")
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in {"policy", "ttl", "check"} or not equals or name in options:
            raise ConfigError(f"capped: the option {pair!r} is unknown or given twice; there are policy=, ttl=, check=")
        options[name] = value
    policy = options.get("policy", "lru")
    of_policy = {"ttl_s": read_time(options["ttl"], "ttl")} if "ttl" in options else {}
    check = check_frame_head if read_flag(options.get("check", "1"), "check") else None
    create_policy(policy, capacity, **of_policy)  # refuses what means nothing before the inner store is opened
    inner = open_store(inner_uri)
    try:
        return CappedStore(inner, capacity, policy, policy_options=of_policy, check=check)
    except BaseException:
        inner.close()
        raise


def _entry(item: tuple[Key, Buffer]) -> tuple[StoreKey, Entry]:
    key, frame = item
    return entry_of(key, len(flat_bytes(frame)))


def _parents(entries: Sequence[tuple[StoreKey, Entry]]) -> list[StoreKey]:
    return [entry.parent for _, entry in entries if entry.parent is not None]


def _listed(store: Store) -> Iterator[Scanned]:
    """List a store that cannot ``scan``; all times are equal."""
    keys = store.list()
    while batch := [*islice(keys, _STAT_BATCH)]:
        for key, stat in zip(batch, store.stat_batch(batch), strict=True):
            if isinstance(stat, StoreError):
                raise stat
            if stat is not None:
                yield Scanned(key, stat.nbytes, 0.0)
