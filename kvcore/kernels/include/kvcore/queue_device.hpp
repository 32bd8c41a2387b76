/* The launch queue of context.hpp for a device with a driver of its own. Host code, and no vendor's header: what a vendor
 * writes is a Driver, a struct of static functions over the driver's API.
 *
 *     struct Driver {
 *         using Stream, Event, Kernel, Module = ...;          pointers, as the vendor's handles are
 *         static constexpr bool arguments_in_memory;          a kernel takes the address of its Args, in memory of the
 *                                                             device, instead of the Args themselves
 *         struct Scope { explicit Scope(int32_t ordinal); };  makes a device that of this thread, as long as it lives
 *
 *         static void open(const char *path);                 the driver's library
 *         static int32_t count();
 *         static void describe(int32_t ordinal, kv_device_info &);
 *         static Module load(int32_t ordinal, const void *image, int64_t bytes);
 *         static Kernel find(Module, const char *name);
 *         static void launch(Stream, Kernel, int64_t blocks, int threads, int shared_bytes, const void *args,
 *                            size_t bytes);                   args: of the host; see arguments_in_memory
 *
 *         static void *allocate(int64_t bytes, Stream);       in the stream's order, aligned to 256 bytes; never null
 *         static void free(void *, Stream);                   likewise
 *         static void fill(void *, uint8_t, int64_t bytes, Stream);
 *         static void copy(const Copy *, int64_t count, Stream);   any memory to any; memory of the host that is not
 *                                                             pinned may be read before it returns, or later
 *         static int32_t place(uint64_t address);             the device that it is memory of; -1: the host's
 *         static void *pin(int64_t bytes);  static void unpin(void *, int64_t bytes);    pinned memory of the host
 *         static void register_host(uint64_t, int64_t bytes); static void unregister_host(uint64_t);
 *
 *         static Stream make_stream();  static Stream adopt(uint64_t native);  static void end_stream(Stream);
 *         static void synchronize(Stream);
 *         static Event make_event(bool shared);  static void end_event(Event);
 *         static void record(Event, Stream);  static bool passed(Event);  static void synchronize(Event);
 *         static void wait(Stream, Event);
 *
 *         static void export_memory(uint64_t, kv_ipc_memory &);  static uint64_t import_memory(const kv_ipc_memory &);
 *         static void close_memory(uint64_t);
 *         static void export_event(Event, unsigned char *);  static Event import_event(const unsigned char *);
 *     };
 *
 * All of them but `open`, `count`, `describe` and `place` are called within a Scope of the device. What goes wrong they
 * throw, as a DriverError (failure.hpp). `place` throws for nothing: what no driver knows is the host's.
 *
 * Uploads are written one behind the other into pinned memory, and cross in one copy before the first launch. Both the
 * pinned memory and its copy on the device are used in turns, half by half: the device's half is free when the copy that
 * replaces it runs, since its users were queued before; the host's is when that copy of the turn before is done.
 */
#ifndef KVCORE_QUEUE_DEVICE_HPP
#define KVCORE_QUEUE_DEVICE_HPP

#include <string.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "context.hpp"
#include "failure.hpp"
#include "kernel_list.hpp"
#include "runtime.h"

namespace kvcore {

constexpr int32_t MAX_DEVICES = 64;

struct Copy {
    void *to;
    const void *from;
    int64_t bytes;
};

/* What a process has of one device. */
template <class Driver> struct Device {
    std::mutex lock; /* guards what follows, except where it is set once */
    bool is_open = false;
    kv_device_info info = {};
    kv_tuning tuning = {};
    typename Driver::Module module = {};
    std::atomic<bool> has_kernels{false};
    typename Driver::Stream memory = {}; /* a stream that allocations are made on, and nothing runs */
    std::vector<typename Driver::Event> spare_events;

    /* Never destroyed: Python may still let go of arrays when the process ends. */
    static Device &at(int32_t ordinal) {
        static Device *devices = new Device[MAX_DEVICES];
        const int32_t count = Driver::count();
        if (ordinal < 0 || ordinal >= count || ordinal >= MAX_DEVICES)
            throw DriverError(KV_FAIL_DEVICE, "there is no device " + std::to_string(ordinal) + "; the driver shows " +
                                                  std::to_string(count));
        Device &device = devices[ordinal];
        std::lock_guard<std::mutex> guard(device.lock);
        if (!device.is_open) {
            Driver::describe(ordinal, device.info);
            typename Driver::Scope scope(ordinal);
            device.memory = Driver::make_stream();
            device.is_open = true;
            int32_t none = -1;
            first_open().compare_exchange_strong(none, ordinal);
        }
        return device;
    }

    /* The device for what is none's own: one that is open already, since to open another takes memory of it. */
    static int32_t any() {
        const int32_t found = first_open().load();
        return found < 0 ? 0 : found;
    }

  private:
    static std::atomic<int32_t> &first_open() {
        static std::atomic<int32_t> ordinal{-1};
        return ordinal;
    }

  public:
    /* Memory that any stream may use at once. */
    void *allocate(int64_t bytes) {
        void *made = Driver::allocate(bytes > 0 ? bytes : 1, memory);
        Driver::synchronize(memory);
        return made;
    }
    void free(void *address) { Driver::free(address, memory); }

    typename Driver::Event take_event() {
        std::lock_guard<std::mutex> guard(lock);
        if (spare_events.empty()) return Driver::make_event(false);
        const auto event = spare_events.back();
        spare_events.pop_back();
        return event;
    }
    void give_back(typename Driver::Event event) {
        std::lock_guard<std::mutex> guard(lock);
        spare_events.push_back(event);
    }
};

/* A stream as the ops take it. */
template <class Driver> class Stream {
  public:
    static constexpr int64_t half_bytes = 512 << 10;
    static constexpr int64_t alignment = 64;
    static constexpr int64_t for_arguments = 16 << 10; /* of a half, what an op's uploads leave for what its launches add */

    Stream(int32_t on, uint64_t native_handle, bool adopt) : ordinal(on), owned_(!adopt), device(Device<Driver>::at(on)) {
        native = adopt ? Driver::adopt(native_handle) : Driver::make_stream();
        try {
            staged_ = static_cast<char *>(Driver::pin(2 * half_bytes));
            arrived_ = static_cast<char *>(device.allocate(2 * half_bytes + 256));
            status = reinterpret_cast<uint64_t *>(arrived_ + 2 * half_bytes);
            for (; events_ < 2; events_++) half_is_read_[events_] = Driver::make_event(false);
            Driver::fill(status, 0xFF, 16, native); /* KV_OK, twice */
        } catch (...) {
            give_back();
            throw;
        }
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    /* Waits. Pinned memory is kept for the next stream by the driver, or with the process: to give it back would stop
     * all that the device does. */
    void end() {
        try {
            Driver::synchronize(native);
        } catch (...) {
            give_back();
            throw;
        }
        give_back();
    }

    const int32_t ordinal;
    typename Driver::Stream native;
    uint64_t *status; /* [2] */
    std::mutex lock;  /* held while an op is queued */

    /* A place for bytes to be uploaded, and where they will be on the device; null if they are too many. `kept_free` of
     * the half are for others. */
    char *reserve(int64_t bytes, void **on_device, int64_t kept_free) {
        const int64_t size = (bytes + alignment - 1) / alignment * alignment;
        if (taken_ + size > half_bytes - kept_free) return nullptr; /* of this op: a second turn would overwrite the first */
        if (used_ + size > half_bytes) turn();
        const int64_t at = half_ * half_bytes + used_;
        used_ += size;
        taken_ += size;
        *on_device = arrived_ + at;
        return staged_ + at;
    }

    /* Sends what was reserved and written since the last time. */
    void send() {
        if (sent_ == used_) return;
        const int64_t at = half_ * half_bytes + sent_;
        const Copy copy = {arrived_ + at, staged_ + at, used_ - sent_};
        Driver::copy(&copy, 1, native);
        sent_ = used_;
    }

    void begin_op() { taken_ = 0; }

  private:
    void turn() {
        send();
        Driver::record(half_is_read_[half_], native);
        was_used_[half_] = true;
        half_ = 1 - half_;
        if (was_used_[half_]) Driver::synchronize(half_is_read_[half_]);
        used_ = sent_ = 0;
    }

    void give_back() {
        while (events_ > 0) Driver::end_event(half_is_read_[--events_]);
        if (arrived_ != nullptr) device.free(arrived_);
        if (staged_ != nullptr) Driver::unpin(staged_, 2 * half_bytes);
        if (owned_) Driver::end_stream(native);
    }

    bool owned_;
    int events_ = 0; /* how many of half_is_read_ there are */
    char *staged_ = nullptr, *arrived_ = nullptr;
    int64_t used_ = 0, sent_ = 0, taken_ = 0; /* bytes: of this half, of it sent, of this op */
    int half_ = 0;
    bool was_used_[2] = {};
    typename Driver::Event half_is_read_[2];

  public:
    Device<Driver> &device;
};

/* What `keep` made, and on which device. */
template <class Driver> struct Kept {
    static std::mutex &lock() {
        static auto *one = new std::mutex;
        return *one;
    }
    static std::map<void *, int32_t> &all() {
        static auto *one = new std::map<void *, int32_t>;
        return *one;
    }
    static int32_t &ordinal() { /* where this thread keeps */
        static thread_local int32_t current = 0;
        return current;
    }
};

template <class Driver, int Width> class DeviceQueue : public Failure {
  public:
    static constexpr int warp_width = Width;

    explicit DeviceQueue(void *stream)
        : stream_(*static_cast<Stream<Driver> *>(stream)), held_(stream_.lock), scope_(stream_.ordinal) {
        stream_.begin_op();
        if (!stream_.device.has_kernels.load()) fail(KV_FAIL_DEVICE, "no kernels have been loaded for this device");
    }
    DeviceQueue(const DeviceQueue &) = delete;
    DeviceQueue &operator=(const DeviceQueue &) = delete;
    ~DeviceQueue() {
        for (void *memory : owned_) {
            try {
                Driver::free(memory, stream_.native);
            } catch (...) {
                fail_by_exception();
            }
        }
    }

    template <class K> void launch(int64_t blocks, int threads, int shared_bytes, const typename K::Args &args) {
        if (failed() || blocks <= 0 || !Listed<K>::is_listed) return;
        const typename Driver::Kernel kernel = find<K>();
        if constexpr (Driver::arguments_in_memory) {
            const void *there = upload(&args, 1, 0);
            if (failed()) return;
            submit();
            Driver::launch(stream_.native, kernel, blocks, threads, shared_bytes, there, sizeof args);
        } else {
            submit();
            Driver::launch(stream_.native, kernel, blocks, threads, shared_bytes, &args, sizeof args);
        }
    }

    int64_t grid(int64_t items, int64_t per_block) const {
        const int64_t blocks = (items + per_block - 1) / per_block;
        const int64_t fill = int64_t(stream_.device.info.units) * stream_.device.tuning.blocks_per_unit;
        return blocks < fill ? blocks : fill;
    }

    template <class T>
    const T *upload(const T *host, int64_t count, int64_t kept_free = Stream<Driver>::for_arguments) {
        if (failed()) return nullptr;
        const int64_t bytes = count * int64_t(sizeof(T));
        void *there = nullptr;
        char *here = stream_.reserve(bytes, &there, kept_free);
        if (here != nullptr) {
            if (bytes > 0) memcpy(here, host, size_t(bytes));
            return static_cast<const T *>(there);
        }
        there = scratch(bytes);
        const Copy copy = {there, host, bytes};
        Driver::copy(&copy, 1, stream_.native);
        Driver::synchronize(stream_.native); /* `host` is the caller's, and only for now */
        return static_cast<const T *>(there);
    }

    void *scratch(int64_t bytes) {
        if (failed()) return nullptr;
        owned_.reserve(owned_.size() + 1);
        owned_.push_back(Driver::allocate(bytes > 0 ? bytes : 1, stream_.native));
        return owned_.back();
    }

    void zero(void *memory, int64_t bytes) {
        if (failed() || bytes <= 0) return;
        submit();
        Driver::fill(memory, 0, bytes, stream_.native);
    }

    /* Addresses are what kernels dereference. That they are memory of this device is the caller's to see to: to ask the
     * driver for each of hundreds of planes would take longer than to move them. */
    template <class T> T *device(uint64_t address) {
        return failed() ? nullptr : reinterpret_cast<T *>(static_cast<uintptr_t>(address));
    }

    bool reaches(uint64_t address) const { return Driver::place(address) == stream_.ordinal; }

    int64_t engine_bytes() const { return stream_.device.tuning.engine_bytes; }

    void transfer(uint64_t to, uint64_t from, int64_t bytes) {
        transfer(reinterpret_cast<void *>(static_cast<uintptr_t>(to)), from, bytes);
    }
    void transfer(void *to, uint64_t from, int64_t bytes) {
        if (failed() || bytes <= 0) return;
        copies_.push_back({to, reinterpret_cast<const void *>(static_cast<uintptr_t>(from)), bytes});
    }

    void submit() {
        if (failed()) return;
        stream_.send();
        if (copies_.empty()) return;
        Driver::copy(copies_.data(), int64_t(copies_.size()), stream_.native);
        copies_.clear();
    }

    static void *keep(const void *host, int64_t bytes) {
        const int32_t ordinal = Kept<Driver>::ordinal();
        auto &device = Device<Driver>::at(ordinal);
        typename Driver::Scope scope(ordinal);
        void *made = device.allocate(bytes);
        const Copy copy = {made, host, bytes};
        Driver::copy(&copy, 1, device.memory);
        Driver::synchronize(device.memory);
        std::lock_guard<std::mutex> guard(Kept<Driver>::lock());
        Kept<Driver>::all()[made] = ordinal;
        return made;
    }

    static void release(void *kept) {
        std::lock_guard<std::mutex> guard(Kept<Driver>::lock());
        auto found = Kept<Driver>::all().find(kept);
        if (found == Kept<Driver>::all().end()) return;
        try {
            typename Driver::Scope scope(found->second);
            Device<Driver>::at(found->second).free(kept);
        } catch (...) {
            Failure().fail_by_exception();
        }
        Kept<Driver>::all().erase(found);
    }

  private:
    template <class K> typename Driver::Kernel find() {
        static std::atomic<typename Driver::Kernel> known[MAX_DEVICES];
        auto &mine = known[stream_.ordinal];
        typename Driver::Kernel kernel = mine.load(std::memory_order_acquire);
        if (kernel == typename Driver::Kernel()) {
            kernel = Driver::find(stream_.device.module, K::name);
            mine.store(kernel, std::memory_order_release);
        }
        return kernel;
    }

    Stream<Driver> &stream_;
    std::lock_guard<std::mutex> held_;
    typename Driver::Scope scope_;
    std::vector<void *> owned_;
    std::vector<Copy> copies_;
};

}  // namespace kvcore

#endif
