"""Pages of host memory: anonymous, huge or shared by name; locked, and bound to a NUMA node.

What the machine refuses is answered with the reason, never raised: containers forbid some of it, and memory serves
without.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.errors import UnsupportedOpError

__all__ = ["HUGEPAGE_BYTES", "Pages", "bind_to_node", "lock", "map_huge", "map_plain", "map_shared", "shared_path"]

HUGEPAGE_BYTES = 2 << 20
_SHARED_FOLDER = "/dev/shm"  # noqa: S108  # where Linux keeps named shared memory; names are created O_EXCL

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call mbind(2), which the C library has no function for."""
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_MADV_POPULATE_WRITE = 23
_MAX_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)


class Pages:
    """Mapped memory as its views know it: it is there as long as one of them is.

    Parameters
    ----------
    mapping : mmap
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.unpin: Callable[[], None] | None = None
        """Undoes what a driver was told of the memory; called before it goes."""
        self.nbytes = len(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return all of it."""
        return np.asarray(self)

    @staticmethod
    def of(array: Any) -> Pages | None:
        """Return the pages that an array is a view of."""
        while isinstance(array, np.ndarray):
            array = array.base
        return array if isinstance(array, Pages) else None

    def __del__(self) -> None:
        unpin, self.unpin = getattr(self, "unpin", None), None
        if unpin is not None:
            unpin()


def map_plain(nbytes: int) -> Pages:
    """Map private pages."""
    return Pages(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def map_huge(nbytes: int) -> tuple[Pages | None, str]:
    """Map private pages of 2 MiB, rounded up to whole ones; return None and the reason where the pool is too small."""
    size = -(-nbytes // HUGEPAGE_BYTES) * HUGEPAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_HUGETLB", 0x40000)
    try:
        return Pages(mmap.mmap(-1, size, flags=flags)), "yes"
    except OSError as error:
        return None, f"no: {size // HUGEPAGE_BYTES} pages of 2 MiB: {error.strerror} (vm.nr_hugepages)"


def map_shared(name: str, nbytes: int, placed: Callable[[Pages], None]) -> Pages:
    """Create shared memory.

    Parameters
    ----------
    name : str
    nbytes : int
    placed : callable
        Is given the memory before any of it exists.

    Raises
    ------
    FileExistsError
        The name is taken.
    OSError, ValueError
        There is not as much memory. The name is gone then.
    """
    path = shared_path(name)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        pages = Pages(mmap.mmap(descriptor, nbytes))
        placed(pages)
        os.posix_fallocate(descriptor, 0, nbytes)  # or the first access beyond what there is would end the process
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return pages


def shared_path(name: str) -> str:
    """Return the path of shared memory.

    Raises
    ------
    UnsupportedOpError
        It is no plain name.
    """
    if not name or "/" in name or name.startswith("."):
        raise UnsupportedOpError(f"shared memory name {name!r}: a plain name without '/' is needed")
    return os.path.join(_SHARED_FOLDER, name)


def lock(address: int, nbytes: int) -> str:
    """Lock pages in memory; return ``"yes"``, or ``"no: "`` and the reason."""
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
        return "yes"
    reason = os.strerror(ctypes.get_errno())
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B"
    return f"no: mlock of {nbytes} B: {reason} (RLIMIT_MEMLOCK is {limit})"


def bind_to_node(pages: Pages, node: int, *, huge: bool = False) -> str:
    """Bind pages that nobody has touched yet to a NUMA node; return its number, or ``"no: "`` and the reason.

    Parameters
    ----------
    pages : Pages
    node : int
    huge : bool
        The pages are of the pool of 2 MiB pages, which each node has its own part of: they are taken at once, as the
        first access to one that the node has not would end the process.
    """
    machine = os.uname().machine
    number = _MBIND.get(machine)
    if number is None:
        return f"no: the number of mbind on {machine} is not known to kvcore"
    if not 0 <= node < _MAX_NODES:
        return f"no: there is no NUMA node {node}"
    mask = (ctypes.c_uint64 * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    if _mbind(number, pages, _MPOL_BIND, mask):
        return f"no: mbind to node {node}: {os.strerror(ctypes.get_errno())}"
    if huge and _libc.madvise(ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.nbytes), _MADV_POPULATE_WRITE):
        reason = os.strerror(ctypes.get_errno())
        _mbind(number, pages, _MPOL_DEFAULT, None)
        return f"no: pages of 2 MiB on node {node}: {reason} (nr_hugepages of the node)"
    return str(node)


def _mbind(number: int, pages: Pages, mode: int, mask: ctypes.Array[ctypes.c_uint64] | None) -> int:
    nodes = 0 if mask is None else _MAX_NODES + 1  # the kernel takes one less than it is told
    result: int = _libc.syscall(
        *(ctypes.c_long(number), ctypes.c_void_p(pages.address), ctypes.c_ulong(pages.nbytes), ctypes.c_int(mode)),
        *(mask, ctypes.c_ulong(nodes), ctypes.c_uint(0)),
    )
    return result
