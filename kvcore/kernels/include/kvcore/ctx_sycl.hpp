/* The execution context in SYCL: an nd_range<1> kernel with a required sub-group size.
 *
 * The kernel passes its work item and the start of its local memory (a `local_accessor`), both of which SYCL gives as
 * values only. KVCORE_WARP_WIDTH is given by the build and is the sub-group size that the kernel requires.
 *
 * OpenCL and SYCL allow a division or square root of floats to be off by some units in the last place, and a GPU takes
 * that liberty; so both are done in integers here (portable.hpp).
 */
#ifndef KVCORE_CTX_SYCL_HPP
#define KVCORE_CTX_SYCL_HPP

#include <sycl/sycl.hpp>

#include "context.hpp"
#include "portable.hpp"

namespace kvcore {

template <int Width> class SyclContext {
  public:
    static constexpr int warp_width = Width;

    SyclContext(const sycl::nd_item<1> &item, char *shared) : item_(item), shared_(shared) {}

    int thread() const { return int(item_.get_local_id(0)); }
    int threads() const { return int(item_.get_local_range(0)); }
    int64_t block() const { return int64_t(item_.get_group(0)); }
    int64_t blocks() const { return int64_t(item_.get_group_range(0)); }
    int lane() const { return int(item_.get_sub_group().get_local_linear_id()); }
    int warp() const { return int(item_.get_sub_group().get_group_linear_id()); }

    void barrier() const { sycl::group_barrier(item_.get_group()); }
    template <class T> T *shared(int byte_offset = 0) const { return reinterpret_cast<T *>(shared_ + byte_offset); }

    template <class T> T shuffle(T v, int from_lane) const {
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
        return sycl::select_from_group(item_.get_sub_group(), v, uint32_t(from_lane));
    }
    template <class T> T shuffle_xor(T v, int mask) const {
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
        return sycl::permute_group_by_xor(item_.get_sub_group(), v, uint32_t(mask));
    }

    /* An OR over one bit for each lane: portable, and two reductions where the mask needs 64 bits. */
    uint64_t ballot(bool vote) const {
        const auto group = item_.get_sub_group();
        const int mine = lane();
        const uint32_t bit = vote ? uint32_t(1) << mine % 32 : 0;
        uint64_t mask = sycl::reduce_over_group(group, mine < 32 ? bit : 0u, sycl::bit_or<uint32_t>());
        if constexpr (Width > 32)
            mask |= uint64_t(sycl::reduce_over_group(group, mine < 32 ? 0u : bit, sycl::bit_or<uint32_t>())) << 32;
        return mask;
    }

    static int popcount(uint64_t v) { return int(sycl::popcount(v)); }
    static int leading_zeros(uint32_t v) { return int(sycl::clz(v)); }
    static float divide(float a, float b) { return portable_divide(a, b); }
    static float square_root(float v) { return portable_square_root(v); }
    static float rint(float v) { return sycl::rint(v); }
    static uint32_t bits(float v) { return sycl::bit_cast<uint32_t>(v); }
    static float from_bits(uint32_t u) { return sycl::bit_cast<float>(u); }

    template <class T> static T atomic_add(T *p, T v) { return reference(p).fetch_add(v); }
    template <class T> static T atomic_max(T *p, T v) { return reference(p).fetch_max(v); }
    template <class T> static T atomic_min(T *p, T v) { return reference(p).fetch_min(v); }
    static void report(uint64_t *status, int code, int64_t position) {
        atomic_min(status, uint64_t(position) << 8 | uint64_t(code));
    }

  private:
    template <class T> static auto reference(T *p) {
        return sycl::atomic_ref<T, sycl::memory_order::relaxed, sycl::memory_scope::device>(*p);
    }

    const sycl::nd_item<1> &item_;
    char *shared_;
};

/* Local memory, counted in 16 bytes: the alignment that kernels are promised is its elements'. */
using SyclShared = sycl::local_accessor<sycl::vec<uint64_t, 2>, 1>;

template <class K, int Width> void sycl_entry(const void *args, const SyclShared &shared) {
    const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<1>();
    char *memory = reinterpret_cast<char *>(shared.get_multi_ptr<sycl::access::decorated::no>().get());
    K::body(SyclContext<Width>(item, memory), *static_cast<const typename K::Args *>(args));
}

}  // namespace kvcore

/* Defines what a device runs, to be found by `name`; the kernel comes last, since its type may hold commas. Its arguments
 * lie in memory of the backend: the type of a kernel's parameter must be one that can be declared ahead, which structs
 * within structs cannot. */
#define KVCORE_SYCL_KERNEL(name, ...)                                                                                  \
    extern "C" SYCL_EXTERNAL SYCL_EXT_ONEAPI_FUNCTION_PROPERTY(                                                        \
        (sycl::ext::oneapi::experimental::nd_range_kernel<1>))                                                         \
        SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::sub_group_size<KVCORE_WARP_WIDTH>))        \
    void name(const void *args, kvcore::SyclShared shared) {                                                           \
        kvcore::sycl_entry<__VA_ARGS__, KVCORE_WARP_WIDTH>(args, shared);                                              \
    }

#endif
