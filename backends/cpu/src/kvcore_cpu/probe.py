"""Says whether the native CPU backend can run here: not yet, and what the processor offers."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvcore.plugins import Probe

__all__ = ["probe"]

_NO_KERNELS = "this release of kvcore-cpu contains no native kernels; cpu_ref does every op on any CPU"

# What kernels of this kind care for, as Linux names it on x86-64 and on Arm.
_INTERESTING = ("avx2", "avx512bw", "avx512_vbmi", "bmi2", "asimd", "sve")


def probe() -> Probe:
    """Look at the processor; loads nothing and changes nothing."""
    details = {"machine": platform.machine() or "unknown", "cores": str(_usable_cores())}
    extensions = _extensions(Path("/proc/cpuinfo"))
    details["extensions"] = " ".join(extensions) or "unknown"
    found = f"{details['machine']}, {details['cores']} usable cores, extensions: {details['extensions']}"
    return Probe(False, f"{_NO_KERNELS} (found: {found})", details)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _extensions(cpuinfo: Path) -> list[str]:
    """Return the extensions of interest that every core has; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return [name for name in _INTERESTING if cores and all(name in core for core in cores)]
