"""ARC, the adaptive replacement cache, weighted by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from kvcore.tiers.policies.ranked import Entry, RankedPolicy

__all__ = ["Arc"]

_ONCE, _OFTEN = 0, 1


class Arc(RankedPolicy):
    """Balances recency and frequency by what it would have needed.

    N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", USENIX FAST 2003. Resident chunks
    are in T1 (used once) or T2 (used again), the keys of evicted ones in the ghost lists B1 and B2. A chunk that comes
    back while B1 has it raises the target of T1, one that B2 has lowers it.

    Three things differ from the paper. Sizes are bytes: the lists are kept to T1 + B1 <= c and T1 + T2 + B1 + B2 <= 2c
    bytes, and the target moves by the chunk's bytes where the paper says 1. The prefix closure decides which chunks may
    go: if none of the list that is to shrink may, one of the other goes. And room is made before the chunk that needs
    it is known, so the target that a chunk moves counts from the next eviction on.
    """

    queues = 2

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._once_bytes = 0  # of T1
        self._target = 0.0  # of T1, in bytes
        self._ghosts: tuple[OrderedDict[Hashable, int], OrderedDict[Hashable, int]] = (OrderedDict(), OrderedDict())
        self._ghost_bytes = [0, 0]

    def place(self, entry: Entry, now: float) -> None:  # noqa: D102
        entry.rank = (entry.used,)
        if entry.uses > 1:
            if entry.queue == _ONCE:
                self._once_bytes -= entry.nbytes
            entry.queue = _OFTEN
            return
        entry.queue = _OFTEN if self._returns(entry) else _ONCE
        if entry.queue == _ONCE:
            self._once_bytes += entry.nbytes
        self._trim()

    def choose(self, tenant: str | None) -> Entry | None:  # noqa: D102
        wanted = _ONCE if self._once_bytes > self._target else _OFTEN
        return self.first(wanted, tenant) or self.first(1 - wanted, tenant)

    def left(self, entry: Entry, *, evicted: bool) -> None:  # noqa: D102
        if entry.queue == _ONCE:
            self._once_bytes -= entry.nbytes
        if evicted:
            self._ghosts[entry.queue][entry.key] = entry.nbytes
            self._ghost_bytes[entry.queue] += entry.nbytes

    def _trim(self) -> None:
        """Keep the ghosts within the paper's bounds: an insertion may break them, an eviction only moves bytes."""
        while self._ghosts[_ONCE] and self._once_bytes + self._ghost_bytes[_ONCE] > self.capacity_bytes:
            self._forget(_ONCE)
        while self._ghosts[_OFTEN] and self.used_bytes + sum(self._ghost_bytes) > 2 * self.capacity_bytes:
            self._forget(_OFTEN)

    def _returns(self, entry: Entry) -> bool:
        """Return whether a ghost list has the chunk; if so take it out, and move the target."""
        for queue, other in ((_ONCE, _OFTEN), (_OFTEN, _ONCE)):
            if entry.key not in self._ghosts[queue]:
                continue
            step = max(self._ghost_bytes[other] / self._ghost_bytes[queue], 1.0) * entry.nbytes
            moved = self._target + (step if queue == _ONCE else -step)
            self._target = min(max(moved, 0.0), float(self.capacity_bytes))
            self._ghost_bytes[queue] -= self._ghosts[queue].pop(entry.key)
            return True
        return False

    def _forget(self, queue: int) -> None:
        """Drop the oldest ghost."""
        self._ghost_bytes[queue] -= self._ghosts[queue].popitem(last=False)[1]
