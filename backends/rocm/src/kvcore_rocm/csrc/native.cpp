// The C ABI for AMD's devices: ops and runtime. KVCORE_WARP_WIDTH: threads in a warp of the devices it is for;
// KVCORE_HEADERS: the hash of the headers that it is compiled from.
#include <kvcore/runtime_entry_points.hpp>

#include "driver.hpp"

using Queue = kvcore::DeviceQueue<kvcore_rocm::HipDriver, KVCORE_WARP_WIDTH>;

KVCORE_ENTRY_POINTS(Queue)
KVCORE_RUNTIME_ENTRY_POINTS(kvcore_rocm::HipDriver)

// Kernels of other headers take other arguments.
KVCORE_EXPORT const char *kvcore_rocm_headers() { return KVCORE_HEADERS; }
