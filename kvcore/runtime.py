"""What a backend offers beside its ops: streams, events, host memory, and memory shared between processes.

`Runtime` is the contract; `HostRuntime` serves every backend that computes on the host, and is the model to follow.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvcore.arrays import ArrayRef, aligned_empty, host_array
from kvcore.errors import LayoutError, LeaseError, OutOfMemoryError, UnsupportedOpError
from kvcore.pages import Pages, bind_to_node, lock, map_huge, map_plain, map_shared, shared_path

__all__ = ["HostBuffer", "HostRuntime", "Runtime", "SharedName"]


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
            It was freed already, or views of it are still alive, among them those of copies that are queued.
        """
        if self._mapping is None:
            raise LeaseError("host buffer is freed twice")
        found = Pages.of(self.array)
        views = (lambda: None) if found is None else weakref.ref(found)
        nbytes, self.array, found = self.nbytes, np.empty(0, np.uint8), None
        held = views()  # what was pinned no longer is where nothing holds them
        if held is not None:
            self.array = held.array()[:nbytes]
            raise LeaseError("host buffer is freed while views of it are in use; drop them first")
        self._mapping.close()
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

    def record(self, stream: Any = None, *, shared: bool = False) -> Any:
        """Return an event that is reached when what is queued on the stream now is done.

        With `shared`, other processes may import it.
        """

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

    def export_event(self, event: Any) -> Any:
        """Return a small handle of plain values by which another process waits for a shared event."""

    def import_event(self, handle: Any) -> Any:
        """Return an event that another process exported."""


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

    def record(self, stream: None = None, *, shared: bool = False) -> None:
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
            Fix the pages in memory: ``mlock``, within RLIMIT_MEMLOCK; on devices, as their driver does for copies.
        hugepages : bool
            From the pool of 2 MiB pages; not together with `shared_name`.
        numa_node : int, optional
            The node that has the pages (``mbind``).
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
        try:
            pages = _map(nbytes, hugepages, numa_node, shared_name, granted)
        except (MemoryError, OSError, ValueError) as error:
            if isinstance(error, (FileExistsError, PermissionError)):
                raise
            raise OutOfMemoryError(f"the machine refused {nbytes} B of host memory: {error}") from error
        if pinned:
            granted["pinned"] = self._pin(pages, nbytes)
        path = None if shared_name is None else shared_path(shared_name)
        return HostBuffer(pages.array()[:nbytes], granted, pages.mapping, path)

    def _pin(self, pages: Pages, nbytes: int) -> str:
        """Pin memory until it is unmapped, or until ``pages.unpin``; return ``"yes"``, or ``"no: "`` and the reason."""
        return lock(pages.address, nbytes)

    def register_host(self, array: Any) -> Any:
        """Host copies need no registration; the handle keeps the array alive.

        Raises
        ------
        LayoutError
            It is neither an array in host memory nor anything with the buffer protocol.
        """
        return host_memory(array)

    def unregister_host(self, handle: Any) -> None:
        """Nothing to undo."""

    def export_buffer(self, buffer: HostBuffer) -> SharedName:
        """Return the name of a buffer allocated with `shared_name`.

        Raises
        ------
        UnsupportedOpError
            The buffer is private to this process.
        """
        name = buffer.granted.get("shared_name") if isinstance(buffer, HostBuffer) else None
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
        descriptor = os.open(shared_path(handle.name), os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size < handle.nbytes:
                raise OutOfMemoryError(f"shared buffer {handle.name!r} has {size} B, its handle says {handle.nbytes} B")
            pages = Pages(mmap.mmap(descriptor, handle.nbytes))
        finally:
            os.close(descriptor)
        return HostBuffer(pages.array(), {"shared_name": handle.name}, pages.mapping)

    def export_event(self, event: None) -> None:
        """Every event is reached, for other processes too."""
        return

    def import_event(self, handle: None) -> None:
        """Every event is reached."""
        return


def unique_shared_name(prefix: str = "kvcore") -> str:
    """Return a name for `alloc_host` that no other process uses."""
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def host_memory(memory: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view of an array in host memory, or of anything with the buffer protocol (mmap, bytearray).

    Raises
    ------
    LayoutError
        It is neither.
    """
    if hasattr(memory, "__array_interface__") or hasattr(memory, "__dlpack__") or isinstance(memory, ArrayRef):
        return host_array(memory)
    try:
        return np.frombuffer(memory, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise LayoutError(
            f"a {type(memory).__qualname__} is no memory of the host ({error}); pass a NumPy array, a torch CPU tensor "
            "or a mmap"
        ) from error


def _map(nbytes: int, hugepages: bool, node: int | None, shared_name: str | None, granted: dict[str, str]) -> Pages:
    def bind(pages: Pages, huge: bool = False) -> None:
        if node is not None:  # before anything touches the pages
            granted["numa_node"] = bind_to_node(pages, node, huge=huge)

    if shared_name is not None:
        pages = map_shared(shared_name, nbytes, bind)
        granted["shared_name"] = shared_name
        if hugepages:
            granted["hugepages"] = "no: shared memory by name has ordinary pages"
        return pages
    if hugepages:
        huge, granted["hugepages"] = map_huge(nbytes)
        if huge is not None:
            bind(huge, True)
            return huge
    pages = map_plain(nbytes)
    bind(pages)
    return pages
