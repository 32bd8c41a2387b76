/* What a vendor writes: the Driver of queue_device.hpp, here over a machine that is none. */
#ifndef FAKEVENDOR_DRIVER_HPP
#define FAKEVENDOR_DRIVER_HPP

#include <kvcore/runtime_entry_points.hpp>
#include <kvcore/simulated.hpp>

#include <set>

#include "machine.hpp"

namespace fakevendor {

#ifndef FAKEVENDOR_ARGUMENTS_IN_MEMORY
#define FAKEVENDOR_ARGUMENTS_IN_MEMORY false
#endif

/* What another process needs for mapping an allocation, within KV_IPC_BYTES. */
struct Exported {
    int64_t process, file, offset, bytes;
};

struct Driver {
    using Stream = StreamState *;
    using Event = EventState *;
    using Kernel = const kvcore::SimulatedKernel *;
    using Module = const std::set<std::string> *; /* names of kernels */
    static constexpr bool arguments_in_memory = FAKEVENDOR_ARGUMENTS_IN_MEMORY;

    /* The machine is locked as long as a device is in use. */
    struct Scope {
        explicit Scope(int32_t ordinal) : held(Machine::one().lock), before(Machine::one().current) {
            Machine::one().current = ordinal;
        }
        ~Scope() { Machine::one().current = before; }
        std::lock_guard<std::recursive_mutex> held;
        const int32_t before;
    };

    static Machine &machine() { return Machine::one(); }
    static int32_t current() {
        if (machine().current >= 0) return machine().current;
        fprintf(stderr, "fakevendor: a function of the driver is called outside of a Scope\n");
        abort();
    }

    static void open(const char *path) {
        if (path[0] != '\0') throw kvcore::DriverError(KV_FAIL_DEVICE, std::string(path) + " is no driver");
    }
    static int32_t count() { return DEVICES; }
    static void describe(int32_t ordinal, kv_device_info &info) {
        snprintf(info.name, sizeof info.name, "Fake %d", ordinal);
        snprintf(info.arch, sizeof info.arch, "fake32");
        info.memory_bytes = MEMORY_BYTES;
        info.units = 2;
        info.warp_width = 32;
        info.driver_version = 7;
    }

    /* An image is a list of names: the kernels themselves are in this library. */
    static Module load(int32_t, const void *image, int64_t bytes) {
        const std::string text(static_cast<const char *>(image), size_t(bytes));
        if (text.rfind("fake", 0) != 0) throw kvcore::DriverError(KV_FAIL_DEVICE, "the image is of no known kind");
        auto *names = new std::set<std::string>;
        for (size_t at = text.find('\n'); at != std::string::npos && at + 1 < text.size();) {
            const size_t end = text.find('\n', at + 1);
            names->insert(text.substr(at + 1, end - at - 1));
            at = end;
        }
        return names;
    }
    static Kernel find(Module module, const char *name) {
        Kernel found = module->count(name) ? kvcore::find_simulated(32, name) : nullptr;
        if (found == nullptr) throw kvcore::DriverError(KV_FAIL_DEVICE, std::string("no kernel ") + name);
        return found;
    }
    static void launch(Stream stream, Kernel kernel, int64_t blocks, int threads, int shared_bytes, const void *args,
                       size_t bytes) {
        if (bytes != kernel->args_bytes) throw kvcore::DriverError(KV_FAIL_DEVICE, "arguments of another kernel");
        const std::string held(static_cast<const char *>(args), arguments_in_memory ? 0 : bytes);
        machine().push(stream, [=] {
            auto &fail = machine().switches.fail_kernel;
            if (fail > 0 && --fail == 0) machine().switches.is_broken = true;
            machine().check();
            run_simulated(*kernel, blocks, threads, shared_bytes, arguments_in_memory ? args : held.data());
        });
    }

    static void *allocate(int64_t bytes, Stream stream) {
        if (bytes > machine().left()) synchronize(stream); /* what was freed before on it comes first */
        return machine().allocate(current(), bytes);
    }
    static void free(void *address, Stream stream) {
        machine().push(stream, [=] { machine().release(address); });
    }
    static void fill(void *address, uint8_t value, int64_t bytes, Stream stream) {
        machine().push(stream, [=] { memset(address, value, size_t(bytes)); });
    }
    static void copy(const kvcore::Copy *copies, int64_t count, Stream stream) {
        for (int64_t i = 0; i < count; i++)
            machine().push(stream, [one = copies[i]] { memcpy(one.to, one.from, size_t(one.bytes)); });
    }
    static int32_t place(uint64_t address) {
        std::lock_guard<std::recursive_mutex> held(machine().lock);
        return machine().place(address);
    }
    static void *pin(int64_t bytes) { return malloc(size_t(bytes)); }
    static void unpin(void *address, int64_t bytes) {
        memset(address, FREED, size_t(bytes)); /* what still reads it shows */
        ::free(address);
    }
    static void register_host(uint64_t address, int64_t bytes) {
        auto &all = machine().registered;
        const auto after = all.lower_bound(address + uint64_t(bytes));
        if (after != all.begin() && std::prev(after)->first + uint64_t(std::prev(after)->second) > address)
            throw kvcore::DriverError(KV_FAIL_DEVICE, "part of the memory is registered already");
        all[address] = bytes;
    }
    static void unregister_host(uint64_t address) {
        if (machine().registered.erase(address) == 0)
            throw kvcore::DriverError(KV_FAIL_DEVICE, "the memory is not registered");
    }

    static Stream make_stream() {
        auto made = std::make_shared<StreamState>(current());
        machine().streams[uint64_t(made.get())] = made;
        return made.get();
    }
    static Stream adopt(uint64_t native) {
        const auto found = machine().streams.find(native);
        if (found == machine().streams.end() || found->second->ordinal != current())
            throw kvcore::DriverError(KV_FAIL_DEVICE, "no stream of this device");
        return found->second.get();
    }
    static void end_stream(Stream stream) {
        synchronize(stream);
        machine().streams.erase(uint64_t(stream));
    }
    static void synchronize(Stream stream) { machine().run_until(stream, stream->queued); }

    static Event make_event(bool shared) {
        auto made = std::make_unique<EventState>();
        if (shared) made->flag = static_cast<uint64_t *>(machine().allocate(current(), 8));
        return made.release();
    }
    static void end_event(Event event) {
        if (event->is_imported) munmap(const_cast<uint64_t *>(event->flag), PAGE);
        delete event;
    }
    static void record(Event event, Stream stream) {
        if (volatile uint64_t *flag = event->flag) {
            *flag = 0;
            machine().push(stream, [=] { *flag = 1; });
        }
        event->stream = stream->shared_from_this();
        event->number = stream->queued;
        machine().check();
    }
    /* The device gets a little further each time that somebody asks. */
    static bool passed(Event event) {
        machine().check();
        if (event->is_imported) return *event->flag == 1;
        if (event->stream == nullptr || event->stream->done >= event->number) return true;
        machine().run_one(event->stream.get());
        return event->stream->done >= event->number;
    }
    static void synchronize(Event event) {
        if (event->is_imported) wait_for(event->flag);
        else if (event->stream != nullptr) machine().run_until(event->stream.get(), event->number);
    }
    static void wait(Stream stream, Event event) {
        if (event->is_imported) {
            machine().push(stream, [flag = event->flag] { wait_for(flag); });
        } else if (event->stream != nullptr) {
            machine().push(stream, [other = event->stream, number = event->number] {
                machine().run_until(other.get(), number);
            });
        }
    }

    static void export_memory(uint64_t address, kv_ipc_memory &out) {
        const auto block = machine().block(address);
        write(out.handle, {getpid(), machine().file[current()], machine().file_offset(block->first), block->second});
        out.offset = int64_t(address - block->first);
        out.allocation_bytes = block->second;
    }
    static uint64_t import_memory(const kv_ipc_memory &handle) {
        const uint64_t address = map(handle.handle);
        imported()[address] = read(handle.handle).bytes;
        return address;
    }
    static void close_memory(uint64_t address) {
        munmap(reinterpret_cast<void *>(address), size_t(imported().at(address)));
        imported().erase(address);
    }
    static void export_event(Event event, unsigned char *out) {
        write(out, {getpid(), machine().file[current()], machine().file_offset(uint64_t(event->flag)), 8});
    }
    static Event import_event(const unsigned char *handle) {
        auto made = std::make_unique<EventState>();
        made->flag = reinterpret_cast<uint64_t *>(map(handle));
        made->is_imported = true;
        return made.release();
    }

    /* Memory of other processes that is mapped here, and its bytes. */
    static std::map<uint64_t, int64_t> &imported() {
        static std::map<uint64_t, int64_t> all;
        return all;
    }

  private:
    static void wait_for(volatile uint64_t *flag) {
        while (*flag != 1) usleep(1000);
    }
    static void write(unsigned char *out, const Exported &exported) {
        memset(out, 0, KV_IPC_BYTES);
        memcpy(out, &exported, sizeof exported);
    }
    static Exported read(const unsigned char *handle) {
        Exported exported;
        memcpy(&exported, handle, sizeof exported);
        return exported;
    }
    static uint64_t map(const unsigned char *handle) {
        const Exported e = read(handle);
        const std::string path = "/proc/" + std::to_string(e.process) + "/fd/" + std::to_string(e.file);
        const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (file < 0) throw kvcore::DriverError(KV_FAIL_DEVICE, path + " is gone");
        void *at = mmap(nullptr, size_t(e.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(e.offset));
        close(file);
        if (at == MAP_FAILED) throw kvcore::DriverError(KV_FAIL_DEVICE, path + " cannot be mapped");
        return uint64_t(at);
    }
};

}  // namespace fakevendor

#endif
