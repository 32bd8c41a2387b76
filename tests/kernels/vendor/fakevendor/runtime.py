"""The runtime: the core's, for this vendor's library."""

from __future__ import annotations

from fakevendor.device import device
from kvcore.kernels.device_runtime import DeviceRuntime


class Runtime(DeviceRuntime):
    """Streams, events and memory of the two devices. `torch` is what stands for torch's current stream."""

    torch: tuple[int, int] | None = None

    def __init__(self) -> None:
        super().__init__(device(), lambda: self.torch)
