"""Says whether the AMD backend can run here, and why not: torch, HIP's runtime, devices, and a compiler for kernels."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.plugins import Probe
from kvcore.plugins.elf import wrong_machine
from kvcore.plugins.torch_build import TorchBuild, torch_build
from kvcore.settings import current
from kvcore_rocm import installed

__all__ = ["probe"]

_KFD = Path("/dev/kfd")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def probe() -> Probe:
    """Look at torch's build, the library, HIP's runtime, the devices and the compilers, in this order.

    Nothing is initialised: the devices are counted from what the kernel driver publishes in /sys, since a process
    that has initialised HIP can no longer fork workers that use the device. torch is not imported.
    """
    named, build = current().rocm_driver, torch_build()
    driver, compilers = installed.driver_path(), [compiler.path for compiler in installed.compilers()]
    details = {"driver": driver or "none", "kfd": _kfd(_KFD), "devices": _devices(_NODES)}
    details |= {"compiler": compilers[0] if compilers else "none", "torch": str(build or "not installed")}
    reason = (
        _torch_reason(build)
        or _native_reason()
        or _driver_reason(driver)
        or ("" if named else _device_reason(details))
        or _compiler_reason(compilers)
    )
    if reason:
        return Probe(False, reason, details)
    devices = "whatever KVCORE_ROCM_DRIVER shows" if named else details["devices"]
    return Probe(True, f"devices: {devices}; HIP's runtime {driver}; kernels compiled by {compilers[0]}", details)


def _torch_reason(build: TorchBuild | None) -> str:
    if build is None or build.kind != "cuda":
        return ""
    return (
        "torch is built for CUDA, and what it calls cuda belongs to the backend cuda; "
        "for AMD devices install torch's build for ROCm"
    )


def _native_reason() -> str:
    libraries = [installed.native_path(width) for width in installed.WIDTHS]
    missing = [library.name for library in libraries if not library.is_file()]
    if missing:
        return (
            f"kvcore-rocm was installed without its native library ({', '.join(missing)} missing); reinstall it from a "
            "wheel, or from source where there is a C++17 compiler"
        )
    built_for = wrong_machine(libraries[0])
    if not built_for:
        return ""
    return f"wrong wheel for this machine: it is for {built_for}; reinstall kvcore-rocm with this machine's pip"


def _driver_reason(driver: str) -> str:
    if not driver:
        return "HIP's runtime, libamdhip64.so, was not found; install ROCm 5.2 or later, or torch's build for ROCm"
    if "/" in driver and not Path(driver).is_file():
        return f"KVCORE_ROCM_DRIVER={driver}: there is no such file"
    return ""


def _device_reason(details: dict[str, str]) -> str:
    if "not found" in details["kfd"]:
        return (
            f"the kernel has no AMD GPU driver ({_KFD} not found); load amdgpu, and give a container "
            "--device=/dev/kfd --device=/dev/dri"
        )
    if "not writable" in details["kfd"]:
        return f"{_KFD} is there and may not be opened; join its group, mostly render or video"
    if details["devices"] == "none":
        return f"the AMD GPU driver shows no GPU in {_NODES}"
    return ""


def _compiler_reason(compilers: list[str]) -> str:
    if compilers:
        return ""
    return f"nothing here compiles kernels for AMD devices; install one of {installed.COMPILERS}"


def _kfd(node: Path) -> str:
    if not node.exists():
        return f"{node} not found"
    return str(node) if os.access(node, os.R_OK | os.W_OK) else f"{node} not writable"


def _devices(nodes: Path) -> str:
    """Return the architectures of the GPUs in the driver's topology; nodes without SIMD units are processors."""
    try:
        texts = [path.read_text(encoding="ascii") for path in sorted(nodes.glob("*/properties"))]
    except OSError as error:
        return f"unknown ({error})"
    words = [dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line) for text in texts]
    gpus = [_arch(node.get("gfx_target_version", "0")) for node in words if node.get("simd_count", "0").strip() != "0"]
    return " ".join(f"{gpus.count(arch)} {arch}" for arch in dict.fromkeys(gpus)) or "none"


def _arch(version: str) -> str:
    """Return ``gfx90a`` for 90010: two decimal digits each for minor and stepping, the latter hexadecimal in names."""
    number = int(version) if version.strip().isdecimal() else 0
    if number == 0:
        return "GPU"
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
