"""Builds ``kvcore_cpu/_native.so`` with a C++17 compiler and nothing else.

``python build_native.py OUTPUT.so [COMPILER OPTION ...]`` builds it by itself; options such as ``-g`` or
``-fsanitize=address`` go to every unit. ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` mean what they mean everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build"]

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src" / "kvcore_cpu" / "csrc"

# The same bytes everywhere: no fused multiply-add. What the two -fno-... give up (errno, traps) does not change values.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-ffunction-sections", "-fdata-sections"),
)
AVX2 = ("-mavx2", "-mf16c", "-mbmi2")
# What is used of the C++ runtime goes in, so that the library needs libc alone.
LINK = (
    *("-shared", "-pthread", "-static-libstdc++", "-static-libgcc"),
    *("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,defs"),
)


def build(output: Path, extra: Sequence[str] = ()) -> None:
    """Compile the sources, and link them into a shared library.

    Parameters
    ----------
    output : Path
    extra : sequence of str
        More options for every unit and the linker.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refused; it has said why.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, f"-I{_include()}", *shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    # The scalar unit comes before others: see isa.hpp.
    units: dict[str, tuple[str, ...]] = {"support": (), "isa_scalar": ()}
    target = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    if target.startswith("x86_64"):
        units["isa_avx2"] = AVX2
        flags.append("-DKVCORE_HAVE_AVX2=1")
    units["native"] = ()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = [f"{folder}/{unit}.o" for unit in units]
        for (unit, own), to in zip(units.items(), objects, strict=True):
            _run([*compiler, *flags, *own, "-c", str(SOURCES / f"{unit}.cpp"), "-o", to])
        library = f"{folder}/{output.name}"
        _run([*compiler, *objects, *LINK, *shlex.split(os.environ.get("LDFLAGS", "")), *extra, "-o", library])
        # A new file in the place of the old one: a process that has the old one loaded keeps it.
        temporary = output.with_name(f".{output.name}.{os.getpid()}")
        temporary.write_bytes(Path(library).read_bytes())
        temporary.chmod(0o755)
        temporary.replace(output)


def _include() -> Path:
    """Return the folder of the C ABI: the checkout's, or that of an installed kvcore."""
    checkout = HERE.parents[1] / "kvcore" / "kernels" / "include"
    if checkout.is_dir():
        return checkout
    found = importlib.util.find_spec("kvcore")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("building kvcore-cpu needs the headers of kvcore: install kvcore, or build in a checkout")
    return Path(next(iter(found.submodule_search_locations))) / "kernels" / "include"


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
