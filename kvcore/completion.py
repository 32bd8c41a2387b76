"""`CompletionQueue`: work that is under way, and the word that it is done.

One primitive for serdes, stores and controllers: a task has an id, a deadline and a result for each of its keys, and a
file descriptor wakes whoever waits for any of them, in an event loop or with `poll`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NewType, TypeVar

from kvcore.errors import ConfigError, KVCoreError

__all__ = ["CompletionQueue", "DeadlineError", "TaskError", "TaskId", "WakeFd", "attempt", "drop_traceback"]

R = TypeVar("R")
TaskId = NewType("TaskId", int)

_UNSET = object()
_log = logging.getLogger("kvcore")
_IDS = itertools.count(1)  # of all queues: an id of one means nothing to another, and is not mistaken for its own


def drop_traceback(result: R) -> R:
    """Return a result; of an exception, let go of the traceback, and of those of all that led to it.

    A traceback holds the local variables of all callers. An outcome may be kept for long, and the buffers that were in
    use where it arose must not be kept with it.
    """
    if isinstance(result, BaseException):
        found: dict[int, BaseException] = {}
        waiting: list[BaseException | None] = [result]
        while waiting:
            error = waiting.pop()
            if error is not None and id(error) not in found:  # causes may go round in a circle
                found[id(error)] = error
                error.__traceback__ = None
                waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return result


def attempt(call: Callable[..., R], *args: Any) -> R | Exception:
    """Call something; return what it returns, or the exception it raises, without its traceback.

    An exception that nobody foresaw, one that is no `KVCoreError`, is logged with its traceback. What is no `Exception`
    (SystemExit on a thread, say) becomes a `KVCoreError`: an outcome there must be. On the main thread it is raised:
    that is where Ctrl-C arrives, and it is for whoever called.
    """
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - it is the outcome, for whoever asks
        if not isinstance(error, KVCoreError):
            _log.warning("%s\n%s", error, traceback.format_exc())  # as text: a record may be kept for long, too
        return drop_traceback(error)
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            raise
        return drop_traceback(KVCoreError(f"left with {type(error).__name__}: {error}"))


class TaskError(KVCoreError, LookupError):
    """There is no such task: its id was never given, or its answer was given already."""


class DeadlineError(KVCoreError, TimeoutError):
    """A key of a task was not done by the task's deadline."""


class WakeFd:
    """A file descriptor that is readable while signals wait: an eventfd, or a pipe where there is none.

    Non-blocking, and closed on exec. Close it; if nobody does, it is closed when nobody has it any more.
    """

    __slots__ = ("_lock", "_read", "_write")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._write = -1
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            for fd in (self._read, self._write):
                os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once it is closed."""
        return self._read

    def signal(self) -> None:
        """Add one signal. Nothing happens on a closed one, or while as many wait as fit."""
        with self._lock:
            if self._write >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> int:
        """Take all signals; return how many there were."""
        with self._lock:
            count = 0
            with contextlib.suppress(BlockingIOError):
                while self._read >= 0:
                    data = os.read(self._read, 8 if self._read == self._write else 4096)
                    count += int.from_bytes(data, sys.byteorder) if self._read == self._write else len(data) // 8
            return count

    def close(self) -> None:
        """Close the descriptor; calling it again does nothing."""
        with self._lock:
            for fd in {self._read, self._write} - {-1}:
                os.close(fd)
            self._read = self._write = -1

    def __del__(self) -> None:
        self.close()  # of an owner that could not be made whole, say: nobody else knows of it


@dataclass(slots=True, eq=False)
class _Task(Generic[R]):
    results: list[object]
    """An R or an exception by key; `_UNSET` while it is under way."""
    missing: int
    deadline: float
    what: str


class CompletionQueue(Generic[R]):
    """Tasks under way, each of some keys, with a result of type R or an exception for each key.

    Parameters
    ----------
    name : str
        For messages: ``"put to fs:/var/cache"``.
    clock : callable
        Seconds, never backwards.

    Notes
    -----
    Thread-safe. `WakeFd` is signalled once for each task, after its result is visible to `take`. A deadline is kept by
    `expire`, which `take` and `wait` call: no thread watches the clock.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._tasks: dict[TaskId, _Task[R]] = {}
        self._timed: set[TaskId] = set()
        """Tasks with a deadline: `expire` need not look at the others."""
        self._changed = threading.Condition()
        self._wake = WakeFd()

    def __len__(self) -> int:
        """The tasks whose answer was not taken yet."""
        return len(self._tasks)

    @property
    def event_fd(self) -> int:
        """The descriptor that is readable while finished tasks wait; read it empty with `clear_event`."""
        return self._wake.fileno()

    def clear_event(self) -> int:
        """Take the signals of tasks that finished; return how many there were."""
        return self._wake.clear()

    def open(self, keys: int, *, timeout: float | None = None) -> TaskId:
        """Begin a task.

        Parameters
        ----------
        keys : int
            How many results it will have. A task of none is done at once.
        timeout : float, optional
            Seconds until its deadline: keys that are not done by then get a `DeadlineError`.

        Raises
        ------
        ConfigError
            `keys` is negative, or `timeout` not above 0.
        """
        if keys < 0 or (timeout is not None and not timeout > 0):
            raise ConfigError(f"a task has 0 keys or more, and a timeout above 0 s, got {keys=}, {timeout=}")
        deadline = float("inf") if timeout is None else self._clock() + timeout
        with self._changed:
            task_id = TaskId(next(_IDS))
            if timeout is not None:
                self._timed.add(task_id)
            self._tasks[task_id] = _Task([_UNSET] * keys, keys, deadline, f"{timeout:g} s" if timeout else "")
        if not keys:
            self._wake.signal()
        return task_id

    def set(self, task_id: TaskId, index: int, result: R | Exception) -> bool:
        """Give the result of one key.

        Returns
        -------
        bool
            Whether it counts: False where the key has one already, or the task is over (its deadline, say).
        """
        with self._changed:
            task = self._tasks.get(task_id)
            if task is None or task.results[index] is not _UNSET:
                return False
            task.results[index] = drop_traceback(result)
            task.missing -= 1
            done = not task.missing
            if done:
                self._changed.notify_all()
        if done:
            self._wake.signal()
        return True

    def set_all(self, task_id: TaskId, results: Sequence[R | Exception]) -> None:
        """Give the results of all keys, in order.

        Raises
        ------
        ConfigError
            There are not as many results as keys. None was given.
        """
        with self._changed:
            task = self._tasks.get(task_id)
            keys = len(results) if task is None else len(task.results)
        if len(results) != keys:
            raise ConfigError(f"{self._name}: {len(results)} results for a task of {keys} keys")
        for index, result in enumerate(results):
            self.set(task_id, index, result)

    def fail(self, task_id: TaskId, error: Exception) -> None:
        """Give `error` to every key that has no result yet."""
        with self._changed:
            task = self._tasks.get(task_id)
            open_keys = [i for i, result in enumerate(task.results) if result is _UNSET] if task else []
        for index in open_keys:
            self.set(task_id, index, error)

    def take(self, task_id: TaskId) -> tuple[R | Exception, ...] | None:
        """Return a task's results, in the order of its keys, exactly once; None while it is under way.

        Raises
        ------
        TaskError
            There is no such task, or its results were taken.
        """
        self.expire()
        with self._changed:
            return self._take(task_id)

    def wait(self, task_id: TaskId, timeout: float | None = None) -> tuple[R | Exception, ...] | None:
        """Wait for a task, `timeout` seconds at most, and `take` it."""
        until = float("inf") if timeout is None else self._clock() + timeout
        while True:
            self.expire()
            with self._changed:
                found = self._take(task_id)
                now = self._clock()
                if found is not None or now >= until:
                    return found
                left = min(until, self._tasks[task_id].deadline) - now
                self._changed.wait(None if left == float("inf") else max(left, 0.001))

    def wait_done(self, task_id: TaskId) -> None:
        """Wait until a task is over, and leave its answer to `take`; one that is not known is over."""
        while self.pending(task_id):
            with self._changed:
                task = self._tasks.get(task_id)
                if task is not None and task.missing:
                    left = task.deadline - self._clock()
                    self._changed.wait(None if left == float("inf") else max(left, 0.001))

    def pending(self, task_id: TaskId) -> bool:
        """Whether a task waits for results: it was begun, is not done, not late, and nobody has discarded it."""
        self.expire()
        with self._changed:
            task = self._tasks.get(task_id)
            return task is not None and task.missing > 0

    def discard(self, task_id: TaskId) -> tuple[R | Exception, ...]:
        """Forget a task for which nobody will ask: what is given for it from now on does not count.

        Returns
        -------
        tuple
            What was given for it before.
        """
        with self._changed:
            task = self._tasks.pop(task_id, None)
            self._timed.discard(task_id)
            self._changed.notify_all()  # whoever waits for it learns that there is no such task
            return tuple(r for r in task.results if r is not _UNSET) if task else ()  # type: ignore[misc]

    def expire(self) -> int:
        """End the keys of tasks that are past their deadline; return how many keys."""
        if not self._timed:
            return 0
        now = self._clock()
        with self._changed:
            timed = [(task_id, self._tasks[task_id]) for task_id in self._timed]
            late = [(task_id, task) for task_id, task in timed if task.missing and task.deadline <= now]
        ended = 0
        for task_id, task in late:
            error = DeadlineError(f"{self._name}: not done within {task.what}")
            for index in range(len(task.results)):
                ended += self.set(task_id, index, error)
        return ended

    def close(self) -> None:
        """Free the descriptor. Results can still be taken; calling it again does nothing."""
        self._wake.close()

    def _take(self, task_id: TaskId) -> tuple[R | Exception, ...] | None:
        task = self._tasks.get(task_id)
        if task is None:
            raise TaskError(f"{self._name}: task {task_id} was never begun, or its answer was given already")
        if task.missing:
            return None
        del self._tasks[task_id]
        self._timed.discard(task_id)
        return tuple(task.results)  # type: ignore[arg-type]
