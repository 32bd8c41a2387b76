"""Says whether the Intel backend can run here: not yet, and what was found of driver, devices and torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path

from kvcore.plugins import Probe

__all__ = ["probe"]

_NO_KERNELS = "this release of kvcore-xpu contains no kernels; cpu_ref does every op on the host"
_INTEL = "0x8086"


def probe() -> Probe:
    """Look for the driver, its devices and the kind of torch; imports no torch, initialises no Level Zero."""
    details = {"driver": _driver(Path("/dev/dri")), "runtime": _runtime()}
    details |= {"devices": _devices(Path("/sys/class/drm")), "torch": _torch_build()}
    found = f"driver {details['driver']}, runtime {details['runtime']}, devices: {details['devices']}"
    found += f", torch: {details['torch']}"
    return Probe(False, f"{_NO_KERNELS} (found: {found})", details)


def _driver(folder: Path) -> str:
    return f"{folder} present" if any(folder.glob("renderD*")) else f"{folder}/renderD* not found"


def _runtime() -> str:
    try:
        ctypes.CDLL("libze_loader.so.1")
    except OSError:
        return "libze_loader.so.1 not found"
    return "libze_loader.so.1 present"


def _devices(drm: Path) -> str:
    """Return the number of render nodes whose vendor is Intel, integrated graphics included."""
    try:
        vendors = [path.read_text(encoding="ascii").strip() for path in drm.glob("renderD*/device/vendor")]
    except OSError as error:
        return f"unknown ({error})"
    intel = vendors.count(_INTEL)
    return str(intel) if intel else "none"


def _torch_build() -> str:
    """Return what torch was built for: from its metadata, and from torch itself only if it is loaded."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    local = version.partition("+")[2]
    if getattr(torch_version, "xpu", None) or local.startswith("xpu"):
        return f"XPU build {version}"
    return f"{version}" if torch_version is None and not local else f"build without XPU {version}"
