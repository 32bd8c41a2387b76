/* The C ABI between kvcore and a native backend: one argument struct and one function per op.
 *
 * Every native backend (CPU, emulated device, CUDA, ROCm, XPU) exports the same functions:
 *
 *     int32_t kvcore_<op>(const struct kv_<...>_args *args, void *stream, uint64_t *status);
 *
 * - `args` and the tables it points to (planes, parts, levels, lists of buffers) are host memory, valid during the call
 *   only. A backend that launches asynchronously copies them.
 * - `kv_array.data` and the addresses of planes and buffers are memory of the backend: host memory for host backends.
 *   An optional array that is absent has data 0.
 * - The result is 0, or the code of a launch that did not take place (KV_FAIL_...); kvcore_last_error() then tells why.
 * - `status` (two words in memory of the backend, KV_OK before the first op) is where an op reports what only the data
 *   could tell: `position << 8 | code`, the least of all that were found, so that it does not depend on the order of
 *   evaluation. Ops report to the first word; the second has what the first failed op of the stream reported, and when
 *   an op is done both are the same. A backend whose calls each have a status of their own may leave the second alone.
 * - An op that reports has written nothing but scratch memory of its own (decode_symbols: that and `values`). So have the
 *   ops behind it on its stream, except for copies between memories (copy_batch): nothing holds these back.
 * - Shapes, dtypes and static arguments have been checked by the caller (kvcore.ops). Arrays may have any strides,
 *   padded, zero (inputs) or negative, and any alignment.
 *
 * The meaning of each op is its hookspec's (kvcore.hookspecs). All integers are native, little-endian; the structs have
 * no implicit padding, so that callers can pack them. A change of any struct raises KV_ABI_VERSION.
 */
#ifndef KVCORE_ABI_H
#define KVCORE_ABI_H

#include <stdint.h>

#define KV_ABI_VERSION 1
#define KV_MAX_DIMS 8
#define KV_OK UINT64_MAX

enum kv_fail {
    KV_FAIL_UNSUPPORTED = 1, /* the arguments are beyond this backend */
    KV_FAIL_MEMORY = 2,      /* no memory for what the launch needs */
    KV_FAIL_POINTER = 3,     /* an address is not memory that the backend can reach */
    KV_FAIL_DEVICE = 4       /* the vendor's runtime refused */
};

/* Status codes, the low 8 bits of a status word; `position` is the flat index of the element, in C order. */
enum kv_code {
    KV_SLOT_RANGE = 1,     /* position in index: no slot or block of that number */
    KV_SLOT_DUPLICATE = 2, /* position in index (of its token, for blocks the block): an earlier one has the same target */
    KV_NONFINITE = 3,      /* NaN or infinity under policy error */
    KV_SCALE = 4,          /* a scale outside 2^-100 .. 2^125 */
    KV_RANGE = 5,          /* a value that the op cannot represent */
    KV_LEVEL = 6,          /* a codebook code without a level */
    KV_TILE_SIZE = 7,      /* position is the tile, from here on: mode and word count are no tile, or exceed the payload */
    KV_TILE_CLASS = 8,     /* a class beyond 31 */
    KV_TILE_STATE = 9,     /* a state outside 2^15 .. 2^31 - 1, or not 2^15 at the end */
    KV_TILE_WORDS = 10,    /* too few words, or words left over */
    KV_TILE_VALUE = 11,    /* a packed value or symbol that means nothing */
    KV_TILE_PADDING = 12   /* padding that is not zero */
};

enum kv_dtype {
    KV_U8 = 0, KV_I8 = 1, KV_U16 = 2, KV_I16 = 3, KV_U32 = 4, KV_I32 = 5, KV_U64 = 6, KV_I64 = 7,
    KV_F16 = 8, KV_BF16 = 9, KV_F32 = 10, KV_E4M3 = 11, KV_E5M2 = 12
};

enum kv_nonfinite { KV_ERROR = 0, KV_SATURATE = 1, KV_PROPAGATE = 2 };
enum kv_unit { KV_SLOT = 0, KV_BLOCK = 1 };
enum kv_kind { KV_INT = 0, KV_AFFINE = 1, KV_FP8 = 2, KV_CODEBOOK = 3 };
enum kv_table_kind { KV_INTEGER = 0, KV_EXPONENT = 1, KV_CODE = 2 };

/* A strided array. Strides are bytes. */
typedef struct kv_array {
    uint64_t data;
    int64_t shape[KV_MAX_DIMS];
    int64_t stride[KV_MAX_DIMS];
    int32_t ndim;
    int32_t dtype; /* kv_dtype */
} kv_array;

/* One part (K, V, ...) of one layer: element [block, token, head, channel] lies at base + the sum of index * stride. */
typedef struct kv_plane {
    uint64_t base;
    int64_t block_stride, token_stride, head_stride, dim_stride;
} kv_plane;

/* What all planes of one part have in common, on both sides of a copy. */
typedef struct kv_part {
    int32_t heads, width, itemsize, reserved;
} kv_part;

/* gather_paged, scatter_paged */
typedef struct kv_paged_args {
    const kv_plane *paged;      /* [parts * layers], part-major */
    const kv_plane *chunks;     /* [chunks * parts * layers], chunk-major, then part-major; block strides unused */
    const kv_part *parts;       /* [parts] */
    const int64_t *first_token; /* [chunks + 1]: number of tokens in the chunks before */
    uint64_t index;             /* int64 [index_count], memory of the backend */
    int64_t index_count;
    int64_t blocks, block_tokens, skip_tokens;
    int32_t chunk_count, part_count, layers;
    int32_t unit;             /* kv_unit */
    int32_t check_duplicates; /* scatter only */
    int32_t reserved;
} kv_paged_args;

/* convert_layout */
typedef struct kv_convert_args {
    const kv_plane *src, *out; /* [parts * layers] each, part-major */
    const kv_part *parts;      /* [parts] */
    int64_t tokens;
    int32_t part_count, layers;
} kv_convert_args;

/* copy_batch, digest */
typedef struct kv_bytes_args {
    const uint64_t *src;   /* [count] addresses */
    const uint64_t *out;   /* [count] addresses; NULL for digest */
    const int64_t *nbytes; /* [count] */
    uint64_t digests;      /* uint64 [count] contiguous, memory of the backend; 0 where none are wanted */
    int64_t count;
} kv_bytes_args;

/* reduce_absmax, reduce_minmax, reduce_norm, reduce_moments */
typedef struct kv_reduce_args {
    kv_array x;
    kv_array exponent; /* moments only: int32, extents 1 or those of x */
    kv_array out;      /* minmax and moments: [2, ...] */
    uint32_t axes;     /* bit i: axis i is reduced */
    int32_t nonfinite; /* kv_nonfinite */
} kv_reduce_args;

/* quantize: x -> codes, scale, zero. dequantize: codes, scale, zero -> x. */
typedef struct kv_quant_args {
    kv_array x;
    kv_array codes;
    kv_array scale; /* float32, extent 1 on shared axes; written by quantize */
    kv_array zero;  /* int32, kind affine only */
    kv_array given; /* quantize only: scales to use */
    const float *levels; /* [level_count] */
    int32_t level_count;
    int32_t kind; /* kv_kind */
    int32_t bits;
    uint32_t axes;     /* bit i: elements along axis i share a scale */
    int32_t nonfinite; /* kv_nonfinite */
    float code_max;    /* q of the hookspec */
} kv_quant_args;

typedef struct kv_rotate_args {
    kv_array x, out;
    uint64_t seed;
    int32_t block, inverse;
} kv_rotate_args;

/* pack_bits, unpack_bits, count_symbols (bits unused) */
typedef struct kv_bits_args {
    kv_array x, out;
    int32_t bits, reserved;
} kv_bits_args;

typedef struct kv_rope_args {
    kv_array x, cos, sin, out;
    int32_t interleaved, reserved;
} kv_rope_args;

/* A TableSet as the backend holds it: made once, used by many calls. All arrays are host memory, copied. */
typedef struct kv_tables_args {
    const uint16_t *frequency; /* [32 * 256] by class, then symbol */
    const uint16_t *cost;      /* [32 * 256] */
    const uint32_t *start;     /* [32 * 256] */
    const uint8_t *symbol;     /* [32 << bits] */
    int32_t bits;
    int32_t kind; /* kv_table_kind */
} kv_tables_args;

/* choose_classes, encode_symbols, decode_symbols. Unused arrays have data 0. */
typedef struct kv_tiles_args {
    kv_array values;                   /* int16 [M, T, W] */
    kv_array skip;                     /* choose only: uint8 [M, T], optional */
    kv_array symbols, classes, offsets; /* choose, encode */
    kv_array payload, modes, words;     /* encode, decode */
    const void *tables;                 /* from kvcore_tables_create */
    int32_t use_offsets, reserved;
} kv_tiles_args;

#endif
