"""The oracle: every op straight from the text of its hookspec, one element at a time, in Python numbers.

Slow and plain on purpose, and independent of everything it judges: of the reference backend, of the layout binder, of
NumPy's and ml_dtypes' conversions. Each function takes what the method of `kvcore.Backend` takes, with `out` given,
and writes the addressed elements and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore_conformance.oracle.bits import count_symbols, pack_bits, unpack_bits
from kvcore_conformance.oracle.digest import copy_batch, digest
from kvcore_conformance.oracle.entropy import choose_classes, decode_symbols, encode_symbols
from kvcore_conformance.oracle.movement import convert_layout, gather_paged, scatter_paged
from kvcore_conformance.oracle.position import shift_rope
from kvcore_conformance.oracle.quantization import dequantize, quantize, rotate
from kvcore_conformance.oracle.reduction import reduce_absmax, reduce_minmax, reduce_moments, reduce_norm

__all__ = ["ORACLE"]

ORACLE: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        gather_paged,
        scatter_paged,
        convert_layout,
        copy_batch,
        reduce_absmax,
        reduce_minmax,
        reduce_moments,
        reduce_norm,
        quantize,
        dequantize,
        rotate,
        pack_bits,
        unpack_bits,
        count_symbols,
        shift_rope,
        digest,
        choose_classes,
        encode_symbols,
        decode_symbols,
    )
}
