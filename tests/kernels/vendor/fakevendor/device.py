"""The vendor's library, compiled on first use."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from kvcore import get_include
from kvcore.kernels.device_runtime import DeviceInfo, Tuning, VendorLibrary
from kvcore.kernels.images import kept

_SOURCES = Path(__file__).parent / "csrc"
_COMMAND = (
    *("g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror"),
)


def build(options: tuple[str, ...] = ()) -> Path:
    """Compile the library; options are more for the compiler."""
    command = [*_COMMAND, *options, "-I", get_include(), str(_SOURCES / "native.cpp"), "-o"]
    sources = [path.read_bytes() for path in sorted(_SOURCES.iterdir())]
    return kept(
        "fakevendor.so", [*command, *sources], lambda path: subprocess.run([*command, str(path)], check=True) and None
    )


def image(library: VendorLibrary, info: DeviceInfo) -> bytes:
    """Return the device code: the names of the kernels."""
    names = [line.partition("\t")[0] for line in library.kernels.splitlines()]
    return "\n".join(["fake", *names]).encode()


@functools.cache
def device() -> VendorLibrary:
    """Return the library of this process."""
    options = tuple(os.environ.get("FAKEVENDOR_OPTIONS", "").split())
    return VendorLibrary(build(options), "fake", image=image, tuning=lambda _: Tuning(4096, 4))
