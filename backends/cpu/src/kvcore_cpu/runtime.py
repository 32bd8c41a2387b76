"""The backend computes on the host: the core's host runtime, and the settings of the native library."""

from __future__ import annotations

from kvcore.runtime import HostRuntime
from kvcore_cpu.native import configure

__all__ = ["Runtime"]


class Runtime(HostRuntime):
    """Streams, events and host memory; made whenever the backend is opened, so settings take effect then."""

    def __init__(self) -> None:
        configure()
