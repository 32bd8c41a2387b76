"""Says whether the emulated device can run here: it can where there is a C++ compiler."""

from __future__ import annotations

import shutil

from kvcore.plugins import Probe

__all__ = ["COMPILER", "probe"]

COMPILER = "g++"


def probe() -> Probe:
    """Look for the compiler; runs nothing."""
    path = shutil.which(COMPILER)
    if path is None:
        return Probe(False, f"the kernels are compiled on first use, and there is no {COMPILER} on PATH; install it")
    return Probe(True, f"kernels of GPUs on fibers, compiled on first use with {path}", {"compiler": path})
