// The emulated device: every kernel, on fibers, behind the C ABI, with memory and streams of its own.
// KVCORE_EMU_WARP is given by the build.
#include "queue.hpp"

#include <kvcore/entry_points.hpp>

using kvcore_emu::Device;
using kvcore_emu::Stream;
using Guard = std::lock_guard<std::mutex>;

KVCORE_ENTRY_POINTS(kvcore_emu::EmuQueue<KVCORE_EMU_WARP>)

// 0: everything runs in order, and only when it is waited for; else orders and times are drawn from the seed.
KVCORE_EXPORT void kvcore_emu_seed(uint64_t seed) {
    Guard guard(Device::one().lock);
    Device::one().seed(seed);
}

// 0: there is no memory.
KVCORE_EXPORT uint64_t kvcore_emu_allocate(int64_t bytes) {
    Guard guard(Device::one().lock);
    try {
        return Device::one().memory.allocate(bytes);
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

KVCORE_EXPORT void kvcore_emu_free(uint64_t address) {
    Guard guard(Device::one().lock);
    Device::one().memory.release(address);
}

// Null: there is no memory.
KVCORE_EXPORT void *kvcore_emu_stream() {
    Guard guard(Device::one().lock);
    try {
        return Device::one().make_stream().get();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

KVCORE_EXPORT void kvcore_emu_stream_free(void *stream) {
    Guard guard(Device::one().lock);
    Device::one().remove_stream(static_cast<Stream *>(stream));
}

KVCORE_EXPORT uint64_t *kvcore_emu_status(void *stream) { return static_cast<Stream *>(stream)->status; }

KVCORE_EXPORT uint64_t kvcore_emu_queued(void *stream) {
    Guard guard(Device::one().lock);
    return static_cast<Stream *>(stream)->queued;
}

KVCORE_EXPORT uint64_t kvcore_emu_done(void *stream) {
    Guard guard(Device::one().lock);
    return static_cast<Stream *>(stream)->done;
}

KVCORE_EXPORT void kvcore_emu_synchronize(void *stream) {
    Guard guard(Device::one().lock);
    Device::one().synchronize(static_cast<Stream *>(stream));
}

// Synchronises, returns what the first failed op reported, and sets the status to KV_OK.
KVCORE_EXPORT uint64_t kvcore_emu_check(void *stream) {
    Guard guard(Device::one().lock);
    auto *checked = static_cast<Stream *>(stream);
    Device::one().synchronize(checked);
    const uint64_t status = checked->status[1];
    checked->status[0] = checked->status[1] = KV_OK;
    return status;
}

// What is queued on a stream later waits until so many commands of another one are done.
KVCORE_EXPORT void kvcore_emu_wait(void *stream, void *other, uint64_t until) noexcept {
    Guard guard(Device::one().lock);
    Device::one().push(static_cast<Stream *>(stream), nullptr, static_cast<Stream *>(other)->shared_from_this(), until);
}
