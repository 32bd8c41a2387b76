/* scatter_paged: tokens of dense chunks into a paged cache. Kernels in paged.hpp. */
#ifndef KVCORE_SCATTER_PAGED_HPP
#define KVCORE_SCATTER_PAGED_HPP

#include "paged.hpp"

#ifndef KVCORE_DEVICE_ONLY
namespace kvcore {

template <class Q> int32_t scatter_paged(Q &q, const kv_paged_args &a, uint64_t *status) {
    return move_paged(q, a, status, false, a.check_duplicates != 0);
}

}  // namespace kvcore
#endif

#endif
