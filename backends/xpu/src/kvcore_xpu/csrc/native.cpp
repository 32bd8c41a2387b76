// The host library of the Intel backend: the launchers of all ops over SYCL, and the device's runtime. Its kernels are
// compiled by Intel's run-time compiler when a device is first used.
#include "driver.hpp"

#include <kvcore/runtime_entry_points.hpp>

using Queue = kvcore::DeviceQueue<kvcore_xpu::SyclDriver, KVCORE_WARP_WIDTH>;

KVCORE_ENTRY_POINTS(Queue)
KVCORE_RUNTIME_ENTRY_POINTS(kvcore_xpu::SyclDriver)
