// The functions under test, of one instruction set each (decoders.cpp).
#pragma once

#include <cstdint>

#include "segments.h"

struct Decoders {
    const char *isa;
    void *(*tables_create)(const kv_tables_args &);
    void (*tables_destroy)(void *);
    int32_t (*decode_symbols)(const kv_tiles_args &, uint64_t *);
    int32_t (*decode_segments)(const kv_decode_segments_args &, uint64_t *);
};

extern const Decoders scalar_decoders;
extern const Decoders avx2_decoders;
