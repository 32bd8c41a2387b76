"""Builds what the backend needs on this machine, in the checkout: its host library, and the image of this GPU alone.

Where there is no compiler, what was built before is used as it is. Whatever a backend compiles on first use is then
compiled once, here, before many processes want it at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np

from bench.device_check.child import Given
from bench.device_check.places import ROOT
from bench.device_check.recorder import Recorder, same

_CALLS: dict[str, tuple[tuple[str, ...], ...]] = {"cuda": ((), ("--image",)), "rocm": ((),)}
"""How ``build_native.py`` of a backend is called, each time with the folder of the package behind it."""


def run(given: Given, recorder: Recorder) -> None:
    """Build, and use the device once."""
    module = given.backend.partition(":")[0]
    name = module.removeprefix("kvcore_").partition(".")[0]
    if name in _CALLS:
        recorder.check("host library and image", partial(_built, name))
    recorder.check("the device does an op", partial(_used, given))


def _built(name: str) -> str:
    script, package = ROOT / "backends" / name / "build_native.py", ROOT / "backends" / name / "src" / f"kvcore_{name}"
    if not script.is_file():
        raise FileNotFoundError(f"{script.relative_to(ROOT)} is not there")
    if shutil.which("g++") is None and "CXX" not in os.environ:
        there = sorted(path.name for path in package.iterdir() if path.suffix in {".so", ".fatbin"})
        if not there:
            raise FileNotFoundError("there is no C++ compiler here, and nothing was built before")
        return f"no C++ compiler here; as built before: {', '.join(there)}"
    environ = dict(os.environ)
    if name == "cuda" and "KVCORE_CUDA_ARCHS" not in environ and shutil.which("nvidia-smi") is not None:
        environ["KVCORE_CUDA_ARCHS"] = _cuda_arch()  # all of them take a minute
    for options in _CALLS[name]:
        command = [sys.executable, str(script), *options, str(package)]
        same(subprocess.run(command, env=environ, check=False).returncode, 0, f"exit status of {' '.join(command)}")
    return f"compute capability {environ.get('KVCORE_CUDA_ARCHS', 'all')}" if name == "cuda" else ""


def _cuda_arch() -> str:
    """Return the compute capability of the first GPU as ``KVCORE_CUDA_ARCHS`` takes it: ``"90"``."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    capability = done.stdout.split()
    if not capability or not re.fullmatch(r"\d+\.\d+", capability[0]):
        raise ValueError(f"nvidia-smi names no compute capability: {done.stdout!r}")
    return capability[0].replace(".", "")


def _used(given: Given) -> str:
    from kvcore.ops import fetch, send

    backend = given.open()
    pattern = np.arange(1000, dtype=np.int64)
    there = send(backend, pattern)
    wanted = int(backend.digest([there.view(np.uint8)]).shape[0])
    same(wanted, 1, "digests")
    same(fetch(backend, there).tobytes() == pattern.tobytes(), True, "a copy to the device and back")
    return f"{backend.name} on {backend.runtime.arch}"
