"""`PrefetchController`: what is in the stores comes up into host memory: lookup, plan, load, publish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvcore.completion import CompletionQueue, TaskId, attempt, drop_traceback
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError, LeaseError, OutOfMemoryError
from kvcore.keys import Key
from kvcore.memory import MemoryPlan
from kvcore.tiers.host_tier import HostKey, HostTier, host_key
from kvcore.tiers.l1 import ReadLease, WriteLease
from kvcore.tiers.lookup import HOST, TierLookup
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.serde_store import KEY_REASONS, layout_shape
from kvcore.tiers.store_tier import Origins, StoreTier, Unusable
from kvcore.tiers.stores.contract import StoreStat, StoreUnavailableError
from kvcore.workers import Priority, Workers

__all__ = ["MAX_IN_FLIGHT", "Found", "PrefetchController", "Retention"]

MAX_IN_FLIGHT = 8
BATCH = 8
"""Objects that are loaded at a time; those before them are published by then."""
OTHERS_SECONDS = 10.0
"""How long to wait for an object that somebody else is writing; then it is a miss."""
Retention = Literal["keep", "temporary"]

CopyFrame = Callable[[StoreTier, Key, memoryview], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Where an object was, and the right to read it.

    Parameters
    ----------
    tier : str
        ``"host"``, or the store it came from.
    lease : ReadLease, optional
        Of the object in host memory, where it was asked for; who asked ends it.
    """

    tier: str
    lease: ReadLease[HostKey] | None = None


class PrefetchController:
    """Loads objects from the tiers that have them, the fastest first, into host memory.

    Parameters
    ----------
    host : HostTier
    lookup : TierLookup
        Of the same tiers.
    tiers : sequence of StoreTier
        The fastest first. One that fails is passed over: what it has is looked for in those below.
    observer : TierObserver
    unusable : Unusable
        Frames that this process cannot read.
    copy : callable
        ``copy(tier, key, frame)`` puts a frame into a tier in the background.
    origins : Origins, optional
        Where it is noted which tier an object came from.
    max_in_flight : int
        Tasks that load at a time; more wait, and those somebody waits for come first.
    retention : {"keep", "temporary"}
        Whether what was loaded stays in host memory until it is evicted, or vanishes with its last reader.

    Raises
    ------
    ConfigError
        There is no such retention, or `max_in_flight` is below 1.
    """

    def __init__(
        self,
        host: HostTier,
        lookup: TierLookup,
        tiers: Sequence[StoreTier],
        observer: TierObserver,
        unusable: Unusable,
        *,
        copy: CopyFrame,
        origins: Origins | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        retention: Retention = "keep",
    ) -> None:
        if retention not in get_args(Retention):
            raise ConfigError(f"there is no retention {retention!r}; there are {', '.join(get_args(Retention))}")
        self._host, self._lookup, self._tiers = host, lookup, list(tiers)
        self._observer, self._unusable, self._copy = observer, unusable, copy
        self._origins = origins if origins is not None else Origins(host)
        self._temporary = retention == "temporary"
        self._workers = Workers(max_in_flight, name="kvcore prefetch")
        self._done: CompletionQueue[Found | None] = CompletionQueue("load")

    @property
    def event_fd(self) -> int:
        """The descriptor that is readable while finished loads wait."""
        return self._done.event_fd

    def submit(
        self,
        keys: Sequence[Key],
        plans: Sequence[MemoryPlan],
        *,
        hold: bool = False,
        priority: Priority = Priority.PREFETCH,
        timeout: float | None = None,
    ) -> TaskId:
        """Begin to load a prefix into host memory.

        It ends with the first object that is nowhere or cannot be used: those after it are None, unless they were
        loaded already.

        Parameters
        ----------
        keys : sequence of Key
        plans : sequence of MemoryPlan
            What each object looks like.
        hold : bool
            Lock the objects for reading.
        priority : Priority
        timeout : float, optional
            Seconds after which the rest is given up.

        Raises
        ------
        ValueError
            There are not as many keys as plans, or an object is asked for twice.
        KVCoreError
            The controller is closed.
        """
        if len(keys) != len(plans):
            raise ValueError(f"a load has a plan for each key, got {len(keys)} keys and {len(plans)} plans")
        if len(set(map(host_key, keys))) != len(keys):
            raise ValueError("a load has each object once: those of a prefix differ")
        task_id = self._done.open(len(keys), timeout=timeout)

        def run() -> None:
            failed = attempt(self._run, task_id, keys, plans, hold)
            if failed is not None:
                self._done.fail(task_id, failed)

        try:
            self._workers.submit(priority, run)
        except BaseException:
            self._done.discard(task_id)
            raise
        return task_id

    def query(self, task_id: TaskId, *, timeout: float | None = 0.0) -> tuple[Found | Exception | None, ...] | None:
        """Return for each object where it was, None, or an error, exactly once; None while still under way.

        Parameters
        ----------
        task_id : TaskId
        timeout : float, optional
            Seconds to wait; None for as long as it takes.
        """
        return self._done.wait(task_id, timeout)

    def forget(self, task_id: TaskId) -> None:
        """Say that nobody will ask for a task; its locks end as they come."""
        self._release(self._done.discard(task_id))

    def close(self) -> None:
        """Finish what was submitted, and free threads and descriptors."""
        self._workers.close()
        self._done.close()

    def _run(self, task_id: TaskId, keys: Sequence[Key], plans: Sequence[MemoryPlan], hold: bool) -> None:
        at = 0
        try:
            while at < len(keys) and self._done.pending(task_id):  # not when it is late, or nobody waits any more
                stop = min(at + BATCH, len(keys))
                outcomes = self._load_batch(keys[at:stop], plans[at:stop], hold)
                for index, outcome in enumerate(outcomes, start=at):
                    if not self._done.set(task_id, index, outcome):
                        self._release([outcome])
                at = stop
                if not all(isinstance(outcome, Found) for outcome in outcomes):
                    break
            for index in range(at, len(keys)):
                self._done.set(task_id, index, None)
        finally:
            self._host.relieve()

    def _load_batch(
        self, keys: Sequence[Key], plans: Sequence[MemoryPlan], hold: bool
    ) -> list[Found | Exception | None]:
        outcomes = self._in_host(keys, plans, hold)
        until = time.monotonic() + OTHERS_SECONDS
        try:
            others = self._fetch(keys, plans, hold, outcomes, [i for i, one in enumerate(outcomes) if one is None])
            while others and time.monotonic() < until:  # nothing is reserved while we wait: nobody waits for us
                self._host.wait_ready([keys[i] for i in others], until - time.monotonic())
                found = self._in_host([keys[i] for i in others], [plans[i] for i in others], hold)
                for i, outcome in zip(others, found, strict=True):
                    outcomes[i] = outcome
                # A temporary object may be gone again, and a load of somebody else have been in vain.
                others = self._fetch(keys, plans, hold, outcomes, [i for i in others if outcomes[i] is None])
        except BaseException:
            self._release(outcomes)
            raise
        return outcomes

    def _fetch(
        self,
        keys: Sequence[Key],
        plans: Sequence[MemoryPlan],
        hold: bool,
        outcomes: list[Found | Exception | None],
        missing: list[int],
    ) -> list[int]:
        """Load what is missing, and give it an outcome; return the places of objects that somebody else is writing."""
        leases: dict[int, WriteLease[HostKey]] = {}
        others: list[int] = []
        try:
            for tier in self._tiers:
                if not missing:
                    break
                here: dict[int, StoreStat] = {}
                for i, stat in zip(
                    missing, self._lookup.ask(tier, [keys[i] for i in missing], "retrieve"), strict=True
                ):
                    if isinstance(stat, StoreStat):
                        here[i] = stat
                    elif stat is not None:
                        outcomes[i] = stat
                wanted = {i: plans[i] for i in here if i not in leases}
                taken, full = self._reserve(keys, wanted)
                for i in wanted:
                    if i in taken:
                        leases[i] = taken[i]
                        continue
                    del here[i]
                    missing.remove(i)
                    if full is None or i < full[0]:
                        others.append(i)
                    else:
                        outcomes[i] = full[1]
                for i, outcome in self._load(tier, keys, here, leases).items():
                    outcomes[i] = self._publish(tier.name, leases.pop(i), hold) if outcome is True else outcome
                    if outcome is True:
                        missing.remove(i)
        finally:
            for lease in leases.values():
                self._host.cancel_write(lease)
        return others

    def _reserve(
        self, keys: Sequence[Key], wanted: dict[int, MemoryPlan]
    ) -> tuple[dict[int, WriteLease[HostKey]], tuple[int, OutOfMemoryError] | None]:
        """Reserve as many of the first objects as there is room for.

        Returns
        -------
        dict of int to WriteLease
            Without those that somebody else has, or is writing.
        (int, OutOfMemoryError) or None
            The first one that found no room, and why.
        """
        places, full = list(wanted), None
        count = len(places)
        while count:
            try:
                taken = self._host.reserve_write(
                    {keys[i]: wanted[i] for i in places[:count]}, temporary=self._temporary
                )
            except OutOfMemoryError as error:
                full = error
                count //= 2
            else:
                break
        if full is not None:
            self._observer.failure(HOST, "retrieve", full)
        leases = {i: taken[host_key(keys[i])] for i in places[:count] if host_key(keys[i]) in taken}
        return leases, None if full is None else (places[count], full)

    def _in_host(self, keys: Sequence[Key], plans: Sequence[MemoryPlan], hold: bool) -> list[Found | Exception | None]:
        """Find what is in host memory, and lock it if asked to."""
        if not hold:
            found: list[Found | Exception | None] = [Found(HOST) if key in self._host else None for key in keys]
            self._count_misses(found)
            return found
        began = time.perf_counter()
        reading = self._host.reserve_read(keys)
        found, hits, nbytes = [], 0, 0
        for lease, asked in zip(map(reading.get, map(host_key, keys)), plans, strict=True):
            if lease is None:
                found.append(None)
            elif layout_shape(lease.memory.plan) == layout_shape(asked):
                found.append(Found(HOST, lease))
                hits, nbytes = hits + 1, nbytes + asked.nbytes
            else:
                self._release([Found(HOST, lease)])
                found.append(
                    LayoutError(
                        f"host memory has another layout under this key, of {lease.memory.nbytes} B, than the one of "
                        f"{asked.nbytes} B that was asked for; KV that differs so needs a namespace of its own"
                    )
                )
        self._count_misses(found)
        if hits:
            self._observer.retrieve(HOST, hits, nbytes, time.perf_counter() - began)
        return found

    def _count_misses(self, found: Sequence[Found | Exception | None]) -> None:
        if None in found:
            self._observer.miss(HOST, found.count(None))

    def _load(
        self,
        tier: StoreTier,
        keys: Sequence[Key],
        here: dict[int, StoreStat],
        leases: dict[int, WriteLease[HostKey]],
    ) -> dict[int, Literal[True] | Exception | None]:
        """Fill reserved objects from one tier; True where that went well."""
        results: dict[int, Literal[True] | Exception | None] = {}
        by_layout: dict[object, list[int]] = {}
        for i in here:
            by_layout.setdefault(layout_shape(leases[i].memory.plan), []).append(i)
        for some in by_layout.values():
            began = time.perf_counter()
            outcomes = self._get(tier, keys, some, here, leases)
            seconds, nbytes = time.perf_counter() - began, 0
            for i, outcome in zip(some, outcomes, strict=True):
                results[i] = True if outcome is True else outcome or None  # False: gone since it was looked up
                if isinstance(outcome, Exception):
                    if not isinstance(outcome, StoreUnavailableError):
                        self._observer.failure(tier.name, "retrieve", outcome)
                    if isinstance(outcome, CorruptFrameError) and outcome.reason in KEY_REASONS:
                        self._unusable.add(tier.name, keys[i])
                elif outcome:
                    nbytes += leases[i].memory.used_size
            good = sum(outcome is True for outcome in outcomes)
            if good:
                self._observer.retrieve(tier.name, good, nbytes, seconds)
            if good < len(outcomes):
                self._observer.miss(tier.name, len(outcomes) - good)
        return results

    def _get(
        self,
        tier: StoreTier,
        keys: Sequence[Key],
        some: Sequence[int],
        here: dict[int, StoreStat],
        leases: dict[int, WriteLease[HostKey]],
    ) -> Sequence[bool | Exception]:
        got = attempt(
            lambda: tier.store.get(
                [keys[i] for i in some],
                [leases[i].memory for i in some],
                stats=[here[i] for i in some],
                sink=self._promotion(tier),
            )
        )
        return [got] * len(some) if isinstance(got, Exception) else got

    def _promotion(self, found_in: StoreTier) -> Callable[[Key, memoryview], None] | None:
        """Return what copies frames into the faster stores that hold them in the same form."""
        above = self._tiers[: self._tiers.index(found_in)]
        faster = [t for t in above if t.promote and not t.read_only and t.store.serde is found_in.store.serde]
        if not faster:
            return None

        def promote(key: Key, frame: memoryview) -> None:
            for tier in faster:
                self._copy(tier, key, frame)

        return promote

    def _publish(self, tier: str, lease: WriteLease[HostKey], hold: bool) -> Found | LeaseError:
        self._origins.coming(lease.key, tier)
        try:
            if hold:
                return Found(tier, self._host.finish_write_and_reserve_read(lease))
            self._host.finish_write(lease)
        except LeaseError as error:  # host memory was cleared meanwhile, say
            self._origins.forget(lease.key)
            return drop_traceback(error)
        return Found(tier)

    def _release(self, outcomes: Sequence[object]) -> None:
        """End locks that nobody has read under."""
        for outcome in outcomes:
            if isinstance(outcome, Found) and outcome.lease is not None:
                with contextlib.suppress(LeaseError):
                    self._host.finish_read(outcome.lease)
