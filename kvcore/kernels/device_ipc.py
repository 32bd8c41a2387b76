"""Memory and events of a device that processes of one machine share."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from dataclasses import dataclass, replace

from kvcore.arrays import ArrayRef, bounds
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import LayoutError, LeaseError, UnsupportedOpError
from kvcore.kernels.device_objects import DeviceEvent, ImportedMemory
from kvcore.kernels.runtime_abi import IPC_BYTES, IpcMemory
from kvcore.kernels.vendor import VendorLibrary

__all__ = ["DeviceBuffer", "SharedEvent", "SharedMemory", "export_event", "import_event"]


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """An array in a device's memory, exported to other processes of this machine, which must number devices alike.

    It is valid as long as the exporting process keeps the memory.

    Parameters
    ----------
    device : str
    handle : bytes
        The driver's, of the allocation that the array lies in.
    offset : int
        Of the array's first element, in bytes.
    allocation_bytes : int
    shape, strides : tuple of int
        Strides in bytes.
    dtype : str
    readonly : bool
    process : int
        That exported it.
    """

    device: str
    handle: bytes
    offset: int
    allocation_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    readonly: bool
    process: int


@dataclass(frozen=True, slots=True)
class SharedEvent:
    """An event exported to other processes of this machine.

    Parameters
    ----------
    device : str
    handle : bytes
        The driver's.
    """

    device: str
    handle: bytes


class SharedMemory:
    """What a process gives to others, and has of them.

    Parameters
    ----------
    library : VendorLibrary
    """

    def __init__(self, library: VendorLibrary) -> None:
        self._library = library
        self._open: weakref.WeakValueDictionary[tuple[int, bytes], ImportedMemory] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def export(self, ref: ArrayRef) -> DeviceBuffer:
        """Return a handle of an array.

        Raises
        ------
        LayoutError
            It has no elements.
        UnsupportedOpError
            The driver does not share this memory.
        """
        start, stop = bounds(ref)
        if start == stop:
            raise LayoutError("an array without elements has no memory to export")
        raw = IpcMemory()
        self._library.call("ipc_export_memory", start, ctypes.byref(raw))
        offset = raw.offset + ref.address - start
        return DeviceBuffer(
            ref.device, bytes(raw.handle), offset, raw.allocation_bytes, ref.shape, ref.strides, dtype_name(ref.dtype),
            ref.readonly, os.getpid(),
        )  # fmt: skip

    def take(self, handle: DeviceBuffer) -> ArrayRef:
        """Return an array of another process; it is let go with its last user, queued ops among them.

        Raises
        ------
        ConfigError
            There is no such device here.
        LeaseError
            This very process exported it, and has it already.
        LayoutError
            The array is not within its allocation.
        KVCoreError
            The driver refuses: the exporting process has ended, or freed it.
        """
        if handle.process == os.getpid():
            raise LeaseError("the buffer was exported by this process; use it as it is here")
        inside = ArrayRef(handle.offset, tuple(handle.shape), tuple(handle.strides), to_dtype(handle.dtype))
        start, stop = bounds(inside)
        if start < 0 or stop > handle.allocation_bytes:
            raise LayoutError(f"the exported array, bytes {start} .. {stop} of {handle.allocation_bytes}, is outside")
        memory = self._opened(self._library.number(handle.device), handle)
        address = memory.base + handle.offset
        return replace(inside, address=address, device=handle.device, readonly=handle.readonly, owner=memory)

    def _opened(self, ordinal: int, handle: DeviceBuffer) -> ImportedMemory:
        """Return an allocation of another process, opened once however many of its arrays are here."""
        key = ordinal, handle.handle
        with self._lock:
            found = self._open.get(key)
            if found is None:
                raw = IpcMemory(_raw(handle.handle), 0, handle.allocation_bytes)
                base = self._library.value("ipc_import_memory", ctypes.c_uint64, ordinal, ctypes.byref(raw))
                found = self._open[key] = ImportedMemory(self._library, ordinal, base)
            return found


def export_event(event: DeviceEvent) -> SharedEvent:
    """Return a handle of an event.

    Raises
    ------
    UnsupportedOpError
        It is private, or the driver does not share events.
    """
    if not event.shared:
        raise UnsupportedOpError("the event is private to this process; record it with shared=True")
    raw = (ctypes.c_ubyte * IPC_BYTES)()
    event.library.call("ipc_export_event", event.handle, raw)
    return SharedEvent(event.library.name(event.ordinal), bytes(raw))


def import_event(library: VendorLibrary, handle: SharedEvent) -> DeviceEvent:
    """Return another process's event.

    Raises
    ------
    ConfigError
        There is no such device here.
    KVCoreError
        The driver refuses.
    """
    return DeviceEvent.imported(library, library.number(handle.device), _raw(handle.handle))


def _raw(handle: bytes) -> ctypes.Array[ctypes.c_ubyte]:
    if len(handle) != IPC_BYTES:
        raise LayoutError(f"an exported handle has {IPC_BYTES} B, this one {len(handle)} B")
    return (ctypes.c_ubyte * IPC_BYTES).from_buffer_copy(handle)
