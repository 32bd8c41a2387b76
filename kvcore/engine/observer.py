"""What an engine tells whoever measures it: requests, tokens, bytes, times. Here nothing is done with it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcore.tiers.observer import TierObserver

__all__ = ["EngineObserver", "EngineObservers", "TierSize"]

_log = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class TierSize:
    """What a tier holds now.

    Parameters
    ----------
    tier : str
        Its name.
    nbytes, objects : int, optional
        Bytes and objects in it; None where it would take a listing to know.
    capacity : int, optional
        Most bytes that it may hold; None where there is no bound, or none is known.
    """

    tier: str
    nbytes: int | None = None
    objects: int | None = None
    capacity: int | None = None


class EngineObserver(TierObserver):
    """Called by an engine and its tiers, from any thread and outside of all locks. Override some methods.

    Times are in seconds. A request goes by the id that its engine gave it, empty where it gave none. What an observer
    raises must change nothing: hand observers over as `EngineObservers`, which logs it and goes on.
    """

    def request_lookup(self, request: str, tokens: int, hit_tokens: int, seconds: float, computed: int = 0) -> None:
        """A sequence of `tokens` was looked up, and the cache can give its first `hit_tokens`.

        The inference engine has `computed` of them already.
        """

    def request_store(self, request: str, stored_tokens: int, total_tokens: int, nbytes: int, seconds: float) -> None:
        """Of a sequence of `total_tokens`, `stored_tokens` that were not stored yet were given to the tiers.

        They are `nbytes` of KV. The time is what the caller waited, not what goes on in the background.
        """

    def request_retrieve(self, request: str, wanted_tokens: int, got_tokens: int, nbytes: int, seconds: float) -> None:
        """KV of `wanted_tokens` was asked for, and `nbytes` of it, for the first `got_tokens`, could be had."""

    def uncacheable(self, reason: str) -> None:
        """A request is neither looked up nor stored. The reason is one of few: it names a kind, not the request."""

    def degraded(self, tier: str, reason: str) -> None:
        """Something does not answer, and the engine does without: a tier by its name, or another part."""

    def recovered(self, tier: str, seconds: float = 0.0) -> None:
        """What was degraded works again, after so long."""

    def watch(self, sizes: Callable[[], Iterable[TierSize]]) -> None:
        """The engine is open. `sizes` says what its tiers hold; it may be called whenever, until `close`."""

    def close(self) -> None:
        """The engine is closed, and there will be no more calls."""


class EngineObservers(EngineObserver):
    """Several observers as one; what one of them raises is logged, and keeps nothing from the others.

    Parameters
    ----------
    observers : sequence of EngineObserver
    """

    def __init__(self, observers: Sequence[EngineObserver] = ()) -> None:
        self.observers = tuple(observers)

    def lookup(self, tier: str, hits: int, misses: int, seconds: float) -> None:
        """See `TierObserver.lookup`."""
        self._tell("lookup", tier, hits, misses, seconds)

    def retrieve(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.retrieve`."""
        self._tell("retrieve", tier, chunks, nbytes, seconds)

    def miss(self, tier: str, chunks: int) -> None:
        """See `TierObserver.miss`."""
        self._tell("miss", tier, chunks)

    def store(self, tier: str, chunks: int, nbytes: int, seconds: float) -> None:
        """See `TierObserver.store`."""
        self._tell("store", tier, chunks, nbytes, seconds)

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        """See `TierObserver.failure`."""
        self._tell("failure", tier, operation, error)

    def evict(self, tier: str, chunks: int, nbytes: int) -> None:
        """See `TierObserver.evict`."""
        self._tell("evict", tier, chunks, nbytes)

    def serde(self, serde: str, direction: str, nbytes: int, seconds: float) -> None:
        """See `TierObserver.serde`."""
        self._tell("serde", serde, direction, nbytes, seconds)

    def request_lookup(self, request: str, tokens: int, hit_tokens: int, seconds: float, computed: int = 0) -> None:
        """See `EngineObserver.request_lookup`."""
        self._tell("request_lookup", request, tokens, hit_tokens, seconds, computed)

    def request_store(self, request: str, stored_tokens: int, total_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_store`."""
        self._tell("request_store", request, stored_tokens, total_tokens, nbytes, seconds)

    def request_retrieve(self, request: str, wanted_tokens: int, got_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_retrieve`."""
        self._tell("request_retrieve", request, wanted_tokens, got_tokens, nbytes, seconds)

    def uncacheable(self, reason: str) -> None:
        """See `EngineObserver.uncacheable`."""
        self._tell("uncacheable", reason)

    def degraded(self, tier: str, reason: str) -> None:
        """See `EngineObserver.degraded`."""
        self._tell("degraded", tier, reason)

    def recovered(self, tier: str, seconds: float = 0.0) -> None:
        """See `EngineObserver.recovered`."""
        self._tell("recovered", tier, seconds)

    def watch(self, sizes: Callable[[], Iterable[TierSize]]) -> None:
        """See `EngineObserver.watch`."""
        self._tell("watch", sizes)

    def close(self) -> None:
        """See `EngineObserver.close`."""
        self._tell("close")

    def _tell(self, what: str, *said: object) -> None:
        for observer in self.observers:
            try:
                getattr(observer, what)(*said)
            except Exception:  # noqa: BLE001 - theirs, whatever it is: what is told of has happened, and goes on
                # As text, and without what was said: kept records must not keep buffers, nor an error's frames.
                _log.error("an observer of the engine failed at %s\n%s", what, traceback.format_exc())
