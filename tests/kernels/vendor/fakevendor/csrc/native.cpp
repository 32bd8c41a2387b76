/* The vendor's library, and what tests ask of the machine. */
#include "driver.hpp"

using fakevendor::Machine;
using Queue = kvcore::DeviceQueue<fakevendor::Driver, 32>;

KVCORE_SIMULATED_KERNELS(32)
KVCORE_ENTRY_POINTS(Queue)
KVCORE_RUNTIME_ENTRY_POINTS(fakevendor::Driver)

KVCORE_EXPORT void fake_refuse_allocation(int64_t which) { Machine::one().switches.refuse_allocation = which; }
KVCORE_EXPORT void fake_limit(int64_t bytes) { Machine::one().switches.memory_bytes = bytes; }
KVCORE_EXPORT void fake_fail_kernel(int64_t which) { Machine::one().switches.fail_kernel = which; }
KVCORE_EXPORT void fake_repair() {
    Machine::one().switches = {};
    for (auto &[handle, stream] : Machine::one().streams) {
        stream->done = stream->queued;
        stream->waiting.clear();
    }
}
KVCORE_EXPORT int64_t fake_streams() { return int64_t(Machine::one().streams.size()); }
KVCORE_EXPORT int64_t fake_in_use() { return Machine::one().in_use(); }
KVCORE_EXPORT int64_t fake_registered() { return int64_t(Machine::one().registered.size()); }
KVCORE_EXPORT int64_t fake_imported() { return int64_t(fakevendor::Driver::imported().size()); }
KVCORE_EXPORT uint64_t fake_stream(int32_t ordinal) { /* as torch would have one */
    fakevendor::Driver::Scope scope(ordinal);
    return uint64_t(fakevendor::Driver::make_stream());
}
KVCORE_EXPORT uint64_t fake_waiting(uint64_t stream) { return Machine::one().streams.at(stream)->waiting.size(); }
