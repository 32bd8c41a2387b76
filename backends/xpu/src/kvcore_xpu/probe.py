"""Says whether the Intel backend can run here, and what was found of driver, devices, compilers and torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
from pathlib import Path

from kvcore.plugins import Probe
from kvcore.plugins.torch_build import torch_build

__all__ = ["COMPILER", "OPENCL", "SYCL", "probe", "probe_cpu"]

COMPILER = "g++"
SYCL = "intel-sycl-rt"
OPENCL = "intel-opencl-rt"
_INTEL = "0x8086"
_LOADER = "libze_loader.so.1"


def probe() -> Probe:
    """Look for a GPU, its driver and what compiles; imports no torch, initialises no Level Zero."""
    nodes, devices = _nodes(Path("/dev/dri")), _devices(Path("/sys/class/drm"))
    details = {"driver": _driver(), "devices": devices, "nodes": nodes}
    details |= {
        "sycl": _version(SYCL),
        "compiler": shutil.which(COMPILER) or "not found",
        "torch": str(torch_build() or "not installed"),
    }
    missing = None
    if devices == "none":
        missing = "this machine has no Intel GPU; for another vendor's, install that vendor's extra of kvcore"
    elif "not" in nodes:
        missing = "an Intel GPU is there, but no node to use it by; give this container or user access to /dev/dri"
    elif "not" in details["driver"]:
        missing = f"{_LOADER} is not installed; install Intel's compute runtime (Level Zero loader and GPU driver)"
    else:
        missing = _no_compiler()
    if missing is not None:
        return Probe(False, missing, details)
    return Probe(True, f"devices: {devices}; kernels are compiled on first use by {SYCL} {details['sycl']}", details)


def probe_cpu() -> Probe:
    """Look for what runs the kernels on the processor."""
    details = {"sycl": _version(SYCL), "opencl": _version(OPENCL), "compiler": shutil.which(COMPILER) or "not found"}
    missing = _no_compiler()
    if missing is None and details["opencl"] == "not installed":
        missing = f"{OPENCL} is not installed, which runs the kernels on the processor; pip install {OPENCL}"
    if missing is not None:
        return Probe(False, missing, details)
    return Probe(True, f"kernels of Intel's GPUs on the processor, through {OPENCL} {details['opencl']}", details)


def _no_compiler() -> str | None:
    if _version(SYCL) == "not installed":
        return f"{SYCL}, which compiles the kernels on first use, is not installed; pip install {SYCL}"
    if shutil.which(COMPILER) is None:
        return f"the host library is compiled on first use, and there is no {COMPILER} on PATH; install it"
    return None


def _driver() -> str:
    try:
        ctypes.CDLL(_LOADER)
    except OSError:
        return f"{_LOADER} not found"
    return f"{_LOADER} present"


def _nodes(folder: Path) -> str:
    nodes = list(folder.glob("renderD*"))
    if not nodes:
        return f"{folder}/renderD* not found"
    usable = any(os.access(node, os.R_OK | os.W_OK) for node in nodes)
    return f"{folder} present" if usable else f"{folder}/renderD* not to be opened: join their group, mostly render"


def _devices(drm: Path) -> str:
    """Return the number of render nodes whose vendor is Intel, integrated graphics included."""
    try:
        vendors = [path.read_text(encoding="ascii").strip() for path in drm.glob("renderD*/device/vendor")]
    except OSError as error:
        return f"unknown ({error})"
    intel = vendors.count(_INTEL)
    return str(intel) if intel else "none"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
