"""A vendor's library as Python holds it: its devices, their kernels, and the streams that callers mean."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.arrays import ArrayRef
from kvcore.errors import BackendLoadError, ConfigError, DeviceError, KVCoreError, LayoutError
from kvcore.kernels.device import DeviceLibrary, no_stream
from kvcore.kernels.device_objects import VendorStream
from kvcore.kernels.runtime_abi import FUNCTIONS, RUNTIME_VERSION, DeviceInfoStruct, TuningStruct
from kvcore.rows import RowLayout

__all__ = ["DeviceInfo", "Tuning", "VendorLibrary", "check_place"]

_TORCH_HANDLES = ("cuda_stream", "sycl_queue")
"""Attributes of torch's streams, and of those of libraries like it, that hold the vendor's own."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a driver says about a device.

    Parameters
    ----------
    ordinal : int
    name : str
    arch : str
        As compilers name it: ``"sm_90"``, ``"gfx942"``.
    memory_bytes : int
    units : int
        Multiprocessors, compute units.
    warp_width : int
    driver_version : int
        As the vendor numbers it.
    """

    ordinal: int
    name: str
    arch: str
    memory_bytes: int
    units: int
    warp_width: int
    driver_version: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is measured about a device and not known beforehand.

    Parameters
    ----------
    engine_bytes : int
        Buffers in its memory of so many bytes and more go through the copy engine, smaller ones through a kernel.
    blocks_per_unit : int
        Blocks of a kernel that fill a unit.
    """

    engine_bytes: int
    blocks_per_unit: int


class VendorLibrary(DeviceLibrary):
    """A library that exports ``abi.h`` and ``runtime.h``.

    Parameters
    ----------
    path : Path
    device_type : str
        As torch names it: ``"cuda"``, ``"xpu"``.
    driver : str
        The vendor's driver library, as the dynamic linker finds it; "" where the library needs no telling.
    image : callable
        Returns the device code for a device, made from `kernels`. It is asked for when a device runs its first op.
    tuning : callable
        Returns the tuning of a device.

    Raises
    ------
    BackendLoadError
        The library does not load, is of another version, or does not find its driver.
    """

    def __init__(
        self,
        path: Path,
        device_type: str,
        *,
        driver: str = "",
        image: Callable[[VendorLibrary, DeviceInfo], bytes],
        tuning: Callable[[DeviceInfo], Tuning],
    ) -> None:
        super().__init__(path)
        self.device_type = device_type
        self.current: Callable[[], tuple[int, int] | None] = lambda: None
        """Returns torch's current device and its stream, the vendor's handle; None where torch uses no such device."""
        self._image, self._tuning = image, tuning
        self._bind()
        try:
            self.call("driver_open", driver.encode())
            self._count = self.value("device_count", ctypes.c_int32)
        except KVCoreError as error:
            raise BackendLoadError(f"{path.name}: {error}") from error
        self.devices = frozenset(f"{device_type}:{i}" for i in range(self._count))
        self._infos: dict[int, DeviceInfo] = {}
        self._loaded: set[int] = set()
        self._loading = threading.Lock()
        self._streams: weakref.WeakSet[VendorStream] = weakref.WeakSet()
        self._defaults: dict[int, VendorStream] = {}
        self._adopted: dict[tuple[int, int], VendorStream] = {}
        self._process = os.getpid()
        self._making = threading.Lock()
        self._making_streams = threading.Lock()
        self._chosen = threading.local()

    def _bind(self) -> None:
        try:
            version = self.dll.kvcore_runtime_version()
            self._calls = {name: getattr(self.dll, f"kvcore_{name}") for name in FUNCTIONS}
            self._kernel_list = self.dll.kvcore_kernel_list
            self.status_of, self.native_of = self.dll.kvcore_stream_status, self.dll.kvcore_stream_native
        except AttributeError as error:
            raise BackendLoadError(f"{self.path} has no device runtime: {error}") from error
        if version != RUNTIME_VERSION:
            raise BackendLoadError(
                f"{self.path} has runtime version {version}, this kvcore has {RUNTIME_VERSION}; "
                "install both of one release"
            )
        for name, function in self._calls.items():
            function.restype, function.argtypes = ctypes.c_int32, FUNCTIONS[name]
        self._kernel_list.restype = ctypes.c_char_p
        for of_stream in (self.status_of, self.native_of):
            of_stream.restype, of_stream.argtypes = ctypes.c_uint64, (ctypes.c_void_p,)

    # --- calls

    def call(self, name: str, *args: Any) -> None:
        """Call a function of ``runtime.h``.

        Raises
        ------
        UnsupportedOpError, OutOfMemoryError, LayoutError, DeviceError
            By its code, with the reason that the library gives.
        """
        code = self._calls[name](*args)
        if code:
            raise self.failure(code, name)

    def quiet(self, name: str, *args: Any) -> None:
        """Call a function that gives something back. After a failure of the device there is nothing to be done.

        Nor is there in a forked child, which has none of it: there the driver is left alone.
        """
        if os.getpid() == self._process:
            self._calls[name](*args)

    def value(self, name: str, kind: Any, *args: Any) -> int:
        """Call a function whose last parameter takes its result, of a ctypes kind; see `call`."""
        result = kind()
        self.call(name, *args, ctypes.byref(result))
        value: int = result.value
        return value

    # --- devices

    @property
    def kernels(self) -> str:
        """The kernels that the ops launch: lines of a name, a tab, and a type."""
        text: bytes = self._kernel_list()
        return text.decode()

    def count(self) -> int:
        """Return the number of devices."""
        return self._count

    def info(self, ordinal: int) -> DeviceInfo:
        """Return what the driver says about a device.

        Raises
        ------
        DeviceError
            There is none of that number.
        """
        found = self._infos.get(ordinal)
        if found is None:
            raw = DeviceInfoStruct()
            self.call("device_info", ordinal, ctypes.byref(raw))
            found = self._infos[ordinal] = DeviceInfo(
                ordinal, raw.name.decode("utf-8", "replace"), raw.arch.decode("utf-8", "replace"), raw.memory_bytes,
                raw.units, raw.warp_width, raw.driver_version,
            )  # fmt: skip
        return found

    def load(self, ordinal: int) -> None:
        """Load the kernels of a device, unless they are.

        Raises
        ------
        BackendLoadError
            There is no image for it, or the driver refuses it.
        """
        if ordinal in self._loaded:
            return
        with self._loading:
            if ordinal in self._loaded:
                return
            info = self.info(ordinal)
            image, chosen = self._image(self, info), self._tuning(info)
            tuning = TuningStruct(chosen.engine_bytes, chosen.blocks_per_unit, 0)
            try:
                self.call("device_load", ordinal, image, len(image), ctypes.byref(tuning))
            except KVCoreError as error:
                raise BackendLoadError(
                    f"{self.device_type}:{ordinal} ({info.name}, {info.arch}) does not take the kernels: {error}"
                ) from error
            self._loaded.add(ordinal)

    def ordinal(self) -> int:
        """Return the current device: that of `on`, else torch's, else 0."""
        chosen: int | None = getattr(self._chosen, "ordinal", None)
        if chosen is not None:
            return chosen
        found = self.current()
        return 0 if found is None else found[0]

    @contextlib.contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Make a device the current one of this thread."""
        before = getattr(self._chosen, "ordinal", None)
        self._chosen.ordinal = ordinal
        try:
            yield
        finally:
            self._chosen.ordinal = before

    # --- streams

    def note(self, stream: VendorStream) -> None:
        """Remember a stream that was made."""
        with self._making_streams:
            self._streams.add(stream)

    def finish(self, ordinal: int) -> None:
        """Wait for all streams of a device, so that they let go of what they hold.

        What fails meanwhile is theirs, and is raised to those who wait for them.
        """
        with self._making_streams:
            found = [stream for stream in self._streams if stream.ordinal == ordinal]
        for stream in found:
            with contextlib.suppress(DeviceError):
                stream.synchronize()

    def resolve(self, stream: Any) -> VendorStream:
        """Return the stream that a caller means.

        Parameters
        ----------
        stream : VendorStream, stream of torch or None
            None: torch's current one where torch uses this kind of device, else one that the library keeps.

        Raises
        ------
        ConfigError
            It is none of these, or of another kind of device.
        KVCoreError
            Once, when torch begins to use the device: what an op on the library's own stream had left to be told.
        """
        if isinstance(stream, VendorStream):
            if stream.library is not self:
                raise ConfigError(
                    f"the stream is one of {stream.library.device_type}, and this is {self.device_type}; "
                    "take one from this backend's runtime.stream()"
                )
            return stream
        if stream is not None:
            return self._adopt(*self._native(stream))
        chosen, found = getattr(self._chosen, "ordinal", None), self.current()
        if found is None or chosen not in (None, found[0]):
            return self._default(chosen or 0)
        before = self._defaults.pop(found[0], None)
        if before is not None:  # torch has begun to use the device: what was queued until now comes first
            before.check()
        return self._adopt(*found)

    def _default(self, ordinal: int) -> VendorStream:
        stream = self._defaults.get(ordinal)
        if stream is None:
            with self._making:
                stream = self._defaults.get(ordinal)
                if stream is None:
                    stream = self._defaults[ordinal] = VendorStream(self, ordinal)
        return stream

    def _adopt(self, ordinal: int, native: int) -> VendorStream:
        """Return the one stream for a vendor's: what is queued on it, and its errors, are known in one place."""
        stream = self._adopted.get((ordinal, native))
        if stream is None:
            with self._making:
                stream = self._adopted.get((ordinal, native))
                if stream is None:
                    stream = self._adopted[ordinal, native] = VendorStream(self, ordinal, native)
        return stream

    def _native(self, stream: Any) -> tuple[int, int]:
        device = getattr(stream, "device", None)
        handle = next((getattr(stream, name) for name in _TORCH_HANDLES if hasattr(stream, name)), None)
        if handle is None or device is None:
            raise no_stream(stream, "take one from the backend's runtime.stream() or from torch, or leave it out")
        kind, index = getattr(device, "type", ""), getattr(device, "index", None)
        if kind != self.device_type or not 0 <= (index or 0) < self._count:
            raise ConfigError(f"the stream is one of {device}; this backend has {self.names()}")
        return index or 0, int(handle)

    def use(self, stream: Any) -> int:
        """Let tables that this thread makes be memory of a stream's device, and return its number."""
        ordinal = self.resolve(stream).ordinal
        self.call("device_use", ordinal)
        return ordinal

    def run(self, op: str, args: bytes, stream: Any, keep: tuple[Any, ...], subject: Any = None) -> None:
        """Queue an op on the device of its stream; see `DeviceLibrary.run`.

        Raises
        ------
        BackendLoadError
            The kernels do not load; see `load`.
        LayoutError
            An array is memory of the host or of another device.
        """
        target = self.resolve(stream)
        self.load(target.ordinal)
        if op != "copy_batch":  # which is for crossing
            check_place(op, keep, self.name(target.ordinal))
        target.queue(self, op, args, keep)

    def name(self, ordinal: int) -> str:
        """Return a device's name: ``"cuda:1"``."""
        return f"{self.device_type}:{ordinal}"

    def number(self, device: int | str) -> int:
        """Return the number of a device, given by number or by name.

        Raises
        ------
        ConfigError
            There is none.
        """
        name = self.name(device) if isinstance(device, int) else device
        if name not in self.devices:
            raise ConfigError(f"there is no device {name!r}; this backend has {self.names()}")
        return int(name.rpartition(":")[2])

    def names(self) -> str:
        """Return the devices, for messages."""
        return ", ".join(sorted(self.devices)) or f"no {self.device_type} device"


def check_place(op: str, keep: Any, device: str) -> None:
    """Refuse memory of the host and of other devices than the stream's: kernels would fault on it."""
    if isinstance(keep, (ArrayRef, RowLayout)):
        if keep.device != device:
            raise LayoutError(
                f"{op}: an array is memory of {keep.device}, and the stream is one of {device}; move the array with "
                "copy_batch, give a stream of its device, or make that device the current one (runtime.on, or torch's)"
            )
    elif isinstance(keep, (tuple, list)):
        for part in keep:
            check_place(op, part, device)
