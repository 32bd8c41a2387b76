"""The Intel GPU backend of kvcore, and the same kernels on the processor through OpenCL for tests.

This module is light: it imports no vendor library and nothing of torch, so that discovery costs nothing.
"""

from __future__ import annotations

from kvcore.plugins import BackendSpec
from kvcore_xpu import probe

__all__ = ["backend", "cpu_device"]


def backend() -> BackendSpec:
    """Return what this backend is; the entry point ``xpu`` of the group ``kvcore.backends``."""
    return BackendSpec(
        name="xpu",
        device_types=("xpu",),
        priority=100,
        api_version=1,  # the version this package was written for, not the one that happens to be installed
        probe=probe.probe,
        implementations={"native": "kvcore_xpu.ops"},
        runtime="kvcore_xpu.runtime:Runtime",
        distribution="kvcore-xpu",
        core_kernels=True,
    )


def cpu_device() -> BackendSpec:
    """Return the same kernels on the processor: a device for tests, named as ``kvcore_xpu:cpu_device``."""
    return BackendSpec(
        name="xpu_cpu",
        device_types=("xpu_cpu",),
        priority=-1,  # it is for tests, and never taken unless it is named
        api_version=1,
        probe=probe.probe_cpu,
        implementations={"native": "kvcore_xpu.cpu_ops"},
        runtime="kvcore_xpu.runtime:CpuRuntime",
        distribution="kvcore-xpu",
        core_kernels=True,
    )
