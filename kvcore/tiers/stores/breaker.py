"""Whether a store that may go away is asked: it is not while it is down, and now and then it is tried again."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.contract import Outage

__all__ = ["FULL", "RETRY_SECONDS", "UNAVAILABLE", "Breaker", "check_retry", "is_certain", "is_unavailable"]

RETRY_SECONDS = (0.5, 30.0)
"""The shortest and the longest wait before a store that is down is tried again."""

_NOBODY = frozenset(
    {
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ENXIO,
    }
)
"""Nobody is there. Whoever answers at all is back."""
_NO_ANSWER = frozenset({errno.EAGAIN, errno.ETIMEDOUT})
"""It does not do what it is asked, which may have taken long to learn."""
_DOUBTFUL = frozenset({errno.ECONNABORTED, errno.ECONNRESET, errno.EIO, errno.EPIPE, errno.ESTALE})
"""A bad block, or a connection that had been idle: one is bad luck, several in a row are not."""
STRIKES = 3
"""Failures of one op in a row, of those that may be bad luck, that make an outage."""

UNAVAILABLE = _NOBODY | _NO_ANSWER | _DOUBTFUL
"""Errnos that say that the medium is not there, or does not do its work for anybody."""
FULL = frozenset({errno.EDQUOT, errno.ENOSPC})
"""Errnos of a medium that takes no more. What it has can be read."""


def is_unavailable(error: BaseException) -> bool:
    """Whether an error says that the medium is not there: nobody answers, or not in time, or input and output fail.

    A full disk, a refused permission, a frame that is too large or damaged do not say so: other calls may go well.
    """
    return isinstance(error, StoreError) and error.errno in UNAVAILABLE


def is_certain(error: BaseException) -> bool:
    """Whether an error says so beyond doubt: one of these is an outage, of the others it takes several in a row."""
    return isinstance(error, StoreError) and error.errno in _NOBODY | _NO_ANSWER


def check_retry(seconds: tuple[float, float]) -> tuple[float, float]:
    """Return the shortest and the longest wait; `ConfigError` where they are not above 0 and in this order."""
    first, most = seconds
    if not 0 < first <= most < float("inf"):
        raise ConfigError(f"retry_seconds are the shortest and the longest wait, such as 0.5 and 30, got {seconds}")
    return first, most


@dataclass(slots=True)
class _Down:
    """An outage that is under way."""

    op: str
    reason: str
    code: int
    since: float
    wait: float
    again: float
    trial: float | None = None
    """Since when calls are let through again, to see whether what failed goes well now."""
    probed_by: int = 0
    """The process that is trying just now: a fork leaves the thread that does so behind."""


class Breaker:
    """Decides by the outcomes of calls whether further ones are made. Thread-safe; it calls nothing and knows no store.

    Parameters
    ----------
    store : str
        What the store is called, for messages.
    retry_seconds : (float, float)
        After so many seconds a store that is down is tried again, then after twice as many, and so on up to the second
        figure. One that goes down soon after it came back goes on with the longer waits.
    clock : callable
        Seconds, never backwards.

    Attributes
    ----------
    changes : deque of (str, float)
        Outages that began, with the reason, and that ended, with no reason and their seconds: in this order, for
        whoever tells of them and takes them off.

    Notes
    -----
    Down: calls are refused. When the time has come, `claim` gives one caller the right to probe. A probe that goes well
    proves what it tried; if something else had failed, calls are let through on trial until that succeeds, or anything
    does after the longest wait. A failure on trial is the same outage.
    """

    def __init__(
        self,
        store: str,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._first, self._most = check_retry(retry_seconds)
        self._clock = clock
        self._lock = threading.Lock()
        self.changes: deque[tuple[str, float]] = deque()
        self._down: _Down | None = None
        self._strikes: dict[str, int] = {}
        self._last: tuple[float, float] = (-float("inf"), self._first)  # when it came back, and the wait by then

    @property
    def refuses(self) -> bool:
        """Whether calls are refused now."""
        down = self._down
        return down is not None and down.trial is None

    def outage(self) -> Outage | None:
        """Return the outage under way, or None."""
        down = self._down  # no lock: of a fork, another thread may hold it for ever
        if down is None:
            return None
        now = self._clock()
        left = max(down.again - now, 0.0) if down.trial is None else 0.0
        return Outage(self.store, down.reason, down.code, now - down.since, left, down.trial is None)

    def failed(self, op: str, error: StoreError, count: int = 1, *, certain: bool = False) -> None:
        """Note that calls of an op failed.

        Parameters
        ----------
        op : str
        error : StoreError
        count : int
            How many, one after the other.
        certain : bool
            The store is down, whatever the errno is.
        """
        code = error.errno or errno.EIO
        if code not in UNAVAILABLE and not certain:
            return
        with self._lock:
            down, now = self._down, self._clock()
            if down is not None:
                if down.trial is not None:
                    down.trial, down.op = None, op
                    self._wait_longer(down, now)
                return
            self._strikes[op] = self._strikes.get(op, 0) + count
            if code in _DOUBTFUL and not certain and self._strikes[op] < STRIKES:
                return
            back, wait = self._last
            wait = min(2 * wait, self._most) if now - back < self._most else self._first
            reason = error.strerror or str(error)
            self._down = _Down(op, reason, code, now, wait, now + wait)
            self._strikes.clear()
            self.changes.append((reason, 0.0))

    def worked(self, op: str) -> None:
        """Note that calls of an op went well."""
        if self._down is None and not self._strikes:
            return
        with self._lock:
            self._strikes.pop(op, None)
            down, now = self._down, self._clock()
            if down is not None and down.trial is not None and (op == down.op or now - down.trial >= self._most):
                self._back(down, now)

    def claim(self) -> bool:
        """Whether it is time for a probe, and the caller is the one to make it; it then calls `probed`."""
        down = self._down
        if down is None or down.trial is not None or self._clock() < down.again or down.probed_by == os.getpid():
            return False
        with self._lock:
            if self._down is not down or down.trial is not None or down.probed_by == os.getpid():
                return False
            down.probed_by = os.getpid()
            return True

    def probed(self, op: str, error: BaseException | None) -> None:
        """Note how a probe, a call of `op`, ended."""
        with self._lock:
            down, now = self._down, self._clock()
            if down is None:
                return
            down.probed_by = 0
            if error is not None:
                self._wait_longer(down, now)
            elif op == down.op or down.code in _NOBODY:
                self._back(down, now)
            else:
                down.trial = now

    def _wait_longer(self, down: _Down, now: float) -> None:
        down.wait = min(2 * down.wait, self._most)
        down.again = now + down.wait

    def _back(self, down: _Down, now: float) -> None:
        self._down, self._last = None, (now, down.wait)
        self.changes.append(("", now - down.since))
