"""The host arena: one region of page-locked memory, leased out in pieces.

The region is allocated once, through a backend's `Runtime`, because locking memory and telling a driver of it is slow.
Pieces are `MemoryObj` leases, as those of `BufferPool` are, so either can stand in for the other.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.errors import ConfigError, LeaseError, OutOfMemoryError
from kvcore.memory import ALIGNMENT, KVMeta, LayoutDesc, MemoryObj, MemoryPlan, align_up
from kvcore.runtime import HostBuffer, Runtime
from kvcore.tiers.blocks import BlockAllocator
from kvcore.tiers.host_limits import HostLimits, clamp, read_limits, size_text

__all__ = ["DEFAULT_BYTES", "HostArena", "LeaseInfo", "MemoryCheck"]

DEFAULT_BYTES = 5 << 30
_POISON = 0xDD
_RECLAIM_SECONDS = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """Where a lease lies.

    Parameters
    ----------
    generation : int
        That of its memory object.
    offset, nbytes : int
        Its bytes of the region.
    """

    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """What `HostArena.memcheck` found.

    Parameters
    ----------
    leases : int
        Leases that are live.
    leaked : tuple of LeaseInfo
        Live leases whose memory objects are all gone: nobody can free them any more.
    overlaps : tuple of (int, int)
        Byte ranges of the region that belong to two blocks, leased or free.
    lost : tuple of (int, int)
        Byte ranges that belong to no block.
    written_after_free : tuple of (int, int)
        Free blocks that somebody wrote to; only found with ``poison=True``.
    """

    leases: int
    leaked: tuple[LeaseInfo, ...]
    overlaps: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]
    written_after_free: tuple[tuple[int, int], ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. Leases that are live and in somebody's hands are not."""
        return not (self.leaked or self.overlaps or self.lost or self.written_after_free)


@dataclass(slots=True)
class _Lease:
    offset: int
    size: int
    buffer: weakref.ref[np.ndarray[Any, np.dtype[np.uint8]]]


class HostArena:
    """Page-locked host memory by lease.

    Parameters
    ----------
    runtime : Runtime
        Of the backend that shall copy from and to the memory; `kvcore.runtime.HostRuntime` where there is no device.
    nbytes : int
        Bytes wanted. Less is granted where the machine has less; `notes` says what and why, and so does the log.
    reserve_bytes : int
        RAM to leave to others.
    pinned : bool
        Lock the pages. What can be locked then limits the size.
    hugepages : bool
        Take pages of 2 MiB, if the pool has as many; else ordinary ones, with a warning. Not with `shared_name`.
    numa_node : int, optional
        Node of the pages.
    shared_name : str, optional
        Make it shared memory of this name, which no other process may have taken.
    min_bytes : int
        Refuse to start with less than this, for example the size of a chunk.
    obey_memlock : bool
        False lets a driver try that locks pages outside of RLIMIT_MEMLOCK.
    poison : bool
        For debugging: fill what is freed, so that `memcheck` finds writes to it. Slow.
    limits : HostLimits, optional
        Those of the machine, if they are known; else they are read.

    Raises
    ------
    ConfigError
        A size makes no sense, huge pages are asked for together with a name, or less than `min_bytes` can be had.
    FileExistsError
        The shared name is taken.
    OutOfMemoryError
        The machine refused the memory.

    Notes
    -----
    Thread-safe. Allocation is best fit with coalescing, O(log size); see `kvcore.tiers.blocks`. Close it, or use it as
    a context manager: shared memory keeps its name, and its bytes, beyond a process that does not.
    """

    def __init__(
        self,
        runtime: Runtime,
        nbytes: int = DEFAULT_BYTES,
        *,
        reserve_bytes: int = 0,
        pinned: bool = True,
        hugepages: bool = False,
        numa_node: int | None = None,
        shared_name: str | None = None,
        min_bytes: int = ALIGNMENT,
        obey_memlock: bool = True,
        poison: bool = False,
        limits: HostLimits | None = None,
    ) -> None:
        if nbytes < 1 or reserve_bytes < 0 or min_bytes < 1:
            raise ConfigError(
                f"an arena has at least 1 byte, and reserves 0 bytes or more; got {nbytes=}, {reserve_bytes=}, "
                f"{min_bytes=}"
            )
        if hugepages and shared_name is not None:
            raise ConfigError(
                f"huge pages cannot be shared by name: drop hugepages, or the name {shared_name!r} (also peer-to-peer "
                "transfer needs ordinary pages)"
            )
        limits = limits or read_limits(numa_node)
        granted, huge, notes = clamp(
            nbytes,
            limits,
            reserve=reserve_bytes,
            locked=pinned and obey_memlock,
            shared=shared_name is not None,
            huge=hugepages,
        )
        granted = granted // mmap.PAGESIZE * mmap.PAGESIZE if granted < nbytes else align_up(nbytes)
        if granted < max(min_bytes, ALIGNMENT):
            why = "; ".join(notes) or f"{size_text(nbytes)} asked for"
            raise ConfigError(f"the host arena needs {max(min_bytes, ALIGNMENT)} B, but gets {granted} B: {why}")
        self._buffer: HostBuffer = runtime.alloc_host(
            granted, pinned=pinned, hugepages=huge, numa_node=numa_node, shared_name=shared_name
        )
        notes += [
            f"{wish} not granted, {answer}"
            for wish, answer in self._buffer.granted.items()
            if wish != "shared_name" and answer.startswith("no: ")
        ]
        self.notes: tuple[str, ...] = tuple(notes)
        """What was not granted as it was asked for, and why."""
        refused = {"hugepages": "no: the pool of 2 MiB pages is too small"} if hugepages and not huge else {}
        self.granted: Mapping[str, str] = {**self._buffer.granted, **refused}
        """What became of the wishes, as `HostBuffer.granted` has it."""
        self.reclaim: Callable[[int], int] | None = None
        """Called where there is no room, outside of all locks, with the bytes that are missing.

        Frees leases, and returns the bytes it freed; 0 if there are none to free.
        """
        for note in notes:
            _log.warning("host arena: %s", note)
        _log.info("host arena of %s: %s", size_text(granted), self.granted)
        self._capacity = granted
        self._blocks = BlockAllocator(granted)
        self._live: dict[int, _Lease] = {}
        self._generation = 0
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._poison = poison
        if poison:
            self._buffer.array[:granted] = _POISON

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the region, as granted."""
        return self._capacity

    @property
    def live_bytes(self) -> int:
        """Bytes under lease now, in whole multiples of `kvcore.memory.ALIGNMENT`."""
        with self._changed:
            return self._capacity - self._blocks.free_bytes

    @property
    def live_leases(self) -> int:
        """Leases not yet freed."""
        with self._changed:
            return len(self._live)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that is free."""
        with self._changed:
            return self._blocks.largest

    def export(self, runtime: Runtime) -> Any:
        """Return the handle by which another process maps the region (`Runtime.export_buffer`)."""
        return runtime.export_buffer(self._buffer)

    def allocate(
        self, descs: Sequence[LayoutDesc], meta: KVMeta | Sequence[KVMeta] = (), *, timeout: float = 0.0
    ) -> MemoryObj:
        """Lease memory for one dense chunk per group; see `allocate_batch`."""
        return self.allocate_batch([MemoryPlan.of(descs, meta)], timeout=timeout)[0]

    def allocate_bytes(self, nbytes: int, meta: KVMeta | None = None, *, timeout: float = 0.0) -> MemoryObj:
        """Lease plain bytes; see `allocate_batch`."""
        return self.allocate_batch([MemoryPlan.of_bytes(nbytes, meta)], timeout=timeout)[0]

    def allocate_batch(self, plans: Sequence[MemoryPlan], *, timeout: float = 0.0) -> list[MemoryObj]:
        """Lease memory for many objects: all of them or none.

        Parameters
        ----------
        plans : sequence of MemoryPlan
        timeout : float
            Seconds to wait for others to free what is missing, once `reclaim` has nothing left to free.

        Raises
        ------
        OutOfMemoryError
            There is no room, nor was there in time; or they are larger than the arena. Nothing is leased then.
        LeaseError
            The arena is closed.
        """
        sizes = [plan.size for plan in plans]
        total, deadline = sum(sizes), time.monotonic() + timeout
        if total > self._capacity:
            raise OutOfMemoryError(
                f"{total} B asked of an arena of {self._capacity} B: they can never fit; raise the arena's size, "
                "or ask for less at once"
            )
        reclaimed = 0
        while True:
            with self._changed:
                offsets = self._take(sizes)
                if offsets is not None:
                    return [self._lease(*piece) for piece in zip(plans, sizes, offsets, strict=True)]
                missing = max(total - self._blocks.free_bytes, max(sizes))
            # What others take meanwhile could keep this going: one request never reclaims more than there is.
            freed = self.reclaim(missing) if self.reclaim is not None and reclaimed <= self._capacity else 0
            reclaimed += max(freed, 0)
            if freed > 0:
                continue
            with self._changed:
                offsets = self._take(sizes)  # others may have freed something since the first try
                if offsets is not None:
                    return [self._lease(*piece) for piece in zip(plans, sizes, offsets, strict=True)]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise OutOfMemoryError(
                        f"{total} B in {len(plans)} pieces asked of an arena of {self._capacity} B: "
                        f"{self._blocks.free_bytes} B are free, at most {self._blocks.largest} B in one piece, and "
                        f"waiting {timeout:g} s brought no more; free memory objects or raise the arena's size"
                    )
                # What becomes reclaimable frees nothing yet, so nobody tells of it: it is asked for again.
                self._changed.wait(left if self.reclaim is None else min(left, _RECLAIM_SECONDS))

    def memcheck(self) -> MemoryCheck:
        """Look for leaks, overlaps, lost bytes and, with ``poison=True``, writes to freed memory."""
        with self._changed:
            leased = [LeaseInfo(g, lease.offset, lease.size) for g, lease in self._live.items()]
            leaked = tuple(i for i in leased if self._live[i.generation].buffer() is None)
            free = sorted(self._blocks.free_blocks())
            blocks = sorted([(i.offset, i.offset + i.nbytes) for i in leased] + [(a, a + size) for a, size in free])
            overlaps, lost, end = [], [], 0
            for start, stop in [*blocks, (self._capacity, self._capacity)]:
                if start < end:
                    overlaps.append((start, min(stop, end)))
                elif start > end:
                    lost.append((end, start))
                end = max(end, stop)
            written = []
            if self._poison:
                written = [(a, a + n) for a, n in free if (self._buffer.array[a : a + n] != _POISON).any()]
        return MemoryCheck(len(leased), leaked, tuple(overlaps), tuple(lost), tuple(written))

    def close(self) -> None:
        """Give the memory back to the machine. Closing twice does nothing.

        Raises
        ------
        LeaseError
            Leases are live, or views of the memory are still held. Nothing happens then.
        """
        with self._changed:
            if self._closed:
                return
            if self._live:
                raise LeaseError(f"the arena has {len(self._live)} live leases; free them before it is closed")
            self._buffer.free()
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, sizes: Sequence[int]) -> list[int] | None:
        """Take a block for each size, or none at all."""
        if self._closed:
            raise LeaseError("the arena is closed")
        # The largest first: they have the fewest places to go.
        offsets = dict.fromkeys(sorted(range(len(sizes)), key=lambda i: -sizes[i]), 0)
        for done, index in enumerate(offsets):
            offset = self._blocks.take(sizes[index])
            if offset is None:
                for taken in list(offsets)[:done]:
                    self._blocks.give(offsets[taken], sizes[taken])
                return None
            offsets[index] = offset
        return [offsets[i] for i in range(len(sizes))]

    def _lease(self, plan: MemoryPlan, size: int, offset: int) -> MemoryObj:
        self._generation += 1
        buffer = self._buffer.array[offset : offset + size]
        self._live[self._generation] = _Lease(offset, size, weakref.ref(buffer))
        return MemoryObj(self, self._generation, buffer, plan.nbytes, plan.descs, plan.offsets, plan.metas)

    def _check(self, generation: int) -> None:
        if generation not in self._live:
            raise LeaseError(
                f"memory object of generation {generation} was freed; its bytes may belong to somebody else by now"
            )

    def _free(self, generation: int, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        with self._changed:
            lease = self._live.get(generation)
            if lease is None:
                raise LeaseError(f"memory object of generation {generation} is freed twice; free each lease once")
            if lease.buffer() is not buffer:
                raise LeaseError(f"memory object of generation {generation} is not of this arena")
            if self._poison:
                buffer[:] = _POISON
            del self._live[generation]
            self._blocks.give(lease.offset, lease.size)
            self._changed.notify_all()
