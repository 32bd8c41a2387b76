"""Thousands of calls leave no file, no thread and no memory behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

from kvcore.errors import StoreError
from kvcore.tiers.stores import Store
from kvcore_conformance.stores.effort import Effort
from kvcore_conformance.stores.space import Space, content
from kvcore_conformance.stores.targets import Target

_FDS = Path("/proc/self/fd")
GROWTH = 4 << 20
SPARE = 2
"""Files or threads more than before that are no leak: a pool may have grown, a connection may be closing."""


def held() -> Counter[str]:
    """Return how many files and threads this process has."""
    files = len(os.listdir(_FDS)) if _FDS.exists() else 0
    return Counter(files=files, threads=threading.active_count())


def more_than(before: Counter[str]) -> Counter[str]:
    """Return what there is more than before; waits a little for what is about to go."""
    deadline = time.monotonic() + 5
    while (more := held() - before) and max(more.values()) > SPARE and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


def use(space: Space, store: Store, operations: int) -> None:
    """Make about that many calls, of all kinds, on few keys."""
    keys = space.keys(12)
    frame = content(2000)
    large = memoryview(bytearray(2000))
    done = 0
    while done < operations:
        store.put_batch([(key, frame) for key in keys[:8]])
        store.put(keys[8], frame)
        assert store.get_batch(keys) == [*[frame] * 9, *[None] * 3]
        store.stat_batch(keys)
        assert store.get_into(keys[0], large) == len(frame)
        assert store.get(keys[1]) == frame
        assert store.exists(keys[1])
        store.delete(keys[8])
        store.quarantine(keys[0], "crc")
        store.delete_batch(keys[:4])
        next(store.list(space.namespace()), None)  # abandoned half-way
        done += 44


def test_calls_leave_nothing_behind(space: Space, store: Store, effort: Effort) -> None:
    use(space, store, effort.operations // 10)  # what is opened once, is open
    before = held()
    tracemalloc.start()
    try:
        baseline, _ = tracemalloc.get_traced_memory()
        use(space, store, effort.operations)
        grown = tracemalloc.get_traced_memory()[0] - baseline
    finally:
        tracemalloc.stop()
    assert max(more_than(before).values(), default=0) <= SPARE
    assert grown < GROWTH, f"{grown} bytes more than before {effort.operations} calls"


def test_opening_and_closing_leaves_nothing_behind(store_target: Target, effort: Effort) -> None:
    def once() -> None:
        with Space(store_target) as space:
            key = space.key()
            space.store.put_batch([(key, b"frame"), (space.key(1), b"frame")])
            assert space.store.get(key) == b"frame"
        with contextlib.suppress(StoreError):
            space.store.get(key)

    once()
    before = held()
    for _ in range(max(2 * SPARE, effort.rounds // 2)):
        once()
    assert max(more_than(before).values(), default=0) <= SPARE
