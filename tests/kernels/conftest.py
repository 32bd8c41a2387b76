from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore import get_include

VENDOR = Path(__file__).parent / "vendor"


@pytest.fixture(scope="session")
def numeric(tmp_path_factory):
    """What kernels compute with, compiled for the host: `numeric.cpp`, under the sanitizer of undefined behaviour."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    library = tmp_path_factory.mktemp("kernels") / "numeric.so"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"),
            *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
            *("-I", get_include(), str(Path(__file__).parent / "numeric.cpp"), "-o", str(library)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))


# --- the vendor that is not part of kvcore


class Machine:
    """The switches of the vendor's machine."""

    def __init__(self, dll):
        for name in ("refuse_allocation", "fail_kernel", "limit"):
            getattr(dll, f"fake_{name}").argtypes = (ctypes.c_int64,)
        for name in ("in_use", "registered", "imported", "streams"):
            getattr(dll, f"fake_{name}").restype = ctypes.c_int64
        dll.fake_stream.restype, dll.fake_stream.argtypes = ctypes.c_uint64, (ctypes.c_int32,)
        dll.fake_waiting.restype, dll.fake_waiting.argtypes = ctypes.c_uint64, (ctypes.c_uint64,)
        self._dll = dll

    def __getattr__(self, name):
        return getattr(self._dll, f"fake_{name}")


@pytest.fixture(scope="session")
def opened():
    sys.path.insert(0, str(VENDOR))
    import fakevendor

    from kvcore.plugins.discover import Candidate

    spec = fakevendor.backend()
    candidate = Candidate("fake", "usable", "it is there", spec, spec.probe(), "")
    yield kvcore.open_backend("fake", device="fake", fallback="error", found=[candidate])
    sys.path.remove(str(VENDOR))


@pytest.fixture(scope="session")
def machine(opened):
    return Machine(opened.runtime.library.dll)


@pytest.fixture
def fake(opened, machine):
    yield opened
    opened.runtime.torch = None
    machine.repair()
