from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcore import get_include


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
