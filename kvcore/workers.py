"""`Workers`: a few threads that take the most urgent task first."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum

from kvcore.errors import ConfigError, KVCoreError

__all__ = ["Priority", "Workers"]

_log = logging.getLogger("kvcore")


class Priority(IntEnum):
    """What goes first: a load is somebody's time to first token, a store nobody waits for."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2


class Workers:
    """Threads that run calls, the most urgent first, and those of one priority in the order they came.

    Parameters
    ----------
    count : int
        Threads; started with the first call.
    name : str
        Theirs.

    Raises
    ------
    ConfigError
        `count` is below 1.

    Notes
    -----
    Threads do not go with a fork: a process takes no work for workers that were made before it was forked.
    """

    def __init__(self, count: int = 1, *, name: str = "kvcore") -> None:
        if count < 1:
            raise ConfigError(f"at least one worker is needed, got max_workers={count}")
        self._count, self._name = count, name
        self._queue: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._idle = 0
        self._process = os.getpid()

    def submit(self, priority: Priority, *calls: Callable[[], object]) -> None:
        """Run calls on threads, soon, and in this order. They must not raise: what they do raise is logged.

        Raises
        ------
        KVCoreError
            The workers are closed, or were made before a fork, or the machine gives no thread. None of the calls is
            run.
        """
        if os.getpid() != self._process:  # before the lock, which somebody may have held when the process was forked
            raise KVCoreError(f"{self._name} was opened before this process was forked; open it again in each process")
        with self._changed:
            if self._closed:
                raise KVCoreError(f"{self._name} is closed and takes no more work")
            waiting = len(self._queue) + len(calls) - self._idle
            for _ in range(min(self._count - len(self._threads), waiting)):
                self._start()
            for call in calls:
                heapq.heappush(self._queue, (priority, next(self._order), call))
            self._changed.notify(len(calls))

    def close(self) -> None:
        """Run what was submitted, then end the threads; calling it again does nothing, nor does it after a fork."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:  # those that there are will do it, later
                return
            raise KVCoreError(f"{self._name} cannot start a thread: {error}; raise the limit of threads") from error
        self._threads.append(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._queue:
                    return
                call = heapq.heappop(self._queue)[2]
            try:
                call()
            except BaseException:  # noqa: BLE001 - a worker must outlive any call, SystemExit too; what it was is told
                _log.error("%s: a call failed\n%s", self._name, traceback.format_exc())
            del call  # and all that it holds: buffers, say
