"""The runtime of devices, for all vendors: streams, events, memory, and what processes share, over `VendorLibrary`."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef, bounds, row_major
from kvcore.errors import ConfigError, KVCoreError, LayoutError, LeaseError
from kvcore.kernels.device_ipc import DeviceBuffer, SharedEvent, SharedMemory, export_event, import_event
from kvcore.kernels.device_objects import Allocation, DeviceEvent, VendorStream
from kvcore.kernels.vendor import DeviceInfo, Tuning, VendorLibrary
from kvcore.pages import Pages
from kvcore.runtime import HostBuffer, HostRuntime, SharedName, host_memory

__all__ = [
    "DeviceBuffer",
    "DeviceInfo",
    "DeviceRuntime",
    "RegisteredHost",
    "SharedEvent",
    "Tuning",
    "VendorLibrary",
]


class RegisteredHost:
    """Host memory that the driver knows of, from `DeviceRuntime.register_host`, until it is dropped.

    Parameters
    ----------
    array : array
        The memory, kept alive.
    forget : callable
        Undoes the registration.
    """

    def __init__(self, array: np.ndarray[Any, Any], forget: Callable[[], None]) -> None:
        self.array = array
        self._forget = weakref.finalize(self, _quietly, forget, array)  # which is there until then
        self._forget.atexit = False  # the driver ends with the process

    def undo(self) -> bool:
        """Undo the registration, unless it is; return whether it was not."""
        found = self._forget.detach()
        if found is not None:
            found[2][0]()
        return found is not None


class DeviceRuntime(HostRuntime):
    """Streams, events and memory of a vendor's devices.

    Without a stream, operations go to torch's current one where torch uses this kind of device, else to one that the
    library keeps for the current device: that of `on`, else 0.

    Parameters
    ----------
    library : VendorLibrary
    current : callable
        Returns the number of torch's current device and its current stream, the vendor's handle; None where torch is
        not loaded, or has not initialised this kind of device.
    """

    def __init__(self, library: VendorLibrary, current: Callable[[], tuple[int, int] | None]) -> None:
        self.library = library
        library.current = current
        self.arch = library.info(library.ordinal()).arch
        self._registered: dict[tuple[int, int], int] = {}  # address and bytes -> how many ask for it
        self._shared = SharedMemory(library)
        self._lock = threading.RLock()  # a handle may be dropped, and so undone, while another one is made

    # --- arrays

    def array(self, array: Any) -> ArrayRef:  # type: ignore[override]  # host backends return NumPy arrays
        """Return a view of a device's memory.

        Raises
        ------
        LayoutError
            The memory is on no device of this backend.
        """
        ref = ArrayRef.of(array)
        if ref.device not in self.library.devices:
            raise LayoutError(
                f"memory on {ref.device} cannot be reached from here, this backend has {self.library.names()}; copy it "
                "over with copy_batch"
            )
        return ref

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayRef:  # type: ignore[override]
        """Allocate memory of the current device. It is given back with its last user, queued ops among them.

        Whoever reads or writes it by other means than the ops of this backend keeps it until that is done.

        Raises
        ------
        LayoutError
            An extent is negative.
        OutOfMemoryError
            There is less memory.
        """
        if any(extent < 0 for extent in shape):  # two of them would make a size that is none
            raise LayoutError(f"extents cannot be negative: {shape}")
        element, ordinal = np.dtype(dtype), self.library.ordinal()
        block = Allocation(self.library, ordinal, math.prod(shape) * element.itemsize)
        return ArrayRef(
            block.address, shape, row_major(shape, element.itemsize), element, self.library.name(ordinal), False, block
        )

    def on(self, device: int | str) -> AbstractContextManager[None]:
        """Make a device the current one of this thread for a ``with``: where `empty` and `stream` are made.

        Parameters
        ----------
        device : int or str
            Its number, or its name: ``"cuda:1"``.

        Raises
        ------
        ConfigError
            There is none of that number.
        """
        return self.library.on(self.library.number(device))

    # --- streams and events

    def stream(self) -> VendorStream:  # type: ignore[override]
        """Return a new stream of the current device."""
        return VendorStream(self.library, self.library.ordinal())

    def synchronize(self, stream: Any = None) -> None:
        """Wait until all that is queued on a stream is done.

        Raises
        ------
        ConfigError
            It is no stream of this backend or of torch.
        DeviceError
            The device failed; the message names the ops that it may have been.
        """
        self.library.resolve(stream).synchronize()

    def check(self, stream: Any = None) -> None:
        """Synchronise, and raise what an op of this stream has found wrong in its data, once.

        Raises
        ------
        KVCoreError
            As the hookspecs of the ops say, and as `synchronize` raises.
        """
        self.library.resolve(stream).check()

    def record(self, stream: Any = None, *, shared: bool = False) -> DeviceEvent:  # type: ignore[override]
        """Return an event: that what is queued now is done. With `shared`, `export_event` takes it."""
        return DeviceEvent(self.library.resolve(stream), shared)

    def wait(self, event: DeviceEvent, stream: Any = None) -> None:  # type: ignore[override]
        """Let what is queued on a stream later wait for an event.

        Raises
        ------
        ConfigError
            It is no event of this backend.
        """
        if not isinstance(event, DeviceEvent) or event.library is not self.library:
            raise ConfigError(f"{event!r} is no event of this backend; take one from runtime.record()")
        self.library.call("event_wait", self.library.resolve(stream).handle, event.handle)

    # --- host memory

    def _pin(self, pages: Pages, nbytes: int) -> str:
        try:
            self.library.call("host_register", pages.address, nbytes)
        except KVCoreError as error:
            return f"no: {error}"
        library, address = self.library, pages.address
        pages.unpin = lambda: library.quiet("host_unregister", address)
        return "yes"

    def register_host(self, array: Any) -> RegisteredHost:
        """Tell the driver of host memory, so that the device copies from and to it directly.

        Memory that is registered already is counted, and stays so until the last handle is undone or dropped.

        Parameters
        ----------
        array : array or buffer
            A NumPy array, a torch CPU tensor, a mmap. Of an array with gaps, all from its first to its last byte.

        Raises
        ------
        LayoutError
            It is no memory of the host, or empty.
        OutOfMemoryError, DeviceError
            The driver refuses, as it does for memory that is registered in part.
        """
        held = host_memory(array)
        start, stop = bounds(held)
        if start == stop:
            raise LayoutError("an array without elements has no memory to register")
        key = start, stop - start
        with self._lock:
            self._registered[key] = self._registered.get(key, 0) + 1
            if self._registered[key] == 1:
                try:
                    self.library.call("host_register", *key)
                except KVCoreError:
                    del self._registered[key]
                    raise
        return RegisteredHost(held, lambda: self._unregister(key))

    def unregister_host(self, handle: RegisteredHost) -> None:
        """Undo one `register_host`. Copies of the memory must be done.

        Raises
        ------
        LeaseError
            It was undone already.
        """
        if not handle.undo():
            raise LeaseError("host memory is unregistered twice")

    def _unregister(self, key: tuple[int, int]) -> None:
        with self._lock:
            self._registered[key] -= 1
            if self._registered[key] == 0:
                del self._registered[key]
                self.library.call("host_unregister", key[0])

    # --- other processes

    def export_buffer(self, buffer: Any) -> Any:
        """Return a handle of a device array, or of a host buffer allocated with `shared_name`.

        What is queued on the array is not waited for: see `export_event`.

        Returns
        -------
        DeviceBuffer or SharedName

        Raises
        ------
        LayoutError
            It is memory of neither.
        UnsupportedOpError
            The host buffer is private, or the driver does not share this memory.
        """
        return (
            super().export_buffer(buffer) if isinstance(buffer, HostBuffer) else self._shared.export(self.array(buffer))
        )

    def import_buffer(self, handle: Any) -> Any:
        """Map what another process exported; see `kvcore.kernels.device_ipc.SharedMemory.take`.

        Returns
        -------
        ArrayRef or HostBuffer
        """
        return super().import_buffer(handle) if isinstance(handle, SharedName) else self._shared.take(handle)

    def export_event(self, event: DeviceEvent) -> SharedEvent:  # type: ignore[override]
        """Return a handle of an event that was recorded with `shared`.

        Raises
        ------
        UnsupportedOpError
            It was recorded without, or the driver does not share events.
        """
        return export_event(event)

    def import_event(self, handle: SharedEvent) -> DeviceEvent:  # type: ignore[override]
        """Return another process's event.

        Raises
        ------
        ConfigError
            There is no such device here.
        KVCoreError
            The driver refuses.
        """
        return import_event(self.library, handle)


def _quietly(forget: Callable[[], None], array: object) -> None:
    """Undo a registration whose handle was dropped: nobody is there to be told that the device has failed."""
    with contextlib.suppress(KVCoreError):
        forget()
