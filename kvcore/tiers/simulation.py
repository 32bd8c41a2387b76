"""Replays a trace over eviction policies: what a tier of a given size would have had."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.errors import ConfigError
from kvcore.tiers.policies import Entry, EvictionPolicy, Lru, RankedPolicy, TenantQuotas, create_policy
from kvcore.tiers.traces import Request, Trace

__all__ = ["OPTIMUM", "UNLIMITED", "Row", "Simulation"]

OPTIMUM = "optimum"
"""Name of the row of `Simulation.optimum`."""

UNLIMITED = "unlimited"
"""Name of the row of `Simulation.unlimited`."""

Tick = Callable[[], None]


@dataclass(slots=True)
class Row:
    """What one policy made of a trace with one capacity.

    Parameters
    ----------
    policy : str
    capacity_bytes : int or None
        None: unlimited.
    requests, tokens : int
        Of the trace.
    hit_tokens : int
        Tokens of the chunks that were resident from the prompt's beginning on when its request came.
    bytes, hit_bytes : int
        The same of the full chunks, in stored bytes: every chunk asked for, and those of the hits.
    evictions, evicted_bytes : int
        Chunks that were resident and went.
    refused : int
        Chunks that were not kept, as all room was taken by chunks of the same request.
    peak_bytes : int
        The most that was resident between two requests.
    """

    policy: str
    capacity_bytes: int | None
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    bytes: int = 0
    hit_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    refused: int = 0
    peak_bytes: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Share of the tokens that were hits; 0 for a trace without tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def byte_hit_rate(self) -> float:
        """Share of the bytes that were hits; 0 for a trace without chunks."""
        return self.hit_bytes / self.bytes if self.bytes else 0.0


class Simulation:
    """A trace, ready to be replayed.

    A request hits the leading chunks of its prompt that are resident. The rest is computed, and stored in prefix order,
    with room made on demand; the request's own chunks are pinned until it is done. If no room is left for a chunk, it
    and those behind it are not stored.

    Parameters
    ----------
    trace : Trace
    bytes_per_token : int, optional
        In place of the trace's, for chunks without a recorded size.

    Raises
    ------
    ConfigError
        `bytes_per_token` is below 1.
    """

    def __init__(self, trace: Trace, *, bytes_per_token: int | None = None) -> None:
        if bytes_per_token is not None and bytes_per_token < 1:
            raise ConfigError(f"bytes_per_token={bytes_per_token}: the least is 1")
        self._trace = trace
        usual = trace.chunk_tokens * (bytes_per_token or trace.bytes_per_token)
        self._sizes: dict[str, int] = {}  # the first recorded size of each chunk counts
        for request in trace.requests:
            for key, nbytes in zip(request.chunks, request.nbytes or [usual] * len(request.chunks), strict=True):
                self._sizes.setdefault(key, nbytes)

    @property
    def unique_bytes(self) -> int:
        """Bytes of all different chunks: what a tier that never evicts needs."""
        return sum(self._sizes.values())

    def run(
        self,
        policy: str,
        capacity_bytes: int,
        *,
        options: Mapping[str, Any] | None = None,
        quotas: Mapping[str, int] | None = None,
        watermark: float | None = None,
        tick: Tick | None = None,
    ) -> Row:
        """Replay the trace.

        Parameters
        ----------
        policy : str
            A name that `create_policy` knows.
        capacity_bytes : int
        options : mapping, optional
            Of the policy.
        quotas : mapping of str to int, optional
            Bytes by tenant.
        watermark : float, optional
            After each request, `EvictionPolicy.relieve` with this watermark; None reclaims on demand only.
        tick : callable, optional
            Called after each request.

        Raises
        ------
        ConfigError
            There is no such policy, an option means nothing to it, or the capacity is below the largest chunk.
        """
        made = create_policy(policy, capacity_bytes, **(options or {}))
        largest = max(self._sizes.values(), default=0)
        if capacity_bytes < largest:
            raise ConfigError(
                f"a capacity of {capacity_bytes:,} bytes is below one chunk, which has up to {largest:,}: "
                "raise the capacity, or lower the bytes per token"
            )
        if quotas:
            made = TenantQuotas(made, quotas)
        row = Row(policy, capacity_bytes)
        for request in self._trace.requests:
            self._dropped(row, made.expire(now=request.time))
            self._count(row, request, made)
            self._serve(row, request, made)
            if watermark is not None:
                self._dropped(row, made.relieve(now=request.time, watermark=watermark))
            row.peak_bytes = max(row.peak_bytes, made.used_bytes)
            if tick is not None:
                tick()
        return row

    def unlimited(self, *, tick: Tick | None = None) -> Row:
        """Replay the trace with room for everything: only what was never there before is a miss."""
        return self._keep(UNLIMITED, None, Lru(max(1, self.unique_bytes)), tick)

    def optimum(self, capacity_bytes: int, *, tick: Tick | None = None) -> Row:
        """Replay the trace with knowledge of the future: keep what is needed again soonest.

        L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966;
        what is needed last may also not be stored at all. A chunk is needed whenever one that follows it is, so the
        order keeps to the prefix closure by itself. No policy has more hits where all chunks have the same bytes; where
        they differ it is a yardstick, not a bound.

        Raises
        ------
        ConfigError
            The capacity is below 1 byte.
        """
        return self._keep(OPTIMUM, capacity_bytes, _Optimum(capacity_bytes, self._trace.requests), tick)

    def _keep(self, name: str, capacity: int | None, policy: RankedPolicy, tick: Tick | None) -> Row:
        """Replay with a policy that sees a whole request before it evicts."""
        row = Row(name, capacity)
        for request in self._trace.requests:
            self._count(row, request, policy)
            new = {key for key in request.chunks if key not in policy}
            for key, parent in zip(request.chunks, (None, *request.chunks), strict=False):
                if not policy.touch(key, now=request.time):
                    policy.insert(key, self._sizes[key], parent=parent, now=request.time)
            gone = policy.evict(policy.used_bytes - policy.capacity_bytes, now=request.time)
            row.refused += sum(key in new for key in gone)
            self._dropped(row, [key for key in gone if key not in new])
            row.peak_bytes = max(row.peak_bytes, policy.used_bytes)
            if tick is not None:
                tick()
        return row

    def _count(self, row: Row, request: Request, policy: EvictionPolicy) -> None:
        """Count what was asked for, and the hits."""
        row.requests += 1
        row.tokens += request.tokens
        row.bytes += sum(self._sizes[key] for key in request.chunks)
        for key in request.chunks:
            if key not in policy:
                break
            row.hit_tokens += self._trace.chunk_tokens
            row.hit_bytes += self._sizes[key]

    def _serve(self, row: Row, request: Request, policy: EvictionPolicy) -> None:
        """Touch what is resident, and store the rest."""
        pinned: list[str] = []
        parent = None
        for place, key in enumerate(request.chunks):
            if not policy.touch(key, now=request.time):
                nbytes = self._sizes[key]
                self._dropped(row, policy.make_room(nbytes, now=request.time))
                if policy.used_bytes + nbytes > policy.capacity_bytes:
                    row.refused += len(request.chunks) - place
                    break
                policy.insert(key, nbytes, parent=parent, tenant=request.tenant, now=request.time)
            policy.pin(key)
            pinned.append(key)
            parent = key
        for key in pinned:
            policy.unpin(key)

    def _dropped(self, row: Row, keys: Sequence[str]) -> None:
        row.evictions += len(keys)
        row.evicted_bytes += sum(self._sizes[key] for key in keys)


class _Optimum(RankedPolicy):
    """What is needed again last goes first; of one request, the end of its chain."""

    def __init__(self, capacity_bytes: int, requests: Sequence[Request]) -> None:
        super().__init__(capacity_bytes)
        self._needed: dict[Hashable, deque[int]] = defaultdict(deque)
        for number, request in enumerate(requests):
            for key in request.chunks:
                self._needed[key].append(number)

    def place(self, entry: Entry, now: float) -> None:
        needed = self._needed[entry.key]
        needed.popleft()
        entry.rank = (-needed[0] if needed else -math.inf, -entry.used)
