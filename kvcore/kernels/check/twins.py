"""Which ops in Triton's language compile for a backend's devices, for its record."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from kvcore.kernels.triton import TWINS

__all__ = ["TRITON_BACKENDS", "compiled_twins"]

TRITON_BACKENDS = {"cuda": "cuda", "rocm": "hip"}
"""Backends that Triton compiles for, and what it calls them."""


def compiled_twins(backend: str, jobs: int) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Compile the twins for all of a backend's targets.

    Parameters
    ----------
    backend : str
        One of `TRITON_BACKENDS`.
    jobs : int
        Compilers at a time.

    Returns
    -------
    ops : tuple of str
        Those all of whose kernels compiled for all targets.
    targets : mapping of str to str
        Architecture -> the compiler and its version.

    Raises
    ------
    ImportError
        Triton is not installed.
    """
    from kvcore.kernels.triton.aot import TARGETS, compile_for, launches

    targets = [t for t in TARGETS if t.backend == TRITON_BACKENDS[backend]]
    work = [(launch, target) for target in targets for launch in launches(target.warp)]
    with ThreadPoolExecutor(jobs) as pool:
        failed = {o.launch.op for o in pool.map(lambda pair: compile_for(*pair), work) if o.error}
    compiler = f"triton {version('triton')}"
    return tuple(op for op in TWINS if op not in failed), {target.name: compiler for target in targets}
