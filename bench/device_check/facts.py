"""What the machine is: device, driver, packages, and which implementation is bound for each op."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.device_check.child import Given
from bench.device_check.recorder import Recorder, same

_PACKAGES = ("torch", "triton", "numpy", "ml_dtypes", "hypothesis", "pytest", "pluggy")
_TOOLS = {
    "gpu": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap,pcie.link.gen.max", "--format=csv"],
    "rocm": ["rocminfo"],
    "nvcc": ["nvcc", "--version"],
    "compiler": ["g++", "--version"],
}
_LINES = 4


def run(given: Given, recorder: Recorder) -> None:
    """Write down facts; fail if the backend cannot be opened, or binds fewer ops than there are."""
    recorder.fact("python", platform.python_version())
    recorder.fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    recorder.fact("processor", _processor())
    for name in _PACKAGES:
        recorder.fact(name, _version(name))
    for name, command in _TOOLS.items():
        recorder.fact(name, _said(command))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    recorder.fact("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B")
    recorder.fact("2 MiB pages free", _read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"))
    recorder.fact("NUMA nodes", _read("/sys/devices/system/node/online"))
    recorder.check("the backend opens and has every op", lambda: _opened(given, recorder))


def _opened(given: Given, recorder: Recorder) -> str:
    from kvcore.hookspecs import op_names

    backend = given.open()
    verdict = next((v for v in backend.explain().verdicts if v.taken), None)
    recorder.fact("probe", "" if verdict is None else verdict.reason)  # with what does not load, and why
    probed = backend.spec.probe()
    for name, value in probed.details.items():
        recorder.fact(f"probe: {name}", value)
    recorder.fact("kernels", ", ".join(backend.spec.implementations))
    recorder.fact("architecture", backend.runtime.arch)
    bound = {op: binding.implementation for op, binding in backend.bindings.items()}
    recorder.fact("implementations", ", ".join(f"{op}={name}" for op, name in bound.items()))
    same(sorted(bound), sorted(op_names()), "ops that are bound")
    return f"{backend.name} on {backend.runtime.arch}, {len(bound)} ops"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _said(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not there"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer: {error}"
    return " / ".join(done.stdout.strip().splitlines()[:_LINES])


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor()}, {cores} cores"


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return "unknown"
