"""Builds the simulated driver, and runs a command with the backend over it.

``python backends/cuda/tests/simulated/build.py pytest --pyargs kvcore_conformance --kvcore-backend cuda``. The driver
is kept in the user's cache, as compiled kernels are.
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
def driver(batch=13):
    """Return the simulated libcuda, with the function for batches of copies of a version of CUDA; 0 for none."""
    options = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
    command = ["g++", *options, f"-DSIMULATED_BATCH={batch}", f"-I{get_include()}", str(SOURCES / "libcuda.cpp")]
    return kept(
        f"simulated-libcuda{batch}.so",
        [*command, (SOURCES / "libcuda.cpp").read_bytes()],
        lambda path: subprocess.run([*command, "-o", str(path)], check=True),
    )


if __name__ == "__main__":
    environ = {**os.environ, "KVCORE_CUDA_DRIVER": str(driver())}
    os.execvpe(sys.argv[1], sys.argv[1:], environ)
