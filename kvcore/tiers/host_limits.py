"""What this machine can give to a host arena: memory, locked memory, shared memory and huge pages.

Everything is read from files below a root, so that other machines can be put in its place. What cannot be read limits
nothing: the allocation itself will tell.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvcore.pages import HUGEPAGE_BYTES

__all__ = ["HostLimits", "clamp", "read_limits", "size_text"]

_CAP_IPC_LOCK = 14
_POOL = "hugepages/hugepages-2048kB"


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bytes (and pages) that are to be had now; None where nothing limits them, or nothing is known.

    Parameters
    ----------
    available : int, optional
        RAM that can be used without swapping, within the memory limit of the control group.
    lockable : int, optional
        What RLIMIT_MEMLOCK (the soft limit) leaves to this process; None with CAP_IPC_LOCK.
    memlock : int, optional
        RLIMIT_MEMLOCK itself.
    shared : int, optional
        Room where named shared memory is kept.
    hugepages : int
        Free, unreserved pages of 2 MiB, of one NUMA node or of all.
    """

    available: int | None = None
    lockable: int | None = None
    memlock: int | None = None
    shared: int | None = None
    hugepages: int = 0


def read_limits(numa_node: int | None = None, *, root: str | Path = "/") -> HostLimits:
    """Read the limits of this machine and process.

    Parameters
    ----------
    numa_node : int, optional
        Count the huge pages of this node only.
    root : path
        Where ``proc``, ``sys`` and ``dev`` are.
    """
    base = Path(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY else soft
    status = _fields(base / "proc/self/status")
    lockable = memlock
    if memlock is not None:
        lockable = max(memlock - _kilobytes(status.get("VmLck", "0")), 0)
        if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
            lockable = None
    return HostLimits(_available(base), lockable, memlock, _room(base / "dev/shm"), _hugepages(base, numa_node))


def _available(base: Path) -> int | None:
    found = []
    meminfo = _fields(base / "proc/meminfo")
    if "MemAvailable" in meminfo:
        found.append(_kilobytes(meminfo["MemAvailable"]))
    group = base / "sys/fs/cgroup"
    path = next((line[3:] for line in _text(base / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    below = group / path.lstrip("/")
    for folder in [below, *below.parents]:
        limit, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            cached = _fields(folder / "memory.stat", separator=" ").get("inactive_file", "0")
            found.append(max(int(limit) - int(used) + int(cached), 0))
        if folder == group:
            break
    return min(found, default=None)


def _hugepages(base: Path, numa_node: int | None) -> int:
    node = base / "sys/kernel/mm" if numa_node is None else base / f"sys/devices/system/node/node{numa_node}"
    free, reserved = (_text(node / _POOL / name) for name in ("free_hugepages", "resv_hugepages"))
    return max(int(free or "0") - int(reserved or "0"), 0)  # a node counts no reservations of its own


def _room(folder: Path) -> int | None:
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


def _fields(path: Path, separator: str = ":") -> dict[str, str]:
    parts = (line.partition(separator) for line in _text(path).splitlines())
    return {name: value.strip() for name, _, value in parts}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def clamp(
    wanted: int, limits: HostLimits, *, reserve: int = 0, locked: bool = False, shared: bool = False, huge: bool = False
) -> tuple[int, bool, list[str]]:
    """Fit a size to a machine.

    Parameters
    ----------
    wanted : int
        Bytes asked for.
    limits : HostLimits
    reserve : int
        Bytes of the available RAM to leave alone.
    locked, shared, huge : bool
        The memory is to be locked, shared by name, of pages of 2 MiB.

    Returns
    -------
    (int, bool, list of str)
        The bytes that can be had (0 and more), whether of huge pages, and why not all that was asked for.
    """
    granted, notes = wanted, []

    def at_most(limit: int | None, what: str) -> None:
        nonlocal granted
        if limit is not None and granted > limit:
            granted = max(limit, 0)
            notes.append(f"{size_text(granted)} instead of {size_text(wanted)}: {what}")

    if locked:
        left = "" if limits.lockable == limits.memlock else f", of which {size_text(limits.lockable or 0)} are left"
        at_most(
            limits.lockable,
            f"RLIMIT_MEMLOCK is {size_text(limits.memlock or 0)}{left}; raise it (ulimit -l, LimitMEMLOCK=), "
            "or do without pinned memory",
        )
    if huge:
        pages = -(-granted // HUGEPAGE_BYTES)
        if pages <= limits.hugepages:
            return granted, True, notes  # the pool is set apart from the RAM that is available
        notes.append(
            f"ordinary pages: {pages} pages of 2 MiB are needed, {limits.hugepages} are free in the 2048kB pool "
            "(vm.nr_hugepages)"
        )
    if shared:
        at_most(limits.shared, f"shared memory has room for {size_text(limits.shared or 0)}")
    if limits.available is not None:
        at_most(
            limits.available - reserve, f"{size_text(limits.available)} of RAM available, {size_text(reserve)} reserved"
        )
    return granted, False, notes


def size_text(nbytes: int) -> str:
    """Return a size as people write it: ``"5 GiB"``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >> shift:
            return f"{nbytes / (1 << shift):.3g} {unit}" if nbytes % (1 << shift) else f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
