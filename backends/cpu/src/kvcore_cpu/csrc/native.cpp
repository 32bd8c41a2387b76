// The exported C functions: each calls the chosen instruction set's.
#include <new>

#include "kernels.hpp"
#include "support.hpp"

#if KVCORE_HAVE_AVX2
#include <cpuid.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvcore_cpu {

#if KVCORE_HAVE_AVX2
static bool machine_has_avx2() {
    unsigned eax, ebx, ecx, edx;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
    __builtin_cpu_init(); // this asks for the operating system's support of the wide registers as well
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
}
#endif

// The instruction sets of this machine, best first; returns nullptr beyond the last.
static const Kernels *kernels_at(int32_t rank) {
#if KVCORE_HAVE_AVX2
    static const bool has_avx2 = machine_has_avx2();
    if (has_avx2 && rank-- == 0) {
        return &avx2::kernels;
    }
#endif
    return rank == 0 ? &scalar::kernels : nullptr;
}

static const Kernels *active = kernels_at(0);
static int limit = 1;
static thread_local const char *last_error = "";

int thread_limit() { return __atomic_load_n(&limit, __ATOMIC_RELAXED); }

int32_t refuse(kv_fail code, const char *reason) {
    last_error = reason;
    return code;
}

} // namespace kvcore_cpu

using namespace kvcore_cpu;

EXPORT int32_t kvcore_abi_version(void) { return KV_ABI_VERSION; }

EXPORT const char *kvcore_last_error(void) { return last_error; }

// The name of an instruction set that this machine has, by rank from the best one: NULL beyond the last, and for -1 the
// one that is in use.
EXPORT const char *kvcore_cpu_isa(int32_t rank) {
    const Kernels *found = rank < 0 ? active : kernels_at(rank);
    return found == nullptr ? nullptr : found->isa;
}

// Chooses an instruction set by rank, and how many threads an op may use, for all calls that follow.
EXPORT int32_t kvcore_cpu_configure(int32_t rank, int32_t threads) {
    const Kernels *found = rank < 0 ? nullptr : kernels_at(rank);
    if (found == nullptr || threads < 1) {
        return refuse(KV_FAIL_UNSUPPORTED, "no instruction set of that rank, or no thread");
    }
    __atomic_store_n(&active, found, __ATOMIC_RELAXED);
    __atomic_store_n(&limit, threads, __ATOMIC_RELAXED);
    return 0;
}

EXPORT void *kvcore_tables_create(const kv_tables_args *args) {
    try {
        return active->tables_create(*args);
    } catch (const std::bad_alloc &) {
        refuse(KV_FAIL_MEMORY, "out of memory");
        return nullptr;
    }
}

EXPORT void kvcore_tables_destroy(void *tables) { active->tables_destroy(tables); }

#define X(op, args_type) \
    EXPORT int32_t kvcore_##op(const args_type *args, void *, uint64_t *status) { \
        try { \
            return active->op(*args, status); \
        } catch (const std::bad_alloc &) { \
            return refuse(KV_FAIL_MEMORY, "no scratch memory"); \
        } \
    }
KVCORE_CPU_OPS(X)
#undef X
