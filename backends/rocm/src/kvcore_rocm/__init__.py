"""The AMD backend of kvcore. torch names AMD devices ``cuda`` too, so the device type is that.

This module is light: it imports no vendor library and nothing of torch, so that discovery costs nothing.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_rocm import probe

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``rocm`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="rocm",
        device_types=("cuda",),
        priority=100,
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={"native": "kvcore_rocm.ops", "triton": "kvcore_rocm.twins"},
        runtime="kvcore_rocm.runtime:Runtime",
        distribution="kvcore-rocm",
        core_kernels=True,
    )
