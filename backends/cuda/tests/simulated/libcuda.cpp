// A CUDA driver without a device: the functions that csrc/cuda.hpp looks up, over kernels on fibers. For tests.
//
// SIMULATED_CUDA_DEVICES, SIMULATED_CUDA_BYTES (memory of a device), SIMULATED_CUDA_VERSION (13000) and
// SIMULATED_CUDA_ARCH (90) say what there is; simulated_set() lets calls fail, simulated_count() tells what was called.
// SIMULATED_BATCH: 13 and 12 have the function of that version of CUDA for batches of copies, 0 has none.
// The name of its devices says that they are simulated, so that nothing takes them for GPUs.
#include <elf.h>

#include <kvcore/simulated.hpp>
#include <kvcore/simulated_machine.hpp>

#ifndef SIMULATED_BATCH
#define SIMULATED_BATCH 13
#endif

KVCORE_SIMULATED_KERNELS(32)

#define CUDA extern "C" __attribute__((visibility("default")))

using namespace simulated;

namespace {

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801
};

struct Handle {
    unsigned char bytes[64];
};
struct Opened { // what a handle says
    int32_t process, file;
    uint64_t offset;
};
struct Context {
    int ordinal;
    Arena *arena = nullptr;
    Stream null;
};
struct Module {
    std::string code; // of an ELF image, which names its kernels
};
struct Function {
    const kvcore::SimulatedKernel *kernel;
    int shared_bytes = 48 << 10;
};
struct Attributes {
    int order, source[2], target[2];
    unsigned flags;
};

// What tests ask for, and what they are told: see simulated_set and simulated_count.
std::map<std::string, int64_t> &wanted() {
    static auto *all = new std::map<std::string, int64_t>;
    return *all;
}
std::map<std::string, int64_t> &counts() {
    static auto *all = new std::map<std::string, int64_t>;
    return *all;
}
bool is_its_turn(const char *name) { // true for the call that it was set for
    auto &left = wanted()[name];
    return left > 0 && --left == 0;
}

int broken = OK; // what a failed kernel has left
pid_t process = 0; // that called cuInit: one that is forked from it cannot use the driver
bool is_forked() { return process != 0 && getpid() != process; }

int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    return text == nullptr ? otherwise : atoll(text);
}
int devices() { return int(setting("SIMULATED_CUDA_DEVICES", 1)); }
uint64_t memory() { return uint64_t(setting("SIMULATED_CUDA_BYTES", int64_t(ARENA_BYTES))); }

thread_local std::vector<Context *> stack;
Context *current() { return stack.empty() ? nullptr : stack.back(); }

std::vector<Stream *> &streams() {
    static auto *all = new std::vector<Stream *>;
    return *all;
}
Stream *stream_of(Stream *stream) { // null is the context's own
    return stream != nullptr ? stream : &current()->null;
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
void *pointer(uint64_t address) { return reinterpret_cast<void *>(uintptr_t(address)); }
uint64_t number(const void *address) { return uint64_t(uintptr_t(address)); }

// Whether bytes of a device are within one allocation; those of the host are not judged.
bool is_whole(uint64_t address, size_t bytes) {
    if (arena_of(pointer(address)) == nullptr) return true;
    const auto [start, size] = block_of(pointer(address));
    return start != nullptr && address + bytes <= number(start) + size;
}

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

// How manieth of the coming calls fails: fail_launch, fail_kernel. What fails every time: no_memory, refuse_fatbin,
// refuse_batches, refuse_ipc (as memory of a pool). mend: forget that a kernel failed.
CUDA void simulated_set(const char *what, int64_t value) {
    Lock held(lock());
    if (std::string(what) == "mend") broken = OK;
    wanted()[what] = value;
}
// batches, copies (one by one), contexts, launches, images, allocations.
CUDA int64_t simulated_count(const char *what) {
    Lock held(lock());
    return counts()[what];
}

// --- the driver, its devices, contexts

CUDA int cuDriverGetVersion(int *version) {
    *version = int(setting("SIMULATED_CUDA_VERSION", 13000));
    return OK;
}
CUDA int cuInit(unsigned) {
    process = getpid();
    return devices() > 0 ? OK : NO_DEVICE;
}
CUDA int cuGetErrorName(int error, const char **name) {
    static const std::map<int, const char *> names = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {LAUNCH_FAILURE, "CUDA_ERROR_LAUNCH_FAILED"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    };
    const auto found = names.find(error);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? INVALID_VALUE : OK;
}
CUDA int cuGetErrorString(int, const char **text) {
    *text = "simulated";
    return OK;
}
CUDA int cuDeviceGetCount(int *count) {
    if (devices() == 0 || is_forked()) return NOT_INITIALIZED; // as cuInit has failed
    *count = devices();
    return OK;
}
CUDA int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < devices() ? OK : INVALID_DEVICE;
}
CUDA int cuDeviceGetName(char *name, int bytes, int) {
    snprintf(name, size_t(bytes), "simulated device");
    return OK;
}
CUDA int cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = memory();
    return OK;
}
CUDA int cuDeviceGetAttribute(int *value, int attribute, int) {
    const int arch = int(setting("SIMULATED_CUDA_ARCH", 90));
    switch (attribute) {
    case 10: *value = 32; return OK;
    case 16: *value = 2; return OK;
    case 75: *value = arch / 10; return OK;
    case 76: *value = arch % 10; return OK;
    default: return INVALID_VALUE;
    }
}
CUDA int cuDevicePrimaryCtxRetain(Context **made, int device) {
    Lock held(lock());
    static auto *all = new std::map<int, Context>;
    auto [found, is_new] = all->try_emplace(device, Context{device, nullptr, Stream{device, {}}});
    *made = &found->second;
    if (is_new) {
        streams().push_back(&found->second.null);
        counts()["contexts"]++;
    }
    return OK;
}
CUDA int cuCtxGetCurrent(Context **context) {
    if (is_forked()) return NOT_INITIALIZED;
    *context = current();
    return OK;
}
CUDA int cuCtxPushCurrent_v2(Context *context) {
    stack.push_back(context);
    return OK;
}
CUDA int cuCtxPopCurrent_v2(Context **context) {
    *context = current();
    stack.pop_back();
    return OK;
}
CUDA int cuCtxSynchronize() {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    finish_all();
    return broken;
}

// --- kernels

CUDA int cuModuleLoadDataEx(Module **made, const void *image, unsigned options, int *, void **values) {
    Lock held(lock());
    constexpr uint32_t fatbin = 0xBA55ED50;
    counts()["images"]++;
    const char *bytes = static_cast<const char *>(image);
    if (current() == nullptr) return INVALID_CONTEXT;
    if (memcmp(bytes, &fatbin, sizeof fatbin) == 0) {
        if (wanted()["refuse_fatbin"] != 0) return NO_BINARY_FOR_GPU;
        *made = new Module{""};
        return OK;
    }
    if (memcmp(bytes, ELFMAG, SELFMAG) != 0) {
        if (options == 2) strcpy(static_cast<char *>(values[0]), "neither machine code nor a fatbin");
        return INVALID_IMAGE;
    }
    Elf64_Ehdr header;
    memcpy(&header, bytes, sizeof header);
    const uint64_t sections = header.e_shoff + uint64_t(header.e_shnum) * header.e_shentsize;
    const uint64_t segments = header.e_phoff + uint64_t(header.e_phnum) * header.e_phentsize;
    *made = new Module{std::string(bytes, sections > segments ? sections : segments)};
    return OK;
}
CUDA int cuModuleGetFunction(Function **made, Module *module, const char *name) {
    Lock held(lock());
    const kvcore::SimulatedKernel *kernel = kvcore::find_simulated(32, name);
    const std::string section = std::string(".text.") + name + '\0';
    if (kernel == nullptr || (!module->code.empty() && module->code.find(section) == std::string::npos))
        return NOT_FOUND;
    *made = new Function{kernel};
    return OK;
}
CUDA int cuFuncSetAttribute(Function *function, int attribute, int value) {
    if (attribute != 8 || value > 227 << 10) return INVALID_VALUE;
    function->shared_bytes = value;
    return OK;
}
CUDA int cuLaunchKernel(Function *function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                        unsigned shared_bytes, Stream *stream, void **parameters, void **) {
    Lock held(lock());
    if (current() == nullptr || stream_of(stream)->ordinal != current()->ordinal) return INVALID_CONTEXT;
    if (broken != OK) return broken;
    if (int(shared_bytes) > function->shared_bytes || threads > 1024 || blocks == 0) return INVALID_VALUE;
    if (is_its_turn("fail_launch")) return LAUNCH_FAILURE;
    counts()["launches"]++;
    const bool fails = is_its_turn("fail_kernel");
    const kvcore::SimulatedKernel *kernel = function->kernel;
    const char *args = static_cast<const char *>(parameters[0]);
    std::vector<char> kept(args, args + kernel->args_bytes);
    stream_of(stream)->push([=] {
        if (fails) broken = LAUNCH_FAILURE;
        if (broken == OK) run_simulated(*kernel, blocks, int(threads), int(shared_bytes), kept.data());
    });
    return OK;
}

// --- memory

CUDA int cuMemAlloc_v2(uint64_t *made, size_t bytes) {
    Lock held(lock());
    Context *context = current();
    if (context == nullptr) return INVALID_CONTEXT;
    if (context->arena == nullptr) context->arena = make_arena(context->ordinal);
    if (context->arena == nullptr || wanted()["no_memory"] != 0) return OUT_OF_MEMORY;
    counts()["allocations"]++;
    *made = number(allocate(*context->arena, bytes, memory()));
    return *made != 0 ? OK : OUT_OF_MEMORY;
}
CUDA int cuMemFree_v2(uint64_t address) {
    Lock held(lock());
    finish_all();
    return release(pointer(address)) ? OK : INVALID_VALUE;
}
CUDA int cuMemHostAlloc(void **made, size_t bytes, unsigned) {
    Lock held(lock());
    if (posix_memalign(made, 4096, bytes) != 0) return OUT_OF_MEMORY;
    pinned()[static_cast<char *>(*made)] = bytes;
    return OK;
}
CUDA int cuMemHostRegister_v2(void *address, size_t bytes, unsigned) {
    Lock held(lock());
    if (is_pinned(address)) return ALREADY_REGISTERED;
    pinned()[static_cast<char *>(address)] = bytes;
    return OK;
}
CUDA int cuMemHostUnregister(void *address) {
    Lock held(lock());
    return pinned().erase(static_cast<char *>(address)) == 1 ? OK : NOT_REGISTERED;
}
CUDA int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, Stream *stream) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    if (broken != OK) return broken;
    if (!is_whole(to, bytes) || !is_whole(from, bytes)) return INVALID_VALUE;
    counts()["copies"]++;
    stream_of(stream)->push([=] { memmove(pointer(to), pointer(from), bytes); });
    return OK;
}

#if SIMULATED_BATCH
static int copy_batch(uint64_t *to, uint64_t *from, size_t *bytes, size_t count, Attributes *attributes, size_t *first,
                      size_t attribute_count, Stream *stream) {
    Lock held(lock());
    if (broken != OK) return broken;
    if (wanted()["refuse_batches"] != 0) return NOT_SUPPORTED;
    if (number(stream) <= 1 || count == 0 || attribute_count != 1 || first[0] != 0) return INVALID_VALUE;
    if (attributes[0].order < 1 || attributes[0].order > 3) return INVALID_VALUE;
    for (size_t i = 0; i < count; ++i)
        if (bytes[i] == 0 || !is_whole(to[i], bytes[i]) || !is_whole(from[i], bytes[i])) return INVALID_VALUE;
    counts()["batches"]++;
    for (size_t i = count; i-- > 0;) // in no particular order
        stream->push([t = to[i], f = from[i], n = bytes[i]] { memmove(pointer(t), pointer(f), n); });
    return OK;
}
#endif
#if SIMULATED_BATCH == 13
CUDA int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *bytes, size_t count, Attributes *attributes,
                               size_t *first, size_t attribute_count, Stream *stream) {
    return copy_batch(to, from, bytes, count, attributes, first, attribute_count, stream);
}
#elif SIMULATED_BATCH == 12
CUDA int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *bytes, size_t count, Attributes *attributes,
                            size_t *first, size_t attribute_count, size_t *failed, Stream *stream) {
    *failed = SIZE_MAX;
    return copy_batch(to, from, bytes, count, attributes, first, attribute_count, stream);
}
#endif

CUDA int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream *stream) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    if (arena_of(pointer(to)) == nullptr || !is_whole(to, bytes)) return INVALID_VALUE;
    stream_of(stream)->push([=] { memset(pointer(to), value, bytes); });
    return OK;
}
CUDA int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t address) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    const Arena *arena = arena_of(pointer(address));
    const bool is_known = arena != nullptr || is_pinned(pointer(address));
    for (unsigned i = 0; i < count; ++i) { // of memory that it does not know, as the driver says it
        if (attributes[i] == 2) *static_cast<unsigned *>(values[i]) = arena != nullptr ? 2 : is_known ? 1 : 0;
        else if (attributes[i] == 9) *static_cast<int *>(values[i]) = arena != nullptr ? arena->ordinal : is_known ? 0 : -2;
        else return INVALID_VALUE;
    }
    return OK;
}
CUDA int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
    Lock held(lock());
    const auto [start, size] = block_of(pointer(address));
    *base = number(start);
    *bytes = size;
    return start != nullptr ? OK : INVALID_VALUE;
}

// --- streams and events

CUDA int cuStreamCreate(Stream **made, unsigned flags) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    if (flags != 1) return INVALID_VALUE; // the null stream would wait for it
    *made = new Stream{current()->ordinal, {}}; // never ended: events still name it
    streams().push_back(*made);
    return OK;
}
CUDA int cuStreamDestroy_v2(Stream *) { return OK; }
CUDA int cuStreamSynchronize(Stream *stream) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    stream = stream_of(stream);
    stream->run_until(stream->queued);
    return broken;
}
CUDA int cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    Lock held(lock());
    stream_of(stream)->push([now = *event] { now.finish(); });
    return OK;
}
CUDA int cuEventCreate(Event **made, unsigned flags) {
    Lock held(lock());
    if (current() == nullptr) return INVALID_CONTEXT;
    if ((flags & 2) == 0) return INVALID_VALUE; // takes its time
    *made = new Event;
    if ((flags & 4) != 0) { // interprocess
        uint64_t flag = 0;
        if (cuMemAlloc_v2(&flag, 1) != OK) return OUT_OF_MEMORY;
        (*made)->flag = static_cast<unsigned char *>(pointer(flag));
    }
    return OK;
}
CUDA int cuEventDestroy_v2(Event *event) {
    Lock held(lock());
    event->finish();
    if (event->flag != nullptr && !event->is_imported) release(event->flag);
    delete event;
    return OK;
}
CUDA int cuEventRecord(Event *event, Stream *stream) {
    Lock held(lock());
    if (current() == nullptr || stream_of(stream)->ordinal != current()->ordinal) return INVALID_HANDLE;
    if (event->flag != nullptr) stream_of(stream)->push([flag = event->flag] { *flag = 1; });
    event->stream = stream_of(stream);
    event->number = event->stream->queued;
    return OK;
}
CUDA int cuEventQuery(Event *event) {
    Lock held(lock());
    if (broken != OK) return broken;
    if (event->is_reached()) return OK;
    if (!event->is_imported) event->stream->run_one(); // who polls sees progress
    return event->is_reached() ? OK : NOT_READY;
}
CUDA int cuEventSynchronize(Event *event) {
    Lock held(lock());
    event->finish();
    return broken;
}

// --- other processes

CUDA int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Lock held(lock());
    const Arena *arena = arena_of(pointer(address));
    if (wanted()["refuse_ipc"] != 0 || arena == nullptr || block_of(pointer(address)).first != pointer(address))
        return INVALID_VALUE;
    const Opened opened = {getpid(), arena->file, uint64_t(static_cast<char *>(pointer(address)) - arena->base)};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &opened, sizeof opened);
    return OK;
}
CUDA int cuIpcOpenMemHandle_v2(uint64_t *made, Handle handle, unsigned flags) {
    Lock held(lock());
    if (flags != 1) return INVALID_VALUE;
    Opened opened;
    memcpy(&opened, &handle, sizeof opened);
    if (opened.process == getpid()) return INVALID_CONTEXT;
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", opened.process, opened.file);
    const int file = open(name, O_RDWR | O_CLOEXEC);
    Arena *arena = file < 0 ? nullptr : map_arena(current()->ordinal, file);
    if (arena == nullptr) return INVALID_VALUE;
    arena->blocks[opened.offset] = ARENA_BYTES - opened.offset; // its owner knows how much is its
    *made = number(arena->base + opened.offset);
    return OK;
}
CUDA int cuIpcCloseMemHandle(uint64_t address) {
    Lock held(lock());
    finish_all();
    for (auto arena = arenas().begin(); arena != arenas().end(); ++arena) {
        if (!(*arena)->holds(pointer(address))) continue;
        munmap((*arena)->base, ARENA_BYTES);
        close((*arena)->file);
        arenas().erase(arena);
        return OK;
    }
    return INVALID_VALUE;
}
CUDA int cuIpcGetEventHandle(Handle *handle, Event *event) { return cuIpcGetMemHandle(handle, number(event->flag)); }
CUDA int cuIpcOpenEventHandle(Event **made, Handle handle) {
    uint64_t flag = 0;
    const int error = cuIpcOpenMemHandle_v2(&flag, handle, 1);
    if (error != OK) return error;
    *made = new Event{nullptr, 0, static_cast<unsigned char *>(pointer(flag)), true};
    return OK;
}
