"""The kernels for a device: those of the package, or compiled by NVRTC on first use and kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore.kernels.images import device_source, headers_hash, kept
from kvcore.kernels.rtc import STANDARD_HEADERS, RuntimeCompiler
from kvcore_cuda.installed import Fatbin, Nvrtc

__all__ = ["compile_with", "images"]

# The same bytes everywhere: no fused multiply-add. NVRTC knows memcpy, and by no other name.
_OPTIONS = ("--std=c++17", "--fmad=false", "-DKVCORE_DEVICE_ONLY", "-D__builtin_memcpy=memcpy")


def images(
    kernels: str,
    arch: str,
    driver_version: int,
    headers: str,
    *,
    fatbin: Fatbin | None,
    nvrtcs: list[Nvrtc],
    folder: Path | None = None,
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Return where kernels for a device may come from, the best first: a name, and what makes the image.

    Parameters
    ----------
    kernels : str
        What ``kvcore_kernel_list()`` of the library returns.
    arch : str
        ``"sm_90"``. What follows the number is not the compiler's.
    driver_version : int
        13000 is CUDA 13.0. A compiler of a later major version makes nothing that the driver takes.
    headers : str
        `headers_hash` of those that the library was built from.
    fatbin : Fatbin, optional
        What the package holds.
    nvrtcs : list of Nvrtc
    folder : Path, optional
        Where compiled kernels are kept; default the user's cache.

    Raises
    ------
    BackendLoadError
        By what makes an image: it cannot be had, and why.
    """
    if fatbin is not None:
        yield "the package's kernels", lambda: _packaged(fatbin, arch, headers)
    target = re.match(r"sm_\d+", arch)
    for nvrtc in nvrtcs:

        def make(nvrtc: Nvrtc = nvrtc) -> bytes:
            if nvrtc.major > driver_version // 1000:
                raise BackendLoadError(f"it is of CUDA {nvrtc.major}, and the driver of {driver_version // 1000}")
            if headers != headers_hash():
                raise BackendLoadError(
                    "the kernels of the installed kvcore are not those that kvcore-cuda was built from; install both "
                    "of one release"
                )
            return compile_with(nvrtc.path, device_source(kernels), target[0] if target else arch, folder)

        yield nvrtc.path, make


def _packaged(fatbin: Fatbin, arch: str, headers: str) -> bytes:
    if not fatbin.has(arch):
        raise BackendLoadError(f"they are for {' '.join(fatbin.archs)}")
    if fatbin.headers != headers:
        raise BackendLoadError("they are of other sources than the library; build them again")
    return fatbin.path.read_bytes()


def compile_with(library: str, source: str, arch: str, folder: Path | None = None) -> bytes:
    """Return the machine code that an NVRTC makes of a source, or has made of it before.

    Raises
    ------
    BackendLoadError
        The library does not load, or refuses; the message has the first lines of its log.
    """
    facts = os.stat(library) if os.path.isfile(library) else None
    identity = f"{library} {facts.st_size} {facts.st_mtime_ns}" if facts else library
    options = (f"--gpu-architecture={arch}", *_OPTIONS)

    def make(path: Path) -> None:
        compiler = RuntimeCompiler(library, "nvrtc")
        path.write_bytes(compiler.compile(source, [*options, f"-I{get_include()}"], STANDARD_HEADERS))

    return kept(f"cuda-{arch}.cubin", [source, *options, identity], make, folder).read_bytes()
