"""`CappedStore` under many threads: never more than its capacity, never a wrong frame, never stuck."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.tiers.stores import MemoryStore, StoreStat

from .capped_store import Wrapped, capped, chunk, key, there


def test_a_put_waits_for_room_that_another_is_filling() -> None:
    started, go = threading.Event(), threading.Event()

    def hold(name: Any, frame: Any) -> None:
        if name == key(1):
            started.set()
            assert go.wait(20)

    store = capped(100, Wrapped(hold))
    first = threading.Thread(target=store.put, args=(key(1), bytes(60)))
    second = threading.Thread(target=store.put, args=(key(2), bytes(60)))
    first.start()
    assert started.wait(20)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert list(store.list()) == []
    go.set()
    first.join(20)
    second.join(20)
    assert there(store) == {2}


@pytest.mark.parametrize("nbytes", [40, 60], ids=["shorter", "as long"])
def test_a_put_waits_for_a_frame_that_is_being_replaced(nbytes: int) -> None:
    started, go = threading.Event(), threading.Event()

    def hold(name: Any, frame: Any) -> None:
        if name == key(1) and started.is_set():
            assert go.wait(20)

    store = capped(100, Wrapped(hold))
    store.put(key(1), bytes(60))
    started.set()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.put, key(1), bytes(nbytes))
        while key(1) not in store._books._granted:
            time.sleep(0.001)
        second = pool.submit(store.put, key(2), bytes(70))
        time.sleep(0.05)
        assert not second.done()
        go.set()
        assert (first.result(20), second.result(20)) == (nbytes, 70)
    assert there(store) == {2}


def test_a_put_waits_for_the_deletion_that_makes_its_room() -> None:
    deleting, go = threading.Event(), threading.Event()

    def hold(name: Any) -> None:
        deleting.set()
        assert go.wait(20)

    store = capped(100, Wrapped(before_delete=hold))
    store.put(key(1), bytes(100))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.put, key(2), bytes(50))
        assert deleting.wait(20)
        second = pool.submit(store.put, key(3), bytes(50))
        time.sleep(0.05)
        assert not second.done()
        assert store.get(key(1)) == bytes(100)
        assert [name.digest[0] for name in store.list()] == [1], "until it is gone, there is no room"
        go.set()
        assert (first.result(20), second.result(20)) == (50, 50)
    assert there(store) == {2, 3}


def test_many_threads_never_have_more_than_the_capacity_nor_a_wrong_frame() -> None:
    capacity = 300
    total, lock, most = 0, threading.Lock(), 0

    class Measured(MemoryStore):
        def put(self, key: Any, frame: Any) -> int:
            nonlocal total, most
            with lock:
                old = self.stat(key)
                total += len(frame) - (old.nbytes if old else 0)
                most = max(most, total)
                return super().put(key, frame)

        def delete(self, key: Any) -> bool:
            nonlocal total
            with lock:
                old = self.stat(key)
                total -= old.nbytes if old else 0
                return super().delete(key)

    store, wrong, refused = capped(capacity, Measured(), "arc"), [], []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(400):
            n = chance.randrange(12)
            choice = chance.random()
            if choice < 0.5:
                try:
                    store.put(chunk(n, parent=n - 1 if n % 4 else None), bytes([n]) * chance.randint(1, 90))
                except StoreError as error:  # all else comes before this chunk, or is being written
                    refused.append(error.errno)
            elif choice < 0.9:
                found = store.get(key(n))
                if found is not None and set(bytes(found)) != {n}:
                    wrong.append(n)
            else:
                store.delete(key(n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert set(refused) <= {errno.ENOSPC}
    assert len(refused) < 160, "a fifth of the puts at most; few are expected"
    there(store)
    assert 200 < most <= capacity


class Interleaved(MemoryStore):
    """Calls a function, once, when a call of that name has its answer and has not given it yet."""

    between: tuple[str, Callable[[], Any]] = ("", lambda: None)

    def get(self, key: Any) -> memoryview | None:
        return self._late("get", super().get(key))

    def stat(self, key: Any) -> StoreStat | None:
        return self._late("stat", super().stat(key))

    def list(self, namespace: bytes | None = None) -> Any:
        return iter(self._late("list", list(super().list(namespace))))

    def _late(self, name: str, answer: Any) -> Any:
        wanted, call = self.between
        if name == wanted:
            self.between = ("", call)
            call()
        return answer


def test_what_was_stored_after_a_read_stands() -> None:
    store = capped(100, Interleaved())
    store.inner.between = "get", lambda: store.put(key(1), bytes(30))
    assert store.get(key(1)) is None
    assert there(store) == {1}
    store.inner.between = "get", lambda: store.put(key(1), bytes(60))
    assert store.get(key(1)) == bytes(30)
    assert there(store) == {1}
    store.inner.between = "get", lambda: store.delete(key(1))
    assert store.get(key(1)) == bytes(60)
    assert there(store) == set()


def test_what_was_stored_after_a_listing_stands() -> None:
    store = capped(100, Interleaved())
    store.inner.between = "list", lambda: store.put(key(1), bytes(30))
    store.refresh()
    assert there(store) == {1}
    store.put(key(2), bytes(10))
    store.inner.delete(key(2))
    store.inner.between = "list", lambda: store.put(key(2), bytes(20))
    store.refresh()
    assert there(store) == {1, 2}
    store.inner.between = "list", lambda: store.delete(key(1))
    store.refresh()
    assert there(store) == {2}
    store.inner.put(key(2), bytes(15))  # by another process
    store.inner.between = "stat", lambda: store.put(key(2), bytes(60))
    store.refresh()
    assert there(store) == {2}
