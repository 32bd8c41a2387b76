/* copy_batch: many byte buffers at once, digested on the way where that is asked for. Kernels in digest.hpp. */
#ifndef KVCORE_COPY_BATCH_HPP
#define KVCORE_COPY_BATCH_HPP

#include "digest.hpp"

#ifndef KVCORE_DEVICE_ONLY
namespace kvcore {

template <class Q> int32_t copy_batch(Q &q, const kv_bytes_args &a, uint64_t *status) {
    return digest_and_copy(q, a, status);
}

}  // namespace kvcore
#endif

#endif
