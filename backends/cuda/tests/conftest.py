"""The backend over a simulated driver, which is the only one that this process opens."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore.settings import VARIABLES
from kvcore_cuda import device, installed
from kvcore_cuda.installed import Fatbin

FATBIN_MAGIC = 0xBA55ED50


@pytest.fixture(scope="session")
def simulated():
    """Return what builds the simulated driver: a function of the version of its batches."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build a simulated driver")
    if not installed.native_path().is_file():
        pytest.fail(f"{installed.native_path()} is not there; `make dev` builds it")
    path = Path(__file__).parent / "simulated" / "build.py"
    spec = importlib.util.spec_from_file_location("simulated_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.driver


@pytest.fixture(scope="session")
def fatbin(tmp_path_factory):
    """Return an image that the simulated driver takes, as if this package had been built with it."""
    library = ctypes.CDLL(str(installed.native_path()))
    library.kvcore_cuda_headers.restype = ctypes.c_char_p
    path = tmp_path_factory.mktemp("image") / "kernels.fatbin"
    path.write_bytes(struct.pack("<I60x", FATBIN_MAGIC))
    return Fatbin(path, ("sm_90",), "a test", library.kvcore_cuda_headers().decode())


class Driver:
    """The simulated driver that is open: lets calls fail, and tells what was called."""

    def __init__(self, path):
        self.path = path
        self.dll = ctypes.CDLL(str(path))  # the same one that the backend has
        self.dll.simulated_count.restype = ctypes.c_int64

    def set(self, what, value):
        self.dll.simulated_set(what.encode(), ctypes.c_int64(value))

    def count(self, what):
        return self.dll.simulated_count(what.encode())

    def context(self):
        current = ctypes.c_void_p()
        assert self.dll.cuCtxGetCurrent(ctypes.byref(current)) == 0
        return current.value


@pytest.fixture(scope="session")
def opened(simulated, fatbin):
    """Return the driver, with two devices, and a backend over it."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable.name, raising=False)
        patch.setenv("SIMULATED_CUDA_DEVICES", "2")
        patch.setenv("KVCORE_CUDA_DRIVER", str(simulated()))
        patch.setattr(installed, "fatbin", lambda: fatbin)
        device.device.cache_clear()
        yield Driver(simulated()), kvcore.open_backend("cuda", fallback="error")


@pytest.fixture
def driver(opened):
    """Return the simulated driver; whatever a test lets fail works again after it."""
    yield opened[0]
    for what in ("no_memory", "fail_launch", "fail_kernel", "refuse_ipc", "mend"):
        opened[0].set(what, 0)


@pytest.fixture
def cuda(opened):
    """Return the backend over the simulated driver."""
    return opened[1]


@pytest.fixture
def in_a_process(simulated, fatbin):
    """Return what runs Python with the backend over a driver of its own, and gives what it prints."""
    prelude = f"""
import ctypes, os, sys, numpy as np, kvcore
from kvcore_cuda import device, installed
from kvcore_cuda.installed import Fatbin
from pathlib import Path
found = Fatbin(Path({str(fatbin.path)!r}), {fatbin.archs!r}, "a test", {fatbin.headers!r})
installed.fatbin = lambda: found
"""

    def run(code, *, driver=None, **environ):
        chosen = {name: value for name, value in os.environ.items() if not name.startswith(("KVCORE_", "SIMULATED_"))}
        chosen["KVCORE_CUDA_DRIVER"] = str(simulated() if driver is None else driver)
        command = [sys.executable, "-c", prelude + code]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**chosen, **environ}, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
