"""Builds ``kvcore_cuda/_native.so`` with a C++17 compiler, and with nvcc, where it is, ``kernels.fatbin`` beside it.

``python build_native.py FOLDER [COMPILER OPTION ...]`` builds the library by itself; options such as ``-g`` go to the
C++ compiler. ``python build_native.py --image FOLDER`` builds the image for the library that is there.
``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` mean what they mean everywhere, ``NVCC`` names another nvcc.
``KVCORE_CUDA_ARCHS`` chooses architectures: ``90``, ``80,90``, or ``none`` for no image: kernels are then compiled by
NVRTC on first use.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
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
    from kvcore.kernels.images import device_source, headers_hash
except ImportError as error:
    raise SystemExit(
        f"building kvcore-cuda needs the headers of kvcore: install kvcore, or build in a checkout ({error})"
    ) from error

__all__ = ["build", "build_image"]

SOURCES = HERE / "src" / "kvcore_cuda" / "csrc"
LIBRARY, IMAGE, FACTS = "_native.so", "kernels.fatbin", "kernels.json"

FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-ffunction-sections", "-fdata-sections"),
)
# What is used of the C++ runtime goes in, so that the library needs libc alone. The driver is opened at run time.
LINK = (
    *("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--as-needed"),
    *("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,defs"),
)
# The same bytes everywhere: no fused multiply-add.
NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-DKVCORE_DEVICE_ONLY", "--threads", "0")
ARCHS = ("75", "80", "86", "89", "90", "100", "120")
"""What an image is for, of that which the compiler knows; PTX of the last for what comes after it."""


def build(folder: Path, extra: Sequence[str] = ()) -> None:
    """Compile and link the library.

    Parameters
    ----------
    folder : Path
    extra : sequence of str
        More options for the compiler.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refused; it has said why.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, f"-I{get_include()}", f'-DKVCORE_HEADERS="{headers_hash()}"']
    flags += [*shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    link = [*LINK, *shlex.split(os.environ.get("LDFLAGS", "")), "-ldl"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / LIBRARY
        subprocess.run([*compiler, *flags, str(SOURCES / "native.cpp"), *link, "-o", str(made)], check=True)
        _put(made, folder / LIBRARY)


def build_image(folder: Path) -> None:
    """Compile the kernels that the library in a folder launches, and note what for; without nvcc say so.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refused; it has said why.
    SystemExit
        ``KVCORE_CUDA_ARCHS`` names an architecture that the compiler does not know; or the library is of other headers.
    """
    for name in (IMAGE, FACTS):
        (folder / name).unlink(missing_ok=True)
    wanted = os.environ.get("KVCORE_CUDA_ARCHS", "").strip()
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    if wanted == "none" or nvcc is None:
        why = "none are wanted" if wanted == "none" else "there is no nvcc"
        _say(f"no compiled kernels go in, since {why}; NVRTC compiles them on first use")
        return
    archs, headers = _archs(nvcc, wanted), headers_hash()
    library = ctypes.CDLL(str(folder / LIBRARY))
    library.kvcore_kernel_list.restype = library.kvcore_cuda_headers.restype = ctypes.c_char_p
    if library.kvcore_cuda_headers().decode() != headers:
        raise SystemExit(f"{folder / LIBRARY} was built from other headers; build it again first")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "kernels.cu", Path(scratch) / IMAGE
        source.write_text(device_source(library.kvcore_kernel_list().decode()))
        _say(f"{nvcc} compiles kernels for {', '.join(archs)} (KVCORE_CUDA_ARCHS chooses)")
        flags = [*NVCC_FLAGS, *_compression(nvcc), f"-I{get_include()}"]
        command = [nvcc, "-fatbin", *flags, *targets, str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        if headers_hash() != headers:
            raise SystemExit("the kernels were changed while they were compiled; build them again")
        _put(made, folder / IMAGE)
    facts = {
        "archs": [*(f"sm_{arch}" for arch in archs), f"compute_{archs[-1]}"],
        "compiler": _version(nvcc),
        "headers": headers,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def _archs(nvcc: str, wanted: str) -> list[str]:
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    known = [name.removeprefix("sm_") for name in listed.split()]
    if not wanted:
        return [arch for arch in ARCHS if arch in known]
    chosen = sorted({arch.strip() for arch in wanted.split(",") if arch.strip()}, key=lambda arch: (len(arch), arch))
    unknown = [arch for arch in chosen if arch not in known]
    if unknown or not chosen:
        raise SystemExit(
            f"KVCORE_CUDA_ARCHS={wanted}: {nvcc} knows {', '.join(known)}, and not {', '.join(unknown) or 'nothing'}; "
            "for example KVCORE_CUDA_ARCHS=80,90"
        )
    return chosen


def _compression(nvcc: str) -> list[str]:
    """Ask for the small form, a ninth, where every driver that the code is for can read it: since CUDA 12.4."""
    release = _version(nvcc).removeprefix("nvcc ").partition(".")[0]
    return ["--compress-mode=size"] if release.isdigit() and int(release) >= 13 else []


def _version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = [part for part in text.replace(",", " ").split() if part.startswith("V") and part[1:2].isdigit()]
    return f"nvcc {found[0][1:]}" if found else "nvcc"


def _say(text: str) -> None:
    sys.stderr.write(f"kvcore-cuda: {text}\n")


def _put(made: Path, to: Path) -> None:
    """Put a new file in the place of the old one: a process that has the old one loaded keeps it."""
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    temporary.write_bytes(made.read_bytes())
    temporary.chmod(0o755 if to.suffix == ".so" else 0o644)
    temporary.replace(to)


if __name__ == "__main__":
    if sys.argv[1] == "--image":
        build_image(Path(sys.argv[2]))
    else:
        build(Path(sys.argv[1]), sys.argv[2:])
