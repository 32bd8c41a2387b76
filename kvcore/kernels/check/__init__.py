"""Whether every kernel compiles for every GPU, asked of the compilers: ``python -m kvcore.kernels.check``.

What is compiled is the very text that backends make their device code of (`kvcore.kernels.images`). The launchers of
all ops are compiled with a queue that runs nothing, which lists whatever they launch, so nothing is listed by hand.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvcore.errors import KVCoreError
from kvcore.hookspecs import op_names
from kvcore.kernels import get_include
from kvcore.kernels.check.reports import Kernel, first_errors, read_clang, read_nvcc, read_ocloc, read_ptx
from kvcore.kernels.check.targets import PREFIX, TARGETS, Target
from kvcore.kernels.images import device_source

__all__ = ["TARGETS", "Kernel", "Outcome", "Target", "compile_for", "compiled_ops"]

_FOLDER = Path(__file__).parent
_PROGRAM = ("g++", "-std=c++17", "-O1", "-w")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of compiling for one target.

    Parameters
    ----------
    target : Target
    status : {"ok", "failed", "skipped"}
    reason : str
        Why it failed or was skipped.
    kernels : tuple of Kernel
        By name.
    """

    target: Target
    status: str
    reason: str = ""
    kernels: tuple[Kernel, ...] = field(default=())


def compile_for(target: Target, timeout_s: float = 1200) -> Outcome:
    """Compile every kernel for a target."""
    missing = target.missing()
    if missing is not None:
        return Outcome(target, "skipped", missing)
    try:
        listed = _launched.get(timeout_s).kernels
        found = _sycl(target, listed, timeout_s) if target.sub_group else _gpu(target, listed, timeout_s)
    except (_Failed, OSError, subprocess.TimeoutExpired) as error:
        return Outcome(target, "failed", str(error))
    structs = _structs(listed)
    compiled = {kernel.name: kernel for kernel in found}
    absent = sorted(structs.keys() - compiled.keys())
    if absent:
        return Outcome(
            target, "failed", f"{target.arch} compiled, but these kernels are not in it: {', '.join(absent)}"
        )
    named = (
        Kernel(structs[name].replace("kvcore::", ""), compiled[name].registers, compiled[name].spills)
        for name in structs
    )
    return Outcome(target, "ok", kernels=tuple(sorted(named, key=lambda k: k.name)))


def compiled_ops(timeout_s: float = 1200) -> tuple[str, ...]:
    """Return the ops that there are launchers of: whose kernels are all compiled, therefore.

    Raises
    ------
    KVCoreError
        The launchers themselves do not compile.
    """
    try:
        there = _launched.get(timeout_s).ops
    except (_Failed, OSError, subprocess.TimeoutExpired) as error:
        raise KVCoreError(f"the launchers do not compile: {error}") from error
    return tuple(op for op in op_names() if op in there)


class _Failed(Exception):
    """A compiler said no."""


def _run(command: Sequence[str], timeout_s: float, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, env=dict(environment or os.environ)
    )
    if done.returncode != 0:
        raise _Failed(f"{' '.join(command[:40])}\n{first_errors(done.stderr or done.stdout)}")
    return done.stdout + done.stderr


class _Launched(NamedTuple):
    """The ops that there are launchers of, and the kernels that they launch: lines "name<TAB>type"."""

    ops: frozenset[str]
    kernels: str


class _Launchers:
    """The launchers, compiled for the host to say what they launch: once for each folder of headers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, _Launched] = {}

    def get(self, timeout_s: float) -> _Launched:
        include = get_include()
        with self._lock:
            if include not in self._made:
                with tempfile.TemporaryDirectory(prefix="kvcore-check-") as scratch:
                    program = str(Path(scratch) / "list")
                    _run([*_PROGRAM, "-I", include, str(_FOLDER / "list.cpp"), "-o", program], timeout_s, Path(scratch))
                    ops, _, kernels = _run([program], timeout_s, Path(scratch)).partition("\n\n")
                self._made[include] = _Launched(frozenset(ops.split()), kernels)
            return self._made[include]


_launched = _Launchers()


def _structs(listed: str) -> dict[str, str]:
    """Return the struct of each kernel, by its name."""
    return dict(line.split("\t", 1) for line in listed.splitlines())


def _gpu(target: Target, listed: str, timeout_s: float) -> Iterable[Kernel]:
    compiler = str(target.compiler())
    with tempfile.TemporaryDirectory(prefix="kvcore-check-") as scratch:
        source, made = Path(scratch) / "kernels.cu", Path(scratch) / "kernels"
        source.write_text(device_source(listed), "utf-8")
        command = [compiler, *target.options, "-DKVCORE_DEVICE_ONLY", "-I", get_include(), str(source), "-o", str(made)]
        said = _run(command, timeout_s, Path(scratch)).splitlines()
        if "-ptx" in target.options:
            return list(read_ptx(made.read_text("utf-8").splitlines()))
        return list(read_nvcc(said) if Path(compiler).name == "nvcc" else read_clang(said))


class _Spirv:
    """What the run-time compiler makes for a size of sub-group: made once, for all targets that begin with it."""

    def __init__(self, sub_group: int) -> None:
        self.sub_group = sub_group
        self._lock = threading.Lock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._folder = Path()
        self._failure: Exception | None = None

    def make(self, listed: str, timeout_s: float) -> Path:
        """Return the folder that the files ``*.spv`` are in."""
        with self._lock:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="kvcore-check-")
                self._folder = Path(self._scratch.name)
                try:
                    self._compile(listed, timeout_s)
                except (_Failed, OSError, subprocess.TimeoutExpired) as error:
                    self._failure = error
            if self._failure is not None:
                raise _Failed(str(self._failure))
            return self._folder

    def _compile(self, listed: str, timeout_s: float) -> None:
        text, program, lib = self._folder / "kernels.cpp", self._folder / "compiler", PREFIX / "lib"
        text.write_text(device_source(listed, context="ctx_sycl.hpp", macro="KVCORE_SYCL_KERNEL"), "utf-8")
        link = ("-I", str(PREFIX / "include"), "-L", str(lib), "-lsycl", f"-Wl,-rpath,{lib}")
        _run([*_PROGRAM, str(_FOLDER / "sycl.cpp"), "-o", str(program), *link], timeout_s, self._folder)
        environment = os.environ | {
            "OCL_ICD_FILENAMES": str(lib / "libintelocl.so"),
            "SYCL_DUMP_IMAGES": "1",  # into the working directory
            "SYCL_CACHE_PERSISTENT": "0",  # what comes out of a cache is not dumped
            # The processor's own code, which is made of the SPIR-V after that and never run, need not be good.
            "SYCL_PROGRAM_COMPILE_OPTIONS": "-cl-opt-disable",
        }
        command = [str(program), str(text), get_include(), str(self.sub_group), *_structs(listed)]
        _run(command, timeout_s, self._folder, environment)


_spirv = {width: _Spirv(width) for width in {target.sub_group for target in TARGETS} - {0}}


def _sycl(target: Target, listed: str, timeout_s: float) -> Iterable[Kernel]:
    folder = _spirv[target.sub_group].make(listed, timeout_s)
    names = list(_structs(listed))
    if not target.device:
        return [Kernel(name, None, None) for name in names]
    images = sorted(folder.glob("*.spv"))
    if not images:
        raise _Failed(f"the SYCL run-time compiler left no SPIR-V for {target.arch} in {folder}")
    said = ""
    for image in images:
        output = ("-output", f"{image.stem}-{target.device}", "-output_no_suffix", "-out_dir", str(folder / "made"))
        command = [str(target.compiler()), "compile", "-spirv_input", "-file", image.name, "-device", target.device]
        said += _run([*command, *output], timeout_s, folder)
    return list(read_ocloc(said.splitlines(), names))
