"""Builds ``kvcore_rocm/_native64.so`` and ``_native32.so`` with a C++17 compiler and nothing else: no ROCm is needed.

``python build_native.py FOLDER [COMPILER OPTION ...]`` builds both by itself; options such as ``-g`` go to the
compiler. ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` mean what they mean everywhere.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if (HERE.parents[1] / "kvcore" / "kernels").is_dir():  # a checkout, whose headers come before installed ones
    sys.path.insert(0, str(HERE.parents[1]))
try:
    from kvcore.kernels import get_include
    from kvcore.kernels.images import headers_hash
except ImportError as error:
    raise SystemExit(
        f"building kvcore-rocm needs the headers of kvcore: install kvcore, or build in a checkout ({error})"
    ) from error

__all__ = ["WIDTHS", "build"]

SOURCES = HERE / "src" / "kvcore_rocm" / "csrc"

WIDTHS = (64, 32)
"""Threads in a warp of the devices that a library is for."""

FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-ffunction-sections", "-fdata-sections"),
)
# What is used of the C++ runtime goes in, so that the library needs libc alone. HIP is opened at run time.
LINK = (
    *("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--as-needed"),
    *("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,defs"),
)


def build(output: Path, warp_width: int, extra: Sequence[str] = ()) -> None:
    """Compile and link the library for one width of warps.

    Parameters
    ----------
    output : Path
    warp_width : {64, 32}
    extra : sequence of str
        More options for the compiler.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refused; it has said why.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, f"-I{get_include()}", f"-DKVCORE_WARP_WIDTH={warp_width}", f'-DKVCORE_HEADERS="{headers_hash()}"']
    flags += [*shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    link = [*LINK, *shlex.split(os.environ.get("LDFLAGS", "")), "-ldl"]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / output.name
        subprocess.run([*compiler, *flags, str(SOURCES / "native.cpp"), *link, "-o", str(library)], check=True)
        # A new file in the place of the old one: a process that has the old one loaded keeps it.
        temporary = output.with_name(f".{output.name}.{os.getpid()}")
        temporary.write_bytes(library.read_bytes())
        temporary.chmod(0o755)
        temporary.replace(output)


if __name__ == "__main__":
    for width in WIDTHS:
        build(Path(sys.argv[1]) / f"_native{width}.so", width, sys.argv[2:])
