"""A native library whose ops are queued on a device: what each keeps alive, and the errors found meanwhile."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.kernels.library import Library, status_error

__all__ = ["DeviceLibrary", "DeviceStream"]

_SILENT = frozenset({"convert_layout", "copy_batch", "digest"})
"""Ops that find nothing wrong in data, so that an error is never theirs."""


class DeviceStream(ABC):
    """A stream: its handle for the C ABI, its status word, and what its queued work uses.

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
        self._held: deque[tuple[Any, Any]] = deque()
        self._ops: dict[str, None] = {}  # queued since the last check
        self._lock = threading.Lock()

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark behind what is queued now."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Tell, without waiting, whether all that was queued before a mark is done."""

    @abstractmethod
    def take_status(self) -> int:
        """Wait until all that is queued is done; return the status word, and set it to `OK`."""

    def hold(self, op: str, keep: Any) -> None:
        """Keep what an op that was just queued uses until the stream has passed it."""
        with self._lock:
            if op not in _SILENT:
                self._ops[op] = None
            self._held.append((self.mark(), keep))
        self.let_go()

    def let_go(self) -> None:
        """Drop what queued work has used and needs no more."""
        done = []  # dropped after the lock: what ends then may be anything, streams too
        with self._lock:
            while self._held and self.passed(self._held[0][0]):
                done.append(self._held.popleft())

    def check(self) -> None:
        """Wait, and raise the error that an op queued since the last check left, if any.

        Raises
        ------
        KVCoreError
            One of `status_error`. It names all ops that may have left it: not those that only move bytes.
        """
        with self._lock:
            ops, self._ops = self._ops, {}
        status = self.take_status()
        self.let_go()
        error = status_error(" or ".join(ops) or "an op", status)
        if error is not None:
            raise error


class DeviceLibrary(Library):
    """A library whose ops are queued: they are done, and their errors known, when their stream is.

    Parameters
    ----------
    path : Path
    default : callable
        Returns the stream of ops that name none.
    """

    def __init__(self, path: Path, default: Callable[[DeviceLibrary], DeviceStream]) -> None:
        super().__init__(path)
        self.default = default(self)

    def run(self, op: str, args: bytes, stream: Any, keep: tuple[Any, ...], subject: Any = None) -> None:
        """Queue an op.

        Raises
        ------
        ConfigError
            The stream is none of a device.
        """
        target = self.default if stream is None else stream
        if not isinstance(target, DeviceStream):
            raise ConfigError(
                f"{op}: stream={stream!r} is a {type(stream).__qualname__}, and no stream; "
                "take one from the backend's runtime.stream(), or leave it out"
            )
        self.launch(op, args, target.handle, target.status)
        target.hold(op, keep)
