// The dispatch table: one function per op, filled once for each instruction set (isa.hpp), chosen once (native.cpp).
#pragma once

#include "ops.hpp"

namespace kvcore_cpu {

struct Kernels {
    const char *isa;
#define X(op, args) int32_t (*op)(const args &, uint64_t *);
    KVCORE_CPU_OPS(X)
#undef X
    void *(*tables_create)(const kv_tables_args &);
    void (*tables_destroy)(void *);
};

namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

} // namespace kvcore_cpu
