"""The emulated device of kvcore: the kernels that ship to GPUs, run on a CPU.

It has memory and streams of its own, as those have. This module is light: nothing is compiled before it is opened.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_emu import probe

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``emu`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="emu",
        device_types=("emu",),
        priority=-1,  # it is for tests, and never taken unless it is named
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={"emulated": "kvcore_emu.ops"},
        runtime="kvcore_emu.runtime:Runtime",
        distribution="kvcore-emu",
        core_kernels=True,
    )
