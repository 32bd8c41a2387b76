"""`StoreController`: what is ready in host memory goes down to the stores, in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvcore.completion import CompletionQueue, TaskId, attempt
from kvcore.errors import ConfigError, KVCoreError, LeaseError
from kvcore.keys import Key
from kvcore.memory import MemoryObj
from kvcore.tiers.host_tier import HostKey, HostTier
from kvcore.tiers.l1 import ReadLease, WriteLease
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.serde_store import layout_shape
from kvcore.tiers.store_tier import StoreTier, Unusable
from kvcore.workers import Priority, Workers

__all__ = ["STORE_POLICIES", "StoreController", "StorePolicy", "StoredIn"]

StorePolicy = Literal["default", "write_through", "buffer_only"]
STORE_POLICIES: tuple[StorePolicy, ...] = get_args(StorePolicy)
BATCH = 8
"""Objects that go to a store at a time."""
COPY_BYTES = 256 << 20
"""Most bytes of frames that wait to be copied into another store; more are dropped."""

_log = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class StoredIn:
    """Where an object went.

    Parameters
    ----------
    tiers : dict of str to int or Exception
        By tier the bytes of its frame, or why it is not there.
    """

    tiers: dict[str, int | Exception] = field(default_factory=dict)

    @property
    def error(self) -> Exception | None:
        """The first tier's error, if no tier has it."""
        errors = [outcome for outcome in self.tiers.values() if isinstance(outcome, Exception)]
        return errors[0] if errors and len(errors) == len(self.tiers) else None


class StoreController:
    """Writes objects to the stores behind the host tier.

    Parameters
    ----------
    host : HostTier
    tiers : sequence of StoreTier
        Those that are not read-only get each object. Of tiers that share a serde, all get the same frame.
    observer : TierObserver
    unusable : Unusable
        Frames that this process cannot read; what it stores in their place is taken off.
    max_workers : int
        Batches under way at a time.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        observer: TierObserver,
        unusable: Unusable,
        *,
        max_workers: int = 1,
    ) -> None:
        self._host = host
        self._groups = _by_serde([tier for tier in tiers if not tier.read_only])
        self._observer, self._unusable = observer, unusable
        self._workers = Workers(max_workers, name="kvcore store controller")
        self._done: CompletionQueue[StoredIn] = CompletionQueue("store")
        self._idle = threading.Condition()
        self._under_way = 0
        self._copying = 0

    def submit(self, leases: Sequence[WriteLease[HostKey]], *, priority: Priority = Priority.STORE) -> TaskId:
        """Make objects visible, and begin to store them.

        They are locked for reading until they are stored: the host tier does not evict them before. An object whose
        reservation is void was given to somebody else: it is not stored, and its outcome is the `LeaseError`.
        """
        task_id = self._done.open(len(leases))
        batches: dict[object, list[tuple[int, ReadLease[HostKey]]]] = {}
        for index, lease in enumerate(leases):
            try:
                reading = self._host.finish_write_and_reserve_read(lease)
            except LeaseError as error:
                self._observer.failure("host", "store", error)
                self._done.set(task_id, index, error)
                continue
            batches.setdefault(layout_shape(reading.memory.plan), []).append((index, reading))
        for batch in batches.values():
            for start in range(0, len(batch), BATCH):
                self._begin(task_id, batch[start : start + BATCH], priority)
        return task_id

    def query(self, task_id: TaskId, *, timeout: float | None = 0.0) -> tuple[StoredIn | Exception, ...] | None:
        """Return for each object where it went, exactly once; None while under way after `timeout` seconds."""
        return self._done.wait(task_id, timeout)

    def wait(self, task_id: TaskId) -> None:
        """Wait for a task, without taking its answer."""
        self._done.wait_done(task_id)

    def forget(self, task_id: TaskId) -> None:
        """Say that nobody will ask for a task."""
        self._done.discard(task_id)

    def copy(self, tier: StoreTier, key: Key, frame: memoryview) -> None:
        """Put a frame into another store in the background, as it is; dropped while too many wait, or it is down."""
        if tier.outage() is not None:
            return
        with self._idle:
            if self._copying + len(frame) > COPY_BYTES:
                return
            self._copying += len(frame)
            self._under_way += 1
        try:
            data = bytes(frame)
            self._workers.submit(Priority.STORE, lambda: self._copy(tier, key, data))
        except BaseException as error:
            self._copied(len(frame))
            if not isinstance(error, KVCoreError):
                raise
            _log.debug("a frame is not copied to %s: %s", tier.name, error)  # closed: who loads is not concerned

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is stored, `timeout` seconds at most; return whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._under_way, timeout)

    def close(self) -> None:
        """Store what was submitted, and free threads and descriptors."""
        self._workers.close()
        self._done.close()

    def _begin(self, task_id: TaskId, batch: list[tuple[int, ReadLease[HostKey]]], priority: Priority) -> None:
        with self._idle:
            self._under_way += 1
        try:
            self._workers.submit(priority, lambda: self._store(task_id, batch))
        except KVCoreError as error:  # closed
            self._finish(task_id, batch, error)

    def _store(self, task_id: TaskId, batch: list[tuple[int, ReadLease[HostKey]]]) -> None:
        self._finish(task_id, batch, attempt(self._put_all, [lease for _, lease in batch]))
        self._host.relieve()

    def _put_all(self, batch: Sequence[ReadLease[HostKey]]) -> list[StoredIn]:
        keys, objs = [lease.key for lease in batch], [lease.memory for lease in batch]
        stored = [StoredIn() for _ in batch]
        for group in self._groups:
            for outcome, one in zip(self._put(group, keys, objs), stored, strict=True):
                one.tiers.update(outcome)
        return stored

    def _put(
        self, group: Sequence[StoreTier], keys: Sequence[HostKey], objs: Sequence[MemoryObj]
    ) -> list[dict[str, int | Exception]]:
        """Store objects in tiers that share a serde: serialised once, and for the others copied.

        For tiers that are down nothing is serialised.
        """
        results: list[dict[str, int | Exception]] = [{} for _ in keys]
        up = []
        for tier in group:
            outage = tier.outage()
            if outage is None:
                up.append(tier)
                continue
            refused = outage.error()
            for result in results:
                result[tier.name] = refused
            self._tell(tier, [refused] * len(keys), 0.0)
        if not up:
            return results
        first, others = up[0], up[1:]
        place = {key: i for i, key in enumerate(keys)}

        def to_others(key: Key, frame: memoryview) -> None:
            for tier in others:
                began = time.perf_counter()
                outcome = attempt(tier.store.store.put, key, frame)
                results[place[key]][tier.name] = outcome  # type: ignore[index]
                self._tell(tier, [outcome], time.perf_counter() - began)

        began = time.perf_counter()
        done = attempt(lambda: first.store.put(keys, objs, sink=to_others if others else None))
        outcomes = (done,) * len(keys) if isinstance(done, Exception) else done  # no room for buffers: all fail
        for result, outcome in zip(results, outcomes, strict=True):
            result[first.name] = outcome
            for tier in others:  # what could not be serialised reached none of them
                result.setdefault(tier.name, outcome)
        self._tell(first, outcomes, time.perf_counter() - began)
        for tier in up:
            self._unusable.discard(
                tier.name, [k for k, r in zip(keys, results, strict=True) if isinstance(r[tier.name], int)]
            )
        return results

    def _copy(self, tier: StoreTier, key: Key, data: bytes) -> None:
        began = time.perf_counter()
        outcome = attempt(tier.store.store.put, key, data)
        if isinstance(outcome, int):
            self._unusable.discard(tier.name, [key])
        self._tell(tier, [outcome], time.perf_counter() - began)
        self._copied(len(data))

    def _copied(self, nbytes: int) -> None:
        with self._idle:
            self._copying -= nbytes
            self._under_way -= 1
            self._idle.notify_all()

    def _tell(self, tier: StoreTier, outcomes: Iterable[int | Exception], seconds: float) -> None:
        stored = 0, 0
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self._observer.failure(tier.name, "store", outcome)
            else:
                stored = stored[0] + 1, stored[1] + outcome
        if stored[0]:
            self._observer.store(tier.name, *stored, seconds)

    def _finish(
        self, task_id: TaskId, batch: list[tuple[int, ReadLease[HostKey]]], stored: Sequence[StoredIn] | Exception
    ) -> None:
        try:
            for number, (index, lease) in enumerate(batch):
                # One that is void was held for longer than a read may. What was stored is right all the same: of
                # an object that was given up meanwhile nothing is stored. See `SerdeStore`.
                with contextlib.suppress(LeaseError):
                    self._host.finish_read(lease)
                self._done.set(task_id, index, stored if isinstance(stored, Exception) else stored[number])
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()


def check_store_policy(name: str) -> StorePolicy:
    """Return the policy of that name; `ConfigError` where there is none."""
    for policy in STORE_POLICIES:
        if name == policy:
            return policy
    raise ConfigError(f"there is no store policy {name!r}; there are {', '.join(STORE_POLICIES)}")


def _by_serde(tiers: Sequence[StoreTier]) -> list[list[StoreTier]]:
    groups: dict[int, list[StoreTier]] = {}
    for tier in tiers:
        groups.setdefault(id(tier.store.serde), []).append(tier)
    return list(groups.values())
