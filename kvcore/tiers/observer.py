"""What tiers tell whoever measures them: hits, misses, bytes, times. `TierCounters` counts; exporters do more."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import defaultdict
from dataclasses import asdict, dataclass, replace

__all__ = ["TierCounters", "TierObserver", "TierStats"]

_log = logging.getLogger("kvcore")


class TierObserver:
    """Called by the tiers, from any thread and outside of all locks. Here every call does nothing: override some.

    Tiers go by their names: ``"host"``, and those of the stores. Counts are in chunks, times in seconds. What an
    observer raises is logged, and changes nothing.
    """

    def lookup(self, tier: str, hits: int, misses: int, seconds: float) -> None:
        """A tier was asked which of some chunks it has."""

    def retrieve(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """Chunks were had from a tier, `nbytes` of KV: loaded into host memory, or found there. They are its hits."""

    def miss(self, tier: str, chunks: int) -> None:
        """Chunks that were to be loaded were not in a tier, or of no use there."""

    def store(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """Chunks went into a tier; `nbytes` of their stored form."""

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        """A chunk could not be stored (``"store"``), used (``"retrieve"``) or removed (``"delete"``).

        Or a tier could not be asked (``"lookup"``), which is told once for all chunks that it was asked for. That a
        tier which is down was not asked is no failure of lookups and loads: chunks are misses there.
        """

    def evict(self, tier: str, chunks: int, nbytes: int) -> None:
        """Chunks left a tier to make room, or expired."""

    def degraded(self, tier: str, reason: str) -> None:
        """A tier is down: it counts as empty until it is back."""

    def recovered(self, tier: str, seconds: float) -> None:
        """A tier is back, after so long."""

    def serde(self, serde: str, direction: str, nbytes: int, seconds: float) -> None:
        """A serde coded one chunk: direction ``"serialize"`` or ``"deserialize"``, `nbytes` of the stored form.

        Told by the serdes that `open_tiers` makes; those of several tiers that are equal are one. The time is that of
        the work, without waiting for a thread.
        """


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since it was opened.

    Parameters
    ----------
    hits, misses : int
        Chunks that were had from here, and that were looked for here in vain, by loads.
    hit_bytes : int
        Bytes of the KV of the hits.
    lookup_hits, lookup_misses : int
        Chunks that mere lookups found here, and did not find.
    stored, stored_bytes : int
        Chunks that were put here, and the bytes they take.
    failed : int
        Chunks that could not be stored here, used or removed, and lookups that failed.
    evicted, evicted_bytes : int
        Chunks that left to make room, and their bytes.
    lookup_seconds, retrieve_seconds, store_seconds : float
        Time spent, summed over threads.
    outages : int
        How often it went down.
    down_seconds : float
        How long it was down, in outages that are over.
    """

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    stored: int = 0
    stored_bytes: int = 0
    failed: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    lookup_seconds: float = 0.0
    retrieve_seconds: float = 0.0
    store_seconds: float = 0.0
    outages: int = 0
    down_seconds: float = 0.0


class TierCounters(TierObserver):
    """Counts by tier, and passes everything on to another observer, if there is one.

    Parameters
    ----------
    then : TierObserver, optional
    """

    def __init__(self, then: TierObserver | None = None) -> None:
        self._then = then or TierObserver()
        self._lock = threading.Lock()
        self._stats: defaultdict[str, TierStats] = defaultdict(TierStats)

    def stats(self) -> dict[str, TierStats]:
        """Return the counters by tier."""
        with self._lock:
            return dict(self._stats)

    def lookup(self, tier: str, hits: int, misses: int, seconds: float) -> None:
        """See `TierObserver.lookup`."""
        self._add(tier, lookup_hits=hits, lookup_misses=misses, lookup_seconds=seconds)
        self._tell("lookup", tier, hits, misses, seconds)

    def retrieve(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.retrieve`."""
        self._add(tier, hits=chunks, hit_bytes=nbytes, retrieve_seconds=seconds)
        self._tell("retrieve", tier, chunks, nbytes, seconds)

    def miss(self, tier: str, chunks: int) -> None:
        """See `TierObserver.miss`."""
        self._add(tier, misses=chunks)
        self._tell("miss", tier, chunks)

    def store(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.store`."""
        self._add(tier, stored=chunks, stored_bytes=nbytes, store_seconds=seconds)
        self._tell("store", tier, chunks, nbytes, seconds)

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        """See `TierObserver.failure`."""
        self._add(tier, failed=1)
        self._tell("failure", tier, operation, error)

    def evict(self, tier: str, chunks: int, nbytes: int) -> None:
        """See `TierObserver.evict`."""
        self._add(tier, evicted=chunks, evicted_bytes=nbytes)
        self._tell("evict", tier, chunks, nbytes)

    def degraded(self, tier: str, reason: str) -> None:
        """See `TierObserver.degraded`."""
        self._add(tier, outages=1)
        self._tell("degraded", tier, reason)

    def recovered(self, tier: str, seconds: float) -> None:
        """See `TierObserver.recovered`."""
        self._add(tier, down_seconds=seconds)
        self._tell("recovered", tier, seconds)

    def serde(self, serde: str, direction: str, nbytes: int, seconds: float) -> None:
        """See `TierObserver.serde`."""
        self._tell("serde", serde, direction, nbytes, seconds)

    def _tell(self, what: str, *said: object) -> None:
        try:
            getattr(self._then, what)(*said)
        except Exception:  # noqa: BLE001 - theirs, whatever it is: what is told of has happened, and goes on
            # As text: the records of a log may be kept for long, and must not keep the buffers of all callers.
            _log.error("an observer of tiers failed at %s%r\n%s", what, said, traceback.format_exc())

    def _add(self, tier: str, **counts: float) -> None:
        with self._lock:
            old = self._stats[tier]
            known = asdict(old)
            self._stats[tier] = replace(old, **{name: known[name] + count for name, count in counts.items()})
