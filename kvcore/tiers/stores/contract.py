"""What every store does. A store keeps opaque bytes under 64-byte keys; it never looks into a frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from kvcore.errors import ConfigError, StoreError

__all__ = [
    "Buffer",
    "Key",
    "Ledger",
    "Store",
    "StoreKey",
    "StoreStat",
    "StoreStats",
    "check_reason",
    "flat_bytes",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
DIGEST_BYTES = 32
_REASON_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


class Key(Protocol):
    """Anything with the two digests of a chunk: a `StoreKey`, or the engine's `ChunkKey`."""

    @property
    def namespace(self) -> bytes:
        """32 bytes."""

    @property
    def digest(self) -> bytes:
        """32 bytes."""


@dataclass(frozen=True, slots=True, order=True)
class StoreKey:
    """What a store files a frame under.

    Parameters
    ----------
    namespace, digest : bytes
        32 bytes each.

    Raises
    ------
    ConfigError
        A digest has another length.
    """

    namespace: bytes
    digest: bytes

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("digest", self.digest)):
            if len(value) != DIGEST_BYTES:
                raise ConfigError(f"the {name} of a store key has {DIGEST_BYTES} bytes, got {len(value)}")

    @classmethod
    def of(cls, key: Key) -> StoreKey:
        """Take the two digests of any key."""
        return key if isinstance(key, cls) else cls(bytes(key.namespace), bytes(key.digest))


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


class Store(Protocol):
    """The contract of stores. All methods may be called from any thread.

    Keys are `StoreKey` or anything with its two digests. A failure of the medium raises `StoreError` (an
    `OSError`, with its errno) and leaves the store as it was; so does any call after `close`.
    """

    def put(self, key: Key, frame: Buffer) -> int:
        """Store a frame, replacing an earlier one in one step; return its bytes.

        Readers see the old frame or the new one, never a mixture, and after a crash too. The buffer is the
        caller's again when the call returns.
        """

    def get(self, key: Key) -> memoryview | None:
        """Return a frame as a read-only view that nobody will change, or None (a miss)."""

    def stat(self, key: Key) -> StoreStat | None:
        """Return the size of a frame, or None."""

    def exists(self, key: Key) -> bool:
        """Tell whether there is a frame; no side effect, not counted."""

    def delete(self, key: Key) -> bool:
        """Remove a frame; tell whether there was one."""

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """Iterate over the keys, of one namespace or all, in no order.

        Others may store and delete meanwhile: what was there all the time is listed, once.
        """

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

    def stats(self) -> StoreStats:
        """Return the counters."""

    def close(self) -> None:
        """Let go of everything the store holds; calling it again does nothing."""


class Ledger:
    """A store's counters, and whether it is still open."""

    __slots__ = ("_lock", "_name", "_open", "_stats")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._open = True

    def add(self, **counts: int) -> None:
        """Add to counters, by the names of `StoreStats`."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + count for name, count in counts.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> StoreStats:
        """Return the counters."""
        return self._stats

    def require_open(self) -> None:
        """Raise `StoreError` once the store is closed."""
        if not self._open:
            raise StoreError(f"the store {self._name} is closed; open it again to use it")

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
