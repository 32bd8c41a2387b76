"""Streams, events and memory of Intel's devices; torch's current stream is the one that ops go to."""

from __future__ import annotations

import sys

from kvcore.kernels.device_runtime import DeviceRuntime
from kvcore_xpu.device import device

__all__ = ["CpuRuntime", "Runtime"]


class Runtime(DeviceRuntime):
    """The runtime of GPUs."""

    def __init__(self) -> None:
        super().__init__(device("gpu"), _current)


class CpuRuntime(DeviceRuntime):
    """The runtime of the processor as a device. Torch knows no such device."""

    def __init__(self) -> None:
        super().__init__(device("cpu"), lambda: None)


def _current() -> tuple[int, int] | None:
    """Return torch's current device, and the queue of SYCL behind its current stream."""
    torch = sys.modules.get("torch")
    xpu = getattr(torch, "xpu", None)
    if xpu is None or not xpu.is_initialized():
        return None
    stream = xpu.current_stream()
    return int(stream.device.index), int(stream.sycl_queue)
