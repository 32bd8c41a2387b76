"""The NVIDIA backend of kvcore.

This module is light: it imports no vendor library and nothing of torch, so that discovery costs nothing.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_cuda import probe

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``cuda`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="cuda",
        device_types=("cuda",),
        priority=100,
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={"native": "kvcore_cuda.ops", "triton": "kvcore_cuda.twins"},
        runtime="kvcore_cuda.runtime:Runtime",
        distribution="kvcore-cuda",
        core_kernels=True,
    )
