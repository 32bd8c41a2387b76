"""What this package holds and what there is of ROCm on this machine. Files are looked up, nothing is run."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

from kvcore.settings import current

__all__ = ["COMPILERS", "WIDTHS", "Compiler", "compilers", "driver_path", "native_path"]

WIDTHS = (64, 32)
"""Threads in a warp, with a library for each: gfx9 (Instinct), and gfx10 and later (Radeon)."""

_VERSIONS = ("7", "6", "5")
"""Major versions of ROCm, as the names of its libraries have them; the latest first."""
_PACKAGES = ("torch/lib", "_rocm_sdk_core/lib")
"""Folders of Python packages with ROCm's libraries: torch's build for ROCm, or what it depends on."""
_FOLDERS = (Path("/opt/rocm/lib"), Path(f"/usr/lib/{platform.machine()}-linux-gnu"), Path("/usr/lib64"))
_PROGRAMS = ("/opt/rocm/bin", "/opt/rocm/llvm/bin")
_CLANGS = ("amdclang++", *(f"clang++-{version}" for version in range(22, 15, -1)), "clang++")

COMPILERS = "hipRTC (libhiprtc.so of ROCm), hipcc, amdclang++ and clang++ (16 or later, with lld)"
"""Who can compile the kernels, for messages; in this order they are asked."""


class Compiler(NamedTuple):
    """Who compiles kernels for AMD's devices.

    Parameters
    ----------
    kind : {"hiprtc", "clang"}
        A library, or a program that takes clang's options, as hipcc does.
    path : str
    """

    kind: str
    path: str

    @property
    def identity(self) -> str:
        """Return what changes when another version is installed."""
        file = Path(self.path).resolve()
        try:
            facts = file.stat()
        except OSError:
            return str(file)
        return f"{file} {facts.st_size} {facts.st_mtime_ns}"


def compilers() -> list[Compiler]:
    """Return the compilers of this machine, the preferred one first."""
    driver = driver_path()
    beside = [Path(driver).parent] if "/" in driver else []
    library = _file("libhiprtc.so", [*beside, *_package_folders(), *_FOLDERS])
    found = [Compiler("hiprtc", library)] if library else []
    for name in ("hipcc", *_CLANGS):
        path = shutil.which(name) or shutil.which(name, path=":".join(_PROGRAMS))
        if path and all(Path(path).resolve() != Path(other.path).resolve() for other in found):
            found.append(Compiler("clang", path))
    return found


def driver_path() -> str:
    """Return which HIP runtime to open; empty where there is none.

    Two of them in a process know nothing of one another's memory and streams: so it is the one that is loaded (torch
    brings its own), else the one that torch would load.
    """
    name = "libamdhip64.so"
    found = current().rocm_driver or _loaded(name) or _file(name, [*_package_folders(), *_FOLDERS])
    if found:
        return found
    for candidate in (name, *(f"{name}.{version}" for version in _VERSIONS)):
        with contextlib.suppress(OSError):  # wherever else the loader looks
            ctypes.CDLL(candidate)
            return _loaded(name) or candidate
    return ""


def native_path(warp_width: int) -> Path:
    """Return the place of this package's library for devices whose warps have 64 or 32 threads."""
    return Path(__file__).with_name(f"_native{warp_width}.so")


def _file(name: str, folders: list[Path]) -> str:
    names = (name, *(f"{name}.{version}" for version in _VERSIONS))
    return next((str(folder / n) for folder in folders for n in names if (folder / n).is_file()), "")


def _loaded(name: str) -> str:
    """Return the path of a library that this process has loaded; empty if it has not."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if name in line)
    return next((path for path in paths if Path(path).name.startswith(name)), "")


def _package_folders() -> list[Path]:
    folders = []
    for package, _, rest in (folder.partition("/") for folder in _PACKAGES):
        with contextlib.suppress(ValueError):  # a module without a spec
            spec = importlib.util.find_spec(package)  # imports nothing
            folders += [Path(place) / rest for place in (spec.submodule_search_locations or ())] if spec else []
    return folders
