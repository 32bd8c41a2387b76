// A HIP runtime without a device: the functions that csrc/hip.hpp looks up, over kernels on fibers. For tests.
//
// SIMULATED_HIP_WARP (64 or 32), SIMULATED_HIP_DEVICES and SIMULATED_HIP_BYTES (memory of a device) say what there is;
// simulated_set() lets calls fail. Its architecture says that it is simulated, so that nothing takes it for a GPU.
#include <kvcore/simulated.hpp>
#include <kvcore/simulated_machine.hpp>


KVCORE_SIMULATED_KERNELS(64)
KVCORE_SIMULATED_KERNELS(32)

#define HIP extern "C" __attribute__((visibility("default")))

using namespace simulated;

namespace {

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, INVALID_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILURE = 719, ALREADY_REGISTERED = 712 };

struct Handle {
    unsigned char bytes[64];
};
struct Opened { // what a handle says
    int32_t process, file;
    uint64_t offset;
};

// What tests ask for: see simulated_set.
struct {
    int64_t no_memory = 0, fail_launch = 0, fail_kernel = 0, lazy_flag = 1;
} wanted;
int broken = OK; // what a failed kernel has left

thread_local int last_error = OK;
thread_local int current_device = 0;

int say(int error) {
    if (error != OK) last_error = error;
    return error;
}

int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    return text == nullptr ? otherwise : atoll(text);
}
int warp() { return int(setting("SIMULATED_HIP_WARP", 64)); }
int devices() { return int(setting("SIMULATED_HIP_DEVICES", 1)); }
uint64_t memory() { return uint64_t(setting("SIMULATED_HIP_BYTES", int64_t(ARENA_BYTES))); }

Stream *stream_of(Stream *stream) { // null is the device's own
    static std::map<int, Stream> own;
    if (stream != nullptr) return stream;
    return &own.try_emplace(current_device, Stream{current_device, {}}).first->second;
}
std::vector<Stream *> &streams() {
    static auto *all = new std::vector<Stream *>;
    return *all;
}
std::map<char *, uint64_t> &pinned() {
    static auto *all = new std::map<char *, uint64_t>;
    return *all;
}
bool is_pinned(const void *address) {
    auto next = pinned().upper_bound(static_cast<char *>(const_cast<void *>(address)));
    if (next == pinned().begin()) return false;
    --next;
    return address < next->first + next->second;
}
void finish_all() {
    for (Stream *stream : streams()) stream->run_until(stream->queued);
}
bool counted(int64_t &left) { // true for the call that it was set for
    return left > 0 && --left == 0;
}

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

// no_memory: 1 until it is 0; fail_launch, fail_kernel: the how manieth of the coming ones fails; mend: forget that a
// kernel failed; lazy_flag: the value of hipIpcMemLazyEnablePeerAccess.
HIP int simulated_set(const char *what, int64_t value) {
    Lock held(lock());
    const std::string name = what;
    if (name == "no_memory") wanted.no_memory = value;
    else if (name == "fail_launch") wanted.fail_launch = value;
    else if (name == "fail_kernel") wanted.fail_kernel = value;
    else if (name == "lazy_flag") wanted.lazy_flag = value;
    else if (name == "mend") broken = OK;
    else return INVALID_VALUE;
    return OK;
}

// --- the thread, its errors, its device

HIP int hipInit(unsigned) { return devices() > 0 ? OK : say(NO_DEVICE); }
HIP int hipDriverGetVersion(int *version) {
    *version = 60200000;
    return OK;
}
HIP int hipPeekAtLastError() { return last_error; }
HIP int hipGetLastError() {
    const int error = last_error;
    last_error = OK;
    return error;
}
HIP const char *hipGetErrorName(int error) {
    switch (error) {
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case NOT_FOUND: return "hipErrorNotFound";
    case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
    case ALREADY_REGISTERED: return "hipErrorHostMemoryAlreadyRegistered";
    default: return "hipErrorUnknown";
    }
}
HIP const char *hipGetErrorString(int) { return "simulated"; }

HIP int hipGetDeviceCount(int *count) {
    *count = devices();
    return *count > 0 ? OK : say(NO_DEVICE);
}
HIP int hipGetDevice(int *ordinal) {
    *ordinal = current_device;
    return OK;
}
HIP int hipSetDevice(int ordinal) {
    if (ordinal < 0 || ordinal >= devices()) return say(INVALID_VALUE);
    current_device = ordinal;
    return OK;
}
HIP int hipDeviceGetName(char *name, int bytes, int) {
    snprintf(name, size_t(bytes), "simulated device");
    return OK;
}
HIP int hipDeviceTotalMem(size_t *bytes, int) {
    *bytes = memory();
    return OK;
}
HIP int hipDeviceGetAttribute(int *value, int attribute, int) {
    if (attribute != 63) return say(INVALID_VALUE); // the number of multiprocessors
    *value = 2;
    return OK;
}
// As ROCm 6 and 7 lay it out: 1472 bytes, the architecture behind all that CUDA has.
HIP int hipGetDevicePropertiesR0600(void *properties, int) {
    char *text = static_cast<char *>(properties);
    memset(text, 0x11, 1472);
    strcpy(text, "gfx, as the device's name may begin");
    strcpy(text + 1160, warp() == 64 ? "gfx90a-simulated:sramecc+:xnack-" : "gfx1100-simulated");
    return OK;
}

// --- kernels

HIP int hipModuleLoadData(void **module, const void *image) {
    if (memcmp(image, "\x7f" "ELF", 4) != 0) return say(INVALID_IMAGE);
    *module = const_cast<void *>(image);
    return OK;
}
HIP int hipModuleGetFunction(const kvcore::SimulatedKernel **kernel, void *module, const char *name) {
    if (memcmp(module, "\x7f" "ELF", 4) != 0) return say(INVALID_IMAGE); // the image must still be there
    *kernel = kvcore::find_simulated(warp(), name);
    return *kernel != nullptr ? OK : say(NOT_FOUND);
}
HIP int hipModuleLaunchKernel(const kvcore::SimulatedKernel *kernel, unsigned blocks, unsigned, unsigned,
                              unsigned threads, unsigned, unsigned, unsigned shared_bytes, Stream *stream,
                              void **parameters, void **) {
    Lock held(lock());
    if (broken != OK) return say(broken);
    if (counted(wanted.fail_launch)) return say(LAUNCH_FAILURE);
    const bool fails = counted(wanted.fail_kernel);
    const char *args = static_cast<const char *>(parameters[0]);
    std::vector<char> kept(args, args + kernel->args_bytes);
    stream_of(stream)->push([=] {
        if (fails) broken = LAUNCH_FAILURE;
        if (broken == OK) run_simulated(*kernel, blocks, int(threads), int(shared_bytes), kept.data());
    });
    return OK;
}

// --- memory

HIP int hipMalloc(void **made, size_t bytes) {
    Lock held(lock());
    static std::map<int, Arena *> own;
    Arena *&arena = own[current_device];
    if (arena == nullptr) arena = make_arena(current_device);
    *made = arena == nullptr || wanted.no_memory ? nullptr : allocate(*arena, bytes, memory());
    return *made != nullptr ? OK : say(OUT_OF_MEMORY);
}
HIP int hipFree(void *memory) {
    Lock held(lock());
    finish_all();
    return release(memory) ? OK : say(INVALID_VALUE);
}
HIP int hipHostMalloc(void **made, size_t bytes, unsigned) {
    Lock held(lock());
    if (posix_memalign(made, 4096, bytes) != 0) return say(OUT_OF_MEMORY);
    pinned()[static_cast<char *>(*made)] = bytes;
    return OK;
}
HIP int hipHostRegister(void *address, size_t bytes, unsigned) {
    Lock held(lock());
    if (is_pinned(address)) return say(ALREADY_REGISTERED);
    pinned()[static_cast<char *>(address)] = bytes;
    return OK;
}
HIP int hipHostUnregister(void *address) {
    Lock held(lock());
    return pinned().erase(static_cast<char *>(address)) == 1 ? OK : say(INVALID_VALUE);
}
HIP int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, Stream *stream) {
    Lock held(lock());
    if (broken != OK) return say(broken);
    if (kind != 4) return say(INVALID_VALUE);
    for (const void *end : {static_cast<const void *>(to), from}) {
        const auto [start, size] = block_of(end);
        if (arena_of(end) != nullptr && (start == nullptr || static_cast<const char *>(end) + bytes > start + size))
            return say(INVALID_VALUE);
    }
    stream_of(stream)->push([=] { memmove(to, from, bytes); });
    return OK;
}
HIP int hipMemsetD8Async(void *to, unsigned char value, size_t bytes, Stream *stream) {
    Lock held(lock());
    if (arena_of(to) == nullptr) return say(INVALID_VALUE);
    stream_of(stream)->push([=] { memset(to, value, bytes); });
    return OK;
}
HIP int hipPointerGetAttribute(void *value, int attribute, void *address) {
    Lock held(lock());
    const Arena *arena = arena_of(address);
    if (attribute == 9 && (arena != nullptr || is_pinned(address))) { // the device
        *static_cast<int *>(value) = arena != nullptr ? arena->ordinal : 0;
        return OK;
    }
    if (attribute == 4 && is_pinned(address)) { // the host's address
        *static_cast<void **>(value) = address;
        return OK;
    }
    return say(INVALID_VALUE);
}
HIP int hipMemGetAddressRange(void **base, size_t *bytes, void *address) {
    Lock held(lock());
    const auto [start, size] = block_of(address);
    *base = start;
    *bytes = size;
    return start != nullptr ? OK : say(INVALID_VALUE);
}

// --- streams and events

HIP int hipStreamCreateWithFlags(Stream **made, unsigned) {
    Lock held(lock());
    *made = new Stream{current_device, {}}; // never ended: events still name it
    streams().push_back(*made);
    return OK;
}
HIP int hipStreamDestroy(Stream *) { return OK; }
HIP int hipStreamSynchronize(Stream *stream) {
    Lock held(lock());
    stream = stream_of(stream);
    stream->run_until(stream->queued);
    return say(broken);
}
HIP int hipStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    Lock held(lock());
    stream_of(stream)->push([now = *event] { now.finish(); });
    return OK;
}
HIP int hipEventCreateWithFlags(Event **made, unsigned flags) {
    *made = new Event;
    if (flags & 4) { // interprocess
        void *flag = nullptr;
        if (hipMalloc(&flag, 1) != OK) return OUT_OF_MEMORY;
        (*made)->flag = static_cast<unsigned char *>(flag);
    }
    return OK;
}
HIP int hipEventDestroy(Event *event) {
    Lock held(lock());
    event->finish();
    if (event->flag != nullptr && !event->is_imported) release(event->flag);
    delete event;
    return OK;
}
HIP int hipEventRecord(Event *event, Stream *stream) {
    Lock held(lock());
    if (event->flag != nullptr) stream_of(stream)->push([flag = event->flag] { *flag = 1; });
    event->stream = stream_of(stream);
    event->number = event->stream->queued;
    return OK;
}
HIP int hipEventQuery(Event *event) {
    Lock held(lock());
    if (broken != OK) return say(broken);
    if (event->is_reached()) return OK;
    if (!event->is_imported) event->stream->run_one(); // who polls sees progress
    return event->is_reached() ? OK : say(NOT_READY);
}
HIP int hipEventSynchronize(Event *event) {
    Lock held(lock());
    event->finish();
    return say(broken);
}

// --- other processes

HIP int hipIpcGetMemHandle(Handle *handle, void *address) {
    Lock held(lock());
    const Arena *arena = arena_of(address);
    if (arena == nullptr || block_of(address).first != address) return say(INVALID_VALUE);
    const Opened opened = {getpid(), arena->file, uint64_t(static_cast<char *>(address) - arena->base)};
    memcpy(handle, &opened, sizeof opened);
    return OK;
}
HIP int hipIpcOpenMemHandle(void **made, Handle handle, unsigned flags) {
    Lock held(lock());
    if (flags != unsigned(wanted.lazy_flag)) return say(INVALID_VALUE);
    Opened opened;
    memcpy(&opened, &handle, sizeof opened);
    if (opened.process == getpid()) return say(INVALID_CONTEXT);
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", opened.process, opened.file);
    const int file = open(name, O_RDWR | O_CLOEXEC);
    Arena *arena = file < 0 ? nullptr : map_arena(current_device, file);
    if (arena == nullptr) return say(INVALID_VALUE);
    arena->blocks[opened.offset] = ARENA_BYTES - opened.offset; // its owner knows how much is its
    *made = arena->base + opened.offset;
    return OK;
}
HIP int hipIpcCloseMemHandle(void *address) {
    Lock held(lock());
    finish_all();
    for (auto arena = arenas().begin(); arena != arenas().end(); ++arena) {
        if (!(*arena)->holds(address)) continue;
        munmap((*arena)->base, ARENA_BYTES);
        close((*arena)->file);
        arenas().erase(arena);
        return OK;
    }
    return say(INVALID_VALUE);
}
HIP int hipIpcGetEventHandle(Handle *handle, Event *event) { return hipIpcGetMemHandle(handle, event->flag); }
HIP int hipIpcOpenEventHandle(Event **made, Handle handle) {
    void *flag = nullptr;
    const int error = hipIpcOpenMemHandle(&flag, handle, unsigned(wanted.lazy_flag));
    if (error != OK) return error;
    *made = new Event{nullptr, 0, static_cast<unsigned char *>(flag), true};
    return OK;
}
