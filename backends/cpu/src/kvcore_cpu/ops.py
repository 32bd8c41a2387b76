"""The ops of the native library, as `kvcore.hookspecs` has them."""

from __future__ import annotations

from kvcore.kernels.native import NativeOps
from kvcore_cpu.fused import kvcore_fused_decode_segments, kvcore_fused_encode_segments
from kvcore_cpu.native import library

__all__ = [
    "kvcore_fused_decode_segments",
    "kvcore_fused_encode_segments",
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

_ops = NativeOps(library())

kvcore_op_choose_classes = _ops.kvcore_op_choose_classes
kvcore_op_convert_layout = _ops.kvcore_op_convert_layout
kvcore_op_copy_batch = _ops.kvcore_op_copy_batch
kvcore_op_count_symbols = _ops.kvcore_op_count_symbols
kvcore_op_decode_symbols = _ops.kvcore_op_decode_symbols
kvcore_op_dequantize = _ops.kvcore_op_dequantize
kvcore_op_digest = _ops.kvcore_op_digest
kvcore_op_encode_symbols = _ops.kvcore_op_encode_symbols
kvcore_op_gather_paged = _ops.kvcore_op_gather_paged
kvcore_op_pack_bits = _ops.kvcore_op_pack_bits
kvcore_op_quantize = _ops.kvcore_op_quantize
kvcore_op_reduce_absmax = _ops.kvcore_op_reduce_absmax
kvcore_op_reduce_minmax = _ops.kvcore_op_reduce_minmax
kvcore_op_reduce_moments = _ops.kvcore_op_reduce_moments
kvcore_op_reduce_norm = _ops.kvcore_op_reduce_norm
kvcore_op_rotate = _ops.kvcore_op_rotate
kvcore_op_scatter_paged = _ops.kvcore_op_scatter_paged
kvcore_op_shift_rope = _ops.kvcore_op_shift_rope
kvcore_op_unpack_bits = _ops.kvcore_op_unpack_bits
