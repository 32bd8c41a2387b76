"""Which processor a shared library is for, told from its first bytes: one for another does not load anywhere else."""

from __future__ import annotations

import contextlib
import platform
import struct
from pathlib import Path

__all__ = ["wrong_machine"]

_MACHINES = {62: "x86_64", 183: "aarch64"}


def wrong_machine(library: Path) -> str:
    """Return which processor a library is for, if it is for another one than this machine's; else an empty string."""
    with contextlib.suppress(OSError, struct.error), library.open("rb") as file:
        magic, machine = struct.unpack("<4s14xH", file.read(20))
        built_for = _MACHINES.get(machine, f"ELF machine {machine}")
        if magic == b"\x7fELF" and platform.machine() in _MACHINES.values() and built_for != platform.machine():
            return built_for
    return ""
