"""`CompletionQueue`: every key of a task gets one answer, every task is answered once, and whoever waits is woken."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcore.completion import CompletionQueue, DeadlineError, TaskError, WakeFd, attempt, drop_traceback
from kvcore.errors import ConfigError, KVCoreError


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def readable(fd: int, timeout: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout)[0])


@pytest.fixture(params=["eventfd", "pipe"])
def wake(request, monkeypatch):
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("there is no eventfd here")
    fd = WakeFd()
    yield fd
    fd.close()


@pytest.fixture
def queue():
    queue = CompletionQueue("test")
    yield queue
    queue.close()


# --- the descriptor


def test_signals_are_counted_and_taken_together(wake):
    assert not readable(wake.fileno())
    assert wake.clear() == 0
    for _ in range(3):
        wake.signal()
    assert readable(wake.fileno())
    assert wake.clear() == 3
    assert not readable(wake.fileno())


def test_the_descriptor_never_blocks_and_is_not_inherited(wake):
    assert not os.get_blocking(wake.fileno())
    assert not os.get_inheritable(wake.fileno())
    with pytest.raises(BlockingIOError):
        os.read(wake.fileno(), 8)


def test_a_pipe_that_is_full_still_wakes(monkeypatch):
    monkeypatch.delattr(os, "eventfd", raising=False)
    wake = WakeFd()
    for _ in range(20_000):
        wake.signal()
    assert readable(wake.fileno())
    assert 1000 < wake.clear() < 20_000
    wake.close()


def test_a_closed_descriptor_is_gone_and_asks_nothing(wake):
    fd = wake.fileno()
    wake.close()
    wake.close()
    wake.signal()
    assert (wake.fileno(), wake.clear()) == (-1, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_clear_may_race_with_signal(wake):
    """Not one of the signals is lost or counted twice."""
    count, stop, taken = 500, threading.Event(), []

    def read():
        while not stop.is_set():
            taken.append(wake.clear())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(count):
        wake.signal()
    stop.set()
    reader.join()
    assert sum(taken) + wake.clear() == count


# --- tasks


def test_results_come_in_the_order_of_the_keys_and_once(queue):
    task = queue.open(3)
    assert queue.take(task) is None
    error = ValueError("b")
    assert queue.set(task, 2, "c")
    assert queue.set(task, 1, error)
    assert queue.take(task) is None
    assert not readable(queue.event_fd)
    assert queue.set(task, 0, "a")
    assert readable(queue.event_fd)
    assert queue.take(task) == ("a", error, "c")
    with pytest.raises(TaskError, match=r"test: task .* answer was given already"):
        queue.take(task)
    assert (queue.clear_event(), len(queue)) == (1, 0)


def test_a_key_keeps_its_first_result(queue):
    task = queue.open(1)
    assert queue.set(task, 0, "first")
    assert not queue.set(task, 0, "second")
    assert queue.take(task) == ("first",)
    assert not queue.set(task, 0, "late")


def test_a_task_of_no_keys_is_done_at_once(queue):
    task = queue.open(0)
    assert readable(queue.event_fd)
    assert queue.take(task) == ()


def test_an_id_means_nothing_to_another_queue(queue):
    other = CompletionQueue("other")
    task = queue.open(0)
    with pytest.raises(TaskError, match="other: task"):
        other.take(task)
    assert other.open(0) != task
    other.close()


def test_fail_answers_the_keys_that_are_left(queue):
    task, error = queue.open(3), OSError("gone")
    queue.set(task, 1, "done")
    queue.fail(task, error)
    assert queue.take(task) == (error, "done", error)
    queue.fail(task, error)


def test_set_all_wants_a_result_for_each_key(queue):
    task = queue.open(2)
    with pytest.raises(ConfigError, match="1 results for a task of 2 keys"):
        queue.set_all(task, ["a"])
    queue.set_all(task, ["a", "b"])
    assert queue.take(task) == ("a", "b")


@pytest.mark.parametrize(("keys", "timeout"), [(-1, None), (1, 0), (1, -2.0), (1, float("nan"))])
def test_tasks_that_mean_nothing_are_refused(queue, keys, timeout):
    with pytest.raises(ConfigError, match="a task has 0 keys or more"):
        queue.open(keys, timeout=timeout)
    assert len(queue) == 0


def test_a_deadline_ends_the_keys_that_are_late():
    clock = Clock()
    queue = CompletionQueue("put to disk", clock=clock)
    task, patient = queue.open(2, timeout=5.0), queue.open(1)
    queue.set(task, 0, "in time")
    clock.now += 4.9
    assert queue.take(task) is None
    clock.now += 0.2
    done, late = queue.take(task)
    assert done == "in time"
    assert isinstance(late, DeadlineError)
    assert isinstance(late, TimeoutError)
    assert str(late) == "put to disk: not done within 5 s"
    assert not queue.set(task, 1, "too late")
    assert queue.take(patient) is None
    assert queue.clear_event() == 1
    queue.close()


def test_wait_returns_when_it_is_done_or_time_is_up(queue):
    task = queue.open(1)
    assert queue.wait(task, 0.0) is None
    start = time.monotonic()
    assert queue.wait(task, 0.03) is None
    assert time.monotonic() - start >= 0.03
    threading.Timer(0.02, queue.set, (task, 0, "now")).start()
    assert queue.wait(task) == ("now",)


def test_wait_keeps_the_deadline_itself(queue):
    (late,) = queue.wait(queue.open(1, timeout=0.02))
    assert isinstance(late, DeadlineError)


def test_one_of_several_that_wait_gets_the_answer(queue):
    task, got = queue.open(1), []
    waiters = [threading.Thread(target=lambda: got.append(attempt(queue.wait, task))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    queue.set(task, 0, "once")
    for waiter in waiters:
        waiter.join()
    assert got.count(("once",)) == 1
    assert sum(isinstance(one, TaskError) for one in got) == 3


def test_what_is_discarded_is_forgotten_and_whoever_waits_for_it_is_told(queue):
    task, got = queue.open(2, timeout=60), []
    queue.set(task, 0, "early")
    waiter = threading.Thread(target=lambda: got.append(attempt(queue.wait, task)))
    waiter.start()
    time.sleep(0.02)
    assert queue.discard(task) == ("early",)
    waiter.join(10)
    assert isinstance(got[0], TaskError)
    assert queue.discard(task) == ()
    assert not queue.set(task, 1, "late")
    assert queue.expire() == 0
    assert (len(queue), queue.clear_event()) == (0, 0)


def test_wait_done_leaves_the_answer(queue):
    task = queue.open(1)
    threading.Timer(0.02, queue.set, (task, 0, "now")).start()
    queue.wait_done(task)
    assert queue.take(task) == ("now",)
    queue.wait_done(task)


def test_results_can_be_taken_after_close(queue):
    task = queue.open(1)
    queue.close()
    queue.close()
    assert queue.event_fd == -1
    queue.set(task, 0, "still there")
    assert queue.take(task) == ("still there",)


def test_the_result_is_visible_before_the_signal():
    """Whoever is woken finds what it was woken for: never is a signal read while nothing can be taken."""
    queue = CompletionQueue("test")
    poll = select.poll()
    poll.register(queue.event_fd, select.POLLIN)
    tasks, missed = [queue.open(1) for _ in range(300)], 0
    worker = threading.Thread(target=lambda: [queue.set(task, 0, None) for task in tasks])
    worker.start()
    left, signals = set(tasks), 0
    while left:
        assert poll.poll(10_000), "a finished task did not wake its waiter"
        signals += queue.clear_event()
        taken = {task for task in left if queue.take(task) is not None}
        left -= taken
        missed += len(tasks) - len(left) < signals
    worker.join()
    assert not missed
    assert signals + queue.clear_event() == len(tasks)
    queue.close()


def test_threads_that_race_to_answer_leave_one_answer_for_each_key():
    queue, keys = CompletionQueue("test"), 200
    task, accepted = queue.open(keys), []
    barrier = threading.Barrier(4)

    def race(name):
        barrier.wait()
        accepted.append(sum(queue.set(task, i, name) for i in range(keys)))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(accepted) == keys
    assert len(queue.take(task)) == keys
    assert queue.clear_event() == 1
    queue.close()


# --- outcomes


def test_an_outcome_holds_no_buffer_of_where_it_arose():
    class Buffer:
        pass

    def fails():
        buffer = Buffer()
        watch.append(weakref.ref(buffer))
        try:
            raise OSError("inner")
        except OSError as error:
            raise KVCoreError("outer") from error

    watch: list = []
    outcome = attempt(fails)
    gc.collect()
    assert isinstance(outcome, KVCoreError)
    assert watch[0]() is None
    assert drop_traceback("a result") == "a result"


def test_attempt_returns_what_was_raised_and_tells_what_nobody_foresaw(caplog):
    def raises(error):
        raise error

    assert attempt(lambda a: a + 1, 2) == 3
    expected, surprise = KVCoreError("foreseen"), ZeroDivisionError("surprise")
    assert attempt(raises, expected) is expected
    assert not caplog.records
    assert attempt(raises, surprise) is surprise
    assert "surprise" in caplog.text
    left = []
    thread = threading.Thread(target=lambda: left.append(attempt(raises, SystemExit(3))))
    thread.start()
    thread.join()
    assert isinstance(left[0], KVCoreError)
    assert "SystemExit" in str(left[0])
    for leaving in (SystemExit(3), KeyboardInterrupt()):  # on the main thread they are for whoever called
        with pytest.raises(type(leaving)):
            attempt(raises, leaving)


def test_all_that_led_to_an_outcome_lets_go_of_its_buffers():
    class Buffer:
        pass

    def fails(error):
        buffer = Buffer()
        watch.append(weakref.ref(buffer))
        raise error

    def caught(error):
        try:
            fails(error)
        except OSError as found:
            return found

    watch: list = []
    cause, context = caught(OSError("cause")), caught(OSError("context"))
    outcome = KVCoreError("outer")
    outcome.__cause__, outcome.__context__ = cause, context
    cause.__cause__ = outcome  # and round in a circle
    assert drop_traceback(outcome) is outcome
    assert [ref() for ref in watch] == [None, None]


def test_a_descriptor_that_nobody_closes_is_closed_with_its_owner():
    queue = CompletionQueue("forgotten")
    fd = queue.event_fd
    del queue
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_who_waits_for_the_end_of_a_task_sees_its_deadline():
    queue = CompletionQueue("late")
    task = queue.open(1, timeout=0.05)
    assert queue.pending(task)
    queue.wait_done(task)
    assert not queue.pending(task)
    assert isinstance(queue.take(task)[0], DeadlineError)
    assert not queue.pending(task)
    queue.close()


class Model(RuleBasedStateMachine):
    """The queue against a dict of lists."""

    tasks = Bundle("tasks")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.queue = CompletionQueue("model", clock=self.clock)
        self.model: dict = {}
        self.deadlines: dict = {}
        self.signals = 0

    def teardown(self):
        self.queue.close()

    def _late(self):
        for task, results in self.model.items():
            if self.deadlines[task] <= self.clock.now and None in results:
                self.model[task] = ["late" if r is None else r for r in results]
                self.signals += 1

    @rule(target=tasks, keys=st.integers(0, 3), timeout=st.sampled_from([None, 1.0, 5.0]))
    def open(self, keys, timeout):
        task = self.queue.open(keys, timeout=timeout)
        assert task not in self.model
        self.model[task] = [None] * keys
        self.deadlines[task] = self.clock.now + (timeout or float("inf"))
        self.signals += not keys
        return task

    @rule(task=tasks, index=st.integers(0, 2), value=st.integers(1, 9))
    def set(self, task, index, value):
        results = self.model.get(task)
        if results is not None and index >= len(results):
            return
        counts = results is not None and results[index] is None
        assert self.queue.set(task, index, value) == counts
        if counts:
            results[index] = value
            self.signals += None not in results

    @rule(task=tasks)
    def take(self, task):
        self._late()
        results = self.model.get(task)
        if results is None:
            with pytest.raises(TaskError):
                self.queue.take(task)
            return
        found = self.queue.take(task)
        if None in results:
            assert found is None
        else:
            assert ["late" if isinstance(r, DeadlineError) else r for r in found] == results
            del self.model[task]

    @rule(task=consumes(tasks))
    def discard(self, task):
        given = self.queue.discard(task)
        results = [r for r in self.model.pop(task, []) if r is not None]
        assert ["late" if isinstance(r, DeadlineError) else r for r in given] == results

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds
        self._late()
        self.queue.expire()

    @rule()
    def wake(self):
        assert self.queue.clear_event() == self.signals
        self.signals = 0

    @invariant()
    def as_many_tasks(self):
        assert len(self.queue) == len(self.model)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30)
