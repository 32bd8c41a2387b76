"""What is compiled on first use: the host library, and the kernels.

The library is made by a plain C++ compiler against the headers of the package intel-sycl-rt; the kernels by SYCL's
run-time compiler, out of text. The one is kept in the user's cache, the other in SYCL's own, told to lie beside it.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore.kernels.images import cache_folder, device_source, kept
from kvcore_xpu.probe import COMPILER, OPENCL, SYCL

__all__ = ["image", "library", "prepare"]

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off", "-w")


def library(kind: str, width: int, folder: Path | None = None) -> Path:
    """Return the host library, compiled if these sources have not been compiled before.

    Parameters
    ----------
    kind : {"gpu", "cpu"}
        Of its devices. Each has a file of its own: what a library has opened is for the whole process.
    width : {16, 32, 64}
        Lanes of a sub-group.
    folder : Path, optional
        Where to keep it; default the user's cache.

    Raises
    ------
    BackendLoadError
        The compiler refused, and the message has its first lines; or something is not installed.
    """
    headers = _installed(SYCL, "include/sycl/sycl.hpp").parents[1]
    libraries = _installed(SYCL, "libsycl.so").parent
    flags = [*_FLAGS, f"-DKVCORE_WARP_WIDTH={width}", "-isystem", str(headers)]
    link = ["-L", str(libraries), "-lsycl", f"-Wl,-rpath,{libraries}"]
    sources = [path.read_bytes() for path in sorted(_SOURCES.iterdir())]

    def make(path: Path) -> None:
        include = ["-I", get_include()]
        _run([COMPILER, *flags, *include, str(_SOURCES / "native.cpp"), "-o", str(path), *link])

    version = importlib.metadata.version(SYCL)
    key: list[str | bytes] = [kind, version, *flags, *link, _run([COMPILER, "--version"]), *sources]
    return kept(f"xpu-{kind}-{width}.so", key, make, folder)


def image(kernels: str, width: int, kind: str) -> bytes:
    """Return the kernels as the driver takes them: a comment with the compiler's options, and the text."""
    options = [f"-I{get_include()}", f"-DKVCORE_WARP_WIDTH={width}", "-DKVCORE_DEVICE_ONLY", "-ffp-contract=off"]
    if kind == "cpu":  # whose compiler, with sub-groups in vector registers, takes minutes over unrolled loops
        options.append("-fno-unroll-loops")
    text = device_source(kernels, context="ctx_sycl.hpp", macro="KVCORE_SYCL_KERNEL")
    return "\n".join(["\t".join(["//", *options]), text]).encode()


def prepare(kind: str) -> None:
    """Set what SYCL reads from the environment when it is loaded, except for what the user has set.

    Raises
    ------
    BackendLoadError
        What runs the kernels on the processor is not installed.
    """
    if not {"SYCL_CACHE_PERSISTENT", "SYCL_CACHE_DIR"} & os.environ.keys():
        os.environ["SYCL_CACHE_PERSISTENT"] = "1"
        os.environ["SYCL_CACHE_DIR"] = str(cache_folder() / "sycl")
    if kind == "cpu" and "OCL_ICD_FILENAMES" not in os.environ:
        # The package's own list of OpenCL's devices has a path that is not filled in.
        os.environ["OCL_ICD_FILENAMES"] = str(_installed(OPENCL, "libintelocl.so"))


def _installed(distribution: str, name: str) -> Path:
    """Return where a file of an installed distribution lies."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendLoadError(f"{distribution} is not installed; pip install {distribution}") from error
    for file in found.files or ():
        if f"/{file.as_posix()}".endswith(f"/{name}"):
            return Path(str(found.locate_file(file))).resolve()
    raise BackendLoadError(f"{distribution} {found.version} has no {name}; reinstall it")


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except OSError as error:
        raise BackendLoadError(f"{command[0]} cannot be run: {error}; install a C++17 compiler") from error
    except subprocess.CalledProcessError as error:
        first = "\n".join(error.stderr.decode("utf-8", "replace").splitlines()[:20])
        raise BackendLoadError(f"{' '.join(command)} failed:\n{first}") from error
