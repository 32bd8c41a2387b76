"""The native library: where it is, and what the settings tell it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels.library import HostLibrary
from kvcore.settings import current

__all__ = ["choice", "configure", "library"]

_PATH = Path(__file__).with_name("_native.so")
_THREADS = 4  # as many saturate the memory of most machines, and the engine needs its cores


@functools.cache
def library() -> HostLibrary:
    """Return the library of this package, loaded on first use.

    Raises
    ------
    BackendLoadError
        It is not there, does not load, or is of another version.
    """
    if not _PATH.is_file():
        raise BackendLoadError(
            f"{_PATH} is not there: kvcore-cpu was installed without its native library; "
            "reinstall it from a wheel, or from source where there is a C++17 compiler"
        )
    return HostLibrary(_PATH)


def choice() -> tuple[str, int]:
    """Return what the settings ask for: an instruction set that is there, and how many threads a call may use.

    Raises
    ------
    BackendLoadError
        As `library`; or ``KVCORE_CPU_ISA`` names what this machine or library lacks.
    """
    settings = current()
    there = _instruction_sets(library().dll)
    isa = settings.cpu_isa or there[0]
    if isa not in there:
        raise BackendLoadError(f"KVCORE_CPU_ISA={isa}: this machine and library have {', '.join(there)}")
    return isa, settings.cpu_threads or min(_THREADS, _usable_cores())


def configure() -> None:
    """Make it so, for the whole process.

    Raises
    ------
    BackendLoadError
        As `choice`.
    """
    isa, threads = choice()
    dll = library().dll
    set_up = dll.kvcore_cpu_configure
    set_up.restype, set_up.argtypes = ctypes.c_int32, (ctypes.c_int32, ctypes.c_int32)
    if set_up(_instruction_sets(dll).index(isa), threads):
        raise BackendLoadError(f"{_PATH} refused instruction set {isa} with {threads} threads; set KVCORE_CPU_THREADS")


def _instruction_sets(dll: ctypes.CDLL) -> list[str]:
    """Return the names of what library and machine both have, best first."""
    name = dll.kvcore_cpu_isa
    name.restype = ctypes.c_char_p
    found: list[str] = []
    while (text := name(len(found))) is not None:
        found.append(text.decode())
    return found


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
