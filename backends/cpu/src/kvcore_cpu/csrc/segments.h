/* Arguments of the fused composites, in the style of kvcore/abi.h. A segment's bytes: kvcore.codecs.segments. */
#ifndef KVCORE_CPU_SEGMENTS_H
#define KVCORE_CPU_SEGMENTS_H

#include <kvcore/abi.h>

#define KV_MAX_RAW_ROWS 4

/* More status codes; `position` is the segment, except where it says otherwise. */
enum kv_segment_code {
    KV_SEGMENT_LENGTH = 32, /* the bytes end too early, or go on; or there are too many tiles, or too few */
    KV_SEGMENT_HEAD = 33,   /* a head that means nothing */
    KV_SEGMENT_ROWS = 34    /* raw rows out of order, or beyond the tokens */
};

/* encode_segments. Besides: KV_NONFINITE, position segment * tokens + row; KV_RANGE, position segments * tokens +
 * segment: values beyond every step. Nothing counts then of what was written. */
typedef struct kv_encode_segments_args {
    kv_array x;                 /* float [S, T, C] */
    kv_array source;            /* [S, T, C], where raw rows are taken from */
    const uint8_t *raw_rows;    /* [S * KV_MAX_RAW_ROWS], ascending */
    const uint8_t *raw_counts;  /* [S] */
    const void *tables;         /* from kvcore_tables_create */
    uint8_t *out;               /* [S * capacity] */
    int64_t *nbytes;            /* [S] */
    uint8_t *modes;             /* [S * tiles of a segment]; a segment of which all rows are raw leaves its own alone */
    uint16_t *words;            /* the same */
    int64_t capacity;           /* bytes that a segment may take: at least those of its largest form */
    int32_t constant;           /* of the step rule */
    int32_t level, has_level;   /* the same */
    int32_t unroped;
} kv_encode_segments_args;

/* decode_segments. Besides the codes above: KV_TILE_... */
typedef struct kv_decode_segments_args {
    const uint8_t *data;       /* the segments, one after another */
    const int64_t *first_byte; /* [S + 1] */
    const uint8_t *modes;      /* of all tiles of all segments */
    const uint16_t *words;
    const int64_t *first_tile; /* [S + 1] */
    const void *tables;
    float *values;             /* [S * tokens * channels] */
    uint8_t *flags;            /* [S] */
    uint8_t *raw_rows;         /* [S * KV_MAX_RAW_ROWS]; unused where all rows are raw */
    int16_t *raw_counts;       /* [S] */
    int64_t count;             /* S */
    int32_t tokens, channels;
    int32_t itemsize;          /* of the elements of raw rows */
    int32_t reserved;
} kv_decode_segments_args;

#endif
