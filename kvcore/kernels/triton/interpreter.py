"""The twins in Triton's interpreter, as a backend for tests: it computes on the host, slowly.

``--kvcore-backend kvcore.kernels.triton.interpreter:backend`` runs them under the conformance suite.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from kvcore.errors import BackendLoadError
from kvcore.plugins.spec import API_VERSION, BackendSpec, Probe

__all__ = ["backend", "interpret"]

_VARIABLE = "TRITON_INTERPRET"


def backend() -> BackendSpec:
    """Return what the core needs to know; never taken unless named."""
    return BackendSpec(
        name="triton_interpreter",
        device_types=("cpu",),
        priority=-1,
        api_version=API_VERSION,
        probe=probe,
        implementations={"triton": "kvcore.kernels.triton.interpreted"},
        distribution="kvcore",
    )


def probe() -> Probe:
    """Look for Triton, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return Probe(False, "Triton is not installed; pip install triton")
    return Probe(True, "Triton's interpreter, for tests")


def interpret() -> None:
    """Have Triton interpret its kernels; to be called before anything imports it.

    Raises
    ------
    BackendLoadError
        Triton was imported already, to compile its kernels.
    """
    if os.environ.get(_VARIABLE) == "1":
        return
    if "triton" in sys.modules:
        raise BackendLoadError(
            f"Triton was imported without {_VARIABLE}=1, and compiles its kernels in this process; "
            "set the variable before the process starts"
        )
    os.environ[_VARIABLE] = "1"
