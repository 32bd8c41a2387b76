// The C ABI for NVIDIA's devices: ops and runtime. KVCORE_HEADERS: the hash of the headers that it is compiled from.
#include <kvcore/runtime_entry_points.hpp>

#include "driver.hpp"

using Queue = kvcore::DeviceQueue<kvcore_cuda::CudaDriver, 32>;

KVCORE_ENTRY_POINTS(Queue)
KVCORE_RUNTIME_ENTRY_POINTS(kvcore_cuda::CudaDriver)

// Kernels of other headers take other arguments.
KVCORE_EXPORT const char *kvcore_cuda_headers() { return KVCORE_HEADERS; }
