/* A machine with devices that are not there: memory, streams and events for a simulated driver.
 *
 * Memory of a device cannot be read or written by the host, except while the machine runs what is queued. What is
 * queued runs when somebody waits for it, not before: who does not wait sees that nothing happened. Fresh and freed
 * memory is filled with patterns. Other processes can open the memory, as they can that of a driver. */
#ifndef KVCORE_SIMULATED_MACHINE_HPP
#define KVCORE_SIMULATED_MACHINE_HPP

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace simulated {

constexpr uint64_t ARENA_BYTES = uint64_t(4) << 30;
constexpr int FRESH = 0xA5, FREED = 0xDD;

/* One at a time uses the machine. */
inline std::recursive_mutex &lock() {
    static auto *one = new std::recursive_mutex;
    return *one;
}

/* The memory of one device: addresses that are reserved, and backed by a file that other processes can open. */
struct Arena {
    int ordinal;
    char *base;
    int file;
    std::map<uint64_t, uint64_t> blocks; /* offset -> bytes */

    bool holds(const void *address) const {
        const char *at = static_cast<const char *>(address);
        return at >= base && at < base + ARENA_BYTES;
    }
};

inline std::vector<std::unique_ptr<Arena>> &arenas() {
    static auto *all = new std::vector<std::unique_ptr<Arena>>;
    return *all;
}

inline Arena *map_arena(int ordinal, int file) {
    void *base = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (base == MAP_FAILED) return nullptr;
    arenas().push_back(std::unique_ptr<Arena>(new Arena{ordinal, static_cast<char *>(base), file, {}}));
    return arenas().back().get();
}

inline Arena *make_arena(int ordinal) {
    const int file = memfd_create("simulated-device", 0);
    if (file < 0 || ftruncate(file, off_t(ARENA_BYTES)) != 0) return nullptr;
    return map_arena(ordinal, file);
}

inline Arena *arena_of(const void *address) {
    for (const auto &arena : arenas())
        if (arena->holds(address)) return arena.get();
    return nullptr;
}

/* As long as it lives, memory of devices can be read and written. */
class Reach {
  public:
    Reach() : held_(lock()) {
        if (depth()++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    ~Reach() {
        if (--depth() == 0) protect(PROT_NONE);
    }

  private:
    static int &depth() {
        static int now = 0;
        return now;
    }
    static void protect(int how) {
        for (const auto &arena : arenas()) mprotect(arena->base, ARENA_BYTES, how);
    }
    std::lock_guard<std::recursive_mutex> held_;
};

/* Null: there is no room below `limit` bytes in all. */
inline void *allocate(Arena &arena, uint64_t bytes, uint64_t limit) {
    constexpr uint64_t step = 256;
    const uint64_t size = (bytes + step - 1) / step * step + step; /* and nobody's bytes behind it */
    uint64_t at = 0, used = 0;
    for (const auto &[offset, taken] : arena.blocks) {
        if (at + size <= offset) break;
        at = (offset + taken + step - 1) / step * step + step;
    }
    for (const auto &block : arena.blocks) used += block.second;
    if (at + size > ARENA_BYTES || used + bytes > limit) return nullptr;
    arena.blocks[at] = bytes;
    Reach reach;
    memset(arena.base + at, FRESH, bytes);
    return arena.base + at;
}

/* The block that an address lies in; else one of no bytes. */
inline std::pair<char *, uint64_t> block_of(const void *address) {
    Arena *arena = arena_of(address);
    if (arena == nullptr) return {nullptr, 0};
    const uint64_t offset = uint64_t(static_cast<const char *>(address) - arena->base);
    auto next = arena->blocks.upper_bound(offset);
    if (next == arena->blocks.begin()) return {nullptr, 0};
    const auto &[start, bytes] = *--next;
    return offset < start + bytes ? std::make_pair(arena->base + start, bytes) : std::make_pair(nullptr, uint64_t(0));
}

inline bool release(void *address) {
    const auto [start, bytes] = block_of(address);
    if (start == nullptr || start != address) return false;
    Reach reach;
    memset(start, FREED, bytes);
    Arena *arena = arena_of(address);
    arena->blocks.erase(uint64_t(start - arena->base));
    return true;
}

struct Stream {
    int ordinal;
    std::deque<std::function<void()>> waiting;
    uint64_t queued = 0, done = 0;

    void push(std::function<void()> command) {
        waiting.push_back(std::move(command));
        queued++;
    }
    void run_one() {
        auto command = std::move(waiting.front());
        waiting.pop_front();
        Reach reach;
        command();
        done++;
    }
    void run_until(uint64_t number) {
        if (done >= number) return;
        Reach reach; // once for all of them
        while (done < number) run_one();
    }
};

/* Reached when a stream has done so many commands; one that is shared also sets a byte that other processes see. */
struct Event {
    Stream *stream = nullptr;
    uint64_t number = 0;
    unsigned char *flag = nullptr;
    bool is_imported = false;

    bool is_reached() const {
        if (is_imported) {
            Reach reach;
            return *const_cast<volatile unsigned char *>(flag) == 1;
        }
        return stream == nullptr || stream->done >= number;
    }
    void finish() const {
        if (is_imported)
            while (!is_reached()) usleep(1000);
        else if (stream != nullptr) stream->run_until(number);
    }
};

}  // namespace simulated

#endif
