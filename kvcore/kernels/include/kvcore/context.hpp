/* What kernels are written against: macros, and the contract of the execution context and of the launch queue.
 *
 * A kernel is a struct. Its body is a template over the context, so that one text is compiled for every device:
 *
 *     struct GatherRows {
 *         struct Args { ... };                                 plain data; pointers are memory of the backend
 *         static constexpr const char *name = "gather_rows";   unique; what run-time compilers look it up by
 *         static constexpr bool flat = true;                   no barrier, shuffle, ballot or shared memory
 *         template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a);
 *     };
 *
 * Below it, under `#ifndef KVCORE_DEVICE_ONLY`, is the launcher of the op: host code, a template over the queue.
 *
 *     template <class Q> int32_t gather_paged(Q &q, const kv_paged_args &a, uint64_t *status);
 *
 * The context `C` (all is one-dimensional):
 *
 *     C::warp_width                        constant: 16, 32 or 64
 *     int thread(), threads()              of the block; at most KVCORE_MAX_THREADS, a multiple of 64
 *     int64_t block(), blocks()
 *     int lane(), warp()
 *     void barrier()                       all threads of the block, or none
 *     T *shared<T>(int byte_offset = 0)    dynamic shared memory, aligned to 16 bytes, uninitialised
 *     T shuffle(T v, int from_lane)        32- and 64-bit types; all lanes of the warp, or none
 *     T shuffle_xor(T v, int mask)         likewise
 *     uint64_t ballot(bool)                likewise; bit i is lane i's
 *     static int popcount(uint64_t)
 *     static int leading_zeros(uint32_t)   32 for 0
 *     static float divide(float, float), square_root(float)     correctly rounded
 *     static float rint(float)             to nearest, half to even
 *     static uint32_t bits(float);  static float from_bits(uint32_t)
 *     static T atomic_add(T *, T)          uint32_t and uint64_t; this one and those below work on global and on shared
 *     static T atomic_max(T *, T)          memory, are relaxed, and return the value before
 *     static T atomic_min(T *, T)
 *     static void report(uint64_t *status, int code, int64_t position)    see abi.h
 *
 * A loop around barrier, shuffle or ballot has a trip count that is the same for the block or warp. Shuffles and
 * ballots order no memory: what one thread reads of another's writes lies behind a barrier. Bodies use no libm, no
 * exceptions, no allocation, no `double`; files are compiled without floating-point contraction.
 *
 * The queue `Q` (host code) orders everything on one stream:
 *
 *     Q::warp_width                                 constant
 *     void launch<K>(int64_t blocks, int threads, int shared_bytes, const K::Args &)    0 blocks: nothing happens
 *     int64_t grid(int64_t items, int64_t per_block)   blocks for a grid-stride loop over items: at most the device's
 *                                                   fill, so bodies must loop; 0 for 0 items
 *     const T *upload(const T *host, int64_t count)  a copy in backend memory, alive until the stream has passed
 *     void *scratch(int64_t bytes)                  backend memory, uninitialised, aligned to 16 bytes, as long alive
 *     void zero(void *, int64_t bytes)              fills backend memory with zeros
 *     T *device<T>(uint64_t address)                what kernels may dereference for an address of abi.h
 *     bool reaches(uint64_t address)                whether it is memory of the backend; else it is the host's
 *     void transfer(uint64_t to, uint64_t from, int64_t bytes)   copies between memories, the host's included; `to`
 *                                                   may also be a pointer that kernels dereference. Unlike kernels it
 *                                                   does not look at the status
 *     int64_t engine_bytes()                        buffers of so many bytes and more, both ends of them in memory of the
 *                                                   backend, are rather transferred than copied by a kernel
 *     void submit()                                 what was asked for so far is with the device; ends every op
 *     int32_t fail(int32_t code, const char *why)   records the first failure; returns failed()
 *     int32_t failed()                              0 or a KV_FAIL_ code
 *     static void *keep(const void *host, int64_t bytes)   backend memory for longer than a stream, filled; or null
 *     static void release(void *kept)
 *
 * After a failure the queue launches nothing, and upload, scratch and device return null; so a launcher asks for all
 * it needs first, launches then, and ends with `return q.failed()`. What a launcher throws is a failure too
 * (entry_points.hpp).
 */
#ifndef KVCORE_CONTEXT_HPP
#define KVCORE_CONTEXT_HPP

#include "abi.h"

#define KVCORE_MAX_THREADS 256

#if defined(__HIP__)
#define KVCORE_DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define KVCORE_HOST_DEVICE __attribute__((host)) __attribute__((device)) __attribute__((always_inline)) inline
#elif defined(__CUDACC__)
#define KVCORE_DEVICE __device__ __forceinline__
#define KVCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVCORE_DEVICE inline
#define KVCORE_HOST_DEVICE inline
#endif

/* Begins the body of each kernel that follows a check: an op whose data were found wrong, or that comes after one on
 * its stream, writes nothing. Uniform: no kernel that begins with it reports.
 *
 * Kernels that report do not begin with it, since others are reporting while they run; so after a failed op they go on
 * checking, and may report a lesser position. The last kernel of their op sets that right (SettleStatus). */
#define KVCORE_UNLESS_FAILED(status)                                                                                   \
    if (*(status) != KV_OK) return

#endif
