"""What a backend offers beside its ops: streams, events, host memory, and memory shared between processes.

`Runtime` is the contract; `HostRuntime` serves every backend that computes on the host, and is the model to follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvcore.arrays import aligned_empty, host_array
from kvcore.errors import LeaseError, OutOfMemoryError, UnsupportedOpError

__all__ = ["HostBuffer", "HostRuntime", "Runtime", "SharedName"]

HUGEPAGE_BYTES = 2 << 20
_SHARED_FOLDER = "/dev/shm"  # noqa: S108  # where Linux keeps named shared memory; names are created O_EXCL


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Host memory from a `Runtime`, and what was granted of what was asked.

    Parameters
    ----------
    array : uint8 array ``[nbytes]``
        The memory, page-aligned.
    granted : mapping of str to str
        For each of ``pinned``, ``hugepages``, ``numa_node``, ``shared_name`` that was asked for: ``"yes"`` (or the
        value), or ``"no: "`` and the reason.
    """

    array: np.ndarray[Any, np.dtype[np.uint8]]
    granted: Mapping[str, str]
    _mapping: mmap.mmap | None = field(default=None, repr=False)
    _unlink: str | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.array.nbytes

    def free(self) -> None:
        """Give the memory back; a shared name vanishes, though processes that have it mapped keep it.

        Raises
        ------
        LeaseError
            It was freed already, or views of it are still alive.
        """
        if self._mapping is None:
            raise LeaseError("host buffer is freed twice")
        nbytes, self.array = self.nbytes, np.empty(0, np.uint8)
        try:
            self._mapping.close()
        except BufferError as error:
            self.array = np.frombuffer(self._mapping, np.uint8)[:nbytes]
            raise LeaseError("host buffer is freed while views of it are in use; drop them first") from error
        self._mapping = None
        if self._unlink is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unlink)


@dataclass(frozen=True, slots=True)
class SharedName:
    """A buffer exported to other processes of this machine."""

    name: str
    nbytes: int


class Runtime(Protocol):
    """What the core asks of a backend beside its ops."""

    arch: str
    """Architecture the kernels are chosen for (``"sm_90"``), or the machine's (``"x86_64"``)."""

    def array(self, array: Any) -> Any:
        """Return an array in the form the backend's ops take, without copying it.

        It has ``shape`` (tuple), ``dtype`` (NumPy) and ``strides`` (bytes). Raises `LayoutError` for memory that the
        backend cannot address.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate an uninitialised contiguous array in the backend's memory."""

    def stream(self) -> Any:
        """Return a new stream; operations on it run in order, those of different streams in any order."""

    def synchronize(self, stream: Any = None) -> None:
        """Wait until everything queued on a stream (None: the current one) is done."""

    def check(self, stream: Any = None) -> None:
        """Synchronise, and raise the error that an op of this stream left in its status word, if any."""

    def record(self, stream: Any = None) -> Any:
        """Return an event that is reached when what is queued on the stream now is done."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """Make later work of a stream wait for an event."""

    def alloc_host(
        self,
        nbytes: int,
        *,
        pinned: bool = False,
        hugepages: bool = False,
        numa_node: int | None = None,
        shared_name: str | None = None,
    ) -> HostBuffer:
        """Allocate host memory; wishes that the machine does not grant are reported in `HostBuffer.granted`."""

    def register_host(self, array: Any) -> Any:
        """Make foreign host memory fit for direct copies; returns a handle for `unregister_host`."""

    def unregister_host(self, handle: Any) -> None:
        """Undo `register_host`."""

    def export_buffer(self, buffer: Any) -> Any:
        """Return a small handle of plain values by which another process maps the buffer."""

    def import_buffer(self, handle: Any) -> Any:
        """Map a buffer that another process exported."""


class HostRuntime:
    """The runtime of backends that compute on the host: everything is done when a call returns."""

    arch = os.uname().machine

    def array(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a NumPy view (bfloat16 and fp8 through ml_dtypes)."""
        return host_array(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Allocate with NumPy, at the beginning of a cache line."""
        return aligned_empty(shape, np.dtype(dtype))

    def stream(self) -> None:
        """The host has one stream, None."""
        return

    def synchronize(self, stream: None = None) -> None:
        """Nothing is ever pending."""

    def check(self, stream: None = None) -> None:
        """Host ops raise their errors at once, so there is never one left."""

    def record(self, stream: None = None) -> None:
        """Every event is reached at once."""
        return

    def wait(self, event: None, stream: None = None) -> None:
        """Nothing to wait for."""

    def alloc_host(
        self,
        nbytes: int,
        *,
        pinned: bool = False,
        hugepages: bool = False,
        numa_node: int | None = None,
        shared_name: str | None = None,
    ) -> HostBuffer:
        """Allocate page-aligned memory.

        Parameters
        ----------
        nbytes : int
            At least 1; rounded up to whole 2 MiB pages with `hugepages`.
        pinned : bool
            Lock the pages in memory (``mlock``, within RLIMIT_MEMLOCK).
        hugepages : bool
            From the pool of 2 MiB pages; not together with `shared_name`.
        numa_node : int, optional
            Not supported by the host runtime; reported as not granted.
        shared_name : str, optional
            Create shared memory of this name; a taken name raises `FileExistsError`.

        Raises
        ------
        OutOfMemoryError
            The machine has not that much memory.
        """
        if nbytes < 1:
            raise OutOfMemoryError(f"a host buffer has at least 1 byte, got {nbytes}")
        granted: dict[str, str] = {}
        if numa_node is not None:
            granted["numa_node"] = "no: the host runtime does not bind memory to NUMA nodes"
        try:
            mapping, path = self._map(nbytes, hugepages, shared_name, granted)
        except (MemoryError, OSError, ValueError) as error:
            if isinstance(error, (FileExistsError, PermissionError)):
                raise
            raise OutOfMemoryError(f"the machine refused {nbytes} B of host memory: {error}") from error
        array = np.frombuffer(mapping, np.uint8)[:nbytes]
        if pinned:
            granted["pinned"] = _mlock(array)
        return HostBuffer(array, granted, mapping, path)

    def _map(
        self, nbytes: int, hugepages: bool, shared_name: str | None, granted: dict[str, str]
    ) -> tuple[mmap.mmap, str | None]:
        if shared_name is not None:
            path = _shared_path(shared_name)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                mapping = mmap.mmap(descriptor, nbytes)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
            granted["shared_name"] = shared_name
            if hugepages:
                granted["hugepages"] = "no: shared memory by name has ordinary pages"
            return mapping, path
        if hugepages:
            size = -(-nbytes // HUGEPAGE_BYTES) * HUGEPAGE_BYTES
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_HUGETLB", 0x40000)
            try:
                mapping = mmap.mmap(-1, size, flags=flags)
                granted["hugepages"] = "yes"
                return mapping, None
            except OSError as error:
                granted["hugepages"] = (
                    f"no: {size // HUGEPAGE_BYTES} pages of 2 MiB: {error.strerror} (vm.nr_hugepages)"
                )
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), None

    def register_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Host copies need no registration; the handle keeps the array alive."""
        return self.array(array)

    def unregister_host(self, handle: Any) -> None:
        """Nothing to undo."""

    def export_buffer(self, buffer: HostBuffer) -> SharedName:
        """Return the name of a buffer allocated with `shared_name`.

        Raises
        ------
        UnsupportedOpError
            The buffer is private to this process.
        """
        name = buffer.granted.get("shared_name")
        if name is None:
            raise UnsupportedOpError("only buffers allocated with shared_name=... can be exported to another process")
        return SharedName(name, buffer.nbytes)

    def import_buffer(self, handle: SharedName) -> HostBuffer:
        """Map a buffer of another process; freeing it here leaves the owner's alone.

        Raises
        ------
        FileNotFoundError
            No process exports that name (any more).
        OutOfMemoryError
            The buffer is smaller than its handle says.
        """
        descriptor = os.open(_shared_path(handle.name), os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size < handle.nbytes:
                raise OutOfMemoryError(f"shared buffer {handle.name!r} has {size} B, its handle says {handle.nbytes} B")
            mapping = mmap.mmap(descriptor, handle.nbytes)
        finally:
            os.close(descriptor)
        return HostBuffer(np.frombuffer(mapping, np.uint8), {"shared_name": handle.name}, mapping)


def unique_shared_name(prefix: str = "kvcore") -> str:
    """Return a name for `alloc_host` that no other process uses."""
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def _shared_path(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise UnsupportedOpError(f"shared memory name {name!r}: a plain name without '/' is needed")
    return os.path.join(_SHARED_FOLDER, name)


def _mlock(array: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)) == 0:
        return "yes"
    reason = os.strerror(ctypes.get_errno())
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B"
    return f"no: mlock of {array.nbytes} B: {reason} (RLIMIT_MEMLOCK is {limit})"
