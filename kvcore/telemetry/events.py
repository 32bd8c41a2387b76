"""`MetricsObserver`: which metrics an event of the engine counts for, whoever keeps them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from kvcore.engine.observer import EngineObserver
from kvcore.telemetry import definitions as d

__all__ = ["MetricsObserver"]

_MOST_REASONS = 32
_OTHER = "other"


class MetricsObserver(EngineObserver, ABC):
    """Turns events into counts, observations and states; a subclass keeps them.

    Notes
    -----
    Thread-safe if `add`, `observe` and `set` are.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._down: set[str] | None = set()
        self._lock = threading.Lock()

    # --- what a subclass does

    @abstractmethod
    def add(self, value: float, metric: d.Metric, *labels: str) -> None:
        """Add to a counter with these values of its own labels."""

    @abstractmethod
    def observe(self, value: float, metric: d.Metric, *labels: str) -> None:
        """Take a value into a histogram."""

    @abstractmethod
    def set(self, value: float, metric: d.Metric, *labels: str) -> None:
        """Set a gauge."""

    # --- events

    def lookup(self, tier: str, hits: int, misses: int, seconds: float) -> None:
        """See `TierObserver.lookup`."""
        if hits:
            self.add(hits, d.TIER_LOOKUPS, tier, "hit")
        if misses:
            self.add(misses, d.TIER_LOOKUPS, tier, "miss")
        self.observe(seconds, d.TIER_SECONDS, tier, "lookup")

    def retrieve(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.retrieve`."""
        self.add(chunks, d.TIER_HITS, tier)
        self.add(nbytes, d.TIER_HIT_BYTES, tier)
        self.observe(seconds, d.TIER_SECONDS, tier, "retrieve")

    def miss(self, tier: str, chunks: int) -> None:
        """See `TierObserver.miss`."""
        self.add(chunks, d.TIER_MISSES, tier)

    def store(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.store`."""
        self.add(chunks, d.TIER_STORED, tier)
        self.add(nbytes, d.TIER_STORED_BYTES, tier)
        self.observe(seconds, d.TIER_SECONDS, tier, "store")

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        """See `TierObserver.failure`."""
        self.add(1, d.TIER_FAILURES, tier, operation)

    def evict(self, tier: str, chunks: int, nbytes: int) -> None:
        """See `TierObserver.evict`."""
        self.add(chunks, d.TIER_EVICTED, tier)
        self.add(nbytes, d.TIER_EVICTED_BYTES, tier)

    def serde(self, serde: str, direction: str, nbytes: int, seconds: float) -> None:
        """See `TierObserver.serde`."""
        self.add(nbytes, d.SERDE_BYTES, serde, direction)
        self.observe(seconds, d.SERDE_SECONDS, serde, direction)

    def request_lookup(self, request: str, tokens: int, hit_tokens: int, seconds: float, computed: int = 0) -> None:
        """See `EngineObserver.request_lookup`."""
        self._request("lookup", seconds)
        self.add(tokens, d.LOOKUP_TOKENS)
        self.add(hit_tokens, d.HIT_TOKENS)
        if tokens > hit_tokens:
            self.add(tokens - hit_tokens, d.MISSED_TOKENS, "not_found")

    def request_store(self, request: str, stored_tokens: int, total_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_store`."""
        self._request("store", seconds)
        self.add(stored_tokens, d.STORED_TOKENS)
        self.add(nbytes, d.STORED_BYTES)

    def request_retrieve(self, request: str, wanted_tokens: int, got_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_retrieve`."""
        self._request("retrieve", seconds)
        self.add(got_tokens, d.RETRIEVED_TOKENS)
        self.add(nbytes, d.RETRIEVED_BYTES)
        if wanted_tokens > got_tokens:
            self.add(wanted_tokens - got_tokens, d.MISSED_TOKENS, "not_loaded")

    def uncacheable(self, reason: str) -> None:
        """See `EngineObserver.uncacheable`."""
        self.add(1, d.UNCACHEABLE, self._known(reason))

    def degraded(self, tier: str, reason: str) -> None:
        """See `EngineObserver.degraded`."""
        self.add(1, d.TIER_OUTAGES, tier)
        with self._lock:
            if self._down is not None:
                self._down.add(tier)
                self.set(1, d.TIER_DEGRADED, tier)

    def recovered(self, tier: str, seconds: float = 0.0) -> None:
        """See `EngineObserver.recovered`."""
        self.add(max(seconds, 0.0), d.TIER_OUTAGE_SECONDS, tier)
        with self._lock:
            if self._down is not None:
                self._down.discard(tier)
                self.set(0, d.TIER_DEGRADED, tier)

    def close(self) -> None:
        """End the outages that are under way: of an engine that is no more nobody shall be alarmed."""
        with self._lock:
            down, self._down = self._down, None
            for tier in down or ():
                self.set(0, d.TIER_DEGRADED, tier)

    # --- the rest

    def _request(self, operation: str, seconds: float) -> None:
        self.add(1, d.REQUESTS, operation)
        self.observe(seconds, d.REQUEST_SECONDS, operation)

    def _known(self, reason: str) -> str:
        """Bound the series that reasons make: one that tells of a request would make a series for each request."""
        if reason in self._reasons:
            return reason
        with self._lock:
            if len(self._reasons) == _MOST_REASONS:
                return _OTHER
            self._reasons.add(reason)
        return reason
