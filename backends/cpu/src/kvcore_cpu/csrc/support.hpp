// What every op needs: status words, unaligned loads, scratch memory, threads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include <kvcore/abi.h>

namespace kvcore_cpu {

// Notes the reason of a launch that does not take place, for kvcore_last_error(). `reason` is a literal.
int32_t refuse(kv_fail code, const char *reason);

// Reports what was found at a position; the least position stays, whichever thread comes first.
inline void report(uint64_t *status, int64_t position, kv_code code) {
    const uint64_t word = static_cast<uint64_t>(position) << 8 | static_cast<uint64_t>(code);
    uint64_t seen = __atomic_load_n(status, __ATOMIC_RELAXED);
    while (word < seen && !__atomic_compare_exchange_n(status, &seen, word, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// Memory of any alignment.
template <class T> inline T load(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> inline void store(void *to, T value) { std::memcpy(to, &value, sizeof value); }

// Scratch memory that grows and is kept: `static thread_local Scratch s;` costs nothing once it is large enough.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(memory_); }

    // Room for `count` values, 64-byte aligned, with undefined contents. Throws std::bad_alloc: KV_FAIL_MEMORY.
    template <class T> T *take(int64_t count) {
        static_assert(std::is_trivial_v<T>);
        const size_t wanted = static_cast<size_t>(count) * sizeof(T);
        if (wanted > size_) {
            grow(wanted, false);
        }
        return static_cast<T *>(memory_);
    }

    // The same, but zero where no earlier user left something else: users put back the zeros that they overwrote.
    template <class T> T *take_zeroed(int64_t count) {
        static_assert(std::is_trivial_v<T>);
        const size_t wanted = static_cast<size_t>(count) * sizeof(T);
        if (wanted > size_) {
            grow(wanted, true);
        }
        return static_cast<T *>(memory_);
    }

  private:
    void grow(size_t wanted, bool zero);

    void *memory_ = nullptr;
    size_t size_ = 0;
};

// Threads are worth their making for this many bytes each.
constexpr int64_t THREAD_BYTES = 1 << 20;

int thread_limit();

// Calls run(context, begin, end) for pieces that make up 0 .. count, from `threads` threads, the caller's among them.
void run_parallel(int64_t count, int64_t threads, void (*run)(void *, int64_t, int64_t), void *context);

// Calls body(begin, end) for ranges that make up 0 .. count, from as many threads as the work is worth.
// `item_bytes`: roughly, what one item reads or writes. One thread: no allocation, one call.
// Scratch that is thread_local dies with a thread made here: take it in the caller, and hand out parts.
template <class F> void parallel_for(int64_t count, int64_t item_bytes, F &&body) {
    const int64_t worth = count * item_bytes / THREAD_BYTES;
    int64_t threads = thread_limit();
    threads = threads < worth ? threads : worth;
    threads = threads < count ? threads : count;
    if (threads > 1) {
        using Body = std::remove_reference_t<F>;
        const auto run = [](void *b, int64_t begin, int64_t end) { (*static_cast<Body *>(b))(begin, end); };
        run_parallel(count, threads, run, const_cast<std::remove_const_t<Body> *>(&body));
    } else if (count > 0) {
        body(int64_t{0}, count);
    }
}

} // namespace kvcore_cpu
