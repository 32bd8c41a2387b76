"""Says whether the AMD backend can run here: not yet, and what was found of driver, devices and torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path

from kvcore.plugins import Probe

__all__ = ["probe"]

_NO_KERNELS = "this release of kvcore-rocm contains no kernels; cpu_ref does every op on the host"
_LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")


def probe() -> Probe:
    """Look for the driver, its devices and the kind of torch; imports neither torch nor initialises HIP.

    The devices are counted from what the kernel driver publishes in /sys: a process that has initialised HIP
    can no longer fork workers that use the device.
    """
    details = {"driver": _driver(Path("/dev/kfd")), "runtime": _runtime()}
    details |= {"devices": _devices(Path("/sys/class/kfd/kfd/topology/nodes")), "torch": _torch_build()}
    found = f"driver {details['driver']}, runtime {details['runtime']}, devices: {details['devices']}"
    found += f", torch: {details['torch']}"
    if details["torch"].startswith("CUDA"):
        found += "; a CUDA build of torch belongs to the backend cuda"
    return Probe(False, f"{_NO_KERNELS} (found: {found})", details)


def _driver(node: Path) -> str:
    return f"{node} present" if node.exists() else f"{node} not found"


def _runtime() -> str:
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return f"{name} present"
    return "libamdhip64.so not found"


def _devices(nodes: Path) -> str:
    """Return the number of GPUs in the driver's topology; nodes without SIMD units are processors."""
    try:
        texts = [path.read_text(encoding="ascii") for path in nodes.glob("*/properties")]
    except OSError as error:
        return f"unknown ({error})"
    words = [dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line) for text in texts]
    gpus = sum(node.get("simd_count", "0").strip() != "0" for node in words)
    return str(gpus) if gpus else "none"


def _torch_build() -> str:
    """Return what torch was built for: from its metadata, and from torch itself only if it is loaded."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    local = version.partition("+")[2]
    if getattr(torch_version, "hip", None) or local.startswith("rocm"):
        return f"ROCm build {version}"
    if getattr(torch_version, "cuda", None) or local.startswith("cu"):
        return f"CUDA build {version}"
    return f"{version}" if torch_version is None and not local else f"build without ROCm {version}"
