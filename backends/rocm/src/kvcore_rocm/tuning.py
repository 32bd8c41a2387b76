"""What is measured about a device. None of it has been yet: these are starting values."""

from __future__ import annotations

from kvcore.kernels.vendor import DeviceInfo, Tuning

__all__ = ["tuning"]

_BY_ARCH = {
    "gfx90a": Tuning(engine_bytes=4 << 20, blocks_per_unit=8),
    "gfx942": Tuning(engine_bytes=8 << 20, blocks_per_unit=8),
    "gfx950": Tuning(engine_bytes=8 << 20, blocks_per_unit=8),
}
# Eight blocks of 256 threads are the waves that a unit of CDNA or of RDNA holds. Copies within a device: a kernel has
# all of its units to move bytes, an engine only a few lanes, which pays off where it is not to disturb others.
_OTHERS = Tuning(engine_bytes=4 << 20, blocks_per_unit=8)


def tuning(info: DeviceInfo) -> Tuning:
    """Return the tuning of a device, by its architecture."""
    return _BY_ARCH.get(info.arch, _OTHERS)
