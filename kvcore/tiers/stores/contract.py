"""What every store does. A store keeps opaque bytes under 64-byte keys; it never looks into a frame."""

from __future__ import annotations

import abc
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeAlias, TypeVar

from kvcore.completion import drop_traceback
from kvcore.errors import ConfigError, StoreError
from kvcore.keys import DIGEST_BYTES, Key, StoreKey

__all__ = [
    "DIGEST_BYTES",
    "Buffer",
    "Key",
    "Ledger",
    "Outage",
    "Outcomes",
    "Store",
    "StoreKey",
    "StoreStat",
    "StoreStats",
    "StoreUnavailableError",
    "StoreUsage",
    "check_reason",
    "flat_bytes",
    "outcome_of",
    "result_of",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
P = ParamSpec("P")
S = TypeVar("S", bound="Store")
T = TypeVar("T")
Outcomes: TypeAlias = list[T | StoreError]
"""Of a batch: for each key a result, or what went wrong with it."""
_REASON_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What is known of a stored frame without reading it."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened; `exists`, `stat` and `list` count nothing.

    Parameters
    ----------
    puts, hits, misses, deletes, quarantined : int
    torn : int
        Those misses where the object vanished or shrank while it was read.
    put_bytes, hit_bytes : int
    """

    puts: int = 0
    hits: int = 0
    misses: int = 0
    deletes: int = 0
    quarantined: int = 0
    torn: int = 0
    put_bytes: int = 0
    hit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds, as far as it knows without listing.

    Parameters
    ----------
    objects, nbytes : int, optional
        Frames, and their bytes; None where only a listing would tell.
    capacity_bytes : int, optional
        Most bytes of frames; None where there is no bound, or none is known.
    """

    objects: int | None = None
    nbytes: int | None = None
    capacity_bytes: int | None = None


class StoreUnavailableError(StoreError):
    """A store was not asked, because its medium is down: it did not answer before. Nothing was done, in no time.

    The errno is that of the failure which told so.
    """


@dataclass(frozen=True, slots=True)
class Outage:
    """Since when a store is down, and why.

    Parameters
    ----------
    store : str
        Its name.
    reason : str
        What went wrong first.
    code : int
        The errno of that.
    seconds : float
        How long ago.
    retry_seconds : float
        In how many seconds it is asked again, at the earliest.
    refuses : bool
        Whether calls are refused. False where the store answers again, and what had failed has yet to succeed.
    """

    store: str
    reason: str
    code: int
    seconds: float
    retry_seconds: float = 0.0
    refuses: bool = True

    def error(self) -> StoreUnavailableError:
        """Return what calls are refused with."""
        return StoreUnavailableError(
            self.code,
            f"{self.store} is not asked: it is down since {self.seconds:.1f} s ({self.reason}); it is asked again in "
            f"{self.retry_seconds:.1f} s, and comes back by itself",
        )


class Store(abc.ABC):
    """The contract of stores, and what a third party subclasses. All methods may be called from any thread.

    Keys are `StoreKey` or anything with its two digests. A failure of the medium raises `StoreError` (an
    `OSError`, with its errno) and leaves the store as it was; so does any call after `close` (EBADF). A batch raises
    neither: it has them as the outcomes of its keys. The errno says whether the medium is there at all:
    `kvcore.tiers.stores.breaker.is_unavailable`.

    What is abstract here suffices. The rest has a plain implementation, which a store replaces where its medium can do
    better: one round trip for a batch, say. `kvcore_conformance.stores` checks all of it.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What it is called in messages and metrics: its URI, without secrets."""

    @abc.abstractmethod
    def put(self, key: Key, frame: Buffer) -> int:
        """Store a frame, replacing an earlier one in one step; return its bytes.

        Readers see the old frame or the new one, never a mixture, and after a crash too. The buffer is the
        caller's again when the call returns.

        Raises
        ------
        ConfigError
            The frame is no contiguous buffer, or the key's digests have not 32 bytes.
        StoreError
            EFBIG where the frame is larger than the medium takes, with that size; else what the medium said.
        """

    @abc.abstractmethod
    def get(self, key: Key) -> memoryview | None:
        """Return a frame as a read-only view that nobody will change, or None (a miss)."""

    @abc.abstractmethod
    def stat(self, key: Key) -> StoreStat | None:
        """Return the size of a frame, or None. Reads no frame, has no side effect, and is not counted."""

    @abc.abstractmethod
    def delete(self, key: Key) -> bool:
        """Remove a frame; tell whether there was one."""

    @abc.abstractmethod
    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """Iterate over the keys, of one namespace or all, in no order.

        Others may store and delete meanwhile: what was there all the time is listed, once.
        """

    @abc.abstractmethod
    def quarantine(self, key: Key, reason: str) -> bool:
        """Move a bad frame out of the way, so that the key is a miss and can be stored again.

        Parameters
        ----------
        key : Key
        reason : str
            A word such as `CorruptFrameError.reason`: lower-case letters, digits, hyphens.

        Returns
        -------
        bool
            Whether there was one.
        """

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """Return the counters."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything the store holds, after the calls that are under way; calling it again does nothing."""

    def exists(self, key: Key) -> bool:
        """Tell whether there is a frame; no side effect, not counted."""
        return self.stat(key) is not None

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """Read a frame into memory of the caller's, whose size `stat` told; return the frame's bytes, or None (a miss).

        Parameters
        ----------
        key : Key
        out : writable memoryview of bytes
            What lies beyond the frame is unspecified afterwards; all of it is after a miss or an error.

        Notes
        -----
        A frame that is longer than `out` was replaced since: a miss, and torn where a store counts those.
        """
        frame = self.get(key)
        if frame is None or len(frame) > len(out):
            return None
        out[: len(frame)] = frame
        return len(frame)

    def put_batch(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int]:
        """Store frames; return for each its bytes or what went wrong. One bad one does not keep the others out.

        Of two frames for one key, the later one stays.

        Raises
        ------
        ConfigError
            One of them is no frame or has no key, as in `put`; nothing was stored.
        """
        for key, frame in items:
            StoreKey.of(key), flat_bytes(frame)
        return [outcome_of(self.put, key, frame) for key, frame in items]

    def get_batch(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """Return for each key what `get` does, or its error."""
        return [outcome_of(self.get, key) for key in keys]

    def get_batch_into(self, items: Sequence[tuple[Key, memoryview]]) -> Outcomes[int | None]:
        """Read frames into memory of the caller's; return for each what `get_into` does, or its error."""
        return [outcome_of(self.get_into, key, out) for key, out in items]

    def stat_batch(self, keys: Sequence[Key]) -> Outcomes[StoreStat | None]:
        """Return for each key what `stat` does, or its error."""
        return [outcome_of(self.stat, key) for key in keys]

    def delete_batch(self, keys: Sequence[Key]) -> Outcomes[bool]:
        """Remove frames; return for each what `delete` does, or its error."""
        return [outcome_of(self.delete, key) for key in keys]

    def usage(self) -> StoreUsage:
        """Return what the store holds, as far as that is known at once: here nothing is."""
        return StoreUsage()

    def outage(self) -> Outage | None:
        """Return why calls are refused at once; None where they are not, as of a store that is no `GuardedStore`."""
        return None

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def outcome_of(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | StoreError:
    """Call something for one key of a batch; return its result, or its `StoreError` without the traceback."""
    try:
        return call(*args, **kwargs)
    except StoreError as error:
        return drop_traceback(error)


def result_of(outcome: T | StoreError) -> T:
    """Return the result of a batch of one; raise what went wrong."""
    if isinstance(outcome, StoreError):
        raise outcome
    return outcome


class Ledger:
    """A store's counters, and whether it is still open."""

    __slots__ = ("_counts", "_lock", "_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(StoreStats.__slots__, 0)
        self._open = True

    def add(self, **counts: int) -> None:
        """Add to counters, by the names of `StoreStats`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def stats(self) -> StoreStats:
        """Return the counters."""
        with self._lock:
            return StoreStats(**self._counts)

    def require_open(self) -> None:
        """Raise `StoreError` once the store is closed."""
        if not self._open:
            raise StoreError(errno.EBADF, f"the store {self.name} is closed; open it again to use it")

    def close(self) -> None:
        """Note that the store is closed."""
        self._open = False


def flat_bytes(frame: Buffer) -> memoryview:
    """View a frame as flat bytes, without a copy; `ConfigError` where it is no contiguous buffer."""
    try:
        view = memoryview(frame)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise ConfigError(f"a store takes a contiguous bytes-like frame: {error}") from error


def check_reason(reason: str) -> None:
    """Raise `ConfigError` unless `reason` is one short word: it becomes part of file names."""
    if not (1 <= len(reason) <= 32 and _REASON_CHARS.issuperset(reason)):
        raise ConfigError(f"a quarantine reason is 1 to 32 of a-z, 0-9 and -, got {reason!r}")
