"""What an eviction policy is: it knows which chunks are resident, and says which go when room is needed.

A policy keeps books and moves no bytes: its owner (a tier) tells it what happens and drops what it names.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping
from typing import Any

from kvcore.errors import ConfigError, OutOfMemoryError

__all__ = ["EvictionPolicy"]


class EvictionPolicy(abc.ABC):
    """Which of the resident chunks of a tier go first.

    Every policy obeys the **prefix closure**: a chunk is named only when no resident chunk names it as its parent, so
    a chunk never goes before those that follow it in its prefix chain. Keys are anything hashable. Times, `now`, are
    seconds of any clock that does not run backwards; only policies with a time to live look at them.

    The owner calls under its own lock: a policy has none. Events about chunks that are not resident (a touch that
    comes after the eviction, say) change nothing and answer False.

    Parameters
    ----------
    capacity_bytes : int
        Bytes that the tier holds; at least 1.

    Raises
    ------
    ConfigError
        The capacity is below 1 byte.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a capacity of {capacity_bytes:,} bytes holds nothing: give at least one chunk's bytes")
        self._capacity_bytes = capacity_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the tier holds."""
        return self._capacity_bytes

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes of all resident chunks."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of resident chunks."""

    @abc.abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether a chunk is resident."""

    @abc.abstractmethod
    def tenants(self) -> Mapping[str, int]:
        """Return the bytes of each tenant that has resident chunks; do not change the mapping."""

    @abc.abstractmethod
    def insert(
        self, key: Hashable, nbytes: int, *, parent: Hashable | None = None, tenant: str = "", now: float
    ) -> None:
        """Record that a chunk is resident now. A resident one starts afresh, and keeps its pins.

        Parameters
        ----------
        key : hashable
        nbytes : int
            Its bytes in this tier; at least 1.
        parent : hashable, optional
            Key of the chunk before it in its prefix chain, resident or not; None for the first. Keys name their whole
            prefix, so parents make no circles.
        tenant : str
            Whose quota the bytes count on.
        now : float
            Seconds.

        Raises
        ------
        ConfigError
            `nbytes` is below 1, or the chunk is its own parent.
        """

    @abc.abstractmethod
    def touch(self, key: Hashable, *, now: float) -> bool:
        """Record that a chunk was read; return whether it is resident."""

    @abc.abstractmethod
    def remove(self, key: Hashable) -> bool:
        """Forget a chunk that left for another reason than eviction; return whether it was resident.

        Chunks that follow it stay, and may be evicted.
        """

    @abc.abstractmethod
    def pin(self, key: Hashable) -> bool:
        """Protect a chunk, and so all before it, from eviction while it is read; pins are counted."""

    @abc.abstractmethod
    def unpin(self, key: Hashable) -> bool:
        """Take back one `pin`; return whether there was one."""

    @abc.abstractmethod
    def evict(self, nbytes: int, *, now: float, tenant: str | None = None) -> list[Any]:
        """Name the chunks to drop for at least `nbytes` of room, and forget them.

        Parameters
        ----------
        nbytes : int
            Room wanted; 0 or less evicts nothing.
        now : float
            Seconds.
        tenant : str, optional
            Take only chunks of this tenant.

        Returns
        -------
        list of keys
            In the order in which they are to be dropped: each after all that follow it. Their bytes are fewer than
            `nbytes` if all others are pinned.
        """

    @abc.abstractmethod
    def expire(self, *, now: float) -> list[Any]:
        """Name the chunks whose time to live is over, and forget them; empty for policies without one."""

    def make_room(self, nbytes: int, *, now: float) -> list[Any]:
        """Reclaim on demand: evict until `nbytes` more fit into the capacity.

        The caller asks `used_bytes` whether they do: pinned chunks stay.

        Raises
        ------
        OutOfMemoryError
            They would not fit into an empty tier; nothing was evicted.
        """
        if nbytes > self.capacity_bytes:
            raise OutOfMemoryError(
                f"{nbytes:,} bytes do not fit into a capacity of {self.capacity_bytes:,} even when all is evicted: "
                "raise the capacity above one chunk, or make chunks smaller"
            )
        return self.evict(self.used_bytes + nbytes - self.capacity_bytes, now=now)

    def relieve(self, *, now: float, watermark: float = 0.8, ratio: float = 0.2) -> list[Any]:
        """Reclaim ahead of demand: above the watermark evict a share of what is used.

        Parameters
        ----------
        now : float
            Seconds.
        watermark : float
            Share of the capacity, above 0 and at most 1; nothing happens while no more is used.
        ratio : float
            Share of the used bytes to evict, above 0 and at most 1.

        Raises
        ------
        ConfigError
            A share is out of its range.
        """
        for name, share in (("watermark", watermark), ("ratio", ratio)):
            if not 0 < share <= 1:
                raise ConfigError(f"{name} {share:g} is not a share above 0 and at most 1")
        if self.used_bytes <= watermark * self.capacity_bytes:
            return []
        return self.evict(max(1, int(ratio * self.used_bytes)), now=now)
