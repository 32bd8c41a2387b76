/* Strided arrays as kernels see them: several arrays of one shape, indexed together, with as few dims as will do.
 *
 * `collapse` (host) drops dims of extent 1 and merges dims that lie behind one another in all arrays; C order stays, so
 * the number of an element is its position in a status word. `locate` (host and device) finds element number i, at the
 * cost of one division per dim but one. Plain functions; no context is needed.
 *
 * Arrays may have any alignment: `load` and `store` take the bytes one by one where they must.
 */
#ifndef KVCORE_VIEWS_HPP
#define KVCORE_VIEWS_HPP

#include "context.hpp"

namespace kvcore {

/* N arrays that share a shape. Strides are bytes, 0 where an array is broadcast. */
template <int N> struct View {
    int64_t extent[KV_MAX_DIMS];
    int64_t stride[KV_MAX_DIMS][N];
    int32_t ndim; /* at least 1 */
    int32_t reserved;

    KVCORE_HOST_DEVICE int64_t size() const {
        int64_t product = 1;
        for (int d = 0; d < ndim; d++) product *= extent[d];
        return product;
    }
    /* The innermost dim. */
    KVCORE_HOST_DEVICE int64_t inner() const { return extent[ndim - 1]; }
    KVCORE_HOST_DEVICE int64_t inner_stride(int n) const { return stride[ndim - 1][n]; }
};

/* Where something lies in each of N arrays: bytes from the first element. */
template <int N> struct Offsets {
    int64_t at[N];
};

/* Quotient and remainder; 32-bit division, several times faster on a GPU, where it will do. */
KVCORE_HOST_DEVICE int64_t divide_by(int64_t extent, int64_t *index) {
    const uint64_t i = uint64_t(*index), n = uint64_t(extent);
    const uint64_t quotient = (i | n) >> 32 == 0 ? uint32_t(i) / uint32_t(n) : i / n;
    *index = int64_t(i - quotient * n);
    return int64_t(quotient);
}

namespace detail {

/* Element `index` (C order) of the first `dims` dims. */
template <int N> KVCORE_HOST_DEVICE Offsets<N> locate(const View<N> &v, int dims, int64_t index) {
    Offsets<N> found = {};
    for (int d = dims - 1; d >= 0; d--) {
        int64_t i = index;
        if (d > 0) index = divide_by(v.extent[d], &i);
        for (int n = 0; n < N; n++) found.at[n] += i * v.stride[d][n];
    }
    return found;
}

}  // namespace detail

/* Find element number `index` in C order, 0 <= index < size(). */
template <int N> KVCORE_HOST_DEVICE Offsets<N> locate(const View<N> &v, int64_t index) {
    return detail::locate(v, v.ndim, index);
}

/* --- runs: up to RUN neighbours along the innermost dim, the work of one thread */

constexpr int RUN = 8;

template <int N> struct Run {
    Offsets<N> first;
    int count; /* 1 .. RUN */
};

template <int N> KVCORE_HOST_DEVICE int64_t runs(const View<N> &v) {
    const int64_t each = (v.inner() + RUN - 1) / RUN;
    return each == 0 ? 0 : v.size() / v.inner() * each;
}

/* Find run number `index`, 0 <= index < runs(v). */
template <int N> KVCORE_HOST_DEVICE Run<N> run_at(const View<N> &v, int64_t index) {
    int64_t within = index;
    const int64_t outer = divide_by((v.inner() + RUN - 1) / RUN, &within);
    const int64_t start = within * RUN, left = v.inner() - start;
    Run<N> run = {detail::locate(v, v.ndim - 1, outer), left < RUN ? int(left) : RUN};
    for (int n = 0; n < N; n++) run.first.at[n] += start * v.inner_stride(n);
    return run;
}

/* --- elements */

template <class T> KVCORE_HOST_DEVICE T load(const char *from) {
    T value;
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T) == 0) return *reinterpret_cast<const T *>(from);
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class T> KVCORE_HOST_DEVICE void store(char *to, T value) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T) == 0) *reinterpret_cast<T *>(to) = value;
    else __builtin_memcpy(to, &value, sizeof value);
}

namespace detail {

/* 8 elements that lie together; aligned, they move at once, in pieces of up to 16 bytes. */
template <class T> struct alignas(RUN * sizeof(T) < 16 ? RUN * sizeof(T) : 16) Pack {
    T item[RUN];
};

template <class T> KVCORE_HOST_DEVICE bool moves_at_once(const char *where, int64_t stride, int count) {
    return count == RUN && stride == int64_t(sizeof(T)) && reinterpret_cast<uintptr_t>(where) % alignof(Pack<T>) == 0;
}

}  // namespace detail

/* The elements of a run in one of its arrays; beyond `count` they are left alone. */
template <class T> KVCORE_HOST_DEVICE void load_run(const char *from, int64_t stride, int count, T (&items)[RUN]) {
    if (detail::moves_at_once<T>(from, stride, count)) {
        const auto pack = *reinterpret_cast<const detail::Pack<T> *>(from);
        for (int i = 0; i < RUN; i++) items[i] = pack.item[i];
        return;
    }
    for (int i = 0; i < RUN; i++)
        if (i < count) items[i] = load<T>(from + i * stride);
}

template <class T> KVCORE_HOST_DEVICE void store_run(char *to, int64_t stride, int count, const T (&items)[RUN]) {
    if (detail::moves_at_once<T>(to, stride, count)) {
        detail::Pack<T> pack;
        for (int i = 0; i < RUN; i++) pack.item[i] = items[i];
        *reinterpret_cast<detail::Pack<T> *>(to) = pack;
        return;
    }
    for (int i = 0; i < RUN; i++)
        if (i < count) store<T>(to + i * stride, items[i]);
}

#ifndef KVCORE_DEVICE_ONLY

constexpr uint32_t ALL_DIMS = ~0u;

/* View some dims (bit i: dim i) of `arrays[0]`, with the others indexed alike: an extent of 1 in them is broadcast, and
 * an array with another number of dims (one that is absent) has stride 0 throughout. */
template <int N> View<N> collapse(uint32_t dims, const kv_array *const (&arrays)[N]) {
    View<N> v = {};
    for (int d = 0; d < arrays[0]->ndim; d++) {
        const int64_t extent = arrays[0]->shape[d];
        if (!(dims >> d & 1) || extent == 1) continue;
        int64_t stride[N];
        bool merges = v.ndim > 0;
        for (int n = 0; n < N; n++) {
            const kv_array &a = *arrays[n];
            stride[n] = a.ndim != arrays[0]->ndim || a.shape[d] == 1 ? 0 : a.stride[d];
            merges = merges && v.stride[v.ndim - 1][n] == extent * stride[n];
        }
        if (!merges) v.ndim++;
        v.extent[v.ndim - 1] = merges ? v.extent[v.ndim - 1] * extent : extent;
        for (int n = 0; n < N; n++) v.stride[v.ndim - 1][n] = stride[n];
    }
    if (v.ndim == 0) v.extent[v.ndim++] = 1;
    return v;
}

/* A stand-in for an array in `collapse`, whose "byte offset" is the number of the element in C order. */
inline kv_array numbering(const kv_array &a) {
    kv_array numbers = a;
    int64_t step = 1;
    for (int d = a.ndim - 1; d >= 0; d--) {
        numbers.stride[d] = step;
        step *= a.shape[d];
    }
    return numbers;
}

/* The array without its first `front` and last `back` dims: that of index 0 there. */
inline kv_array without(const kv_array &a, int front, int back) {
    kv_array inner = a;
    inner.ndim = a.ndim - front - back;
    for (int d = 0; d < inner.ndim; d++) {
        inner.shape[d] = a.shape[d + front];
        inner.stride[d] = a.stride[d + front];
    }
    return inner;
}

inline int64_t element_count(const kv_array &a) {
    int64_t product = 1;
    for (int d = 0; d < a.ndim; d++) product *= a.shape[d];
    return product;
}

/* Launch a kernel whose threads share out `items` among them: its body is a loop from `first_item` by `item_step`. */
template <class K, class Q> void launch_items(Q &q, int64_t items, const typename K::Args &args) {
    q.template launch<K>(q.grid(items, KVCORE_MAX_THREADS), KVCORE_MAX_THREADS, 0, args);
}

#endif

template <class C> KVCORE_DEVICE int64_t first_item(const C &ctx) { return ctx.block() * ctx.threads() + ctx.thread(); }
template <class C> KVCORE_DEVICE int64_t item_step(const C &ctx) { return ctx.blocks() * ctx.threads(); }

}  // namespace kvcore

#endif
