"""A bounded number of calls at a time, first come, first served."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Permits"]


class Permits:
    """A semaphore that is fair: one of `threading` may leave a thread waiting while another takes turn after turn.

    Parameters
    ----------
    count : int
        How many may be held at a time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Take a permit, after all who asked before."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # whoever gives its permit back opens this lock instead
        except BaseException:
            # Interrupted from the keyboard: leave the queue, or pass on the permit that came meanwhile.
            with self._lock:
                queued = turn in self._waiting
                if queued:
                    self._waiting.remove(turn)
            if not queued:
                self.release()
            raise

    def release(self) -> None:
        """Give a permit to who has waited longest, or back."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
