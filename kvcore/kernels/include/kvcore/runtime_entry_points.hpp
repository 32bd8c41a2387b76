/* The functions of runtime.h, over a Driver (queue_device.hpp): KVCORE_RUNTIME_ENTRY_POINTS(Driver), once in a library,
 * beside KVCORE_ENTRY_POINTS(kvcore::DeviceQueue<Driver, width>). Nothing that is thrown leaves one of them.
 */
#ifndef KVCORE_RUNTIME_ENTRY_POINTS_HPP
#define KVCORE_RUNTIME_ENTRY_POINTS_HPP

#include "entry_points.hpp"
#include "queue_device.hpp"

namespace kvcore {

/* An event, its device, and whether it came from the device's spare ones. */
template <class Driver> struct DeviceEvent {
    int32_t ordinal;
    bool is_spare;
    typename Driver::Event event;
};

template <class Function> int32_t guarded(Function function) {
    try {
        function();
        return 0;
    } catch (...) {
        return Failure().fail_by_exception();
    }
}

template <class Driver> struct RuntimeFunctions {
    using OneStream = Stream<Driver>;
    using OneEvent = DeviceEvent<Driver>;
    using Scope = typename Driver::Scope;

    static OneStream &stream(void *handle) { return *static_cast<OneStream *>(handle); }
    static OneEvent &event(void *handle) { return *static_cast<OneEvent *>(handle); }

    static void info(int32_t ordinal, kv_device_info *out) { *out = Device<Driver>::at(ordinal).info; }

    static void load(int32_t ordinal, const void *image, int64_t bytes, const kv_tuning *tuning) {
        auto &device = Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        std::lock_guard<std::mutex> guard(device.lock);
        if (device.has_kernels) return;
        device.module = Driver::load(ordinal, image, bytes);
        device.tuning = *tuning;
        device.has_kernels = true;
    }

    static void allocate(int32_t ordinal, int64_t bytes, uint64_t *address) {
        auto &device = Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        *address = uint64_t(uintptr_t(device.allocate(bytes)));
    }
    static void free(int32_t ordinal, uint64_t address) {
        auto &device = Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        device.free(reinterpret_cast<void *>(uintptr_t(address)));
    }

    static void make_stream(int32_t ordinal, uint64_t native, bool adopt, void **out) {
        Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        *out = new OneStream(ordinal, native, adopt);
    }
    static void synchronize(void *handle) {
        Scope scope(stream(handle).ordinal);
        Driver::synchronize(stream(handle).native);
    }
    static void check(void *handle, uint64_t *status) {
        OneStream &one = stream(handle);
        std::lock_guard<std::mutex> guard(one.lock);
        Scope scope(one.ordinal);
        const Copy copy = {status, one.status, 8};
        Driver::copy(&copy, 1, one.native);
        Driver::synchronize(one.native);
        if (*status == KV_OK) return; /* the second word is then the same */
        Driver::fill(one.status, 0xFF, 16, one.native);
    }
    static void end_stream(void *handle) {
        if (handle == nullptr) return;
        std::unique_ptr<OneStream> one(&stream(handle));
        Scope scope(one->ordinal);
        one->end();
    }

    static void record(void *handle, bool shared, void **out) {
        OneStream &one = stream(handle);
        Scope scope(one.ordinal);
        std::unique_ptr<OneEvent> made(new OneEvent{one.ordinal, !shared, {}});
        made->event = shared ? Driver::make_event(true) : one.device.take_event();
        try {
            Driver::record(made->event, one.native);
        } catch (...) {
            end_event(made.release());
            throw;
        }
        *out = made.release();
    }
    static void passed(void *handle, int32_t *out) {
        Scope scope(event(handle).ordinal);
        *out = Driver::passed(event(handle).event);
    }
    static void synchronize_event(void *handle) {
        Scope scope(event(handle).ordinal);
        Driver::synchronize(event(handle).event);
    }
    static void wait(void *handle, void *for_event) {
        Scope scope(stream(handle).ordinal);
        Driver::wait(stream(handle).native, event(for_event).event);
    }
    static void end_event(void *handle) {
        if (handle == nullptr) return;
        std::unique_ptr<OneEvent> one(&event(handle));
        Scope scope(one->ordinal);
        if (one->is_spare) Device<Driver>::at(one->ordinal).give_back(one->event);
        else Driver::end_event(one->event);
    }

    static void register_host(uint64_t address, int64_t bytes) {
        const int32_t ordinal = Device<Driver>::any();
        Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        Driver::register_host(address, bytes);
    }
    static void unregister_host(uint64_t address) {
        Scope scope(Device<Driver>::any());
        Driver::unregister_host(address);
    }

    static void export_memory(uint64_t address, kv_ipc_memory *out) {
        const int32_t ordinal = Driver::place(address);
        if (ordinal < 0) throw DriverError(KV_FAIL_POINTER, "only memory of a device is exported by handle");
        Scope scope(ordinal);
        Driver::export_memory(address, *out);
    }
    static void import_memory(int32_t ordinal, const kv_ipc_memory *handle, uint64_t *out) {
        Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        *out = Driver::import_memory(*handle) + uint64_t(handle->offset);
    }
    static void close_memory(int32_t ordinal, uint64_t address) {
        Scope scope(ordinal);
        Driver::close_memory(address);
    }
    static void export_event(void *handle, unsigned char *out) {
        Scope scope(event(handle).ordinal);
        Driver::export_event(event(handle).event, out);
    }
    static void import_event(int32_t ordinal, const unsigned char *handle, void **out) {
        Device<Driver>::at(ordinal);
        Scope scope(ordinal);
        std::unique_ptr<OneEvent> made(new OneEvent{ordinal, false, {}});
        made->event = Driver::import_event(handle);
        *out = made.release();
    }
};

}  // namespace kvcore

#define KVCORE_RUNTIME_FUNCTION(name, parameters, call)                                                                \
    KVCORE_EXPORT int32_t kvcore_##name parameters {                                                                   \
        return kvcore::guarded([&] { call; });                                                                         \
    }

#define KVCORE_RUNTIME_ENTRY_POINTS(Driver)                                                                            \
    using KvcoreRuntime = kvcore::RuntimeFunctions<Driver>;                                                            \
    KVCORE_EXPORT int32_t kvcore_runtime_version() { return KV_RUNTIME_VERSION; }                                      \
    KVCORE_EXPORT const char *kvcore_kernel_list() { return kvcore::kernel_list(); }                                   \
    KVCORE_EXPORT uint64_t *kvcore_stream_status(void *stream) { return KvcoreRuntime::stream(stream).status; }        \
    KVCORE_EXPORT uint64_t kvcore_stream_native(void *stream) {                                                        \
        return uint64_t(uintptr_t(KvcoreRuntime::stream(stream).native));                                              \
    }                                                                                                                  \
    KVCORE_RUNTIME_FUNCTION(driver_open, (const char *path), Driver::open(path))                                       \
    KVCORE_RUNTIME_FUNCTION(device_count, (int32_t * count), *count = Driver::count())                                 \
    KVCORE_RUNTIME_FUNCTION(device_info, (int32_t ordinal, kv_device_info * info), KvcoreRuntime::info(ordinal, info)) \
    KVCORE_RUNTIME_FUNCTION(device_load,                                                                               \
                            (int32_t ordinal, const void *image, int64_t bytes, const kv_tuning *tuning),              \
                            KvcoreRuntime::load(ordinal, image, bytes, tuning))                                        \
    KVCORE_RUNTIME_FUNCTION(device_use, (int32_t ordinal), kvcore::Kept<Driver>::ordinal() = ordinal)                  \
    KVCORE_RUNTIME_FUNCTION(memory_allocate, (int32_t ordinal, int64_t bytes, uint64_t *address),                      \
                            KvcoreRuntime::allocate(ordinal, bytes, address))                                          \
    KVCORE_RUNTIME_FUNCTION(memory_free, (int32_t ordinal, uint64_t address), KvcoreRuntime::free(ordinal, address))   \
    KVCORE_RUNTIME_FUNCTION(memory_place, (uint64_t address, int32_t *ordinal), *ordinal = Driver::place(address))     \
    KVCORE_RUNTIME_FUNCTION(host_register, (uint64_t address, int64_t bytes),                                          \
                            KvcoreRuntime::register_host(address, bytes))                                              \
    KVCORE_RUNTIME_FUNCTION(host_unregister, (uint64_t address), KvcoreRuntime::unregister_host(address))              \
    KVCORE_RUNTIME_FUNCTION(stream_create, (int32_t ordinal, uint64_t native, int32_t adopt, void **stream),           \
                            KvcoreRuntime::make_stream(ordinal, native, adopt != 0, stream))                           \
    KVCORE_RUNTIME_FUNCTION(stream_synchronize, (void *stream), KvcoreRuntime::synchronize(stream))                    \
    KVCORE_RUNTIME_FUNCTION(stream_check, (void *stream, uint64_t *status), KvcoreRuntime::check(stream, status))      \
    KVCORE_RUNTIME_FUNCTION(stream_destroy, (void *stream), KvcoreRuntime::end_stream(stream))                         \
    KVCORE_RUNTIME_FUNCTION(event_record, (void *stream, int32_t shared, void **event),                                \
                            KvcoreRuntime::record(stream, shared != 0, event))                                         \
    KVCORE_RUNTIME_FUNCTION(event_passed, (void *event, int32_t *passed), KvcoreRuntime::passed(event, passed))        \
    KVCORE_RUNTIME_FUNCTION(event_synchronize, (void *event), KvcoreRuntime::synchronize_event(event))                 \
    KVCORE_RUNTIME_FUNCTION(event_wait, (void *stream, void *event), KvcoreRuntime::wait(stream, event))               \
    KVCORE_RUNTIME_FUNCTION(event_destroy, (void *event), KvcoreRuntime::end_event(event))                             \
    KVCORE_RUNTIME_FUNCTION(ipc_export_memory, (uint64_t address, kv_ipc_memory * handle),                             \
                            KvcoreRuntime::export_memory(address, handle))                                             \
    KVCORE_RUNTIME_FUNCTION(ipc_import_memory, (int32_t ordinal, const kv_ipc_memory *handle, uint64_t *address),      \
                            KvcoreRuntime::import_memory(ordinal, handle, address))                                    \
    KVCORE_RUNTIME_FUNCTION(ipc_close_memory, (int32_t ordinal, uint64_t address),                                     \
                            KvcoreRuntime::close_memory(ordinal, address))                                             \
    KVCORE_RUNTIME_FUNCTION(ipc_export_event, (void *event, unsigned char *handle),                                    \
                            KvcoreRuntime::export_event(event, handle))                                                \
    KVCORE_RUNTIME_FUNCTION(ipc_import_event, (int32_t ordinal, const unsigned char *handle, void **event),            \
                            KvcoreRuntime::import_event(ordinal, handle, event))

#endif
