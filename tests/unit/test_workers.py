"""`Workers`: the most urgent call first, and nothing that was submitted is lost."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from kvcore.errors import ConfigError, KVCoreError
from kvcore.workers import Priority, Workers


@pytest.fixture
def workers():
    workers = Workers(1, name="test")
    yield workers
    workers.close()


class Gate:
    """A call that keeps its worker busy until it is opened."""

    def __init__(self):
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self._open.wait(10)

    def open(self):
        self._open.set()


def test_the_most_urgent_goes_first_and_equals_in_their_order(workers):
    gate, ran = Gate(), []
    workers.submit(Priority.STORE, gate)
    assert gate.entered.wait(10)
    workers.submit(Priority.STORE, lambda: ran.append("store 1"), lambda: ran.append("store 2"))
    workers.submit(Priority.PREFETCH, lambda: ran.append("prefetch"))
    workers.submit(Priority.LOAD, lambda: ran.append("load 1"), lambda: ran.append("load 2"))
    workers.submit(Priority.STORE, lambda: ran.append("store 3"))
    gate.open()
    workers.close()
    assert ran == ["load 1", "load 2", "prefetch", "store 1", "store 2", "store 3"]


def test_as_many_run_at_a_time_as_there_are_workers():
    workers, together = Workers(3, name="test"), threading.Barrier(4)
    workers.submit(Priority.LOAD, *[lambda: together.wait(10)] * 3)
    together.wait(10)  # breaks, and fails here, unless three calls wait at once
    workers.close()


def test_threads_are_started_when_there_is_work_and_no_more_than_that():
    workers = Workers(4, name="lazy")
    assert not [t for t in threading.enumerate() if t.name.startswith("lazy")]
    workers.submit(Priority.LOAD, lambda: None, lambda: None)
    assert len([t for t in threading.enumerate() if t.name.startswith("lazy")]) <= 2
    workers.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lazy")]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_a_call_that_raises_is_told_and_its_worker_goes_on(workers, caplog, error):
    def broken():
        raise error

    done = threading.Event()
    with caplog.at_level(logging.ERROR, "kvcore"):
        workers.submit(Priority.LOAD, broken)
        workers.submit(Priority.LOAD, done.set)
        assert done.wait(10)
    assert "test: a call failed" in caplog.text


def test_close_runs_what_was_submitted_and_takes_no_more():
    workers, ran = Workers(2, name="test"), []
    workers.submit(Priority.STORE, *[lambda i=i: (time.sleep(0.002), ran.append(i)) for i in range(20)])
    workers.close()
    assert sorted(ran) == list(range(20))
    with pytest.raises(KVCoreError, match="test is closed"):
        workers.submit(Priority.LOAD, lambda: ran.append("never"))
    workers.close()
    assert "never" not in ran


def test_a_worker_may_close_its_own_pool():
    workers, done = Workers(1, name="test"), threading.Event()
    workers.submit(Priority.LOAD, workers.close, done.set)
    assert done.wait(10)
    workers.close()


def test_none_of_a_batch_is_run_where_no_thread_can_be_had(monkeypatch):
    workers, ran = Workers(2, name="test"), []

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(KVCoreError, match=r"cannot start a thread.*raise the limit"):
            workers.submit(Priority.LOAD, lambda: ran.append(1))
    workers.submit(Priority.LOAD, lambda: ran.append(2))
    workers.close()
    assert ran == [2]


def test_with_one_thread_more_calls_than_threads_are_done_by_it(monkeypatch):
    workers, ran = Workers(4, name="test"), []
    workers.submit(Priority.LOAD, lambda: None)

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        workers.submit(Priority.LOAD, lambda: ran.append(1), lambda: ran.append(2))
    workers.close()
    assert ran == [1, 2]


def test_at_least_one_worker_is_needed():
    with pytest.raises(ConfigError, match="max_workers=0"):
        Workers(0)


def test_many_threads_may_submit_and_every_call_runs_once():
    workers, lock, counts = Workers(3, name="test"), threading.Lock(), {}

    def call(key):
        with lock:
            counts[key] = counts.get(key, 0) + 1

    def client(c):
        for i in range(200):
            workers.submit(Priority(i % 3), lambda key=(c, i): call(key))

    clients = [threading.Thread(target=client, args=(c,)) for c in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    workers.close()
    assert len(counts) == 800
    assert set(counts.values()) == {1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_workers_refuse_and_close_at_once(workers):
    workers.submit(Priority.LOAD, lambda: None)
    child = os.fork()
    if not child:
        code = 1
        try:
            workers.submit(Priority.LOAD, lambda: None)
        except KVCoreError as error:
            workers.close()
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
