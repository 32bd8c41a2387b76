/* The driver of NVIDIA's devices (queue_device.hpp), over CUDA's driver API. */
#ifndef KVCORE_CUDA_DRIVER_HPP
#define KVCORE_CUDA_DRIVER_HPP

#include <string.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <kvcore/blocks.hpp>
#include <kvcore/queue_device.hpp>

#include "cuda.hpp"

namespace kvcore_cuda {

struct CudaDriver {
    using Stream = CudaStream *;
    using Event = CudaEvent *;
    using Kernel = CudaFunction *;
    using Module = CudaModule *;
    static constexpr bool arguments_in_memory = false;

    /* Makes the primary context of a device, which torch uses too, that of this thread. */
    class Scope {
      public:
        explicit Scope(int32_t ordinal) {
            const Cuda &cuda = Cuda::get();
            CudaContext *mine = context(ordinal), *current = nullptr;
            KVCORE_CUDA_CALL(cuda, cuCtxGetCurrent, &current);
            if (current == mine) return;
            KVCORE_CUDA_CALL(cuda, cuCtxPushCurrent, mine);
            is_pushed_ = true;
        }
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;
        ~Scope() {
            CudaContext *popped = nullptr;
            if (is_pushed_) Cuda::get().cuCtxPopCurrent(&popped);
        }

      private:
        bool is_pushed_ = false;
    };

    static void open(const char *path) { Cuda::open(path[0] != '\0' ? path : "libcuda.so.1"); }

    static int32_t count() {
        static std::atomic<int32_t> known{-1}; /* it never changes, and is asked for at every call */
        if (known.load(std::memory_order_relaxed) >= 0) return known;
        const Cuda &cuda = Cuda::get();
        int found = 0; /* without a device cuInit has failed, and the driver counts nothing */
        if (cuda.has_devices) KVCORE_CUDA_CALL(cuda, cuDeviceGetCount, &found);
        known = found;
        return found;
    }

    static void describe(int32_t ordinal, kv_device_info &info) {
        const Cuda &cuda = Cuda::get();
        info = {};
        const int device = handle(ordinal);
        KVCORE_CUDA_CALL(cuda, cuDeviceGetName, info.name, int(sizeof info.name) - 1, device);
        size_t bytes = 0;
        KVCORE_CUDA_CALL(cuda, cuDeviceTotalMem, &bytes, device);
        info.memory_bytes = int64_t(bytes);
        KVCORE_CUDA_CALL(cuda, cuDeviceGetAttribute, &info.units, CUDA_DEVICE_MULTIPROCESSORS, device);
        KVCORE_CUDA_CALL(cuda, cuDeviceGetAttribute, &info.warp_width, CUDA_DEVICE_WARP_SIZE, device);
        int major = 0, minor = 0;
        KVCORE_CUDA_CALL(cuda, cuDeviceGetAttribute, &major, CUDA_DEVICE_COMPUTE_MAJOR, device);
        KVCORE_CUDA_CALL(cuda, cuDeviceGetAttribute, &minor, CUDA_DEVICE_COMPUTE_MINOR, device);
        /* A driver for tests says that it is one, so that nobody takes what it gives for a GPU's. */
        const char *remark = strstr(info.name, "simulated") != nullptr ? "-simulated" : "";
        snprintf(info.arch, sizeof info.arch, "sm_%d%d%s", major, minor, remark);
        info.driver_version = cuda.version;
    }

    /* The image ends with a null byte where it is a text. KV_FAIL_UNSUPPORTED: it is not for this device or driver. */
    static Module load(int32_t, const void *image, int64_t) {
        char log[4096] = "";
        int options[] = {CUDA_JIT_ERROR_LOG, CUDA_JIT_ERROR_LOG_BYTES};
        void *values[] = {log, reinterpret_cast<void *>(sizeof log - 1)};
        Module made = nullptr;
        const int error = Cuda::get().cuModuleLoadDataEx(&made, image, 2, options, values);
        if (error != CUDA_SUCCESS)
            Cuda::get().refuse("cuModuleLoadDataEx", error, log[0] != '\0' ? std::string("; ") + log : "");
        return made;
    }

    static Kernel find(Module module, const char *name) {
        Kernel found = nullptr;
        Cuda::get().check(name, Cuda::get().cuModuleGetFunction(&found, module, name));
        return found;
    }

    static void launch(Stream stream, Kernel kernel, int64_t blocks, int threads, int shared_bytes, const void *args,
                       size_t) {
        constexpr int64_t most_blocks = INT32_MAX;
        constexpr int granted = 48 << 10; /* what no kernel has to ask for */
        const Cuda &cuda = Cuda::get();
        if (blocks > most_blocks)
            throw DriverError(KV_FAIL_UNSUPPORTED,
                              "a kernel would need " + std::to_string(blocks) + " blocks; split the call");
        if (shared_bytes > granted)
            KVCORE_CUDA_CALL(cuda, cuFuncSetAttribute, kernel, CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, shared_bytes);
        void *parameters[] = {const_cast<void *>(args)};
        KVCORE_CUDA_CALL(cuda, cuLaunchKernel, kernel, unsigned(blocks), 1, 1, unsigned(threads), 1, 1,
                         unsigned(shared_bytes), stream, parameters, nullptr);
    }

    static void *allocate(int64_t bytes, Stream stream) {
        void *made = blocks().allocate(bytes, stream);
        if (made != nullptr) return made;
        throw DriverError(KV_FAIL_MEMORY, "the device has no " + std::to_string(bytes) + " B of memory left");
    }
    static void free(void *memory, Stream stream) { blocks().free(memory, stream, most_kept); }

    static void fill(void *to, uint8_t value, int64_t bytes, Stream stream) {
        KVCORE_CUDA_CALL(Cuda::get(), cuMemsetD8Async, address(to), value, size_t(bytes), stream);
    }

    static void copy(const kvcore::Copy *copies, int64_t count, Stream stream) {
        if (count > 1 && copy_batch(copies, count, stream)) return;
        for (const kvcore::Copy *c = copies; c != copies + count; ++c)
            KVCORE_CUDA_CALL(Cuda::get(), cuMemcpyAsync, address(c->to), address(c->from), size_t(c->bytes), stream);
    }

    static int32_t place(uint64_t asked) {
        const Cuda &cuda = Cuda::get();
        CudaContext *current = nullptr;
        if (cuda.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != nullptr) return place_in_context(asked);
        /* Any context will do: one that there is, since to make one takes memory of its device. */
        int32_t ordinal = (count() < kvcore::MAX_DEVICES ? count() : kvcore::MAX_DEVICES) - 1;
        while (ordinal > 0 && contexts()[ordinal].load(std::memory_order_acquire) == nullptr) --ordinal;
        if (ordinal < 0) return -1;
        Scope scope(ordinal);
        return place_in_context(asked);
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
        KVCORE_CUDA_CALL(Cuda::get(), cuMemHostAlloc, &made, size_t(bytes), CUDA_HOST_PORTABLE);
        return made;
    }
    static void unpin(void *memory, int64_t bytes) {
        std::lock_guard<std::mutex> guard(pinned().lock);
        pinned().spare[bytes].push_back(memory);
    }

    static void register_host(uint64_t at, int64_t bytes) {
        KVCORE_CUDA_CALL(Cuda::get(), cuMemHostRegister, pointer(at), size_t(bytes), CUDA_HOST_PORTABLE);
    }
    static void unregister_host(uint64_t at) { KVCORE_CUDA_CALL(Cuda::get(), cuMemHostUnregister, pointer(at)); }

    static Stream make_stream() {
        Stream made = nullptr;
        KVCORE_CUDA_CALL(Cuda::get(), cuStreamCreate, &made, CUDA_STREAM_NON_BLOCKING);
        return made;
    }
    static Stream adopt(uint64_t native) {
        if (native == per_thread_stream)
            throw DriverError(KV_FAIL_UNSUPPORTED, "CU_STREAM_PER_THREAD is another stream in every thread, so that "
                                                   "nothing can be kept in its order; give a stream of its own");
        return static_cast<Stream>(pointer(native));
    }
    static void end_stream(Stream stream) { KVCORE_CUDA_CALL(Cuda::get(), cuStreamDestroy, stream); }
    static void synchronize(Stream stream) { KVCORE_CUDA_CALL(Cuda::get(), cuStreamSynchronize, stream); }

    static Event make_event(bool shared) {
        Event made = nullptr;
        const unsigned flags = CUDA_EVENT_DISABLE_TIMING | (shared ? unsigned(CUDA_EVENT_INTERPROCESS) : 0);
        KVCORE_CUDA_CALL(Cuda::get(), cuEventCreate, &made, flags);
        return made;
    }
    static void end_event(Event event) { KVCORE_CUDA_CALL(Cuda::get(), cuEventDestroy, event); }
    static void record(Event event, Stream stream) { KVCORE_CUDA_CALL(Cuda::get(), cuEventRecord, event, stream); }
    static bool passed(Event event) {
        const int error = Cuda::get().cuEventQuery(event);
        if (error != CUDA_SUCCESS && error != CUDA_NOT_READY) Cuda::get().refuse("cuEventQuery", error);
        return error == CUDA_SUCCESS;
    }
    static void synchronize(Event event) { KVCORE_CUDA_CALL(Cuda::get(), cuEventSynchronize, event); }
    static void wait(Stream stream, Event event) {
        KVCORE_CUDA_CALL(Cuda::get(), cuStreamWaitEvent, stream, event, 0);
    }

    /* The handle is of the whole allocation. The driver takes memory of cuMemAlloc alone: none of a pool, and none that
     * is mapped (torch's cudaMallocAsync and expandable segments). */
    static void export_memory(uint64_t at, kv_ipc_memory &out) {
        const Cuda &cuda = Cuda::get();
        CudaAddress base = 0;
        size_t bytes = 0;
        KVCORE_CUDA_CALL(cuda, cuMemGetAddressRange, &base, &bytes, at);
        CudaHandle made;
        const int error = cuda.cuIpcGetMemHandle(&made, base);
        if (error == CUDA_INVALID_VALUE || error == CUDA_NOT_SUPPORTED)
            throw DriverError(KV_FAIL_UNSUPPORTED,
                              "the driver does not share memory of a pool or of expandable segments; allocate it with "
                              "runtime.empty, or let torch allocate without them (PYTORCH_CUDA_ALLOC_CONF)");
        cuda.check("cuIpcGetMemHandle", error);
        memcpy(out.handle, made.bytes, KV_IPC_BYTES);
        out.offset = int64_t(at - base);
        out.allocation_bytes = int64_t(bytes);
    }
    static uint64_t import_memory(const kv_ipc_memory &from) {
        CudaHandle given;
        memcpy(given.bytes, from.handle, KV_IPC_BYTES);
        CudaAddress made = 0;
        const int error = Cuda::get().cuIpcOpenMemHandle(&made, given, CUDA_IPC_LAZY_PEER_ACCESS);
        if (error == CUDA_INVALID_CONTEXT)
            throw DriverError(KV_FAIL_POINTER, "memory is imported by other processes than the one that exported it");
        Cuda::get().check("cuIpcOpenMemHandle", error);
        return made;
    }
    static void close_memory(uint64_t at) { KVCORE_CUDA_CALL(Cuda::get(), cuIpcCloseMemHandle, at); }
    static void export_event(Event event, unsigned char *out) {
        CudaHandle made;
        KVCORE_CUDA_CALL(Cuda::get(), cuIpcGetEventHandle, &made, event);
        memcpy(out, made.bytes, KV_IPC_BYTES);
    }
    static Event import_event(const unsigned char *from) {
        CudaHandle given;
        memcpy(given.bytes, from, KV_IPC_BYTES);
        Event made = nullptr;
        KVCORE_CUDA_CALL(Cuda::get(), cuIpcOpenEventHandle, &made, given);
        return made;
    }

  private:
    /* Bytes of a device that wait for a user. Memory of a pool would need no bound, but no other process can import it. */
    static constexpr int64_t most_kept = int64_t(512) << 20;
    static constexpr uint64_t legacy_stream = 1, per_thread_stream = 2; /* handles with a meaning; 0 is the former */

    struct Raw {
        static void *allocate(int64_t bytes) {
            CudaAddress made = 0;
            const int error = Cuda::get().cuMemAlloc(&made, size_t(bytes));
            if (error != CUDA_SUCCESS && error != CUDA_OUT_OF_MEMORY) Cuda::get().refuse("cuMemAlloc", error);
            return error == CUDA_SUCCESS ? pointer(made) : nullptr;
        }
        static void free(void *memory) {
            KVCORE_CUDA_CALL(Cuda::get(), cuCtxSynchronize); /* which cuMemFree does, though no text promises it */
            KVCORE_CUDA_CALL(Cuda::get(), cuMemFree, address(memory));
        }
    };

    struct Pinned {
        std::mutex lock;
        std::map<int64_t, std::vector<void *>> spare; /* by size */
    };

    static void *pointer(uint64_t at) { return reinterpret_cast<void *>(uintptr_t(at)); }
    static CudaAddress address(const void *memory) { return CudaAddress(uintptr_t(memory)); }

    static int handle(int32_t ordinal) {
        int device = 0;
        KVCORE_CUDA_CALL(Cuda::get(), cuDeviceGet, &device, ordinal);
        return device;
    }

    /* Retained once, and as long as the process lives. */
    static CudaContext *context(int32_t ordinal) {
        CudaContext *found = contexts()[ordinal].load(std::memory_order_acquire);
        if (found != nullptr) return found;
        KVCORE_CUDA_CALL(Cuda::get(), cuDevicePrimaryCtxRetain, &found, handle(ordinal));
        contexts()[ordinal].store(found, std::memory_order_release);
        return found;
    }
    static std::atomic<CudaContext *> *contexts() {
        static std::atomic<CudaContext *> all[kvcore::MAX_DEVICES];
        return all;
    }

    static int32_t place_in_context(uint64_t asked) {
        unsigned type = 0;
        int ordinal = -1;
        int attributes[] = {CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE_ORDINAL};
        void *values[] = {&type, &ordinal};
        if (Cuda::get().cuPointerGetAttributes(2, attributes, values, asked) != CUDA_SUCCESS) return -1;
        return type == CUDA_MEMORY_DEVICE ? ordinal : -1;
    }

    /* One call for all of them, where the driver has it. False: they are still to be copied, one by one, and to copy
     * some of them twice does no harm. */
    static bool copy_batch(const kvcore::Copy *copies, int64_t count, Stream stream) {
        static std::atomic<bool> is_refused{false};
        const Cuda &cuda = Cuda::get();
        const bool has_batches = cuda.cuMemcpyBatchAsync != nullptr || cuda.cuMemcpyBatchAsync_v1 != nullptr;
        if (!has_batches || is_refused || address(stream) <= legacy_stream) return false;
        std::vector<CudaAddress> to, from;
        std::vector<size_t> bytes;
        for (const kvcore::Copy *c = copies; c != copies + count; ++c) {
            to.push_back(address(c->to));
            from.push_back(address(c->from));
            bytes.push_back(size_t(c->bytes));
        }
        CudaCopyAttributes attributes = {CUDA_COPY_IN_STREAM_ORDER, {}, {}, 0};
        size_t first = 0, failed = 0;
        const size_t n = size_t(count);
        const int error =
            cuda.cuMemcpyBatchAsync != nullptr
                ? cuda.cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), n, &attributes, &first, 1, stream)
                : cuda.cuMemcpyBatchAsync_v1(to.data(), from.data(), bytes.data(), n, &attributes, &first, 1, &failed,
                                             stream);
        if (error == CUDA_NOT_SUPPORTED) is_refused = true;
        else if (error != CUDA_INVALID_VALUE) cuda.check("cuMemcpyBatchAsync", error); /* else see which copy it is */
        return error == CUDA_SUCCESS;
    }

    /* Those of the thread's device. Never destroyed: Python may still let go of arrays when the process ends. */
    static kvcore::Blocks<Raw> &blocks() {
        static auto *all = new kvcore::Blocks<Raw>[kvcore::MAX_DEVICES];
        CudaContext *current = nullptr;
        KVCORE_CUDA_CALL(Cuda::get(), cuCtxGetCurrent, &current);
        for (int32_t i = 0; i < count() && i < kvcore::MAX_DEVICES; ++i)
            if (contexts()[i].load(std::memory_order_relaxed) == current) return all[i];
        throw DriverError(KV_FAIL_DEVICE, "the thread has no device");
    }
    static Pinned &pinned() {
        static auto *one = new Pinned;
        return *one;
    }
};

}  // namespace kvcore_cuda

#endif
