"""What this package holds and what there is of CUDA on this machine. Files are looked up, nothing is run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from kvcore.settings import current

__all__ = ["DRIVER", "Fatbin", "Nvrtc", "driver_name", "fatbin", "native_path", "nvrtcs"]

DRIVER = "libcuda.so.1"
_PACKAGE = Path(__file__).parent
_EMBEDDED = frozenset({72, 87, 101, 110})
"""Architectures of embedded devices, which run machine code of their own only."""
_MAJORS = (13, 12, 11)
"""Of CUDA, as the names of its libraries have them."""


class Fatbin(NamedTuple):
    """The kernels that were compiled when this package was built.

    Parameters
    ----------
    path : Path
    archs : tuple of str
        ``sm_90``: machine code for it and later ones of its family (9.x); ``compute_120``: a text for it and all later.
    compiler : str
    headers : str
        `kvcore.kernels.images.headers_hash` of its sources.
    """

    path: Path
    archs: tuple[str, ...]
    compiler: str
    headers: str

    def has(self, arch: str) -> bool:
        """Tell whether there is code for an architecture, to be run as it is or translated by the driver."""
        number = _number(arch)
        if number is None:
            return False
        for held in self.archs:
            family, of = held.split("_")
            same_family = int(of) // 10 == number // 10 and (number not in _EMBEDDED or int(of) == number)
            if int(of) <= number and (family == "compute" or same_family):
                return True
        return False


class Nvrtc(NamedTuple):
    """A library of the run-time compiler.

    Parameters
    ----------
    path : str
    major : int
        Of its version of CUDA.
    """

    path: str
    major: int


def fatbin() -> Fatbin | None:
    """Return what the package holds, None where it was built without nvcc."""
    path = _PACKAGE / "kernels.fatbin"
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        return Fatbin(path, tuple(facts["archs"]), facts["compiler"], facts["headers"]) if path.is_file() else None
    except (OSError, ValueError, KeyError):
        return None


def native_path() -> Path:
    """Return the place of this package's library."""
    return _PACKAGE / "_native.so"


def driver_name() -> str:
    """Return the driver library to open."""
    return current().cuda_driver or DRIVER


def nvrtcs() -> list[Nvrtc]:
    """Return the run-time compilers of this machine: those of Python packages, of CUDA's toolkit, and the loader's."""
    found: dict[str, Nvrtc] = {}
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    homes += [os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))] if nvcc else []
    folders = [*_package_folders(), *(Path(home, "lib64") for home in homes if home)]
    for major in _MAJORS:
        name = f"libnvrtc.so.{major}" + (".2" if major == 11 else "")  # all of CUDA 11 since 11.2
        paths = [folder / name for folder in folders]
        loaded = _loader_path(name)
        for path in [*(str(p) for p in paths if p.is_file()), *([loaded] if loaded else [])]:
            found.setdefault(os.path.realpath(path), Nvrtc(path, major))
    return list(found.values())


def _number(arch: str) -> int | None:
    """Return 90 for ``sm_90``, whatever follows."""
    found = re.match(r"sm_(\d+)", arch)
    return int(found[1]) if found else None


def _package_folders() -> list[Path]:
    with contextlib.suppress(ValueError):  # a module without a spec
        spec = importlib.util.find_spec("nvidia")  # a namespace package: imports nothing
        places = spec.submodule_search_locations if spec is not None else None
        return [Path(place, name, "lib") for place in places or () for name in ("cu13", "cuda_nvrtc")]
    return []


def _loader_path(name: str) -> str:
    """Return the path of a library that the loader would find, without loading it."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, name).is_file():
            return str(Path(folder, name))
    with contextlib.suppress(OSError):  # the loader's index: paths, each with a null byte behind it
        found = re.search(rb"/[\x21-\x7e]*/" + re.escape(name.encode()) + rb"\0", Path("/etc/ld.so.cache").read_bytes())
        if found:
            return found[0][:-1].decode()
    return ""
