"""Kernels, written once: C++ bodies for every vendor's compiler, and the way from hooks to a native library.

`include/kvcore/` holds the kernel bodies as templates over an execution context, and ``abi.h``, the C ABI that every
native backend exports. `kvcore.kernels.native` turns an op's arguments into calls of that ABI, so that a backend's own
``ops.py`` is a list of names.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """Return the folder to pass to a compiler as ``-I``, for out-of-tree backends: it holds ``kvcore/abi.h``."""
    return str(Path(__file__).parent / "include")
