"""Stores on a server: it goes away and comes back, and no answer is wrong meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcore.errors import StoreError
from kvcore.tiers.stores import Store
from kvcore_conformance.stores.servers import Server
from kvcore_conformance.stores.space import Space, content, refused
from kvcore_conformance.stores.targets import Target

PATIENCE = 120.0


@pytest.fixture
def server(store_target: Target) -> Server:
    """The server that the store is on."""
    if store_target.server is None:
        pytest.skip("this store is on no server that the suite started")
    return store_target.server


def test_without_its_server_every_call_is_an_error_that_says_so(
    space: Space, store: Store, server: Server, store_target: Target
) -> None:
    key = space.key()
    store.put(key, b"frame")
    server.kill()
    try:
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.put(key, b"other"),
            lambda: store.get(key),
            lambda: store.stat(key),
            lambda: store.exists(key),
            lambda: store.delete(key),
            lambda: store.get_batch([key, key]),
            lambda: store.put_batch([(key, b"other")]),
            lambda: list(store.list(key.namespace)),
        )
        began = time.monotonic()
        with ThreadPoolExecutor(len(calls)) as pool:  # each may wait for as long as its retries take
            answers = list(pool.map(refused, calls))
        assert time.monotonic() - began < PATIENCE
        for error in (error for errors in answers for error in errors):
            assert error.errno, f"{error!r} has no errno"
            assert not any(secret in str(error) for secret in store_target.secrets)
    finally:
        server.start()
    assert store.get(key) == b"frame"
    assert store.put(key, b"other") == 5
    assert store.get(key) == b"other"


def test_a_restart_in_the_middle_of_batches(space: Space, store: Store, server: Server) -> None:
    keys = space.keys(24)
    confirmed: dict[int, int] = {}
    begun: dict[int, int] = {}
    over = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        version = 0
        while not over.is_set():
            version += 1
            for n in range(len(keys)):
                begun[n] = version
            try:
                outcomes = store.put_batch([(key, _frame(n, version)) for n, key in enumerate(keys)])
            except StoreError as error:
                outcomes = [error] * len(keys)
            except BaseException as error:
                failures.append(error)
                raise
            for n, outcome in enumerate(outcomes):
                if isinstance(outcome, StoreError):
                    assert outcome.errno
                else:
                    confirmed[n] = version

    writer = threading.Thread(target=write)
    writer.start()
    try:
        _wait_for(lambda: len(confirmed) == len(keys))
        server.kill()
        time.sleep(0.2)
        server.start()
        seen = max(confirmed.values())
        _wait_for(lambda: max(confirmed.values()) > seen + 1)
    finally:
        over.set()
        writer.join(PATIENCE)
    assert not failures
    assert not writer.is_alive()
    for n, view in enumerate(store.get_batch(keys)):
        assert isinstance(view, memoryview)
        version = int.from_bytes(view[:8], "little")
        assert confirmed[n] <= version <= begun[n]
        assert view == _frame(n, version)
    assert space.listed() == sorted(keys)


def _frame(n: int, version: int) -> bytes:
    return version.to_bytes(8, "little") + content(30_000 + n, version)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)
