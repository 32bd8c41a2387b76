"""Says whether the native CPU backend can run here: the library loads, and has an instruction set of this machine."""

from __future__ import annotations

import platform

from kvcore.errors import BackendLoadError
from kvcore.plugins import Probe

__all__ = ["probe"]


def probe() -> Probe:
    """Load the library, and say what it dispatches to."""
    from kvcore_cpu.native import choice  # not at import: discovery loads no library

    details = {"machine": platform.machine() or "unknown"}
    try:
        isa, threads = choice()
    except BackendLoadError as error:
        return Probe(False, str(error), details)
    details |= {"isa": isa, "threads": str(threads)}
    return Probe(True, f"native kernels for {isa}, up to {threads} threads a call", details)
