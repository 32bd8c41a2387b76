"""`Scratch`: buffers for what is between two steps of a chain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.memory import BufferPool, MemoryObj

__all__ = ["Scratch"]

_UNBOUNDED = 1 << 62  # as many bytes as calls under way need; what is kept is bounded by `kept`


class Scratch:
    """Buffers that are used over and over, so that a call allocates none once as many calls ran at a time before.

    Parameters
    ----------
    kept : int
        Idle buffers that are kept, those that were used last.

    Notes
    -----
    Thread-safe. A buffer serves any size up to its own; one that is larger than twice what is asked for is left for
    others, so that a small object does not hold a large buffer.
    """

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._idle: list[MemoryObj] = []

    @property
    def idle(self) -> int:
        """Buffers that wait for use."""
        return len(self._idle)

    @contextmanager
    def bytes(self, nbytes: int) -> Iterator[MemoryObj]:
        """Lend plain bytes, of which `nbytes` are in use."""
        obj = self._take(nbytes)
        try:
            obj.reset_used_size()
            obj.set_used_size(nbytes)
            yield obj
        finally:
            with self._lock:
                self._idle.append(obj)
                del self._idle[: -self._kept]

    def _take(self, nbytes: int) -> MemoryObj:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if nbytes <= self._idle[index].nbytes <= max(2 * nbytes, 4096):
                    return self._idle.pop(index)
        return BufferPool(_UNBOUNDED).allocate_bytes(nbytes)  # a pool of its own: the buffer goes with the object
