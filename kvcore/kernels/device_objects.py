"""What a vendor's library makes, as Python holds it: streams, events and memory. Each ends with its last user."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kvcore.errors import OutOfMemoryError
from kvcore.kernels.device import DeviceStream

if TYPE_CHECKING:
    from kvcore.kernels.vendor import VendorLibrary

__all__ = ["Allocation", "DeviceEvent", "ImportedMemory", "VendorStream"]


class VendorStream(DeviceStream):
    """A stream of a device.

    Parameters
    ----------
    library : VendorLibrary
    ordinal : int
    native : int, optional
        The vendor's stream, which stays its owner's; without it there is a new one.

    Raises
    ------
    OutOfMemoryError, DeviceError
    """

    def __init__(self, library: VendorLibrary, ordinal: int, native: int | None = None) -> None:
        self.handle = 0
        self.library, self.ordinal = library, ordinal
        made = ctypes.c_void_p()
        library.call("stream_create", ordinal, native or 0, native is not None, ctypes.byref(made))
        self.handle = handle = made.value or 0
        super().__init__(handle, library.status_of(handle))
        library.note(self)

    @property
    def native(self) -> int:
        """The vendor's handle of it, as torch's ``ExternalStream`` takes it."""
        handle: int = self.library.native_of(self.handle)
        return handle

    def mark(self) -> DeviceEvent:
        """Return an event behind what is queued now."""
        return DeviceEvent(self)

    def passed(self, mark: DeviceEvent) -> bool:
        """Tell whether an event is reached."""
        return mark.passed()

    def finish(self) -> None:
        """Wait for the device."""
        self.library.call("stream_synchronize", self.handle)

    def take_status(self) -> int:
        """Wait for the device, and take its findings."""
        status = ctypes.c_uint64()
        self.library.call("stream_check", self.handle, ctypes.byref(status))
        return status.value

    def __repr__(self) -> str:
        return f"<stream of {self.library.device_type}:{self.ordinal} at {self.handle:#x}>"

    def __del__(self) -> None:
        if self.handle:  # waits; what is held is dropped after that
            self.library.quiet("stream_destroy", self.handle)


class DeviceEvent:
    """Reached when a stream has passed what was queued when it was made.

    Parameters
    ----------
    stream : VendorStream
    shared : bool
        Other processes may import it.
    """

    __slots__ = ("handle", "library", "ordinal", "shared")

    def __init__(self, stream: VendorStream, shared: bool = False) -> None:
        self.handle = 0
        self.library, self.ordinal, self.shared = stream.library, stream.ordinal, shared
        self._made("event_record", stream.handle, shared)

    @classmethod
    def imported(cls, library: VendorLibrary, ordinal: int, handle: ctypes.Array[ctypes.c_ubyte]) -> DeviceEvent:
        """Return another process's event."""
        event = cls.__new__(cls)
        event.handle = 0
        event.library, event.ordinal, event.shared = library, ordinal, False
        event._made("ipc_import_event", ordinal, handle)
        return event

    def _made(self, name: str, *args: Any) -> None:
        made = ctypes.c_void_p()
        self.library.call(name, *args, ctypes.byref(made))
        self.handle = made.value or 0

    def passed(self) -> bool:
        """Tell, without waiting, whether it is reached."""
        return bool(self.library.value("event_passed", ctypes.c_int32, self.handle))

    def synchronize(self) -> None:
        """Wait until it is reached."""
        self.library.call("event_synchronize", self.handle)

    def __del__(self) -> None:
        if self.handle:
            self.library.quiet("event_destroy", self.handle)


class Allocation:
    """A block of a device's memory, given back with its last user.

    Parameters
    ----------
    library : VendorLibrary
    ordinal : int
    nbytes : int

    Raises
    ------
    OutOfMemoryError
        There is less.
    """

    __slots__ = ("address", "library", "ordinal")

    def __init__(self, library: VendorLibrary, ordinal: int, nbytes: int) -> None:
        self.address = 0
        self.library, self.ordinal = library, ordinal
        where = f"{library.device_type}:{ordinal}"
        if nbytes >= 2**63:  # more than the library's int64 takes
            raise OutOfMemoryError(f"{where} has no {nbytes} B")
        try:
            self.address = self._allocate(nbytes)
        except OutOfMemoryError as error:
            total = library.info(ordinal).memory_bytes
            raise OutOfMemoryError(
                f"{where} has no {nbytes} B; it has {total} B in all, and others may use it too: free arrays first "
                f"({error})"
            ) from error

    def _allocate(self, nbytes: int) -> int:
        try:
            return self.library.value("memory_allocate", ctypes.c_uint64, self.ordinal, nbytes)
        except OutOfMemoryError:
            self.library.finish(self.ordinal)  # streams may hold what they are done with, or soon will be
            return self.library.value("memory_allocate", ctypes.c_uint64, self.ordinal, nbytes)

    def __del__(self) -> None:
        if self.address:
            self.library.quiet("memory_free", self.ordinal, self.address)


class ImportedMemory:
    """An allocation of another process, let go with its last user.

    Parameters
    ----------
    library : VendorLibrary
    ordinal : int
    base : int
        What the library gave, less the offset.
    """

    __slots__ = ("__weakref__", "base", "library", "ordinal")

    def __init__(self, library: VendorLibrary, ordinal: int, base: int) -> None:
        self.library, self.ordinal, self.base = library, ordinal, base

    def __del__(self) -> None:
        self.library.quiet("ipc_close_memory", self.ordinal, self.base)
