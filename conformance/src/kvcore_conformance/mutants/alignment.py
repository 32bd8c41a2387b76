"""Defects of ops that take every address for a multiple of the element size, whatever they are about."""

# ruff: noqa: D103 -- a defect says in its name what is wrong
from __future__ import annotations

from typing import Any

import numpy as np

from kvcore_conformance.arena import root
from kvcore_conformance.mutants.catalogue import Call, mutant


def _aligned(array: Any) -> Any:
    """Return what lies at the aligned address below an array's own."""
    base, beyond = root(array), array.ctypes.data % array.itemsize
    if not beyond:
        return array
    return np.ndarray(array.shape, array.dtype, base, array.ctypes.data - base.ctypes.data - beyond, array.strides)


@mutant("reduce_moments", "quantize", "rotate", "shift_rope", "choose_classes", "encode_symbols")
def input_read_at_an_aligned_address(call: Call) -> Any:
    call.args[0] = _aligned(call.args[0])
    return call.run()


@mutant("reduce_norm", "dequantize", "count_symbols", "decode_symbols")
def output_written_at_an_aligned_address(call: Call) -> Any:
    out = call.kwargs["out"]
    call.kwargs["out"] = _aligned(out)
    call.run()
    return out
