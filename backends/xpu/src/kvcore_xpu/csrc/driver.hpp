/* What the launch queue asks of a device (queue_device.hpp), answered by SYCL: devices that run what Intel's run-time
 * compiler makes of the kernels, while this file is compiled by a plain C++ compiler.
 *
 * - All of a platform's devices share its default context, which is torch's too; memory is unified shared memory of it.
 * - A stream is an in-order queue. SYCL frees memory at once, so what a stream lets go of is kept for its next
 *   allocations, which are queued behind its last use; and returned when the stream is known to have passed.
 * - Errors that SYCL finds after a call has returned come through the queue's handler, and are thrown when somebody
 *   waits for the queue next. An adopted queue has its owner's handler, which they go to instead.
 * - Queues, kernels and bundles are never destroyed at the end of the process, which SYCL would not survive.
 */
#pragma once

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include <sycl/sycl.hpp>

#include <kvcore/ctx_sycl.hpp>
#include <kvcore/queue_device.hpp>

#ifndef KVCORE_WARP_WIDTH
#define KVCORE_WARP_WIDTH 32
#endif

namespace kvcore_xpu {

namespace x = sycl::ext::oneapi::experimental;
using kvcore::Copy;
using kvcore::DriverError;

/* The first error of a queue that nobody has been told yet. */
class Late {
  public:
    void keep(sycl::exception_list errors) {
        std::lock_guard<std::mutex> guard(lock_);
        for (const std::exception_ptr &error : errors)
            if (first_ == nullptr) first_ = error;
    }
    void raise() {
        std::exception_ptr error;
        {
            std::lock_guard<std::mutex> guard(lock_);
            std::swap(error, first_);
        }
        if (error != nullptr) std::rethrow_exception(error);
    }

  private:
    std::mutex lock_;
    std::exception_ptr first_;
};

struct Queue {
    std::shared_ptr<Late> late; /* the handler's as well, which may outlive this */
    sycl::queue queue;
    std::mutex lock; /* guards what follows */
    std::map<void *, int64_t> sizes;
    std::multimap<int64_t, void *> spare; /* by size */
    int64_t spare_bytes = 0;

    Queue(std::shared_ptr<Late> handler, sycl::queue made) : late(std::move(handler)), queue(std::move(made)) {}

    static Queue *make(const sycl::device &device) {
        auto late = std::make_shared<Late>();
        return new Queue(late, sycl::queue(device, [late](sycl::exception_list errors) { late->keep(errors); },
                                           {sycl::property::queue::in_order()}));
    }
};

struct Built {
    sycl::kernel_bundle<sycl::bundle_state::executable> bundle;
};

struct SyclDriver {
    using Stream = Queue *;
    using Event = sycl::event *;
    using Kernel = sycl::kernel *;
    using Module = Built *;
    static constexpr bool arguments_in_memory = true; /* see KVCORE_SYCL_KERNEL */
    static constexpr int64_t alignment = 256;
    static constexpr int64_t spare_limit = int64_t(64) << 20; /* of a stream, while it has passed all its work */

    struct Scope {
        explicit Scope(int32_t ordinal) : before_(current()) { current() = ordinal; }
        ~Scope() { current() = before_; }
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;

      private:
        int32_t before_;
    };

    /* "gpu": Intel's GPUs through Level Zero, as torch has them; "cpu": the processor through OpenCL. */
    static void open(const char *kind) {
        static std::mutex lock;
        std::lock_guard<std::mutex> guard(lock);
        if (is_open()) return;
        const bool gpu = std::string(kind) == "gpu";
        if (!gpu && std::string(kind) != "cpu")
            throw DriverError(KV_FAIL_DEVICE, std::string("there are devices of kinds gpu and cpu, none of ") + kind);
        for (const sycl::device &device : sycl::device::get_devices(
                 gpu ? sycl::info::device_type::gpu : sycl::info::device_type::cpu)) {
            const auto backend = gpu ? sycl::backend::ext_oneapi_level_zero : sycl::backend::opencl;
            if (device.get_backend() == backend && device.get_info<sycl::info::device::vendor_id>() == 0x8086)
                devices().push_back(device);
        }
        /* Discrete GPUs come first, as in torch. */
        std::stable_partition(devices().begin(), devices().end(),
                              [](const auto &d) { return !d.template get_info<sycl::info::device::host_unified_memory>(); });
        is_open() = true;
    }
    static int32_t count() { return int32_t(devices().size()); }

    static void describe(int32_t ordinal, kv_device_info &info) {
        const sycl::device &device = devices().at(size_t(ordinal));
        fit(info.name, device.get_info<sycl::info::device::name>());
        fit(info.arch, arch(device));
        info.memory_bytes = int64_t(device.get_info<sycl::info::device::global_mem_size>());
        info.units = int32_t(device.get_info<sycl::info::device::max_compute_units>());
        info.warp_width = KVCORE_WARP_WIDTH;
        info.driver_version = version(device.get_info<sycl::info::device::driver_version>());
    }

    /* `image` is the kernels' source text; its first line is a comment, of the compiler's options between tabs. */
    static Module load(int32_t ordinal, const void *image, int64_t bytes) {
        const sycl::device &device = devices().at(size_t(ordinal));
        const auto widths = device.get_info<sycl::info::device::sub_group_sizes>();
        if (std::find(widths.begin(), widths.end(), size_t(KVCORE_WARP_WIDTH)) == widths.end())
            throw DriverError(KV_FAIL_UNSUPPORTED, device.get_info<sycl::info::device::name>() +
                                                       " has no sub-groups of " + std::to_string(KVCORE_WARP_WIDTH) +
                                                       " lanes; let KVCORE_XPU_SUB_GROUP be another");
        const std::string text(static_cast<const char *>(image), size_t(bytes));
        std::string log;
        try {
            auto source = x::create_kernel_bundle_from_source(context(device), x::source_language::sycl, text);
            auto built = x::build(source, {device}, x::properties{x::build_options{options(text)}, x::save_log{&log}});
            return new Built{std::move(built)};
        } catch (const sycl::exception &error) {
            throw DriverError(KV_FAIL_DEVICE, "the run-time compiler refused the kernels: " + summary(error.what(), log));
        }
    }

    static Kernel find(Module module, const char *name) {
        return new sycl::kernel(module->bundle.ext_oneapi_get_kernel(name));
    }

    static void launch(Stream stream, Kernel kernel, int64_t blocks, int threads, int shared_bytes, const void *args,
                       size_t) {
        stream->queue.submit([&](sycl::handler &handler) {
            handler.set_arg(0, args);
            handler.set_arg(1, kvcore::SyclShared(size_t(shared_bytes + 15) / 16 + 1, handler));
            handler.parallel_for(sycl::nd_range<1>(size_t(blocks) * size_t(threads), size_t(threads)), *kernel);
        });
    }

    static void *allocate(int64_t bytes, Stream stream) {
        const int64_t size = (bytes + alignment - 1) / alignment * alignment;
        std::lock_guard<std::mutex> guard(stream->lock);
        const auto fits = stream->spare.lower_bound(size);
        if (fits != stream->spare.end() && fits->first <= 2 * size) {
            void *memory = fits->second;
            stream->spare_bytes -= fits->first;
            stream->spare.erase(fits);
            return memory;
        }
        void *memory = sycl::aligned_alloc_device(size_t(alignment), size_t(size), stream->queue);
        if (memory == nullptr && !stream->spare.empty()) { /* it may be the spare ones that are in the way */
            stream->queue.wait();
            drop_spare(*stream);
            memory = sycl::aligned_alloc_device(size_t(alignment), size_t(size), stream->queue);
        }
        if (memory == nullptr)
            throw DriverError(KV_FAIL_MEMORY, "the device has no " + std::to_string(bytes) + " B free");
        stream->sizes[memory] = size;
        return memory;
    }

    static void free(void *memory, Stream stream) {
        std::lock_guard<std::mutex> guard(stream->lock);
        const int64_t size = stream->sizes.at(memory);
        stream->spare.emplace(size, memory);
        stream->spare_bytes += size;
        if (stream->spare_bytes > spare_limit && stream->queue.ext_oneapi_empty()) drop_spare(*stream);
    }

    static void fill(void *to, uint8_t value, int64_t bytes, Stream stream) {
        stream->queue.memset(to, value, size_t(bytes));
    }

    static void copy(const Copy *copies, int64_t count, Stream stream) {
        for (const Copy *c = copies; c != copies + count; c++) stream->queue.memcpy(c->to, c->from, size_t(c->bytes));
    }

    static int32_t place(uint64_t address) {
        const void *memory = reinterpret_cast<const void *>(uintptr_t(address));
        try {
            for (const sycl::device &device : devices()) {
                const auto kind = sycl::get_pointer_type(memory, context(device));
                if (kind == sycl::usm::alloc::unknown) continue;
                return kind == sycl::usm::alloc::host ? -1 : ordinal_of(sycl::get_pointer_device(memory, context(device)));
            }
        } catch (const sycl::exception &) { /* what SYCL does not know is the host's */
        }
        return -1;
    }

    static void *pin(int64_t bytes) {
        void *memory = sycl::aligned_alloc_host(size_t(alignment), size_t(bytes), context(device()));
        if (memory == nullptr)
            throw DriverError(KV_FAIL_MEMORY, "no " + std::to_string(bytes) + " B of pinned memory are to be had");
        return memory;
    }
    static void unpin(void *memory, int64_t) { sycl::free(memory, context(device())); }

    /* Of the processor it is what the word says: the pages stay in memory. */
    static void register_host(uint64_t address, int64_t bytes) {
        void *memory = reinterpret_cast<void *>(uintptr_t(address));
        if (device().is_gpu()) return x::prepare_for_device_copy(memory, size_t(bytes), context(device()));
        if (mlock(memory, size_t(bytes)) != 0)
            throw DriverError(KV_FAIL_MEMORY, std::string("mlock: ") + strerror(errno) + " (see RLIMIT_MEMLOCK)");
        std::lock_guard<std::mutex> guard(locked().lock);
        locked().bytes[address] = bytes;
    }
    static void unregister_host(uint64_t address) {
        void *memory = reinterpret_cast<void *>(uintptr_t(address));
        if (device().is_gpu()) return x::release_from_device_copy(memory, context(device()));
        std::lock_guard<std::mutex> guard(locked().lock);
        const auto found = locked().bytes.find(address);
        if (found == locked().bytes.end()) throw DriverError(KV_FAIL_POINTER, "it has not been registered");
        munlock(memory, size_t(found->second));
        locked().bytes.erase(found);
    }

    static Stream make_stream() { return Queue::make(device()); }

    static Stream adopt(uint64_t native) {
        const auto &queue = *reinterpret_cast<sycl::queue *>(uintptr_t(native));
        if (!queue.is_in_order())
            throw DriverError(KV_FAIL_UNSUPPORTED, "the queue runs its commands out of order; give one that does not");
        if (queue.get_context() != context(device()) || queue.get_device() != device())
            throw DriverError(KV_FAIL_UNSUPPORTED,
                              "the queue is of another device or context than " +
                                  device().get_info<sycl::info::device::name>() + " in its platform's default context");
        return new Queue(std::make_shared<Late>(), queue);
    }

    static void end_stream(Stream stream) { delete drained(stream); }
    static void synchronize(Stream stream) {
        stream->queue.wait_and_throw();
        std::lock_guard<std::mutex> guard(stream->lock);
        if (stream->spare_bytes > spare_limit && stream->queue.ext_oneapi_empty()) drop_spare(*stream);
        stream->late->raise();
    }

    static Event make_event(bool shared) {
        if (shared) throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc);
        return new sycl::event;
    }
    static void end_event(Event event) { delete event; }
    static void record(Event event, Stream stream) { *event = stream->queue.ext_oneapi_submit_barrier(); }
    static bool passed(Event event) {
        return event->get_info<sycl::info::event::command_execution_status>() ==
               sycl::info::event_command_status::complete;
    }
    static void synchronize(Event event) { event->wait(); }
    static void wait(Stream stream, Event event) { stream->queue.ext_oneapi_submit_barrier({*event}); }

    static void export_memory(uint64_t, kv_ipc_memory &) { throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc); }
    static uint64_t import_memory(const kv_ipc_memory &) { throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc); }
    static void close_memory(uint64_t) { throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc); }
    static void export_event(Event, unsigned char *) { throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc); }
    static Event import_event(const unsigned char *) { throw DriverError(KV_FAIL_UNSUPPORTED, no_ipc); }

  private:
    static constexpr const char *no_ipc =
        "device memory and events are not shared between processes: OpenCL cannot, and for Level Zero it is not done; "
        "share a host buffer by name";

    struct Locked {
        std::mutex lock;
        std::map<uint64_t, int64_t> bytes;
    };
    static Locked &locked() {
        static auto *all = new Locked;
        return *all;
    }

    static bool &is_open() {
        static bool opened = false;
        return opened;
    }
    static std::vector<sycl::device> &devices() {
        static auto *all = new std::vector<sycl::device>;
        return *all;
    }
    static int32_t &current() {
        static thread_local int32_t ordinal = 0;
        return ordinal;
    }
    static const sycl::device &device() { return devices().at(size_t(current())); }
    static sycl::context context(const sycl::device &device) { return device.get_platform().khr_get_default_context(); }

    static int32_t ordinal_of(const sycl::device &device) {
        const auto found = std::find(devices().begin(), devices().end(), device);
        return found == devices().end() ? -1 : int32_t(found - devices().begin());
    }

    static void drop_spare(Queue &stream) {
        for (const auto &[size, memory] : stream.spare) {
            stream.sizes.erase(memory);
            sycl::free(memory, stream.queue);
        }
        stream.spare.clear();
        stream.spare_bytes = 0;
    }
    static Stream drained(Stream stream) {
        stream->queue.wait();
        drop_spare(*stream);
        return stream;
    }

    static std::vector<std::string> options(const std::string &text) {
        std::istringstream line(text.substr(0, text.find('\n')));
        std::vector<std::string> found;
        std::string option;
        std::getline(line, option, '\t'); /* the comment's begin */
        while (std::getline(line, option, '\t')) found.push_back(option);
        return found;
    }

    /* The log's first error: a message has room for few lines. */
    static std::string summary(const char *what, const std::string &log) {
        std::istringstream lines(log.empty() ? what : log);
        std::string line, first;
        while (std::getline(lines, line)) {
            if (first.empty()) first = line;
            if (line.find("error") != std::string::npos) return line;
        }
        return first;
    }

    template <size_t Size> static void fit(char (&to)[Size], const std::string &text) {
        snprintf(to, Size, "%s", text.c_str());
    }

    /* As ocloc names them, where it has a name. */
    static std::string arch(const sycl::device &device) {
        if (!device.is_gpu()) return "opencl-cpu";
        const auto known = device.get_info<x::info::device::architecture>();
        switch (known) {
            case x::architecture::intel_gpu_pvc:
            case x::architecture::intel_gpu_pvc_vg: return "pvc";
            case x::architecture::intel_gpu_dg2_g10: return "dg2-g10";
            case x::architecture::intel_gpu_dg2_g11: return "dg2-g11";
            case x::architecture::intel_gpu_dg2_g12: return "dg2-g12";
            case x::architecture::intel_gpu_bmg_g21: return "bmg-g21";
            default: break;
        }
        char text[32];
        snprintf(text, sizeof text, "intel-gpu-%llx", static_cast<unsigned long long>(known));
        return text;
    }

    /* "2026.22.10" is 2026022, "1.6.31294+7" is 1006: the first two numbers. */
    static int32_t version(const std::string &text) {
        int major = 0, minor = 0;
        sscanf(text.c_str(), "%d.%d", &major, &minor);
        return major * 1000 + minor;
    }
};

}  // namespace kvcore_xpu
