/* gather_paged: tokens of a paged cache into dense chunks. Kernels in paged.hpp. */
#ifndef KVCORE_GATHER_PAGED_HPP
#define KVCORE_GATHER_PAGED_HPP

#include "paged.hpp"

#ifndef KVCORE_DEVICE_ONLY
namespace kvcore {

template <class Q> int32_t gather_paged(Q &q, const kv_paged_args &a, uint64_t *status) {
    return move_paged(q, a, status, true, false);
}

}  // namespace kvcore
#endif

#endif
