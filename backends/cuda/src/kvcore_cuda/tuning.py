"""What is measured about a device. None of it has been yet: these are starting values."""

from __future__ import annotations

import re

from kvcore.kernels.vendor import DeviceInfo, Tuning

__all__ = ["tuning"]

# A multiprocessor holds 2048 threads on the data centre's architectures, 1536 on the others since sm_86, 1024 on
# sm_75; the registers of the kernels that move and quantise leave room for half of them. So a few blocks of 256
# threads, of which three or six are resident there. Copies within a device: a kernel has all multiprocessors to move
# bytes, an engine only itself, which pays off where it is not to disturb others.
_BY_ARCH = {
    "sm_75": Tuning(engine_bytes=4 << 20, blocks_per_unit=4),
    "sm_80": Tuning(engine_bytes=8 << 20, blocks_per_unit=6),
    "sm_86": Tuning(engine_bytes=4 << 20, blocks_per_unit=6),
    "sm_89": Tuning(engine_bytes=4 << 20, blocks_per_unit=6),
    "sm_90": Tuning(engine_bytes=8 << 20, blocks_per_unit=6),
    "sm_100": Tuning(engine_bytes=8 << 20, blocks_per_unit=6),
    "sm_120": Tuning(engine_bytes=4 << 20, blocks_per_unit=6),
}
_OTHERS = Tuning(engine_bytes=8 << 20, blocks_per_unit=6)


def tuning(info: DeviceInfo) -> Tuning:
    """Return the tuning of a device, by its architecture."""
    arch = re.match(r"sm_\d+", info.arch)
    return _BY_ARCH.get(arch[0], _OTHERS) if arch else _OTHERS
