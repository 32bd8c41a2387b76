"""Whether every kernel compiles for every GPU, asked of the compilers: ``python -m kvcore.kernels.check``.

The launchers of all ops are compiled with a queue that runs nothing, so that whatever they launch is compiled, and
nothing has to be listed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvcore.kernels import get_include

__all__ = ["TARGETS", "Kernel", "Outcome", "Target", "compile_for", "read_clang", "read_nvcc"]

_FOLDER = Path(__file__).parent
_PREFIX = Path(sys.prefix)
_CUDA = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin")
_SYCL = ("-std=c++17", "-O1", "-w")
# The device's own headers and libraries are left out: kernels need none of them, and so neither ROCm.
_HIP = (
    *("-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off", "--cuda-device-only", "-nogpulib", "-nogpuinc"),
    *("--no-gpu-bundle-output", "-fno-caret-diagnostics", "-Rpass-analysis=kernel-resource-usage"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, and who compiles for it.

    Parameters
    ----------
    arch : str
    compilers : tuple of str
        Programs that can, the preferred one first.
    options : tuple of str
    sub_group : int
        Of SYCL: the source is compiled into a program that asks Intel's run-time compiler, which comes in the packages
        ``intel-sycl-rt`` and ``intel-opencl-rt``. 0: the compiler itself compiles for the device.
    """

    arch: str
    compilers: tuple[str, ...]
    options: tuple[str, ...] = ()
    sub_group: int = 0

    def compiler(self) -> str | None:
        """Return the path of the first compiler that is installed."""
        return next(filter(None, map(shutil.which, self.compilers)), None)

    def missing(self) -> str | None:
        """Return what is not installed, or None."""
        if self.compiler() is None:
            return f"none of {', '.join(self.compilers)} is installed"
        needed = (_PREFIX / "include/sycl/sycl.hpp", _PREFIX / "lib/libintelocl.so")
        if self.sub_group and not all(path.exists() for path in needed):
            return "intel-sycl-rt and intel-opencl-rt are not installed in this environment"
        return None

    def commands(self, made: str) -> list[list[str]]:
        """Return what to run, one after the other; the last one reports the kernels."""
        command = [str(self.compiler()), *self.options, "-I", get_include()]
        if not self.sub_group:
            return [[*command, str(_FOLDER / "gpu.cu"), "-o", made]]
        lib = _PREFIX / "lib"
        link = ("-I", str(_PREFIX / "include"), "-L", str(lib), "-lsycl", f"-Wl,-rpath,{lib}")
        program = [*command, str(_FOLDER / "sycl.cpp"), "-o", made, *link]
        return [program, [made, get_include(), str(self.sub_group)]]

    def read(self, lines: Iterable[str]) -> Iterator[Kernel]:
        """Return what the last command reported."""
        if self.sub_group:
            return (Kernel(line.replace("kvcore::", ""), None, None) for line in lines)
        return read_nvcc(lines) if Path(str(self.compiler())).name == "nvcc" else read_clang(lines)


TARGETS = (
    *(Target(a, ("nvcc",), (*_CUDA, f"-arch={a}")) for a in ("sm_80", "sm_90", "sm_100")),
    *(
        Target(a, ("clang++-19", "clang++-20", "clang++-21", "amdclang++"), (*_HIP, f"--offload-arch={a}"))
        for a in ("gfx90a", "gfx942", "gfx1100")
    ),
    *(Target(f"sycl{width}", ("g++",), _SYCL, width) for width in (32, 64)),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel needs on one architecture.

    Parameters
    ----------
    name : str
        Of its struct.
    registers : int, optional
        32-bit registers of a thread (AMD: vector registers). SYCL does not say.
    spills : int, optional
        Bytes that a thread writes to memory for want of registers (AMD: vector registers that are spilled).
    """

    name: str
    registers: int | None
    spills: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of compiling for one target.

    Parameters
    ----------
    target : Target
    status : {"ok", "failed", "skipped"}
    reason : str
        Why it failed or was skipped.
    kernels : tuple of Kernel
        By name.
    """

    target: Target
    status: str
    reason: str = ""
    kernels: tuple[Kernel, ...] = field(default=())


def compile_for(target: Target, timeout_s: float = 600) -> Outcome:
    """Compile every kernel for a target."""
    missing = target.missing()
    if missing is not None:
        return Outcome(target, "skipped", missing)
    environment = os.environ | {"OCL_ICD_FILENAMES": str(_PREFIX / "lib/libintelocl.so")} if target.sub_group else None
    output = ""
    with tempfile.TemporaryDirectory(prefix="kvcore-check-") as scratch:
        for command in target.commands(str(Path(scratch) / "kernels")):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
            except (OSError, subprocess.TimeoutExpired) as error:
                return Outcome(target, "failed", str(error))
            if done.returncode != 0:
                return Outcome(target, "failed", f"{' '.join(command)}\n{_first_errors(done.stderr)}")
            output = done.stdout + done.stderr
    kernels = tuple(sorted(target.read(output.splitlines()), key=lambda k: k.name))
    if not kernels:
        return Outcome(target, "failed", f"{target.arch} compiled, but no kernel was reported")
    return Outcome(target, "ok", kernels=kernels)


def read_nvcc(lines: Iterable[str]) -> Iterator[Kernel]:
    """Read what ``ptxas -v`` says of each kernel."""
    name, spills = "", 0
    for line in lines:
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name = kernel_name(found[1])
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spills = int(found[1])
        elif found := re.search(r"Used (\d+) registers", line):
            yield Kernel(name, int(found[1]), spills)


def read_clang(lines: Iterable[str]) -> Iterator[Kernel]:
    """Read the remarks of clang on what each kernel uses."""
    name, registers, spills = "", 0, 0
    for line in lines:
        if found := re.search(r"Function Name: (\w+)", line):
            name = kernel_name(found[1])
        elif found := re.search(r" VGPRs: (\d+)", line):
            registers = int(found[1])
        elif found := re.search(r" VGPRs Spill: (\d+)", line):
            spills = int(found[1])
        elif "LDS Size" in line:  # the last remark of a kernel
            yield Kernel(name, registers, spills)


def kernel_name(symbol: str) -> str:
    """Return the name of a kernel's struct out of its entry's mangled name.

    The names of C++ are mangled as each part's length and text; those of namespace and entry are left out.
    """
    parts = [symbol[m.end() : m.end() + int(m[0])] for m in re.finditer(r"(?<=[A-Z_])\d+", symbol)]
    names = [part for part in dict.fromkeys(parts) if part not in {"kvcore", "gpu_entry", "Args"}]
    return f"{names[0]}<{', '.join(names[1:])}>" if len(names) > 1 else "".join(names) or symbol


def _first_errors(text: str) -> str:
    lines = text.splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return "\n".join((errors or lines)[:10])
