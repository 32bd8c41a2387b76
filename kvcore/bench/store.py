"""What stores and serdes cost: rates, latencies of single objects and of batches, and what the core adds to a task."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcore.bench.cases import Case, Row, neighbours, rate, spread
from kvcore.bench.peer import Peer
from kvcore.errors import KVCoreError
from kvcore.keys import Key, StoreKey
from kvcore.memory import BufferPool, MemoryObj, MemoryPlan
from kvcore.serde import AsyncSerdeProcessor, Deserializer, Serializer
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.stores import MemoryStore

__all__ = ["BATCH", "TASK_AIM_US", "Latency", "StoreCase", "StoreRow", "aims", "measure_store", "measure_tasks"]

BATCH = 8
"""Objects of a batch."""
SINGLES = 4
"""Samples of a single object to one of a batch: percentiles want many."""
TASK_AIM_US = 50.0


@dataclass(frozen=True, slots=True)
class StoreCase(Case):
    """One path of the suite: `call` handles one object.

    Parameters
    ----------
    batch : callable, optional
        The same with `BATCH` objects.
    size_ratio : float, optional
        Bytes of the KV over bytes stored.
    limit : str
        What `roofline` does, for people.
    aim : float, optional
        The least of the roofline's speed that will do.
    note : str
        What there is to know of the peer's part in it: said where there is a peer.
    before, roofline_before : callable, optional
        Called before each call, of a batch too, or of the roofline, and not timed: clears what would be replaced.
    """

    batch: Callable[[], Any] | None = None
    size_ratio: float | None = None
    limit: str = ""
    aim: float | None = None
    note: str = ""
    before: Callable[[], Any] | None = None
    roofline_before: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one call: percentiles of `samples` calls, each a call that was really made."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Take the nearest ranks of some samples, at least one."""
        ranked = sorted(seconds)
        p50, p95, p99 = (float(f"{1e3 * _rank(ranked, q):.4g}") for q in (0.5, 0.95, 0.99))
        return cls(p50, p95, p99, len(ranked))


def _rank(ranked: Sequence[float], q: float) -> float:
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True)
class StoreRow(Row):
    """A `Row`, of single objects, and what is asked of stores beside: see `StoreCase` and `Latency`."""

    size_ratio: float | None = None
    single: Latency | None = None
    batch: Latency | None = None
    batch_gbps: float | None = None
    limit: str = ""
    aim: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim was met; None where there is none."""
        return None if self.aim is None or self.ratio_roofline is None else self.ratio_roofline >= self.aim


def measure_store(cases: Iterable[StoreCase], peer: Peer | None, repeats: int) -> Iterator[StoreRow]:
    """Time cases one by one; single objects, the roofline, batches and the peer alternate.

    Raises
    ------
    KVCoreError
        A case did not do what it is there for, or the peer has died.
    """
    for case in cases:
        yield _measure(case, peer, repeats)


def _measure(case: StoreCase, peer: Peer | None, repeats: int) -> StoreRow:
    notes, request = ([case.note] if case.note else [], case.peer) if peer is not None else ([], None)
    one = partial(_seconds, case.call, before=case.before)
    limit = partial(_seconds, case.roofline, before=case.roofline_before) if case.roofline is not None else None
    many = partial(_seconds, case.batch, before=case.before) if case.batch is not None else None
    for warm in (one, limit, many):
        if warm is not None:
            warm()
    # What a call is held against goes on for as long as the call: then a busy machine interrupts both as often.
    span = min(one() for _ in range(3))
    roof_loops, peer_loops = 1, 1
    if limit is not None:
        roof_loops = _loops(span, min(limit() for _ in range(3)))
    if peer is not None and request is not None:
        try:
            peer_loops = _loops(span, peer.seconds(request, 1))
        except KVCoreError as error:
            notes.append(str(error))
            request = None
    singles, roof, batches, theirs = [], [], [], []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for _ in range(SINGLES):
                singles.append(one())
                if limit is not None:
                    roof.append(limit(roof_loops))
            if peer is not None and request is not None:
                theirs.append(peer.seconds(request, peer_loops))
            if many is not None:
                batches.append(many())
    finally:
        if enabled:
            gc.enable()
    return StoreRow(
        case.path,
        case.unit,
        rate(case.nbytes, singles) or 0.0,
        spread(singles),
        rate(case.nbytes, theirs),
        rate(case.nbytes, roof),
        neighbours(theirs, singles[SINGLES - 1 :: SINGLES] if theirs else []),
        neighbours(roof, singles),
        "; ".join(notes),
        case.size_ratio,
        Latency.of(singles),
        Latency.of(batches) if batches else None,
        rate(BATCH * case.nbytes, batches),
        case.limit,
        case.aim,
    )


def _seconds(call: Callable[[], Any], loops: int = 1, *, before: Callable[[], Any] | None = None) -> float:
    seconds = 0.0
    for _ in range(loops):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        seconds += time.perf_counter() - start
    return seconds / loops


def _loops(span: float, once: float) -> int:
    return max(1, round(span / max(once, 1e-7)))


# --- tasks that do nothing


class _Idle(Serializer, Deserializer):
    """A serde that writes one byte, so that what a task takes is the core's own."""

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        return 1

    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        return 1

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        return None


def measure_tasks(repeats: int) -> list[dict[str, Any]]:
    """Return what a task costs beyond its work: rows of ``{path, us, p99_us, aim_us, met}``, medians.

    Of the processor: from `submit_serialize` until its answer is there, one task at a time, and with 64 of them under
    way; minus the direct call. Of `SerdeStore`: from `submit_put` until its answer, minus `put`. The submitting thread
    and the worker share one core, so both switches between them are in it.
    """
    idle, key, pool = _Idle(), StoreKey(bytes(32), bytes(32)), BufferPool(1 << 20)
    rows = []
    with AsyncSerdeProcessor(idle, idle) as processor:
        src, dsts = pool.allocate_bytes(1), [pool.allocate_bytes(1) for _ in range(64)]
        store = MemoryStore()
        whole = SerdeStore(store, processor, pool)
        try:

            def direct() -> None:
                dsts[0].set_used_size(idle.serialize(src, dsts[0], key))

            def tasks(count: int) -> None:
                ids = [processor.submit_serialize([src], [dst], [key]) for dst in dsts[:count]]
                for task in ids:
                    processor.take_serialize_results(task, timeout=None)

            def put_task() -> None:
                whole.query_put(whole.submit_put([key], [src]), timeout=None)

            for path, call, base, count in (
                ("serde task", lambda: tasks(1), direct, 1),
                ("serde task, 64 under way", lambda: tasks(64), direct, 64),
                ("store task", put_task, lambda: whole.put([key], [src]), 1),
            ):
                rows.append({"path": path, **_task_row(call, base, count, repeats, dsts)})
        finally:
            whole.close()
            store.close()
    return rows


def _task_row(
    call: Callable[[], Any], base: Callable[[], Any], count: int, repeats: int, dsts: Sequence[MemoryObj]
) -> dict[str, Any]:
    taken, bare = [], []
    for index in range(repeats * max(1, 100 // count) + 1):
        pair = _seconds(call) / count, _seconds(base)
        if index:  # the first one starts the thread
            taken.append(pair[0])
            bare.append(pair[1])
        for dst in dsts:
            dst.reset_used_size()
    # The verdict is on the figure that is shown.
    us = round(1e6 * (statistics.median(taken) - statistics.median(bare)), 1)
    p99 = round(1e6 * (_rank(sorted(taken), 0.99) - statistics.median(bare)), 1)
    return {"us": us, "p99_us": p99, "aim_us": TASK_AIM_US, "met": us < TASK_AIM_US}


def aims(rows: Sequence[StoreRow], tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was aimed at: ``{path, what, value, aim, met}``, ``aim`` being the least or (of tasks) the most."""
    found = [
        {"path": row.path, "what": f"of {row.limit}", "value": row.ratio_roofline, "aim": row.aim, "met": row.met}
        for row in rows
        if row.met is not None
    ]
    return found + [
        {"path": task["path"], "what": "us", "value": task["us"], "aim": task["aim_us"], "met": task["met"]}
        for task in tasks
    ]
