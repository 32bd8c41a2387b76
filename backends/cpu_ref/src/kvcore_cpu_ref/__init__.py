"""The NumPy reference: the executable definition of every kvcore op."""

from __future__ import annotations

from kvcore.plugins import API_VERSION, BackendSpec
from kvcore_cpu_ref.probe import probe

__version__ = "0.1.0.dev0"
__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what the core needs to know; the entry point ``cpu_ref`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="cpu_ref",
        device_types=("cpu",),
        priority=0,
        api_version=API_VERSION,
        probe=probe,
        implementations={"numpy": "kvcore_cpu_ref.ops"},
        runtime="kvcore_cpu_ref.runtime:Runtime",
        distribution="kvcore-cpu-ref",
    )
