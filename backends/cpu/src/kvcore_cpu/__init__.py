"""The native CPU backend of kvcore.

This module is light: it loads no library and nothing of torch, so that discovery costs nothing.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_cpu import probe

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``cpu`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="cpu",
        device_types=("cpu",),
        priority=50,
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={"native": "kvcore_cpu.ops"},
        runtime="kvcore_cpu.runtime:Runtime",
        distribution="kvcore-cpu",
    )
