"""The Intel GPU backend of kvcore.

This module is light: it imports no vendor library and nothing of torch, so that discovery costs nothing.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_xpu import probe

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``xpu`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="xpu",
        device_types=("xpu",),
        priority=100,
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={},
        distribution="kvcore-xpu",
    )
