"""What an engine says about itself: its counters, and whether it does all that it was configured for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcore.tiers.observer import TierStats
from kvcore.tiers.overview import TierHealth

__all__ = ["EngineStats", "Health"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine since it was opened.

    Parameters
    ----------
    lookups, lookup_tokens, hit_tokens : int
        Requests that were looked up, their tokens, and those of them that were found.
    stores, stored_tokens, stored_bytes : int
        Calls, and the tokens and bytes of KV that were not there before.
    retrieves, wanted_tokens, retrieved_tokens, retrieved_bytes : int
        Calls, tokens asked for and had, and the bytes that were copied.
    dropped : int
        Chunks that were not stored, for want of host memory.
    uncacheable : Counter of str
        Requests that were not cached because their inputs cannot be identified, by reason.
    misses : Counter of str
        Chunks that were looked for in vain, by reason.
    tiers : dict of str to TierStats
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stores: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    retrieves: int = 0
    wanted_tokens: int = 0
    retrieved_tokens: int = 0
    retrieved_bytes: int = 0
    dropped: int = 0
    uncacheable: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    tiers: dict[str, TierStats] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that were found."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine does all that it was configured for.

    Parameters
    ----------
    tiers : dict of str to TierHealth
        By name.
    """

    tiers: dict[str, TierHealth]

    @property
    def status(self) -> str:
        """``"ok"``, or ``"degraded"`` where a tier is down: it counts as empty, and all else goes on."""
        return "ok" if all(tier.ok for tier in self.tiers.values()) else "degraded"
