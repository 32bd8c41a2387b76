"""Twins of kernels in Triton's language, for machines that have Triton and no library that was built for them.

The kernels follow the C++ bodies in ``include/kvcore`` step by step, and give the same bytes. Seven ops have a twin:
`TWINS`. This package is light: Triton is imported with `kvcore.kernels.triton.ops`, or one of the kernels' modules.
"""

from __future__ import annotations

__all__ = ["TWINS"]

TWINS = (*("gather_paged", "scatter_paged", "reduce_absmax", "quantize", "dequantize", "pack_bits", "decode_symbols"),)
"""The ops that there are kernels for."""
