/* The functions of abi.h, over a launch queue: KVCORE_ENTRY_POINTS(Queue), once in a library, defines them all.
 *
 * `Queue(void *stream)` is made for each call. It has what context.hpp says and is a Failure. Nothing that is thrown
 * leaves an entry point: it becomes a code.
 */
#ifndef KVCORE_ENTRY_POINTS_HPP
#define KVCORE_ENTRY_POINTS_HPP

#include "failure.hpp"
#include "kernels.hpp"

#define KVCORE_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvcore {

/* Calls a launcher. The queue outlives what is thrown, so that it can take back what it began. */
template <class Q, class Launcher> int32_t call(void *stream, uint64_t *status, bool reports, Launcher launcher) {
    try {
        Q queue(stream);
        try {
            launcher(queue);
            if (reports) queue.template launch<SettleStatus>(1, 64, 0, {status});
            queue.submit();
        } catch (...) {
            queue.fail_by_exception();
        }
        return queue.failed();
    } catch (...) {
        return Failure().fail_by_exception();
    }
}

/* kvcore_tables_create. */
template <class Q> void *try_create_tables(const kv_tables_args &args) {
    try {
        return create_tables<Q>(args);
    } catch (...) {
        Failure().fail_by_exception();
        return nullptr;
    }
}

}  // namespace kvcore

#define KVCORE_ENTRY_POINT(Queue, op, Args, reports)                                                                   \
    KVCORE_EXPORT int32_t kvcore_##op(const Args *args, void *stream, uint64_t *status) {                              \
        return kvcore::call<Queue>(stream, status, reports, [&](auto &queue) { kvcore::op(queue, *args, status); });   \
    }

/* Do(Queue, op, Args, whether the op reports) for each op. */
#define KVCORE_EACH_OP(Do, Queue)                                                                                      \
    Do(Queue, gather_paged, kv_paged_args, true)                                                                       \
    Do(Queue, scatter_paged, kv_paged_args, true)                                                                      \
    Do(Queue, convert_layout, kv_convert_args, false)                                                                  \
    Do(Queue, copy_batch, kv_bytes_args, false)                                                                        \
    Do(Queue, digest, kv_bytes_args, false)                                                                            \
    Do(Queue, reduce_absmax, kv_reduce_args, true)                                                                     \
    Do(Queue, reduce_minmax, kv_reduce_args, true)                                                                     \
    Do(Queue, reduce_norm, kv_reduce_args, true)                                                                       \
    Do(Queue, reduce_moments, kv_reduce_args, true)                                                                    \
    Do(Queue, quantize, kv_quant_args, true)                                                                           \
    Do(Queue, dequantize, kv_quant_args, true)                                                                         \
    Do(Queue, rotate, kv_rotate_args, true)                                                                            \
    Do(Queue, pack_bits, kv_bits_args, true)                                                                           \
    Do(Queue, unpack_bits, kv_bits_args, false)                                                                        \
    Do(Queue, count_symbols, kv_bits_args, false)                                                                      \
    Do(Queue, shift_rope, kv_rope_args, false)                                                                         \
    Do(Queue, choose_classes, kv_tiles_args, false)                                                                    \
    Do(Queue, encode_symbols, kv_tiles_args, false)                                                                    \
    Do(Queue, decode_symbols, kv_tiles_args, true)

#define KVCORE_ENTRY_POINTS(Queue)                                                                                     \
    KVCORE_EXPORT int32_t kvcore_abi_version() { return KV_ABI_VERSION; }                                              \
    KVCORE_EXPORT const char *kvcore_last_error() { return kvcore::last_error(); }                                     \
    KVCORE_EXPORT void *kvcore_tables_create(const kv_tables_args *args) {                                             \
        return kvcore::try_create_tables<Queue>(*args);                                                                \
    }                                                                                                                  \
    KVCORE_EXPORT void kvcore_tables_destroy(void *tables) { Queue::release(tables); }                                 \
    KVCORE_EACH_OP(KVCORE_ENTRY_POINT, Queue)

#endif
