// What the library exports: a line per op, X(op, struct of its arguments). Each op is a function
//
//     int32_t op(const args &, uint64_t *status);
//
// in a file `*.inl.hpp` of this folder, which isa.hpp includes once for each instruction set. Adding an op is its line
// here and, if its file is new, the file's line in isa.hpp.
#pragma once

#include <kvcore/abi.h>

#define KVCORE_MOVEMENT_OPS(X) \
    X(gather_paged, kv_paged_args) \
    X(scatter_paged, kv_paged_args) \
    X(convert_layout, kv_convert_args) \
    X(copy_batch, kv_bytes_args) \
    X(digest, kv_bytes_args)

#define KVCORE_REDUCE_OPS(X) \
    X(reduce_absmax, kv_reduce_args) \
    X(reduce_minmax, kv_reduce_args) \
    X(reduce_norm, kv_reduce_args) \
    X(reduce_moments, kv_reduce_args)

#define KVCORE_QUANTIZE_OPS(X) \
    X(quantize, kv_quant_args) \
    X(dequantize, kv_quant_args)

#define KVCORE_ROTATE_OPS(X) X(rotate, kv_rotate_args)

#define KVCORE_BITS_OPS(X) \
    X(pack_bits, kv_bits_args) \
    X(unpack_bits, kv_bits_args) \
    X(count_symbols, kv_bits_args)

#define KVCORE_ROPE_OPS(X) X(shift_rope, kv_rope_args)

#define KVCORE_CLASSES_OPS(X) X(choose_classes, kv_tiles_args)

#define KVCORE_ENCODE_OPS(X) X(encode_symbols, kv_tiles_args)

#define KVCORE_DECODE_OPS(X) X(decode_symbols, kv_tiles_args)

// Composites in one piece. Their structs are in segments.h.
#include "segments.h"
#define KVCORE_SEGMENTS_OPS(X) \
    X(encode_segments, kv_encode_segments_args) \
    X(decode_segments, kv_decode_segments_args)

#define KVCORE_CPU_OPS(X) \
    KVCORE_MOVEMENT_OPS(X) \
    KVCORE_REDUCE_OPS(X) \
    KVCORE_QUANTIZE_OPS(X) \
    KVCORE_ROTATE_OPS(X) \
    KVCORE_BITS_OPS(X) \
    KVCORE_ROPE_OPS(X) \
    KVCORE_CLASSES_OPS(X) \
    KVCORE_ENCODE_OPS(X) \
    KVCORE_DECODE_OPS(X) \
    KVCORE_SEGMENTS_OPS(X)
