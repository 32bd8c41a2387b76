"""Many threads: whole frames only, nothing lost, and a list that others write into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from kvcore.errors import StoreError
from kvcore.tiers.stores import Store
from kvcore_conformance.stores.effort import Effort
from kvcore_conformance.stores.space import Space, content

PATIENCE = 120.0
CLOSING = 10.0
"""Seconds after `close` within which calls of other threads come back."""


@contextmanager
def meanwhile(*works: Callable[[], object]) -> Iterator[threading.Event]:
    """Call each of `works` again and again in a thread of its own, until the block ends; raise what they raise."""
    over = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not over.is_set():
            work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(repeat, work) for work in works]
        try:
            yield over
        finally:
            over.set()
            wait(futures, PATIENCE)
        for future in futures:
            future.result()


def test_writers_of_one_key_do_not_mix(space: Space, store: Store, effort: Effort) -> None:
    key = space.key()
    frames = [content(20_000 + 3000 * n, n) for n in range(3)]
    whole = set(frames)
    store.put(key, frames[0])

    def write_and_read(frame: bytes) -> int:
        for _ in range(effort.rounds):
            assert store.put(key, frame) == len(frame)
            view = store.get(key)
            assert view is not None
            assert bytes(view) in whole
        return effort.rounds

    with ThreadPoolExecutor(len(frames)) as pool:
        assert sum(pool.map(write_and_read, frames)) == len(frames) * effort.rounds
    view = store.get(key)
    assert view is not None
    assert bytes(view) in whole
    assert space.listed() == [key]
    stats = store.stats()
    assert (stats.puts, stats.hits) == (1 + len(frames) * effort.rounds, 1 + len(frames) * effort.rounds)


def test_readers_see_the_old_frame_or_the_new_one(space: Space, store: Store, effort: Effort) -> None:
    key = space.key()
    frames = [content(300_000, 1), content(200_000, 2), content(300_000, 3)]
    whole = set(frames)
    sizes = {len(frame) for frame in frames}
    store.put(key, frames[0])

    def read() -> None:
        view = store.get(key)
        assert view is not None, "a frame that is overwritten is never gone"
        assert bytes(view) in whole

    def read_into() -> None:
        memory = bytearray(300_000)
        nbytes = store.get_into(key, memoryview(memory))
        assert nbytes is not None
        assert bytes(memory[:nbytes]) in whole

    def look() -> None:
        stat = store.stat(key)
        assert stat is not None
        assert stat.nbytes in sizes

    with meanwhile(read, read_into, look):
        for n in range(effort.rounds):
            store.put(key, frames[n % 3])


def test_readers_of_a_frame_that_is_deleted_see_it_whole_or_not(space: Space, store: Store, effort: Effort) -> None:
    key, frame = space.key(), content(100_000)

    def read() -> None:
        view = store.get(key)
        assert view is None or view == frame

    with meanwhile(read, read):
        for _ in range(effort.rounds):
            store.put(key, frame)
            assert store.delete(key)
    assert store.get(key) is None


def test_threads_with_keys_of_their_own(space: Space, store: Store, effort: Effort) -> None:
    def work(n: int) -> None:
        for round_ in range(effort.rounds):
            keys = [space.key(b"%32d" % (n * 10 + i)) for i in range(3)]
            frames = [content(1000 + round_, n * 10 + i) for i in range(3)]
            store.put(keys[0], frames[0])
            assert store.put_batch(list(zip(keys[1:], frames[1:], strict=True))) == [1000 + round_] * 2
            assert store.get_batch(keys) == frames
            assert store.get(keys[2]) == frames[2]
            assert store.delete(keys[1])
            assert store.get_batch(keys) == [frames[0], None, frames[2]]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(space.listed()) == 8
    stats = store.stats()
    assert (stats.puts, stats.deletes) == (4 * 3 * effort.rounds, 4 * effort.rounds)


def test_a_list_has_once_what_was_there_all_the_time(space: Space, store: Store, effort: Effort) -> None:
    stay = space.keys(60)
    store.put_batch([(key, key.digest) for key in stay])
    come_and_go = [space.key(1000 + n) for n in range(60)]
    at = iter(range(10**9))

    def write() -> None:
        key = come_and_go[next(at) % len(come_and_go)]
        store.put(key, b"frame")
        store.put(stay[next(at) % len(stay)], b"replaced")
        store.delete(key)

    with meanwhile(write):
        for _ in range(max(3, effort.rounds // 4)):
            found = list(store.list(space.namespace()))
            assert len(set(found)) == len(found)
            assert set(stay) <= set(found) <= {*stay, *come_and_go}


def test_closing_while_others_call_tears_nothing(space: Space, store: Store) -> None:
    keys = space.keys(4)
    frames = {key: content(50_000, n) for n, key in enumerate(keys)}
    stored: set[int] = set()
    over = threading.Event()

    def work(n: int) -> bool:
        key = keys[n]
        try:
            while not over.is_set():
                assert store.put(key, frames[key]) == 50_000
                stored.add(n)
                assert store.get(key) in (frames[key], None)
        except StoreError:
            return True
        return False

    with ThreadPoolExecutor(len(keys)) as pool:
        futures = [pool.submit(work, n) for n in range(len(keys))]
        try:
            while not stored and not any(future.done() for future in futures):
                time.sleep(0.001)
            store.close()
            wait(futures, CLOSING)
        finally:
            over.set()
        assert all(future.result(PATIENCE) for future in futures), "a closed store still serves"
    again = space.reopen()
    for n, key in enumerate(keys):
        view = again.get(key)
        assert view in (frames[key], None)
        assert view is not None or n not in stored or not space.target.persistent
