"""All ops of the reference, one module a family, as `kvcore.hookspecs` has them."""

from __future__ import annotations

from kvcore_cpu_ref.bits import kvcore_op_count_symbols, kvcore_op_pack_bits, kvcore_op_unpack_bits
from kvcore_cpu_ref.digest import kvcore_op_digest
from kvcore_cpu_ref.entropy import kvcore_op_choose_classes, kvcore_op_decode_symbols, kvcore_op_encode_symbols
from kvcore_cpu_ref.movement import (
    kvcore_op_convert_layout,
    kvcore_op_copy_batch,
    kvcore_op_gather_paged,
    kvcore_op_scatter_paged,
)
from kvcore_cpu_ref.position import kvcore_op_shift_rope
from kvcore_cpu_ref.quantization import kvcore_op_dequantize, kvcore_op_quantize, kvcore_op_rotate
from kvcore_cpu_ref.reduction import (
    kvcore_op_reduce_absmax,
    kvcore_op_reduce_minmax,
    kvcore_op_reduce_moments,
    kvcore_op_reduce_norm,
)

__all__ = [
    "kvcore_op_choose_classes",
    "kvcore_op_convert_layout",
    "kvcore_op_copy_batch",
    "kvcore_op_count_symbols",
    "kvcore_op_decode_symbols",
    "kvcore_op_dequantize",
    "kvcore_op_digest",
    "kvcore_op_encode_symbols",
    "kvcore_op_gather_paged",
    "kvcore_op_pack_bits",
    "kvcore_op_quantize",
    "kvcore_op_reduce_absmax",
    "kvcore_op_reduce_minmax",
    "kvcore_op_reduce_moments",
    "kvcore_op_reduce_norm",
    "kvcore_op_rotate",
    "kvcore_op_scatter_paged",
    "kvcore_op_shift_rope",
    "kvcore_op_unpack_bits",
]
