"""The emulated device as Python holds it: its library, memory, streams and events."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from kvcore import settings
from kvcore.errors import LayoutError, OutOfMemoryError
from kvcore.kernels.device import DeviceLibrary, DeviceStream, no_stream
from kvcore_emu.build import library

__all__ = ["DEVICE", "Allocation", "EmuLibrary", "EmuStream", "Event", "device"]

DEVICE = "emu:0"
_MAX_BYTES = 2**63 - 1

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "seed": (None, (ctypes.c_uint64,)),
    "allocate": (ctypes.c_uint64, (ctypes.c_int64,)),
    "free": (None, (ctypes.c_uint64,)),
    "stream": (ctypes.c_void_p, ()),
    "stream_free": (None, (ctypes.c_void_p,)),
    "status": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "queued": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "done": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "synchronize": (None, (ctypes.c_void_p,)),
    "check": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "wait": (None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)),
}


class EmuLibrary(DeviceLibrary):
    """The compiled library.

    Parameters
    ----------
    warp_width : {16, 32, 64}
    flags : tuple of str
        More options for the compiler.
    """

    def __init__(self, warp_width: int, flags: tuple[str, ...] = ()) -> None:
        self.warp_width = warp_width
        super().__init__(library(warp_width, flags))
        self._default = EmuStream(self)

    def resolve(self, stream: Any) -> EmuStream:
        """Return a stream, for None the default one.

        Raises
        ------
        ConfigError
            It is none.
        """
        if stream is None:
            return self._default
        if not isinstance(stream, EmuStream):
            raise no_stream(stream, "take one from the backend's runtime.stream(), or leave it out")
        return stream

    def emu(self, name: str) -> Any:
        """Return one of the library's functions for memory, streams and events: ``kvcore_emu_<name>``."""
        function = getattr(self.dll, f"kvcore_emu_{name}")
        function.restype, function.argtypes = _SIGNATURES[name]
        return function


class EmuStream(DeviceStream):
    """A stream. What is queued runs when somebody waits for it, at the latest when the stream is dropped."""

    def __init__(self, owner: EmuLibrary) -> None:
        self._mark, self._done = owner.emu("queued"), owner.emu("done")
        self._synchronize, self._check = owner.emu("synchronize"), owner.emu("check")
        self._free = owner.emu("stream_free")
        self.handle = handle = owner.emu("stream")()
        if not handle:
            raise OutOfMemoryError(f"{DEVICE} has no memory for a stream")
        super().__init__(handle, owner.emu("status")(handle))

    def mark(self) -> int:
        """Return how many commands were queued."""
        count: int = self._mark(self.handle)
        return count

    def passed(self, mark: int) -> bool:
        """Tell whether so many commands are done."""
        done: int = self._done(self.handle)
        return done >= mark

    def take_status(self) -> int:
        """Run what is queued, and return what it reported."""
        status: int = self._check(self.handle)
        return status

    def finish(self) -> None:
        """Run what is queued."""
        self._synchronize(self.handle)

    def __del__(self) -> None:
        if self.handle:
            self._free(self.handle)


class Event(NamedTuple):
    """Reached when a stream has passed a mark."""

    stream: EmuStream
    mark: int


class Allocation:
    """A block of device memory, freed with its last user.

    Parameters
    ----------
    owner : EmuLibrary
    nbytes : int

    Raises
    ------
    LayoutError
        `nbytes` is negative.
    OutOfMemoryError
        There is less memory.
    """

    __slots__ = ("_free", "address")

    def __init__(self, owner: EmuLibrary, nbytes: int) -> None:
        self.address = 0
        if nbytes < 0:
            raise LayoutError(f"an allocation cannot have {nbytes} B")
        if nbytes <= _MAX_BYTES:  # what the library's int64 takes
            self.address = owner.emu("allocate")(nbytes)
        if not self.address:
            raise OutOfMemoryError(f"{DEVICE} has no {nbytes} B; free arrays first")
        self._free = owner.emu("free")

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)


@functools.cache
def device() -> EmuLibrary:
    """Return the device of this process; the library is compiled when it is first asked for."""
    chosen = settings.current()
    made = EmuLibrary(chosen.emu_warp, chosen.emu_flags)
    made.emu("seed")(chosen.emu_seed)
    return made
