"""What compilers say of the kernels that they compile: names, registers, spills."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Kernel", "first_errors", "read_clang", "read_nvcc", "read_ocloc", "read_ptx"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel needs on one architecture.

    Parameters
    ----------
    name : str
    registers : int, optional
        32-bit registers of a thread (AMD: vector registers). SYCL, PTX and Intel's compiler do not say.
    spills : int, optional
        Bytes that a thread writes to memory for want of registers (AMD: vector registers that are spilled; Intel:
        registers, about).
    """

    name: str
    registers: int | None
    spills: int | None


def read_nvcc(lines: Iterable[str]) -> Iterator[Kernel]:
    """Read what ``ptxas -v`` says of each kernel."""
    name, spills = "", 0
    for line in lines:
        if found := re.search(r"entry function '(\w+)'", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spills = int(found[1])
        elif found := re.search(r"Used (\d+) registers", line):
            yield Kernel(name, int(found[1]), spills)


def read_ptx(lines: Iterable[str]) -> Iterator[Kernel]:
    """Read the entries out of PTX itself."""
    for line in lines:
        if found := re.search(r"\.entry (\w+)", line):
            yield Kernel(found[1], None, None)


def read_clang(lines: Iterable[str]) -> Iterator[Kernel]:
    """Read the remarks of clang on what each kernel uses."""
    name, registers, spills = "", 0, 0
    for line in lines:
        if found := re.search(r"Function Name: (\w+)", line):
            name = found[1]
        elif found := re.search(r" VGPRs: (\d+)", line):
            registers = int(found[1])
        elif found := re.search(r" VGPRs Spill: (\d+)", line):
            spills = int(found[1])
        elif "LDS Size" in line:  # the last remark of a kernel
            yield Kernel(name, registers, spills)


def read_ocloc(lines: Iterable[str], names: Iterable[str]) -> Iterator[Kernel]:
    """Read the warnings of Intel's offline compiler, which speaks of kernels that spill and of no others."""
    spills = {}
    for line in lines:
        if found := re.search(r"kernel (?:__sycl_kernel_)?(\w+) .*spilled around (\d+)", line):
            spills[found[1]] = int(found[2])
    for name in names:
        yield Kernel(name, None, spills.get(name, 0))


def first_errors(text: str) -> str:
    """Return the lines of a compiler's output that tell what is wrong."""
    lines = text.splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return "\n".join((errors or lines)[:10])
