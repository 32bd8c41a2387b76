"""A store in front of another one that may go away: calls are refused at once while it is gone, until it is back."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvcore.completion import attempt
from kvcore.errors import StoreError
from kvcore.keys import DIGEST_BYTES
from kvcore.tiers.stores.breaker import FULL, RETRY_SECONDS, Breaker, is_certain, is_unavailable
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Outage,
    Outcomes,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    StoreUsage,
    flat_bytes,
)
from kvcore.tiers.stores.registry import open_store

__all__ = ["GuardedStore", "open_guarded"]

T = TypeVar("T")

_PROBE = StoreKey(bytes(DIGEST_BYTES), bytes(DIGEST_BYTES))
"""What a probe asks for. No frame has it: both digests would have to be zero."""
_OPEN = "open"
_CLOSING_SECONDS = 1.0

_log = logging.getLogger("kvcore")


def _on_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, name="kvcore store probe", daemon=True)
    thread.start()
    return thread


class GuardedStore(Store):
    """A store that is not asked while it is down.

    An error which says that the medium is not there (`is_unavailable`) begins an outage: all calls are refused at once
    with a `StoreUnavailableError`, batches key by key. While callers come, it is probed now and then, on a thread of
    its own, so that none of them waits for a server that does not answer. The log has one line when an outage begins
    and one when it is over.

    Parameters
    ----------
    opener : callable
        Opens the store; called at once, and again by each probe until it does not raise.
    name : str
        What the store is called before it could be opened.
    label : str
        What the log calls it: that of the tier. `name` if empty.
    retry_seconds : (float, float)
        See `Breaker`.
    clock : callable
        Seconds, never backwards.
    on_down, on_up : callable, optional
        Called when an outage begins, with the reason, and when it is over, with its seconds.
    spawn : callable
        Runs a probe; may return a thread, for which `close` waits a moment.

    Raises
    ------
    ConfigError
        The opener says that the URI means nothing.
    StoreError
        The store cannot be opened, and will not be by waiting: another's directory, no permission. One that is
        unreachable, or has a full disk, is down.
    """

    def __init__(
        self,
        opener: Callable[[], Store],
        name: str,
        *,
        label: str = "",
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        on_down: Callable[[str], None] | None = None,
        on_up: Callable[[float], None] | None = None,
        spawn: Callable[[Callable[[], None]], threading.Thread | None] = _on_thread,
    ) -> None:
        self._opener, self._name, self._label = opener, name, label or name
        self._on_down, self._on_up, self._spawn = on_down, on_up, spawn
        self._retry = retry_seconds
        self._breaker = Breaker(name, retry_seconds, clock)
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._closed = False
        self._probe_thread: threading.Thread | None = None
        self._inner: Store | None = None
        self._said = ""
        try:
            self._inner = opener()
        except StoreError as error:
            if not is_unavailable(error) and error.errno not in FULL:
                raise
            self._failed(_OPEN, error, certain=True)

    @property
    def name(self) -> str:
        """See `Store.name`: that of the store behind it."""
        return self._name if self._inner is None else self._inner.name

    @property
    def inner(self) -> Store | None:
        """The store behind it; None until it could be opened."""
        return self._inner

    def outage(self) -> Outage | None:
        """Return the outage under way, or None; begin a probe if it is time for one."""
        if self._breaker.claim():
            try:
                self._probe_thread = self._spawn(self._probe)
            except RuntimeError as error:  # no thread can be started, now: a later one may be
                self._breaker.probed(_OPEN, error)
        return self._breaker.outage()

    def put(self, key: Key, frame: Buffer) -> int:
        """See `Store.put`."""
        return self._one("put", lambda store: store.put(key, frame))

    def get(self, key: Key) -> memoryview | None:
        """See `Store.get`."""
        return self._one("get", lambda store: store.get(key))

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """See `Store.get_into`."""
        return self._one("get", lambda store: store.get_into(key, out))

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        return self._one("stat", lambda store: store.stat(key))

    def exists(self, key: Key) -> bool:
        """See `Store.exists`."""
        return self._one("stat", lambda store: store.exists(key))

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        return self._one("delete", lambda store: store.delete(key))

    def quarantine(self, key: Key, reason: str) -> bool:
        """See `Store.quarantine`."""
        return self._one("quarantine", lambda store: store.quarantine(key, reason))

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`."""
        store = self._store()
        if isinstance(store, StoreError):
            raise store
        return self._listed(store, namespace)

    def put_batch(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int]:
        """See `Store.put_batch`."""
        if self._breaker.refuses:
            for key, frame in items:
                StoreKey.of(key), flat_bytes(frame)  # what is no frame is refused, whoever is down
        return self._many("put", len(items), lambda store: store.put_batch(items))

    def get_batch(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """See `Store.get_batch`."""
        return self._many("get", len(keys), lambda store: store.get_batch(keys))

    def get_batch_into(self, items: Sequence[tuple[Key, memoryview]]) -> Outcomes[int | None]:
        """See `Store.get_batch_into`."""
        return self._many("get", len(items), lambda store: store.get_batch_into(items))

    def stat_batch(self, keys: Sequence[Key]) -> Outcomes[StoreStat | None]:
        """See `Store.stat_batch`."""
        return self._many("stat", len(keys), lambda store: store.stat_batch(keys))

    def delete_batch(self, keys: Sequence[Key]) -> Outcomes[bool]:
        """See `Store.delete_batch`."""
        return self._many("delete", len(keys), lambda store: store.delete_batch(keys))

    def stats(self) -> StoreStats:
        """See `Store.stats`: what reached the store behind it."""
        return StoreStats() if self._inner is None else self._inner.stats()

    def usage(self) -> StoreUsage:
        """See `Store.usage`."""
        return StoreUsage() if self._inner is None else self._inner.usage()

    def close(self) -> None:
        """See `Store.close`. A probe that is opening the store closes it when it has done so."""
        with self._lock:
            self._closed = True
            inner = self._inner
        if self._probe_thread is not None and self._probe_thread is not threading.current_thread():
            self._probe_thread.join(_CLOSING_SECONDS)
        if inner is not None:
            inner.close()

    # --- what calls tell

    def _store(self) -> Store | StoreError:
        """Return the store, or why it is not asked."""
        if self._closed:
            return StoreError(errno.EBADF, f"the store {self.name} is closed; open it again to use it")
        outage, inner = self.outage(), self._inner
        if outage is not None and (outage.refuses or inner is None):
            return outage.error()
        return inner if inner is not None else self._store()  # it was opened, and came back, between the two

    def _one(self, op: str, call: Callable[[Store], T]) -> T:
        store = self._store()
        if isinstance(store, StoreError):
            raise store
        try:
            answer = call(store)
        except StoreError as error:
            self._failed(op, error)
            raise
        self._worked(op)
        return answer

    def _many(self, op: str, count: int, call: Callable[[Store], Outcomes[T]]) -> Outcomes[T]:
        store = self._store()
        if isinstance(store, StoreError):
            return [store] * count
        try:
            outcomes = call(store)
        except StoreError as error:  # of a store that fails as a whole
            self._failed(op, error, max(count, 1))
            raise
        errors = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
        certain = next(filter(is_certain, errors), None)
        if certain is not None:
            self._failed(op, certain)
        elif len(errors) < len(outcomes):  # a bad block among good ones is no outage
            self._worked(op)
        elif bad := [error for error in errors if is_unavailable(error)]:
            self._failed(op, bad[0], len(bad))
        return outcomes

    def _listed(self, store: Store, namespace: bytes | None) -> Iterator[StoreKey]:
        try:
            for key in store.list(namespace):
                self._worked("list")
                yield key
        except StoreError as error:
            self._failed("list", error)
            raise
        self._worked("list")

    def _failed(self, op: str, error: StoreError, count: int = 1, *, certain: bool = False) -> None:
        self._breaker.failed(op, error, count, certain=certain)
        self._tell()

    def _worked(self, op: str) -> None:
        self._breaker.worked(op)
        self._tell()

    def _tell(self) -> None:
        """Say what has changed, in its order: whoever tells of one change tells of those that come meanwhile."""
        changes = self._breaker.changes
        while changes and self._telling.acquire(blocking=False):
            try:
                while changes:
                    self._say(*changes.popleft())
            finally:
                self._telling.release()

    def _say(self, reason: str, seconds: float) -> None:
        # A warning both times: who sees that a tier went shall see that it came back.
        if reason:
            _log.warning(
                "tier %s is down: %s; it counts as empty, and is asked again every %g to %g s",
                self._label, reason, *self._retry,
            )  # fmt: skip
            if self._on_down is not None:
                self._on_down(reason)
        else:
            _log.warning("tier %s is back after %.1f s", self._label, seconds)
            if self._on_up is not None:
                self._on_up(seconds)

    # --- probes

    def _probe(self) -> None:
        """Try the store: open it, or ask it for what is not there."""
        inner = self._inner
        if inner is not None:
            answer = attempt(inner.stat, _PROBE)
            gone = isinstance(answer, Exception) and (is_unavailable(answer) or not isinstance(answer, StoreError))
            if self._closed:
                return  # whatever was answered, it says nothing of the medium
            self._breaker.probed("stat", answer if gone and isinstance(answer, Exception) else None)
            self._tell()
            return
        opened = attempt(self._opener)
        if isinstance(opened, Exception):
            self._still_down(opened)
            self._breaker.probed(_OPEN, opened)
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._inner = opened
        if closed:
            with contextlib.suppress(StoreError):
                opened.close()
            return
        self._breaker.probed(_OPEN, None)
        self._tell()

    def _still_down(self, error: Exception) -> None:
        """Say why, if it is another reason than before, and one that time will not mend: somebody has to know."""
        text = str(error)
        lasting = not is_unavailable(error) and text != self._said
        if lasting:
            self._said = text
        _log.log(logging.WARNING if lasting else logging.DEBUG, "tier %s is still down: %s", self._label, text)


def open_guarded(
    uri: str,
    *,
    label: str = "",
    retry_seconds: tuple[float, float] = RETRY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    on_down: Callable[[str], None] | None = None,
    on_up: Callable[[float], None] | None = None,
) -> GuardedStore:
    """Open a store by its URI, or stand in for it until it can be opened. Parameters and errors: `GuardedStore`."""
    return GuardedStore(
        lambda: open_store(uri),
        _without_secrets(uri),
        label=label,
        retry_seconds=retry_seconds,
        clock=clock,
        on_down=on_down,
        on_up=on_up,
    )


def _without_secrets(uri: str) -> str:
    """Return a URI without user, password and options. A store that is open says itself which of them it shows."""
    return re.sub(r"//[^/]*@", "//", uri.partition("?")[0])
