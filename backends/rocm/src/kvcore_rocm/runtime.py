"""Streams, events and memory of AMD's devices. Without a stream, operations go to torch's current one."""

from __future__ import annotations

from kvcore.kernels.device_runtime import DeviceRuntime
from kvcore_rocm.device import current, device

__all__ = ["Runtime"]


class Runtime(DeviceRuntime):
    """The runtime of this process's devices."""

    def __init__(self) -> None:
        super().__init__(device(), current)
