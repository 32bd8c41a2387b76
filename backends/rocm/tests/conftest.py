"""The backend over a simulated HIP runtime, which is the only one that this process opens."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore.settings import VARIABLES
from kvcore_rocm import device, installed

CODE_OBJECT = b"\x7fELF, as far as the simulated runtime looks"


@pytest.fixture(scope="session")
def simulated():
    """Return the path of the simulated runtime."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build a simulated HIP runtime")
    for width in installed.WIDTHS:
        if not installed.native_path(width).is_file():
            pytest.fail(f"{installed.native_path(width)} is not there; `make dev` builds it")
    spec = importlib.util.spec_from_file_location("simulated_hip", Path(__file__).parent / "simulated" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.driver()


class Driver:
    """The simulated runtime that is open: lets calls fail."""

    def __init__(self, path):
        self.dll = ctypes.CDLL(str(path))  # the same one that the backend has

    def set(self, what, value):
        assert self.dll.simulated_set(what.encode(), ctypes.c_int64(value)) == 0

    def last_error(self):
        return self.dll.hipPeekAtLastError()

    def device(self):
        ordinal = ctypes.c_int(-1)
        assert self.dll.hipGetDevice(ctypes.byref(ordinal)) == 0
        return ordinal.value


@pytest.fixture(scope="session")
def opened(simulated):
    """Return the runtime, with two devices, and a backend over it; no kernels are compiled for it."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable.name, raising=False)
        patch.setenv("SIMULATED_HIP_DEVICES", "2")
        patch.setenv("KVCORE_ROCM_DRIVER", str(simulated))
        patch.setattr(device, "image", lambda kernels, arch, folder: CODE_OBJECT)
        device.device.cache_clear()
        with pytest.MonkeyPatch.context() as while_probed:
            while_probed.setattr(installed, "compilers", lambda: [installed.Compiler("clang", "none")])
            backend = kvcore.open_backend("rocm", fallback="error")
        yield Driver(simulated), backend


@pytest.fixture
def driver(opened):
    """Return the simulated runtime; whatever a test lets fail works again after it."""
    yield opened[0]
    for what, value in {"no_memory": 0, "fail_launch": 0, "fail_kernel": 0, "lazy_flag": 1, "mend": 0}.items():
        opened[0].set(what, value)


@pytest.fixture
def rocm(opened):
    """Return the backend over the simulated runtime."""
    return opened[1]


@pytest.fixture
def in_a_process(simulated):
    """Return what runs Python with the backend over a runtime of its own, and gives what it prints."""
    prelude = f"""
import sys, numpy as np, kvcore
from kvcore_rocm import device, images, installed
compiled = device.image
device.image = lambda kernels, arch, folder: {CODE_OBJECT!r}
installed.compilers = lambda: [installed.Compiler("clang", "none")]
"""

    def run(code, *, driver=None, **environ):
        chosen = {name: value for name, value in os.environ.items() if not name.startswith(("KVCORE_", "SIMULATED_"))}
        chosen["KVCORE_ROCM_DRIVER"] = str(simulated if driver is None else driver)
        command = [sys.executable, "-c", prelude + code]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**chosen, **environ}, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
