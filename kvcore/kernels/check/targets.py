"""The architectures that kernels are compiled for, and who compiles: no GPU and no driver is needed for any."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PREFIX", "TARGETS", "Target"]

PREFIX = Path(sys.prefix)
"""The environment, in which the packages of Intel's run-time compiler put headers and libraries."""

_CUDA = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v")
# The device's own headers and libraries are left out: kernels need none of them, and so neither ROCm.
_HIP = (
    *("-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off", "-fhip-fp32-correctly-rounded-divide-sqrt"),
    *("--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output"),
    *("-fno-caret-diagnostics", "-Rpass-analysis=kernel-resource-usage"),
)
_CLANG = ("clang++-19", "clang++-20", "clang++-21", "amdclang++")


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, and who compiles for it.

    Parameters
    ----------
    arch : str
    compilers : tuple of str
        Programs that can, the preferred one first.
    options : tuple of str
    backend : str
        The backend whose kernels run on it.
    sub_group : int
        Of SYCL: the kernels go through Intel's run-time compiler, which comes in the packages ``intel-sycl-rt`` and
        ``intel-opencl-rt``, and which a program compiled by `compilers` asks for it. 0: they compile for the device.
    device : str
        Of Intel's offline compiler, which makes machine code of what the run-time compiler has made. Empty: the
        run-time compiler's own device, the processor.
    """

    arch: str
    compilers: tuple[str, ...]
    options: tuple[str, ...] = ()
    backend: str = ""
    sub_group: int = 0
    device: str = ""

    def compiler(self) -> str | None:
        """Return the path of the first compiler that is installed."""
        return next(filter(None, map(shutil.which, self.compilers)), None)

    def missing(self) -> str | None:
        """Return what is not installed, or None."""
        if self.compiler() is None:
            return f"none of {', '.join(self.compilers)} is installed"
        if self.sub_group and shutil.which("g++") is None:
            return "g++ is not installed, which compiles the program that asks for SPIR-V"
        needed = (PREFIX / "include/sycl/sycl.hpp", PREFIX / "lib/libintelocl.so")
        if self.sub_group and not all(path.exists() for path in needed):
            return "intel-sycl-rt and intel-opencl-rt are not installed in this environment"
        return None

    def compiled_by(self) -> str:
        """Return the compiler and its version, as records name it."""
        sycl = f"intel-sycl-rt {importlib.metadata.version('intel-sycl-rt')}" if self.sub_group else ""
        if self.sub_group and not self.device:
            return sycl
        program = Path(str(self.compiler())).name
        # ocloc has no option that prints its version; it is its package's, and is left out where that is not known.
        command = ["dpkg-query", "-W", "-f", "version ${Version}", "intel-opencl-icd"]
        if not self.device:
            command = [str(self.compiler()), "--version"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            said = ""
        found = re.search(r"\bV(\d[\d.]*)", said) or re.search(r"version (\d[\d.]*\d)", said)
        name = re.sub(r"\+\+.*", "", program)
        return " and ".join(filter(None, [sycl, f"{name} {found[1]}" if found else name]))


TARGETS = (
    *(
        Target(f"sm_{number}", ("nvcc",), (*_CUDA, "-cubin", f"-arch=sm_{number}"), "cuda")
        for number in (75, 80, 86, 89, 90, 100, 120)
    ),
    # What the driver compiles for architectures that are newer than all of these.
    Target("compute_120", ("nvcc",), (*_CUDA, "-ptx", "-arch=compute_120"), "cuda"),
    *(Target(a, _CLANG, (*_HIP, f"--offload-arch={a}"), "rocm") for a in ("gfx90a", "gfx942", "gfx1100")),
    *(Target(f"sycl{width}", ("g++",), (), "xpu", width) for width in (32, 64)),
    *(Target(device, ("ocloc",), (), "xpu", 32, device) for device in ("pvc", "dg2")),
)
