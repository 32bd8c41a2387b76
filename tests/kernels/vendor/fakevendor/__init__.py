"""A vendor that kvcore has never heard of: its driver is `csrc/driver.hpp`, all else is the core's."""

from __future__ import annotations

import shutil

from kvcore.plugins import BackendSpec, Probe

__all__ = ["backend", "probe"]


def probe() -> Probe:
    """Look for the compiler."""
    found = shutil.which("g++")
    return Probe(found is not None, "g++ compiles the driver on first use" if found else "install g++")


def backend() -> BackendSpec:
    """Return what this backend is."""
    return BackendSpec(
        name="fake",
        device_types=("fake",),
        priority=-1,
        api_version=1,
        probe=probe,
        implementations={"native": "fakevendor.ops"},
        runtime="fakevendor.runtime:Runtime",
        distribution="",
        core_kernels=True,
    )
