"""`SerdeStore`: a store of frames and a serde, which together are a store of memory objects."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias, TypeVar

from kvcore.completion import CompletionQueue, TaskError, TaskId, attempt, drop_traceback
from kvcore.errors import CorruptFrameError, KVCoreError, OutOfMemoryError, StoreError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan, MemoryPool
from kvcore.serde.contract import LayoutDescGroup, MemoryObjGroup, SerdeProcessor
from kvcore.tiers.stores import Store
from kvcore.tiers.stores.contract import StoreStat
from kvcore.workers import Priority, Workers

__all__ = ["KEY_REASONS", "Object", "SerdeStore", "layout_shape"]

R = TypeVar("R")
Object: TypeAlias = MemoryObj | MemoryObjGroup
FrameSink: TypeAlias = Callable[[Key, memoryview], None]

KEY_REASONS = frozenset({"encrypted", "authentication", "key"})
"""Why a frame may be unreadable here and good elsewhere: whoever has its key can read it. It is never moved aside."""

_log = logging.getLogger("kvcore")


class SerdeStore:
    """Memory objects in a store, through a serde.

    To put: reserve temporary buffers, serialise, put the frames, release. To get: reserve, get the frames, deserialise
    the hits, release. One part of a batch is coded while another is on its way to or from the store.

    Parameters
    ----------
    store : Store
    serde : SerdeProcessor
        May serve several stores. Both stay the caller's, who closes them after this.
    pool : MemoryPool
        Where the temporary buffers come from: the host arena, so that a device's driver knows them, or a `BufferPool`.
    max_workers : int
        Batches that `submit_put` and `submit_get` have under way at a time.
    window : int
        Objects of a part. Two parts are under way, so there are at most ``2 * window`` temporary buffers per batch;
        with fewer, if there is no room for more, parts are smaller.

    Notes
    -----
    Thread-safe. All objects of a batch have one layout. Each key has its own outcome: one bad object does not keep the
    others out. A batch for which no temporary buffer can be had fails as a whole, before anything is stored. An object
    that was freed while it was serialised is not stored: its bytes may have been somebody else's.
    """

    def __init__(
        self, store: Store, serde: SerdeProcessor, pool: MemoryPool, *, max_workers: int = 2, window: int = 4
    ) -> None:
        self.store = store
        self.serde = serde
        self._pool = pool
        self._window = window
        self._workers = Workers(max_workers, name=f"kvcore store {store.name}")
        self._puts: CompletionQueue[int] = CompletionQueue(f"put to {store.name}")
        self._gets: CompletionQueue[bool] = CompletionQueue(f"get from {store.name}")

    @property
    def name(self) -> str:
        """That of the store."""
        return self.store.name

    # --- at once

    def put(
        self, keys: Sequence[Key], objs: Sequence[Object], *, sink: FrameSink | None = None
    ) -> tuple[int | Exception, ...]:
        """Store objects; return for each key the bytes of its frame, or what went wrong.

        Parameters
        ----------
        keys : sequence of Key
        objs : sequence of MemoryObj or MemoryObjGroup
        sink : callable, optional
            Called with each key and frame, before its temporary buffer goes: to store it elsewhere too.

        Raises
        ------
        ValueError
            There are not as many keys as objects, or the objects differ in their layout.
        OutOfMemoryError
            There is no room for the temporary buffers; nothing was stored.
        """
        layout = _one_layout(keys, objs)
        if layout is None:
            return ()
        results: list[int | Exception] = [KVCoreError("not done")] * len(keys)
        under_way: deque[tuple[range, list[MemoryObj], TaskId]] = deque()
        with self._temporaries(len(keys), self.serde.estimate_serialized_size(layout)) as free:
            try:
                for part in _parts(len(keys), len(free)):
                    while len(free) < len(part):
                        self._put_part(under_way, keys, objs, results, free, sink)
                    temps = [free.popleft() for _ in part]
                    for temp in temps:
                        temp.reset_used_size()
                    task = self.serde.submit_serialize([objs[i] for i in part], temps, [keys[i] for i in part])
                    under_way.append((part, temps, task))
                while under_way:
                    self._put_part(under_way, keys, objs, results, free, sink)
            finally:  # after an error the serde may still be writing to the buffers
                for _, _, task in under_way:
                    with suppress(TaskError):
                        self.serde.take_serialize_results(task, timeout=None)
        return tuple(map(drop_traceback, results))

    def get(
        self,
        keys: Sequence[Key],
        objs: Sequence[Object],
        *,
        stats: Sequence[StoreStat | Exception | None] | None = None,
        sink: FrameSink | None = None,
    ) -> tuple[bool | Exception, ...]:
        """Fill objects; return for each key whether it was there, or why its frame could not be used.

        A frame that is short, altered or foreign is moved aside in the store, so that its key can be stored again.

        Parameters
        ----------
        keys : sequence of Key
        objs : sequence of MemoryObj or MemoryObjGroup
            Unspecified afterwards where the answer is not True.
        stats : sequence, optional
            What ``store.stat_batch(keys)`` said, where the caller has asked already.
        sink : callable, optional
            Called with each key and frame that was used, before its temporary buffer goes.

        Raises
        ------
        ValueError, OutOfMemoryError
            As `put` does.
        """
        layout = _one_layout(keys, objs)
        if layout is None:
            return ()
        results: list[bool | Exception] = [False] * len(keys)
        estimate = attempt(self.serde.estimate_serialized_size, layout)
        most = _most_stored(layout, estimate)
        sizes: dict[int, int] = {}
        for i, stat in enumerate(self.store.stat_batch(keys) if stats is None else stats):
            if isinstance(stat, Exception):
                results[i] = stat
            elif stat is not None and stat.nbytes > most:
                results[i] = CorruptFrameError(
                    f"{stat.nbytes} B are stored, and no frame of such an object has more than {most} B",
                    reason="length",
                )
                self._quarantine(keys[i], "length")
            elif stat is not None:
                sizes[i] = stat.nbytes
        found = list(sizes)
        under_way: deque[tuple[list[int], list[MemoryObj], TaskId]] = deque()
        with self._temporaries(len(found), _buffer_size(sizes.values(), estimate)) as free:
            try:
                for part in _parts(len(found), len(free)):
                    while len(free) < len(part):
                        self._deserialized(under_way, keys, results, free, sink)
                    wanted = found[part.start : part.stop]
                    hits, temps = self._get_part(wanted, keys, results, free)
                    task = self.serde.submit_deserialize(temps, [objs[i] for i in hits], [keys[i] for i in hits])
                    under_way.append((hits, temps, task))
                while under_way:
                    self._deserialized(under_way, keys, results, free, sink)
            finally:  # after an error the serde may still be reading the buffers
                for _, _, task in under_way:
                    with suppress(TaskError):
                        self.serde.take_deserialize_results(task, timeout=None)
        return tuple(map(drop_traceback, results))

    # --- without waiting

    def submit_put(
        self,
        keys: Sequence[Key],
        objs: Sequence[Object],
        *,
        timeout: float | None = None,
        priority: Priority = Priority.STORE,
    ) -> TaskId:
        """Begin to `put`; the objects stay as they are until the answer was taken.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which keys that are not done get a `DeadlineError`. Their objects may still be read then,
            until `close`.
        """
        _one_layout(keys, objs)
        return self._submit(self._puts, len(keys), lambda: self.put(keys, objs), timeout, priority)

    def submit_get(
        self,
        keys: Sequence[Key],
        objs: Sequence[Object],
        *,
        timeout: float | None = None,
        priority: Priority = Priority.LOAD,
    ) -> TaskId:
        """Begin to `get`; as `submit_put`. Objects of a `DeadlineError` may still be written, until `close`."""
        _one_layout(keys, objs)
        return self._submit(self._gets, len(keys), lambda: self.get(keys, objs), timeout, priority)

    def query_put(self, task_id: TaskId, *, timeout: float | None = 0.0) -> tuple[int | Exception, ...] | None:
        """Return what `put` did, exactly once; None while it is under way after `timeout` seconds."""
        return self._puts.wait(task_id, timeout)

    def query_get(self, task_id: TaskId, *, timeout: float | None = 0.0) -> tuple[bool | Exception, ...] | None:
        """Return what `get` did, exactly once; None while it is under way after `timeout` seconds."""
        return self._gets.wait(task_id, timeout)

    def get_put_event_fd(self) -> int:
        """Return the descriptor that is readable while finished puts wait."""
        return self._puts.event_fd

    def get_get_event_fd(self) -> int:
        """Return the descriptor that is readable while finished gets wait."""
        return self._gets.event_fd

    def close(self) -> None:
        """Wait for what is under way, and free threads and descriptors. Store and serde stay open."""
        self._workers.close()
        self._puts.close()
        self._gets.close()

    def _submit(
        self,
        queue: CompletionQueue[R],
        count: int,
        call: Callable[[], tuple[R | Exception, ...]],
        timeout: float | None,
        priority: Priority,
    ) -> TaskId:
        task_id = queue.open(count, timeout=timeout)

        def run() -> None:
            outcomes = attempt(call)
            if isinstance(outcomes, Exception):
                queue.fail(task_id, outcomes)
            else:
                queue.set_all(task_id, outcomes)

        try:
            self._workers.submit(priority, run)
        except BaseException:
            queue.discard(task_id)
            raise
        return task_id

    # --- parts of a batch

    @contextmanager
    def _temporaries(self, count: int, nbytes: int) -> Iterator[deque[MemoryObj]]:
        """Lease the buffers of two parts, or fewer if there is no room; all are freed at the end, wherever they are."""
        temps: list[MemoryObj] = []
        try:
            for _ in range(min(count, 2 * self._window)):
                try:
                    temps.append(self._pool.allocate_bytes(nbytes))
                except OutOfMemoryError:
                    if not temps:
                        raise
                    break
            yield deque(temps)
        finally:
            for temp in temps:
                temp.free()

    def _put_part(
        self,
        under_way: deque[tuple[range, list[MemoryObj], TaskId]],
        keys: Sequence[Key],
        objs: Sequence[Object],
        results: list[int | Exception],
        free: deque[MemoryObj],
        sink: FrameSink | None,
    ) -> None:
        """Store what the serde made of the oldest part."""
        part, temps, task = under_way[0]
        coded = self.serde.take_serialize_results(task, timeout=None) or ()
        under_way.popleft()  # only now: until then the serde may be writing to its buffers
        good = []
        for i, temp, outcome in zip(part, temps, coded, strict=True):
            checked = outcome if isinstance(outcome, Exception) else attempt(_check_lease, objs[i])
            if isinstance(checked, Exception):
                results[i] = checked
            else:
                good.append((i, temp))
        stored = self.store.put_batch([(keys[i], temp.view()) for i, temp in good])
        for (i, temp), outcome in zip(good, stored, strict=True):
            results[i] = outcome
            if sink is not None:
                sink(keys[i], temp.view().toreadonly())
        free.extend(temps)

    def _get_part(
        self, wanted: Sequence[int], keys: Sequence[Key], results: list[bool | Exception], free: deque[MemoryObj]
    ) -> tuple[list[int], list[MemoryObj]]:
        temps = [free.popleft() for _ in wanted]
        for temp in temps:
            temp.reset_used_size()
        got = self.store.get_batch_into([(keys[i], temp.view()) for i, temp in zip(wanted, temps, strict=True)])
        hits, filled = [], []
        for i, temp, outcome in zip(wanted, temps, got, strict=True):
            if isinstance(outcome, int):
                temp.set_used_size(outcome)
                hits.append(i)
                filled.append(temp)
                continue
            free.append(temp)
            if outcome is not None:
                results[i] = outcome
        return hits, filled

    def _deserialized(
        self,
        under_way: deque[tuple[list[int], list[MemoryObj], TaskId]],
        keys: Sequence[Key],
        results: list[bool | Exception],
        free: deque[MemoryObj],
        sink: FrameSink | None,
    ) -> None:
        """See what the serde made of the oldest part."""
        hits, temps, task = under_way[0]
        outcomes = self.serde.take_deserialize_results(task, timeout=None) or ()
        under_way.popleft()
        for i, temp, outcome in zip(hits, temps, outcomes, strict=True):
            results[i] = True if outcome is None else outcome
            if outcome is None and sink is not None:
                sink(keys[i], temp.view().toreadonly())
            elif isinstance(outcome, CorruptFrameError) and outcome.reason not in KEY_REASONS:
                self._quarantine(keys[i], outcome.reason)
        free.extend(temps)

    def _quarantine(self, key: Key, reason: str) -> None:
        try:
            self.store.quarantine(key, reason)
        except StoreError as error:  # a store that is mounted read-only, say: the miss stands all the same
            _log.warning("a bad frame stays where it is: %s", drop_traceback(error))


def _parts(count: int, buffers: int) -> Iterator[range]:
    """Cut a batch into parts, each of half of the buffers: one is coded while another is on its way."""
    step = max(buffers // 2, 1)
    for start in range(0, count, step):
        yield range(start, min(start + step, count))


def _check_lease(obj: Object) -> None:
    """Raise `LeaseError` if an object was freed: what was read of it may be somebody else's."""
    for one in (obj,) if isinstance(obj, MemoryObj) else obj:
        if one is not None:
            one.bytes()


def _most_stored(layout: MemoryPlan | LayoutDescGroup, estimate: int | Exception) -> float:
    """Return more bytes than any frame of an object takes, of whatever codec: what is larger is not read at all."""
    plans = (layout,) if isinstance(layout, MemoryPlan) else layout
    if None in plans or isinstance(estimate, Exception):  # the frame holds more than is asked for, or is another's
        return float("inf")
    return 4 * max(estimate, sum(plan.nbytes for plan in plans if plan is not None)) + (1 << 20)


def _buffer_size(sizes: Iterable[int], estimate: int | Exception) -> int:
    """Return the size of temporary buffers for some frames: few different ones, so that they are used again."""
    most = max(sizes, default=0)
    if isinstance(estimate, int) and most <= estimate:
        return estimate
    return 1 << most.bit_length()  # frames of other codecs


def _one_layout(keys: Sequence[Key], objs: Sequence[Object]) -> MemoryPlan | LayoutDescGroup | None:
    """Return the layout that all objects of a batch have; None for an empty one."""
    if len(keys) != len(objs):
        raise ValueError(f"a batch has a key for each object, got {len(keys)} keys and {len(objs)} objects")
    layouts = [_layout(obj) for obj in objs]
    for i, layout in enumerate(layouts):
        if layout_shape(layout) != layout_shape(layouts[0]):
            raise ValueError(f"the objects of a batch have one layout, but number {i} differs from the first")
    return layouts[0] if layouts else None


def _layout(obj: Object) -> MemoryPlan | LayoutDescGroup:
    if isinstance(obj, MemoryObj):
        return obj.plan
    return tuple(None if one is None else one.plan for one in obj)


def layout_shape(layout: MemoryPlan | LayoutDescGroup) -> object:
    """What of a layout must be the same throughout a batch: all but where in a sequence the KV is."""
    if isinstance(layout, MemoryPlan):
        return layout.nbytes, layout.descs, layout.offsets
    return tuple(None if one is None else layout_shape(one) for one in layout)
