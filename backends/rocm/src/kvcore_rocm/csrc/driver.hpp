/* The driver of AMD's devices (queue_device.hpp), over HIP. */
#ifndef KVCORE_ROCM_DRIVER_HPP
#define KVCORE_ROCM_DRIVER_HPP

#include <ctype.h>
#include <string.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <kvcore/blocks.hpp>
#include <kvcore/queue_device.hpp>

#include "hip.hpp"

namespace kvcore_rocm {

struct HipDriver {
    using Stream = HipStream *;
    using Event = HipEvent *;
    using Kernel = void *;
    using Module = void *;
    static constexpr bool arguments_in_memory = false;

    /* Makes a device that of this thread, and then the one before: torch's must stay what it is. */
    class Scope {
      public:
        explicit Scope(int32_t ordinal) {
            const Hip &hip = Hip::get();
            KVCORE_HIP_CALL(hip, hipGetDevice, &before_);
            if (before_ == ordinal) return;
            KVCORE_HIP_CALL(hip, hipSetDevice, ordinal);
            is_changed_ = true;
        }
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;
        ~Scope() {
            if (is_changed_) Hip::get().hipSetDevice(before_);
        }

      private:
        int before_ = 0;
        bool is_changed_ = false;
    };

    static void open(const char *path) { Hip::open(path); }

    static int32_t count() {
        static std::atomic<int32_t> known{-1}; /* it never changes, and is asked for at every call */
        if (known.load(std::memory_order_relaxed) >= 0) return known;
        const Hip &hip = Hip::get();
        int found = 0;
        const int error = hip.hipGetDeviceCount(&found);
        if (error != HIP_SUCCESS && error != HIP_NO_DEVICE) hip.refuse("hipGetDeviceCount", error);
        if (error == HIP_NO_DEVICE) hip.forget_error();
        known = error == HIP_SUCCESS ? found : 0;
        return known;
    }

    static void describe(int32_t ordinal, kv_device_info &info) {
        const Hip &hip = Hip::get();
        info = {};
        KVCORE_HIP_CALL(hip, hipDeviceGetName, info.name, int(sizeof info.name) - 1, ordinal);
        size_t bytes = 0;
        KVCORE_HIP_CALL(hip, hipDeviceTotalMem, &bytes, ordinal);
        info.memory_bytes = int64_t(bytes);
        KVCORE_HIP_CALL(hip, hipDeviceGetAttribute, &info.units, HIP_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal);
        KVCORE_HIP_CALL(hip, hipDriverGetVersion, &info.driver_version);
        const std::string arch = architecture(hip, ordinal);
        snprintf(info.arch, sizeof info.arch, "%s", arch.c_str());
        info.warp_width = arch.compare(0, 4, "gfx9") == 0 ? 64 : 32; /* as ctx_gpu.hpp has it */
    }

    static Module load(int32_t, const void *image, int64_t bytes) {
        char *kept = new char[size_t(bytes)]; /* as long as the module, which is for ever: HIP may read it late */
        memcpy(kept, image, size_t(bytes));
        Module made = nullptr;
        const int error = Hip::get().hipModuleLoadData(&made, kept);
        if (error == HIP_SUCCESS) return made;
        delete[] kept;
        Hip::get().refuse("hipModuleLoadData", error);
    }

    static Kernel find(Module module, const char *name) {
        Kernel found = nullptr;
        Hip::get().check(name, Hip::get().hipModuleGetFunction(&found, module, name));
        return found;
    }

    static void launch(Stream stream, Kernel kernel, int64_t blocks, int threads, int shared_bytes, const void *args,
                       size_t) {
        if (blocks * threads > int64_t(UINT32_MAX)) /* HIP counts the threads of a grid in 32 bits */
            throw DriverError(KV_FAIL_UNSUPPORTED, "a kernel would need " + std::to_string(blocks) + " blocks of " +
                                                       std::to_string(threads) + " threads; split the call");
        void *parameters[] = {const_cast<void *>(args)};
        KVCORE_HIP_CALL(Hip::get(), hipModuleLaunchKernel, kernel, unsigned(blocks), 1, 1, unsigned(threads), 1, 1,
                        unsigned(shared_bytes), stream, parameters, nullptr);
    }

    static void *allocate(int64_t bytes, Stream stream) {
        void *made = blocks().allocate(bytes, stream);
        if (made != nullptr) return made;
        throw DriverError(KV_FAIL_MEMORY, "device " + std::to_string(current()) + " has no " + std::to_string(bytes) +
                                              " B of memory left");
    }
    static void free(void *memory, Stream stream) { blocks().free(memory, stream, most_kept); }

    static void fill(void *to, uint8_t value, int64_t bytes, Stream stream) {
        KVCORE_HIP_CALL(Hip::get(), hipMemsetD8Async, to, value, size_t(bytes), stream);
    }

    static void copy(const kvcore::Copy *copies, int64_t count, Stream stream) {
        const Hip &hip = Hip::get();
        for (const kvcore::Copy *c = copies; c != copies + count; ++c)
            KVCORE_HIP_CALL(hip, hipMemcpyAsync, c->to, c->from, size_t(c->bytes), HIP_MEMCPY_DEFAULT, stream);
    }

    /* Memory of the host has a device as well once it is pinned, but then it has an address for the host. */
    static int32_t place(uint64_t address) {
        const Hip &hip = Hip::get();
        void *asked = pointer(address), *host = nullptr;
        int ordinal = -1;
        if (hip.hipPointerGetAttribute(&ordinal, HIP_POINTER_DEVICE_ORDINAL, asked) != HIP_SUCCESS) {
            hip.forget_error();
            return -1;
        }
        const int error = hip.hipPointerGetAttribute(&host, HIP_POINTER_HOST_POINTER, asked);
        if (error != HIP_SUCCESS) hip.forget_error();
        return error == HIP_SUCCESS && host != nullptr ? -1 : ordinal;
    }

    /* To give pinned memory back stops all devices, so that it is kept for the next user. */
    static void *pin(int64_t bytes) {
        {
            std::lock_guard<std::mutex> guard(pinned().lock);
            auto &spare = pinned().spare[bytes];
            if (!spare.empty()) {
                void *found = spare.back();
                spare.pop_back();
                return found;
            }
        }
        void *made = nullptr;
        KVCORE_HIP_CALL(Hip::get(), hipHostMalloc, &made, size_t(bytes), HIP_HOST_PORTABLE);
        return made;
    }
    static void unpin(void *memory, int64_t bytes) {
        std::lock_guard<std::mutex> guard(pinned().lock);
        pinned().spare[bytes].push_back(memory);
    }

    static void register_host(uint64_t address, int64_t bytes) {
        KVCORE_HIP_CALL(Hip::get(), hipHostRegister, pointer(address), size_t(bytes), HIP_HOST_PORTABLE);
    }
    static void unregister_host(uint64_t address) {
        KVCORE_HIP_CALL(Hip::get(), hipHostUnregister, pointer(address));
    }

    static Stream make_stream() {
        Stream made = nullptr;
        KVCORE_HIP_CALL(Hip::get(), hipStreamCreateWithFlags, &made, HIP_STREAM_NON_BLOCKING);
        return made;
    }
    static Stream adopt(uint64_t native) {
        if (native == per_thread_stream)
            throw DriverError(KV_FAIL_UNSUPPORTED, "hipStreamPerThread is another stream in every thread, so that "
                                                   "nothing can be kept in its order; give a stream of its own");
        return static_cast<Stream>(pointer(native));
    }
    static void end_stream(Stream stream) { KVCORE_HIP_CALL(Hip::get(), hipStreamDestroy, stream); }
    static void synchronize(Stream stream) { KVCORE_HIP_CALL(Hip::get(), hipStreamSynchronize, stream); }

    static Event make_event(bool shared) {
        Event made = nullptr;
        const unsigned flags = HIP_EVENT_DISABLE_TIMING | (shared ? unsigned(HIP_EVENT_INTERPROCESS) : 0);
        KVCORE_HIP_CALL(Hip::get(), hipEventCreateWithFlags, &made, flags);
        return made;
    }
    static void end_event(Event event) { KVCORE_HIP_CALL(Hip::get(), hipEventDestroy, event); }
    static void record(Event event, Stream stream) { KVCORE_HIP_CALL(Hip::get(), hipEventRecord, event, stream); }
    static bool passed(Event event) {
        const Hip &hip = Hip::get();
        const int error = hip.hipEventQuery(event);
        if (error == HIP_SUCCESS) return true;
        if (error != HIP_NOT_READY) hip.refuse("hipEventQuery", error);
        hip.forget_error();
        return false;
    }
    static void synchronize(Event event) { KVCORE_HIP_CALL(Hip::get(), hipEventSynchronize, event); }
    static void wait(Stream stream, Event event) { KVCORE_HIP_CALL(Hip::get(), hipStreamWaitEvent, stream, event, 0); }

    /* The handle is of the whole allocation: HIP takes addresses within, but versions differ in what is opened then. */
    static void export_memory(uint64_t address, kv_ipc_memory &out) {
        const Hip &hip = Hip::get();
        void *base = nullptr;
        size_t bytes = 0;
        KVCORE_HIP_CALL(hip, hipMemGetAddressRange, &base, &bytes, pointer(address));
        HipHandle handle;
        KVCORE_HIP_CALL(hip, hipIpcGetMemHandle, &handle, base);
        memcpy(out.handle, handle.bytes, KV_IPC_BYTES);
        out.offset = int64_t(address - uint64_t(uintptr_t(base)));
        out.allocation_bytes = int64_t(bytes);
    }
    static uint64_t import_memory(const kv_ipc_memory &from) {
        const Hip &hip = Hip::get();
        HipHandle handle;
        memcpy(handle.bytes, from.handle, KV_IPC_BYTES);
        void *made = nullptr;
        int error = hip.hipIpcOpenMemHandle(&made, handle, 1);
        if (error == HIP_INVALID_VALUE) error = hip.hipIpcOpenMemHandle(&made, handle, 0); /* ROCm 5: see hip.hpp */
        if (error == HIP_INVALID_CONTEXT) {
            hip.forget_error();
            throw DriverError(KV_FAIL_POINTER, "memory is imported by other processes than the one that exported it");
        }
        hip.check("hipIpcOpenMemHandle", error);
        return uint64_t(uintptr_t(made));
    }
    static void close_memory(uint64_t address) {
        KVCORE_HIP_CALL(Hip::get(), hipIpcCloseMemHandle, pointer(address));
    }
    static void export_event(Event event, unsigned char *out) {
        HipHandle handle;
        KVCORE_HIP_CALL(Hip::get(), hipIpcGetEventHandle, &handle, event);
        memcpy(out, handle.bytes, KV_IPC_BYTES);
    }
    static Event import_event(const unsigned char *from) {
        HipHandle handle;
        memcpy(handle.bytes, from, KV_IPC_BYTES);
        Event made = nullptr;
        KVCORE_HIP_CALL(Hip::get(), hipIpcOpenEventHandle, &made, handle);
        return made;
    }

  private:
    /* Bytes of a device that wait for a user. HIP's pools are not used: not every version has them, and other processes
     * cannot import what comes of them. */
    static constexpr int64_t most_kept = int64_t(512) << 20;
    static constexpr uint64_t per_thread_stream = 2; /* a handle with a meaning */

    struct Raw { /* hipFree waits until the device has done all its work */
        static void *allocate(int64_t bytes) {
            const Hip &hip = Hip::get();
            void *made = nullptr;
            const int error = hip.hipMalloc(&made, size_t(bytes));
            if (error == HIP_SUCCESS) return made;
            if (error != HIP_OUT_OF_MEMORY) hip.refuse("hipMalloc", error);
            hip.forget_error();
            return nullptr;
        }
        static void free(void *memory) { KVCORE_HIP_CALL(Hip::get(), hipFree, memory); }
    };

    struct Pinned {
        std::mutex lock;
        std::map<int64_t, std::vector<void *>> spare; /* by size */
    };

    static void *pointer(uint64_t address) { return reinterpret_cast<void *>(uintptr_t(address)); }

    static int current() {
        int ordinal = 0;
        KVCORE_HIP_CALL(Hip::get(), hipGetDevice, &ordinal);
        return ordinal;
    }

    /* Those of the thread's device. Never destroyed: Python may still let go of arrays when the process ends. */
    static kvcore::Blocks<Raw> &blocks() {
        static auto *all = new kvcore::Blocks<Raw>[kvcore::MAX_DEVICES];
        return all[current()];
    }
    static Pinned &pinned() {
        static auto *one = new Pinned;
        return *one;
    }

    /* "gfx90a" of gcnArchName "gfx90a:sramecc+:xnack-". Where the name lies in the struct depends on the version of
     * ROCm; it is the only text in it beside the device's name, which comes first and has 256 bytes. */
    static std::string architecture(const Hip &hip, int32_t ordinal) {
        constexpr size_t name_bytes = 256;
        std::vector<char> properties(16 << 10); /* ROCm 7 writes 1.5 KiB */
        KVCORE_HIP_CALL(hip, hipGetDeviceProperties, properties.data(), ordinal);
        for (size_t at = name_bytes; at + sizeof kv_device_info::arch < properties.size(); ++at) {
            if (memcmp(&properties[at], "gfx", 3) != 0) continue;
            size_t end = at;
            while (isalnum(static_cast<unsigned char>(properties[end])) || properties[end] == '-') ++end;
            return std::string(&properties[at], end - at);
        }
        throw DriverError(KV_FAIL_DEVICE, "HIP does not say which architecture device " + std::to_string(ordinal) +
                                              " has; this kvcore-rocm knows ROCm 5.2 to 7");
    }
};

}  // namespace kvcore_rocm

#endif
