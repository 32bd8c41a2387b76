#include "support.hpp"

#include <atomic>
#include <exception>
#include <memory>
#include <thread>

namespace kvcore_cpu {

// In bytes, the grain of a cache line: what take() promises.
static constexpr size_t ALIGNMENT = 64;

void Scratch::grow(size_t wanted, bool zero) {
    const size_t size = (wanted + wanted / 2 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    std::free(memory_);
    size_ = 0;
    memory_ = std::aligned_alloc(ALIGNMENT, size);
    if (memory_ == nullptr) {
        throw std::bad_alloc();
    }
    size_ = size;
    if (zero) {
        std::memset(memory_, 0, size);
    }
}

void run_parallel(int64_t count, int64_t threads, void (*run)(void *, int64_t, int64_t), void *context) {
    // More pieces than threads: one that is late, or shares its core, takes fewer.
    const int64_t pieces = count < 4 * threads ? count : 4 * threads;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    const auto work = [&]() noexcept {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            try {
                run(context, count * i / pieces, count * (i + 1) / pieces);
            } catch (const std::bad_alloc &) {
                failed = true;
            }
        }
    };
    const auto helpers = std::make_unique<std::thread[]>(static_cast<size_t>(threads - 1));
    for (int64_t i = 0; i < threads - 1; ++i) {
        try {
            helpers[i] = std::thread(work);
        } catch (const std::exception &) {
            break; // no more threads are to be had: those that there are do the work
        }
    }
    work();
    for (int64_t i = 0; i < threads - 1; ++i) {
        if (helpers[i].joinable()) {
            helpers[i].join();
        }
    }
    if (failed) {
        throw std::bad_alloc();
    }
}

} // namespace kvcore_cpu
