/* HIP's API as it is used here, found in the user's libamdhip64 at run time. No ROCm header is needed to build.
 *
 * What is declared has been the same from ROCm 5.2 to 7. What has not is left alone:
 * - hipDeviceProp_t grew in ROCm 6, which gave the function another name. Only the architecture is read out of it.
 * - hipPointerAttribute_t and hipMemoryType changed. hipPointerGetAttribute gives one value at a time.
 * - hipIpcMemLazyEnablePeerAccess was 0 once: both are tried.
 */
#ifndef KVCORE_ROCM_HIP_HPP
#define KVCORE_ROCM_HIP_HPP

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <mutex>
#include <string>

#include <kvcore/failure.hpp>

namespace kvcore_rocm {

using kvcore::DriverError;

enum HipError {
    HIP_SUCCESS = 0,
    HIP_INVALID_VALUE = 1,
    HIP_OUT_OF_MEMORY = 2,
    HIP_NO_DEVICE = 100,
    HIP_INVALID_CONTEXT = 201,
    HIP_NOT_READY = 600
};
enum HipFlag : unsigned {
    HIP_STREAM_NON_BLOCKING = 1,
    HIP_EVENT_DISABLE_TIMING = 2,
    HIP_EVENT_INTERPROCESS = 4,
    HIP_HOST_PORTABLE = 1
};
enum HipConstant {
    HIP_MEMCPY_DEFAULT = 4,
    HIP_ATTRIBUTE_MULTIPROCESSOR_COUNT = 63,
    HIP_POINTER_HOST_POINTER = 4,
    HIP_POINTER_DEVICE_ORDINAL = 9
};

struct HipStream;
struct HipEvent;
struct HipHandle { /* of memory or an event, for other processes */
    unsigned char bytes[64];
};

/* Name, and parameters. */
#define KVCORE_HIP_FUNCTIONS(Do)                                                                                       \
    Do(hipInit, unsigned)                                                                                              \
    Do(hipDriverGetVersion, int *)                                                                                     \
    Do(hipGetLastError)                                                                                                \
    Do(hipGetDeviceCount, int *)                                                                                       \
    Do(hipGetDevice, int *)                                                                                            \
    Do(hipSetDevice, int)                                                                                              \
    Do(hipDeviceGetName, char *, int, int)                                                                             \
    Do(hipDeviceTotalMem, size_t *, int)                                                                               \
    Do(hipDeviceGetAttribute, int *, int, int)                                                                         \
    Do(hipModuleLoadData, void **, const void *)                                                                       \
    Do(hipModuleGetFunction, void **, void *, const char *)                                                            \
    Do(hipModuleLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,            \
       HipStream *, void **, void **)                                                                                  \
    Do(hipMalloc, void **, size_t)                                                                                     \
    Do(hipFree, void *)                                                                                                \
    Do(hipHostMalloc, void **, size_t, unsigned)                                                                       \
    Do(hipHostRegister, void *, size_t, unsigned)                                                                      \
    Do(hipHostUnregister, void *)                                                                                      \
    Do(hipMemcpyAsync, void *, const void *, size_t, int, HipStream *)                                                 \
    Do(hipMemsetD8Async, void *, unsigned char, size_t, HipStream *)                                                   \
    Do(hipPointerGetAttribute, void *, int, void *)                                                                    \
    Do(hipMemGetAddressRange, void **, size_t *, void *)                                                               \
    Do(hipStreamCreateWithFlags, HipStream **, unsigned)                                                               \
    Do(hipStreamDestroy, HipStream *)                                                                                  \
    Do(hipStreamSynchronize, HipStream *)                                                                              \
    Do(hipStreamWaitEvent, HipStream *, HipEvent *, unsigned)                                                          \
    Do(hipEventCreateWithFlags, HipEvent **, unsigned)                                                                 \
    Do(hipEventDestroy, HipEvent *)                                                                                    \
    Do(hipEventRecord, HipEvent *, HipStream *)                                                                        \
    Do(hipEventQuery, HipEvent *)                                                                                      \
    Do(hipEventSynchronize, HipEvent *)                                                                                \
    Do(hipIpcGetMemHandle, HipHandle *, void *)                                                                        \
    Do(hipIpcOpenMemHandle, void **, HipHandle, unsigned)                                                              \
    Do(hipIpcCloseMemHandle, void *)                                                                                   \
    Do(hipIpcGetEventHandle, HipHandle *, HipEvent *)                                                                  \
    Do(hipIpcOpenEventHandle, HipEvent **, HipHandle)

struct Hip {
#define KVCORE_HIP_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
    KVCORE_HIP_FUNCTIONS(KVCORE_HIP_MEMBER)
#undef KVCORE_HIP_MEMBER
    int (*hipGetDeviceProperties)(void *, int) = nullptr;
    const char *(*hipGetErrorName)(int) = nullptr;
    const char *(*hipGetErrorString)(int) = nullptr;

    static std::atomic<const Hip *> &opened() {
        static std::atomic<const Hip *> one{nullptr};
        return one;
    }

    /* Loads the library, and begins. After the first time it does nothing. */
    static void open(const char *path) {
        static std::mutex *lock = new std::mutex;
        std::lock_guard<std::mutex> guard(*lock);
        if (opened().load() != nullptr) return;
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw DriverError(KV_FAIL_DEVICE, std::string("no HIP runtime: ") + dlerror());
        Hip *made = new Hip; /* never unloaded: what it made lives as long as the process */
#define KVCORE_HIP_FIND(name, ...) find(library, path, #name, made->name);
        KVCORE_HIP_FUNCTIONS(KVCORE_HIP_FIND)
#undef KVCORE_HIP_FIND
        find(library, path, "hipGetErrorName", made->hipGetErrorName);
        find(library, path, "hipGetErrorString", made->hipGetErrorString);
        const bool is_new = dlsym(library, "hipGetDevicePropertiesR0600") != nullptr; /* ROCm 6: a larger struct */
        find(library, path, is_new ? "hipGetDevicePropertiesR0600" : "hipGetDeviceProperties",
             made->hipGetDeviceProperties);
        const int error = made->hipInit(0);
        if (error != HIP_SUCCESS && error != HIP_NO_DEVICE) made->refuse("hipInit", error);
        opened().store(made);
    }

    static const Hip &get() {
        const Hip *one = opened().load(std::memory_order_acquire);
        if (one == nullptr) throw DriverError(KV_FAIL_DEVICE, "the HIP runtime has not been opened");
        return *one;
    }

    void check(const char *what, int error) const {
        if (error != HIP_SUCCESS) refuse(what, error);
    }

    /* Reports an error, and takes it back from HIP: torch asks for the thread's last error behind its own launches, and
     * must not be told of ours. */
    [[noreturn]] void refuse(const char *what, int error) const {
        forget_error();
        throw DriverError(error == HIP_OUT_OF_MEMORY ? KV_FAIL_MEMORY : KV_FAIL_DEVICE,
                          std::string(what) + ": " + hipGetErrorName(error) + " (" + hipGetErrorString(error) + ")");
    }
    void forget_error() const { hipGetLastError(); }

  private:
    template <class Function> static void find(void *library, const char *path, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr)
            throw DriverError(KV_FAIL_DEVICE, std::string(path) + " has no " + name + "; ROCm 5.2 and later have it");
    }
};

}  // namespace kvcore_rocm

/* hip: a Hip. */
#define KVCORE_HIP_CALL(hip, function, ...) (hip).check(#function, (hip).function(__VA_ARGS__))

#endif
