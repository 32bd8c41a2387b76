"""Builds the simulated HIP runtime, and runs a command with the backend over it.

``python backends/rocm/tests/simulated/build.py pytest --pyargs kvcore_conformance --kvcore-backend rocm``, with
SIMULATED_HIP_WARP=32 for warps of 32 threads. The library is kept in the user's cache, as compiled kernels are.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from kvcore.kernels import get_include
from kvcore.kernels.images import kept

SOURCES = Path(__file__).parent


@functools.cache
def driver():
    """Return the simulated libamdhip64."""
    options = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
    command = ["g++", *options, f"-I{get_include()}", str(SOURCES / "libamdhip64.cpp")]
    return kept(
        "simulated-libamdhip64.so",
        [*command, (SOURCES / "libamdhip64.cpp").read_bytes()],
        lambda path: subprocess.run([*command, "-o", str(path)], check=True),
    )


if __name__ == "__main__":
    environ = {**os.environ, "KVCORE_ROCM_DRIVER": str(driver())}
    os.execvpe(sys.argv[1], sys.argv[1:], environ)
