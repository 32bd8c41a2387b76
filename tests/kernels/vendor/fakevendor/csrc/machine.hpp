/* Two devices that are nothing but memory of the host, and streams whose work is done late: when somebody waits, or asks
 * whether it is done. What is freed is filled with a pattern and its addresses never come again, so that whoever uses it
 * too late sees it. The memory is a file without a name, so that other processes may map parts of it.
 */
#ifndef FAKEVENDOR_MACHINE_HPP
#define FAKEVENDOR_MACHINE_HPP

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include <kvcore/failure.hpp>

namespace fakevendor {

constexpr int DEVICES = 2, FRESH = 0xA5, FREED = 0xDD;
constexpr size_t PAGE = 4096, DEVICE_BYTES = size_t(1) << 36;
constexpr int64_t MEMORY_BYTES = int64_t(1) << 30; /* of it, what allocations may take together */

struct Switches {
    int64_t refuse_allocation = 0; /* the how manieth from now is refused; 0: none */
    int64_t fail_kernel = 0;       /* likewise fails while it runs */
    int64_t memory_bytes = MEMORY_BYTES;
    bool is_broken = false;        /* a kernel failed; the device does nothing more */
};

struct StreamState : std::enable_shared_from_this<StreamState> {
    explicit StreamState(int32_t ordinal) : ordinal(ordinal) {}
    const int32_t ordinal;
    std::deque<std::function<void()>> waiting;
    uint64_t queued = 0, done = 0;
};

struct EventState {
    std::shared_ptr<StreamState> stream; /* null: not recorded */
    uint64_t number = 0;
    volatile uint64_t *flag = nullptr; /* of a shared event: memory of its process; 1 when it is reached */
    bool is_imported = false;
};

class Machine {
  public:
    static Machine &one() {
        static Machine *machine = new Machine; /* never destroyed: arrays may end after it */
        return *machine;
    }

    std::recursive_mutex lock;
    Switches switches;
    int32_t current = -1; /* device of the Scope */
    int file[DEVICES];
    std::map<uintptr_t, int64_t> registered; /* host memory: address -> bytes */
    std::map<uint64_t, std::shared_ptr<StreamState>> streams;

    void check() const {
        if (switches.is_broken) throw kvcore::DriverError(KV_FAIL_DEVICE, "a kernel used memory that it has not");
    }

    /* --- memory */

    void *allocate(int32_t ordinal, int64_t bytes) {
        if (switches.refuse_allocation > 0 && --switches.refuse_allocation == 0)
            throw kvcore::DriverError(KV_FAIL_MEMORY, "the driver has no memory left");
        if (bytes > left()) throw kvcore::DriverError(KV_FAIL_MEMORY, std::to_string(left()) + " B are free");
        const size_t size = (size_t(bytes) + PAGE - 1) / PAGE * PAGE;
        char *made = base_[ordinal] + used_[ordinal];
        used_[ordinal] += size + PAGE; /* a gap, so that neighbours are no one allocation */
        memset(made, FRESH, size_t(bytes));
        blocks_[uintptr_t(made)] = bytes;
        in_use_ += bytes;
        return made;
    }

    void release(void *address) {
        const auto found = blocks_.find(uintptr_t(address));
        if (found == blocks_.end()) {
            fprintf(stderr, "fakevendor: %p is freed, and no allocation\n", address);
            abort();
        }
        memset(address, FREED, size_t(found->second));
        in_use_ -= found->second;
        blocks_.erase(found);
    }

    int64_t in_use() const { return in_use_; }
    int64_t left() const { return switches.memory_bytes - in_use_; }

    int32_t place(uint64_t address) const {
        return block(address) == blocks_.end() ? -1 : ordinal_of(address);
    }

    /* The allocation that an address lies in. */
    std::map<uintptr_t, int64_t>::const_iterator block(uint64_t address) const {
        auto after = blocks_.upper_bound(uintptr_t(address));
        if (after == blocks_.begin()) return blocks_.end();
        const auto found = std::prev(after);
        return address < found->first + uint64_t(found->second) ? found : blocks_.end();
    }

    int32_t ordinal_of(uint64_t address) const {
        for (int i = 0; i < DEVICES; i++)
            if (address >= uintptr_t(base_[i]) && address < uintptr_t(base_[i]) + DEVICE_BYTES) return i;
        return -1;
    }
    int64_t file_offset(uint64_t address) const { return int64_t(address - uintptr_t(base_[ordinal_of(address)])); }

    /* --- streams */

    void push(StreamState *stream, std::function<void()> command) {
        check();
        stream->waiting.push_back(std::move(command));
        stream->queued++;
    }

    void run_one(StreamState *stream) {
        check();
        auto command = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        command();
        stream->done++;
    }

    void run_until(StreamState *stream, uint64_t number) {
        check();
        while (stream->done < number) run_one(stream);
    }

  private:
    Machine() {
        for (int i = 0; i < DEVICES; i++) {
            file[i] = memfd_create("fakevendor", MFD_CLOEXEC);
            void *at = MAP_FAILED;
            if (file[i] >= 0 && ftruncate(file[i], off_t(DEVICE_BYTES)) == 0)
                at = mmap(nullptr, DEVICE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file[i], 0);
            if (at == MAP_FAILED) {
                perror("fakevendor: memory of a device");
                abort();
            }
            base_[i] = static_cast<char *>(at);
        }
    }

    char *base_[DEVICES];
    size_t used_[DEVICES] = {};
    std::map<uintptr_t, int64_t> blocks_; /* size by address */
    int64_t in_use_ = 0;
};

}  // namespace fakevendor

#endif
