"""A native library whose ops are queued on a device: what each keeps alive, and the errors found meanwhile."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from kvcore.errors import ConfigError, DeviceError
from kvcore.kernels.library import Library, status_error

__all__ = ["DeviceLibrary", "DeviceStream", "no_stream"]

_SILENT = frozenset({"convert_layout", "copy_batch", "digest"})
"""Ops that find nothing wrong in data, so that what a status word says is never theirs."""


class DeviceStream(ABC):
    """A stream: its handle for the C ABI, its status word, and what its queued work uses.

    What an op uses is dropped when the stream has passed it, which is looked for whenever the next one is queued. Only
    one mark is out at a time, so that a stream that is far behind costs no mark for each op; so what is queued behind
    that mark is dropped a little later than could be.

    Parameters
    ----------
    handle : int
        What the library takes as stream.
    status : int
        Address of a uint64, `OK` at first, that kernels of this stream report to.
    """

    def __init__(self, handle: int, status: int) -> None:
        self.handle = handle
        self.status = status
        self._queued = 0  # ops so far
        self._held: deque[tuple[int, Any]] = deque()  # number of the op, and what it uses
        self._latest: tuple[int, Any] | None = None  # a mark, and the last op that is known to lie before it
        self._ops: dict[str, None] = {}  # queued since the last check
        self._launching: dict[int, Any] = {}  # what ops use that are being queued
        self._lock = threading.Lock()

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark behind what is queued now."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Tell, without waiting, whether all that was queued before a mark is done."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that is queued is done."""

    @abstractmethod
    def take_status(self) -> int:
        """Wait until all that is queued is done; return the status word, and set it to `OK`."""

    def hold(self, keep: Any) -> None:
        """Keep what an op uses until the stream has passed what is queued now."""
        with self._lock:
            self._queued += 1
            self._held.append((self._queued, keep))

    def let_go(self, until: int = 0) -> None:
        """Drop what queued work has used and needs no more; the ops up to a number are known to be done."""
        done = []  # dropped after the lock: what ends then may be anything, streams too
        with self._lock:
            if self._latest is not None and self.passed(self._latest[1]):
                until = max(until, self._latest[0])
            if self._latest is not None and until >= self._latest[0]:
                done.append(self._latest)
                self._latest = None
            while self._held and self._held[0][0] <= until:
                done.append(self._held.popleft())
            if self._held and self._latest is None:
                self._latest = self._queued, self.mark()

    def synchronize(self) -> None:
        """Wait until all that is queued is done.

        Raises
        ------
        DeviceError
            The device failed. It names the ops queued since the last check.
        """
        until = self._queued
        try:
            self.finish()
        except DeviceError as error:
            raise self._named(error, self._ops) from error
        self._launching.clear()
        self.let_go(until)

    def check(self) -> None:
        """Wait, and raise the error that an op queued since the last check left, if any.

        Raises
        ------
        KVCoreError
            One of `status_error`. It names all ops that may have left it: not those that only move bytes.
        DeviceError
            The device failed. It names all ops.
        """
        with self._lock:
            until = self._queued
            ops, self._ops = self._ops, {}
        try:
            status = self.take_status()
        except DeviceError as error:
            raise self._named(error, ops) from error
        self._launching.clear()
        self.let_go(until)
        found = status_error(" or ".join(op for op in ops if op not in _SILENT) or "an op", status)
        if found is not None:
            raise found

    def queue(self, library: Library, op: str, args: bytes, keep: Any) -> None:
        """Queue an op of a library, and keep what it uses.

        Raises
        ------
        UnsupportedOpError, OutOfMemoryError, LayoutError
            The launch did not take place.
        DeviceError
            The device failed, now or in an op that was queued before. It names these.
        """
        before = dict(self._ops)
        # An interrupt may come between any two steps: what is launched is kept before it is, until the next wait.
        self._launching[id(keep)] = keep
        try:
            try:
                library.launch(op, args, self.handle, self.status)
            finally:
                self.hold(keep)  # also of an op that failed half way: what it launched by then may still run
                self._launching.pop(id(keep), None)
            self._ops[op] = None
            self.let_go()
        except DeviceError as error:
            raise self._named(error, before) from error

    @staticmethod
    def _named(error: DeviceError, ops: dict[str, None]) -> DeviceError:
        return DeviceError(f"{error}; queued since the last check: {', '.join(tuple(ops)) or 'no op'}")


class DeviceLibrary(Library):
    """A library whose ops are queued: they are done, and their errors known, when their stream is."""

    @abstractmethod
    def resolve(self, stream: Any) -> DeviceStream:
        """Return the stream that a caller means; None is the one of ops that name none.

        Raises
        ------
        ConfigError
            It is no stream of this device.
        """

    def run(self, op: str, args: bytes, stream: Any, keep: tuple[Any, ...], subject: Any = None) -> None:
        """Queue an op.

        Raises
        ------
        ConfigError
            The stream is none of this device.
        UnsupportedOpError, OutOfMemoryError, LayoutError, DeviceError
            See `DeviceStream.queue`.
        """
        self.resolve(stream).queue(self, op, args, keep)


def no_stream(stream: Any, advice: str) -> ConfigError:
    """Return the error for what was given as a stream and is none."""
    return ConfigError(f"stream={stream!r} is a {type(stream).__qualname__}, and no stream; {advice}")
