/* The execution context on NVIDIA (nvcc, NVRTC) and AMD (clang -x hip, hipcc, hipRTC), and the entry of each kernel.
 *
 * AMD's side uses the compiler's built-ins alone, so that it needs no ROCm header. The warp of gfx9 has 64 lanes, that
 * of gfx10 and later 32 (KVCORE_WARP_WIDTH where it is set otherwise).
 *
 * Contraction must be off (-fmad=false, -ffp-contract=off).
 */
#ifndef KVCORE_CTX_GPU_HPP
#define KVCORE_CTX_GPU_HPP

#include "context.hpp"

#if defined(KVCORE_WARP_WIDTH)
#elif defined(__GFX9__)
#define KVCORE_WARP_WIDTH 64
#else
#define KVCORE_WARP_WIDTH 32
#endif

#if defined(__HIP__)
#define KVCORE_SHARED __attribute__((shared))
#define KVCORE_GLOBAL __attribute__((global))
#define KVCORE_BOUNDS __attribute__((amdgpu_flat_work_group_size(1, KVCORE_MAX_THREADS)))
#else
#define KVCORE_SHARED __shared__
#define KVCORE_GLOBAL __global__
#define KVCORE_BOUNDS __launch_bounds__(KVCORE_MAX_THREADS)
#endif

namespace kvcore {

class GpuContext {
  public:
    static constexpr int warp_width = KVCORE_WARP_WIDTH;

#if defined(__HIP__)
    KVCORE_DEVICE int thread() const { return int(__builtin_amdgcn_workitem_id_x()); }
    KVCORE_DEVICE int threads() const { return int(__builtin_amdgcn_workgroup_size_x()); }
    KVCORE_DEVICE int64_t block() const { return __builtin_amdgcn_workgroup_id_x(); }
    KVCORE_DEVICE int64_t blocks() const {
        return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
    }

    KVCORE_DEVICE void barrier() const {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }
    KVCORE_DEVICE uint64_t ballot(bool vote) const {
        if constexpr (warp_width == 64) return __builtin_amdgcn_ballot_w64(vote);
        else return __builtin_amdgcn_ballot_w32(vote);
    }

    KVCORE_DEVICE static int popcount(uint64_t v) { return __builtin_popcountll(v); }
    KVCORE_DEVICE static int leading_zeros(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
    KVCORE_DEVICE static float divide(float a, float b) { return a / b; } /* -fhip-fp32-correctly-rounded-divide-sqrt */
    KVCORE_DEVICE static float square_root(float v) { return __builtin_sqrtf(v); }
    KVCORE_DEVICE static float rint(float v) { return __builtin_rintf(v); }
    KVCORE_DEVICE static uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
    KVCORE_DEVICE static float from_bits(uint32_t u) { return __builtin_bit_cast(float, u); }

    template <class T> KVCORE_DEVICE static T atomic_add(T *p, T v) {
        return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    template <class T> KVCORE_DEVICE static T atomic_max(T *p, T v) {
        return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    template <class T> KVCORE_DEVICE static T atomic_min(T *p, T v) {
        return __hip_atomic_fetch_min(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
#else
    KVCORE_DEVICE int thread() const { return int(threadIdx.x); }
    KVCORE_DEVICE int threads() const { return int(blockDim.x); }
    KVCORE_DEVICE int64_t block() const { return blockIdx.x; }
    KVCORE_DEVICE int64_t blocks() const { return gridDim.x; }

    KVCORE_DEVICE void barrier() const { __syncthreads(); }
    KVCORE_DEVICE uint64_t ballot(bool vote) const { return __ballot_sync(0xFFFFFFFFu, vote); }

    KVCORE_DEVICE static int popcount(uint64_t v) { return __popcll(v); }
    KVCORE_DEVICE static int leading_zeros(uint32_t v) { return __clz(int(v)); }
    KVCORE_DEVICE static float divide(float a, float b) { return __fdiv_rn(a, b); }
    KVCORE_DEVICE static float square_root(float v) { return __fsqrt_rn(v); }
    KVCORE_DEVICE static float rint(float v) { return rintf(v); }
    KVCORE_DEVICE static uint32_t bits(float v) { return __float_as_uint(v); }
    KVCORE_DEVICE static float from_bits(uint32_t u) { return __uint_as_float(u); }

    KVCORE_DEVICE static uint32_t atomic_add(uint32_t *p, uint32_t v) { return atomicAdd(p, v); }
    KVCORE_DEVICE static uint32_t atomic_max(uint32_t *p, uint32_t v) { return atomicMax(p, v); }
    KVCORE_DEVICE static uint32_t atomic_min(uint32_t *p, uint32_t v) { return atomicMin(p, v); }
    KVCORE_DEVICE static uint64_t atomic_add(uint64_t *p, uint64_t v) { return atomicAdd(word(p), v); }
    KVCORE_DEVICE static uint64_t atomic_max(uint64_t *p, uint64_t v) { return atomicMax(word(p), v); }
    KVCORE_DEVICE static uint64_t atomic_min(uint64_t *p, uint64_t v) { return atomicMin(word(p), v); }
#endif

    KVCORE_DEVICE int lane() const { return thread() % warp_width; }
    KVCORE_DEVICE int warp() const { return thread() / warp_width; }

    template <class T> KVCORE_DEVICE T *shared(int byte_offset = 0) const {
        extern KVCORE_SHARED __attribute__((aligned(16))) char kvcore_shared[]; /* what the launch gave */
        return reinterpret_cast<T *>(kvcore_shared + byte_offset);
    }

    template <class T> KVCORE_DEVICE T shuffle(T v, int from_lane) const {
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
        union {
            T value;
            int words[sizeof(T) / 4];
        } moved = {v};
        for (int &w : moved.words) w = shuffle_word(w, from_lane);
        return moved.value;
    }
    template <class T> KVCORE_DEVICE T shuffle_xor(T v, int mask) const { return shuffle(v, lane() ^ mask); }

    KVCORE_DEVICE static void report(uint64_t *status, int code, int64_t position) {
        atomic_min(status, uint64_t(position) << 8 | uint64_t(code));
    }

  private:
#if defined(__HIP__)
    KVCORE_DEVICE static int shuffle_word(int w, int from_lane) {
        return __builtin_amdgcn_ds_bpermute(from_lane * 4, w);
    }
#else
    KVCORE_DEVICE static int shuffle_word(int w, int from_lane) { return __shfl_sync(0xFFFFFFFFu, w, from_lane); }
    KVCORE_DEVICE static unsigned long long *word(uint64_t *p) { return reinterpret_cast<unsigned long long *>(p); }
#endif
};

/* What a device runs: kernel K. */
template <class K> KVCORE_GLOBAL void KVCORE_BOUNDS gpu_entry(const typename K::Args args) {
    K::body(GpuContext(), args);
}

}  // namespace kvcore

/* The same, to be found by `name`; the kernel comes last, since its type may hold commas. */
#define KVCORE_GPU_KERNEL(name, ...)                                                                                   \
    extern "C" KVCORE_GLOBAL void KVCORE_BOUNDS name(const typename __VA_ARGS__::Args args) {                          \
        __VA_ARGS__::body(kvcore::GpuContext(), args);                                                                 \
    }

#endif
