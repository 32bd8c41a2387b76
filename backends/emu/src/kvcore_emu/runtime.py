"""Streams, events and memory of the emulated device; host memory is the core's host runtime's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef, row_major
from kvcore.errors import LayoutError
from kvcore.runtime import HostRuntime
from kvcore_emu.device import DEVICE, Allocation, EmuStream, Event, device

__all__ = ["Runtime"]


class Runtime(HostRuntime):
    """The device's runtime. Without a stream, operations go to the default one, which is like any other."""

    def __init__(self) -> None:
        self._device = device()
        self.arch = f"warp{self._device.warp_width}"

    def reseed(self, seed: int) -> None:
        """Draw orders from another seed, as ``KVCORE_EMU_SEED`` does."""
        self._device.emu("seed")(seed)

    def array(self, array: Any) -> ArrayRef:  # type: ignore[override]  # host backends return NumPy arrays
        """Return a view of device memory.

        Raises
        ------
        LayoutError
            The memory is not the device's.
        """
        ref = ArrayRef.of(array)
        if ref.device != DEVICE:
            raise LayoutError(f"memory on {ref.device} cannot be reached by {DEVICE}; copy it over with copy_batch")
        return ref

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayRef:  # type: ignore[override]
        """Allocate device memory, filled with a pattern.

        Raises
        ------
        LayoutError
            An extent is negative.
        OutOfMemoryError
            There is less memory.
        """
        if any(extent < 0 for extent in shape):  # two of them would make a size that is none
            raise LayoutError(f"extents cannot be negative: {shape}")
        element = np.dtype(dtype)
        block = Allocation(self._device, math.prod(shape) * element.itemsize)
        return ArrayRef(block.address, shape, row_major(shape, element.itemsize), element, DEVICE, False, block)

    def stream(self) -> EmuStream:  # type: ignore[override]
        """Return a new stream."""
        return EmuStream(self._device)

    def synchronize(self, stream: EmuStream | None = None) -> None:
        """Run all that is queued on a stream."""
        self._of(stream).synchronize()

    def check(self, stream: EmuStream | None = None) -> None:
        """Synchronise, and raise what an op of this stream has found wrong in its data, once."""
        self._of(stream).check()

    def record(  # type: ignore[override]  # host backends return None
        self, stream: EmuStream | None = None, *, shared: bool = False
    ) -> Event:
        """Return an event: that what is queued now is done."""
        recorded = self._of(stream)
        return Event(recorded, recorded.mark())

    def wait(self, event: Event, stream: EmuStream | None = None) -> None:  # type: ignore[override]
        """Let what is queued on a stream later wait for an event."""
        self._device.emu("wait")(self._of(stream).handle, event.stream.handle, event.mark)

    def _of(self, stream: EmuStream | None) -> EmuStream:
        return self._device.resolve(stream)
