"""The reference computes on the host: the core's host runtime is all it needs."""

from __future__ import annotations

from kvcore.runtime import HostRuntime

__all__ = ["Runtime"]


class Runtime(HostRuntime):
    """Streams, events and host memory of the reference backend."""
