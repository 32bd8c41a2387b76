"""The kernels for an architecture, compiled on first use and kept."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore.kernels.images import device_source, kept
from kvcore.kernels.rtc import STANDARD_HEADERS, RuntimeCompiler
from kvcore_rocm import installed
from kvcore_rocm.installed import Compiler

__all__ = ["compile_with", "image", "program_command"]

# The same bytes everywhere: no fused multiply-add, divisions and square roots rounded correctly.
_OPTIONS = (
    *("-std=c++17", "-O3", "-DKVCORE_DEVICE_ONLY", "-ffp-contract=off"),
    "-fhip-fp32-correctly-rounded-divide-sqrt",
)
# ROCm's device libraries and headers are left out: kernels need none of them.
_CLANG = ("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output", "-w")
_TIMEOUT_S = 600
_ERROR_LINES = 20


def image(kernels: str, arch: str, folder: Path | None = None) -> bytes:
    """Return the code object with all kernels for an architecture.

    Parameters
    ----------
    kernels : str
        What ``kvcore_kernel_list()`` of a library returns.
    arch : str
        ``"gfx942"``. What follows the number (features, a remark) is not the compiler's.
    folder : Path, optional
        Where it is kept; default the user's cache.

    Raises
    ------
    BackendLoadError
        There is no compiler, or none of them could; the message has what each of them said.
    """
    found = re.match("gfx[0-9a-f]+", arch)
    if found is None:
        raise BackendLoadError(f"{arch} is no architecture of an AMD device: those are called gfx942, gfx1100, ...")
    refused = []
    for compiler in installed.compilers():
        try:
            return compile_with(compiler, device_source(kernels), found[0], folder)
        except BackendLoadError as error:
            refused.append(f"{compiler.path}: {error}")
    if not refused:
        raise BackendLoadError(
            f"there is no compiler for the kernels of {found[0]}: looked for {installed.COMPILERS}; install one of them"
        )
    raise BackendLoadError(
        f"the kernels were not compiled for {found[0]}; a newer ROCm may know it:\n" + "\n".join(refused)
    )


def compile_with(compiler: Compiler, source: str, arch: str, folder: Path | None = None) -> bytes:
    """Return the code object that a compiler makes of a source, or has made of it before.

    Raises
    ------
    BackendLoadError
        It refused, and the message has its first lines; or nothing can be kept in the folder.
    """
    library = compiler.kind == "hiprtc"
    command = [compiler.path, *_arch_options(arch)] if library else program_command(compiler.path, arch)

    def make(path: Path) -> None:
        if library:
            path.write_bytes(_by_library(compiler.path, source, command[1:]))
        else:
            _by_program(command, source, path)

    return kept(f"rocm-{arch}.hsaco", [source, *command, compiler.identity], make, folder).read_bytes()


def program_command(compiler: str, arch: str) -> list[str]:
    """Return the command, without source and output, by which clang or hipcc compiles kernels."""
    return [compiler, *_CLANG, *_arch_options(arch), "-I", get_include()]


def _arch_options(arch: str) -> list[str]:
    return [f"--offload-arch={arch}", *_OPTIONS]


def _by_program(command: list[str], source: str, made: Path) -> None:
    text = made.with_suffix(".hip")
    text.write_text(source)
    try:
        done = subprocess.run(
            [*command, str(text), "-o", str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendLoadError(f"cannot be run: {error}") from error
    if done.returncode != 0 or made.read_bytes()[:4] != b"\x7fELF":
        lines = done.stderr.splitlines()
        first = [line for line in lines if "error" in line.lower()] or lines or ["it made no code object"]
        raise BackendLoadError("\n".join(first[:_ERROR_LINES]))


def _by_library(path: str, source: str, options: list[str]) -> bytes:
    """Compile by hipRTC. Not run yet: written after its documentation."""
    headers = {name: _renamed(text) for name, text in STANDARD_HEADERS.items()}
    return RuntimeCompiler(path, "hiprtc").compile(source, [*options, f"-I{get_include()}"], headers, "kvcore.hip")


def _renamed(text: str) -> str:
    """Give what a header defines names of its own: hipRTC has some of it too, by version in one type or another."""
    names = re.findall(r"typedef .* (\w+);", text) + sorted(set(re.findall(r"constexpr bool (\w+)", text)))
    return "".join(f"#define {name} kvcore_{name}\n" for name in names) + text
