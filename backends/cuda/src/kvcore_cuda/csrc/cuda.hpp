/* CUDA's driver API as it is used here, found in the user's libcuda at run time. No header of CUDA is needed to build.
 *
 * The names are those that cuda.h maps its functions to: a library keeps each for ever, with the parameters it had when
 * the name was new. The streams of those without _ptsz are the legacy ones, as torch's are.
 */
#ifndef KVCORE_CUDA_CUDA_HPP
#define KVCORE_CUDA_CUDA_HPP

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <mutex>
#include <string>

#include <kvcore/failure.hpp>

namespace kvcore_cuda {

using kvcore::DriverError;

enum CudaError {
    CUDA_SUCCESS = 0,
    CUDA_INVALID_VALUE = 1,
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_NOT_INITIALIZED = 3,
    CUDA_NO_DEVICE = 100,
    CUDA_INVALID_IMAGE = 200,
    CUDA_INVALID_CONTEXT = 201,
    CUDA_NO_BINARY_FOR_GPU = 209,
    CUDA_INVALID_PTX = 218,
    CUDA_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_INVALID_SOURCE = 300,
    CUDA_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_JIT_COMPILATION_DISABLED = 223,
    CUDA_NOT_READY = 600,
    CUDA_NOT_PERMITTED = 800,
    CUDA_NOT_SUPPORTED = 801
};
enum CudaAttribute : int {
    CUDA_DEVICE_WARP_SIZE = 10,
    CUDA_DEVICE_MULTIPROCESSORS = 16,
    CUDA_DEVICE_COMPUTE_MAJOR = 75,
    CUDA_DEVICE_COMPUTE_MINOR = 76,
    CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8,
    CUDA_JIT_ERROR_LOG = 5,
    CUDA_JIT_ERROR_LOG_BYTES = 6,
    CUDA_POINTER_MEMORY_TYPE = 2,
    CUDA_POINTER_DEVICE_ORDINAL = 9
};
enum CudaFlag : unsigned {
    CUDA_MEMORY_DEVICE = 2, /* a value of CUDA_POINTER_MEMORY_TYPE */
    CUDA_STREAM_NON_BLOCKING = 1,
    CUDA_EVENT_DISABLE_TIMING = 2,
    CUDA_EVENT_INTERPROCESS = 4,
    CUDA_HOST_PORTABLE = 1,
    CUDA_IPC_LAZY_PEER_ACCESS = 1,
    CUDA_COPY_IN_STREAM_ORDER = 1
};
constexpr int CUDA_OLDEST_DRIVER = 11080; /* 11.8, of the drivers 520 and later */

struct CudaContext;
struct CudaModule;
struct CudaFunction;
struct CudaStream;
struct CudaEvent;
struct CudaHandle { /* of memory or an event, for other processes */
    unsigned char bytes[64];
};
struct CudaLocation {
    int type, id;
};
struct CudaCopyAttributes { /* of a batch of copies */
    int source_order;
    CudaLocation source, target; /* hints, which managed memory alone has a use for */
    unsigned flags;
};
using CudaAddress = unsigned long long;

/* Member, name in the library, and parameters. */
#define KVCORE_CUDA_FUNCTIONS(Do)                                                                                      \
    Do(cuDriverGetVersion, "cuDriverGetVersion", int *)                                                                \
    Do(cuInit, "cuInit", unsigned)                                                                                     \
    Do(cuGetErrorName, "cuGetErrorName", int, const char **)                                                           \
    Do(cuGetErrorString, "cuGetErrorString", int, const char **)                                                       \
    Do(cuDeviceGetCount, "cuDeviceGetCount", int *)                                                                    \
    Do(cuDeviceGet, "cuDeviceGet", int *, int)                                                                         \
    Do(cuDeviceGetName, "cuDeviceGetName", char *, int, int)                                                           \
    Do(cuDeviceTotalMem, "cuDeviceTotalMem_v2", size_t *, int)                                                         \
    Do(cuDeviceGetAttribute, "cuDeviceGetAttribute", int *, int, int)                                                  \
    Do(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CudaContext **, int)                                      \
    Do(cuCtxGetCurrent, "cuCtxGetCurrent", CudaContext **)                                                             \
    Do(cuCtxPushCurrent, "cuCtxPushCurrent_v2", CudaContext *)                                                         \
    Do(cuCtxPopCurrent, "cuCtxPopCurrent_v2", CudaContext **)                                                          \
    Do(cuCtxSynchronize, "cuCtxSynchronize")                                                                           \
    Do(cuModuleLoadDataEx, "cuModuleLoadDataEx", CudaModule **, const void *, unsigned, int *, void **)                \
    Do(cuModuleGetFunction, "cuModuleGetFunction", CudaFunction **, CudaModule *, const char *)                        \
    Do(cuFuncSetAttribute, "cuFuncSetAttribute", CudaFunction *, int, int)                                             \
    Do(cuLaunchKernel, "cuLaunchKernel", CudaFunction *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,   \
       unsigned, CudaStream *, void **, void **)                                                                       \
    Do(cuMemAlloc, "cuMemAlloc_v2", CudaAddress *, size_t)                                                             \
    Do(cuMemFree, "cuMemFree_v2", CudaAddress)                                                                         \
    Do(cuMemcpyAsync, "cuMemcpyAsync", CudaAddress, CudaAddress, size_t, CudaStream *)                                 \
    Do(cuMemsetD8Async, "cuMemsetD8Async", CudaAddress, unsigned char, size_t, CudaStream *)                           \
    Do(cuPointerGetAttributes, "cuPointerGetAttributes", unsigned, int *, void **, CudaAddress)                        \
    Do(cuMemGetAddressRange, "cuMemGetAddressRange_v2", CudaAddress *, size_t *, CudaAddress)                          \
    Do(cuMemHostAlloc, "cuMemHostAlloc", void **, size_t, unsigned)                                                    \
    Do(cuMemHostRegister, "cuMemHostRegister_v2", void *, size_t, unsigned)                                            \
    Do(cuMemHostUnregister, "cuMemHostUnregister", void *)                                                             \
    Do(cuStreamCreate, "cuStreamCreate", CudaStream **, unsigned)                                                      \
    Do(cuStreamDestroy, "cuStreamDestroy_v2", CudaStream *)                                                            \
    Do(cuStreamSynchronize, "cuStreamSynchronize", CudaStream *)                                                       \
    Do(cuStreamWaitEvent, "cuStreamWaitEvent", CudaStream *, CudaEvent *, unsigned)                                    \
    Do(cuEventCreate, "cuEventCreate", CudaEvent **, unsigned)                                                         \
    Do(cuEventDestroy, "cuEventDestroy_v2", CudaEvent *)                                                               \
    Do(cuEventRecord, "cuEventRecord", CudaEvent *, CudaStream *)                                                      \
    Do(cuEventQuery, "cuEventQuery", CudaEvent *)                                                                      \
    Do(cuEventSynchronize, "cuEventSynchronize", CudaEvent *)                                                          \
    Do(cuIpcGetMemHandle, "cuIpcGetMemHandle", CudaHandle *, CudaAddress)                                              \
    Do(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", CudaAddress *, CudaHandle, unsigned)                               \
    Do(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", CudaAddress)                                                        \
    Do(cuIpcGetEventHandle, "cuIpcGetEventHandle", CudaHandle *, CudaEvent *)                                          \
    Do(cuIpcOpenEventHandle, "cuIpcOpenEventHandle", CudaEvent **, CudaHandle)

struct Cuda {
#define KVCORE_CUDA_MEMBER(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
    KVCORE_CUDA_FUNCTIONS(KVCORE_CUDA_MEMBER)
#undef KVCORE_CUDA_MEMBER
    /* Of CUDA 13 and of 12.8, which also gives the copy that failed; null in older drivers. */
    int (*cuMemcpyBatchAsync)(CudaAddress *, CudaAddress *, size_t *, size_t, CudaCopyAttributes *, size_t *, size_t,
                              CudaStream *) = nullptr;
    int (*cuMemcpyBatchAsync_v1)(CudaAddress *, CudaAddress *, size_t *, size_t, CudaCopyAttributes *, size_t *, size_t,
                                 size_t *, CudaStream *) = nullptr;
    int version = 0;
    bool has_devices = false;

    /* Loads the library, and begins. After the first time it does nothing. */
    static void open(const char *path) {
        static std::mutex *lock = new std::mutex;
        std::lock_guard<std::mutex> guard(*lock);
        if (opened().load() != nullptr) return;
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw DriverError(KV_FAIL_DEVICE, std::string("no driver: ") + dlerror());
        Cuda *made = new Cuda; /* never unloaded: what it made lives as long as the process */
        find(library, path, "cuDriverGetVersion", made->cuDriverGetVersion);
        made->cuDriverGetVersion(&made->version);
        if (made->version < CUDA_OLDEST_DRIVER)
            throw DriverError(KV_FAIL_DEVICE, std::string(path) + " is a driver for CUDA " + number(made->version) +
                                                  "; 11.8 is needed: update NVIDIA's driver to 520 or later");
#define KVCORE_CUDA_FIND(member, name, ...) find(library, path, name, made->member);
        KVCORE_CUDA_FUNCTIONS(KVCORE_CUDA_FIND)
#undef KVCORE_CUDA_FIND
        find(library, "cuMemcpyBatchAsync_v2", made->cuMemcpyBatchAsync);
        find(library, "cuMemcpyBatchAsync", made->cuMemcpyBatchAsync_v1);
        const int error = made->cuInit(0);
        if (error != CUDA_SUCCESS && error != CUDA_NO_DEVICE) made->refuse("cuInit", error);
        made->has_devices = error == CUDA_SUCCESS;
        opened().store(made);
    }

    static const Cuda &get() {
        const Cuda *one = opened().load(std::memory_order_acquire);
        if (one == nullptr) throw DriverError(KV_FAIL_DEVICE, "CUDA's driver has not been opened");
        return *one;
    }

    void check(const char *what, int error) const {
        if (error != CUDA_SUCCESS) refuse(what, error);
    }
    [[noreturn]] void refuse(const char *what, int error, const std::string &more = "") const {
        const char *name = nullptr, *text = nullptr;
        cuGetErrorName(error, &name);
        cuGetErrorString(error, &text);
        const std::string said = std::string(what) + ": " + (name != nullptr ? name : std::to_string(error)) + " (" +
                                 (text != nullptr ? text : "no text") + ")";
        const char *forked = "; a process that was forked from one with CUDA has none of its own: spawn it instead";
        throw DriverError(code(error), said + (error == CUDA_NOT_INITIALIZED ? forked : more));
    }

  private:
    static int32_t code(int error) {
        switch (error) {
        case CUDA_OUT_OF_MEMORY: return KV_FAIL_MEMORY;
        case CUDA_INVALID_IMAGE:
        case CUDA_NO_BINARY_FOR_GPU:
        case CUDA_INVALID_PTX:
        case CUDA_INVALID_SOURCE:
        case CUDA_JIT_COMPILER_NOT_FOUND:
        case CUDA_UNSUPPORTED_PTX_VERSION:
        case CUDA_JIT_COMPILATION_DISABLED: /* another image may do */
        case CUDA_NOT_PERMITTED:
        case CUDA_NOT_SUPPORTED: return KV_FAIL_UNSUPPORTED;
        default: return KV_FAIL_DEVICE;
        }
    }
    static std::atomic<const Cuda *> &opened() {
        static std::atomic<const Cuda *> one{nullptr};
        return one;
    }
    static std::string number(int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    }
    template <class Function> static bool find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
    template <class Function> static void find(void *library, const char *path, const char *name, Function &function) {
        if (!find(library, name, function))
            throw DriverError(KV_FAIL_DEVICE, std::string(path) + " has no " + name + ", so it is no driver for CUDA "
                                                                                      "11.8 or later");
    }
};

}  // namespace kvcore_cuda

/* cuda: a Cuda. */
#define KVCORE_CUDA_CALL(cuda, function, ...) (cuda).check(#function, (cuda).function(__VA_ARGS__))

#endif
