"""What is measured about a device and not known beforehand. These are starting values: none has been measured."""

from __future__ import annotations

from kvcore.kernels.vendor import DeviceInfo, Tuning

__all__ = ["tuning"]

_BY_ARCH = {
    # A unit is a vector engine of 8 hardware threads of 16 or 32 lanes: one block of 256 lanes fills it.
    "pvc": Tuning(engine_bytes=4 << 20, blocks_per_unit=1),
    # The processor: its threads take whole blocks, and a copy of its own memory needs no kernel.
    "opencl-cpu": Tuning(engine_bytes=64 << 10, blocks_per_unit=4),
}
_OTHERS = Tuning(engine_bytes=1 << 20, blocks_per_unit=1)


def tuning(info: DeviceInfo) -> Tuning:
    """Return the tuning of a device."""
    return _BY_ARCH.get(info.arch, _OTHERS)
