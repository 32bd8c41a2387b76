/* The execution context on a CPU: each thread of a block is a fiber, so that barriers, shuffles and ballots are real.
 *
 * A warp runs until all its lanes wait at a barrier of the block or have ended; then the next warp does. Greedy running
 * makes a missing barrier visible: one warp is then far ahead of the others. Blocks, warps and lanes take turns in an
 * order drawn from a seed. A kernel that waits for threads that do not come ends the process, naming block and thread,
 * as a GPU would hang or, worse, not.
 */
#ifndef KVCORE_CTX_CPU_HPP
#define KVCORE_CTX_CPU_HPP

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <new>

#include "context.hpp"
#include "fibers.hpp"
#include "mix.hpp"

namespace kvcore {

/* The numbers 0 .. n - 1, each once: from a start, by a step that has no factor in common with n. Seed 0: in order. */
class Order {
  public:
    Order(int64_t n, uint64_t seed) : n_(n) {
        if (seed == 0 || n < 2) return;
        uint64_t drawn = mix(seed);
        at_ = static_cast<int64_t>(drawn % static_cast<uint64_t>(n));
        step_ = static_cast<int64_t>(mix(drawn) % static_cast<uint64_t>(n - 1)) + 1;
        while (common_factor(step_, n_) != 1) step_ = step_ % n_ + 1;
    }

    int64_t next() {
        int64_t found = at_;
        at_ += step_;
        if (at_ >= n_) at_ -= n_;
        return found;
    }

  private:
    static int64_t common_factor(int64_t a, int64_t b) { return b == 0 ? a : common_factor(b, a % b); }
    int64_t n_, at_ = 0, step_ = 1;
};

/* A block of threads, each on its fiber; run for one block after the other. */
class FiberBlock {
  public:
    using Body = void (*)(FiberBlock &, int thread, const void *args);
    enum class Wait : int { none, barrier, ballot, shuffle4, shuffle8, done };

    FiberBlock(const char *kernel, int warp_width, int threads, int shared_bytes, uint64_t seed)
        : kernel_(kernel), width_(warp_width), threads_(threads), shared_bytes_(shared_bytes), seed_(seed) {
        static thread_local Stacks stacks;
        stacks_ = &stacks;
        lanes_.reset(new (std::nothrow) Lane[static_cast<size_t>(threads)]);
        shared_ = malloc(shared_bytes > 0 ? static_cast<size_t>(shared_bytes) : 1);
        ready_ = lanes_ && shared_ && stacks.reserve(static_cast<size_t>(threads));
    }
    FiberBlock(const FiberBlock &) = delete;
    FiberBlock &operator=(const FiberBlock &) = delete;
    ~FiberBlock() { free(shared_); }

    bool ready() const { return ready_; } /* false: there was no memory */

    void run(int64_t block, int64_t blocks, Body body, const void *args) {
        block_ = block, blocks_ = blocks, body_ = body, args_ = args;
        memset(shared_, 0xA5, static_cast<size_t>(shared_bytes_)); /* reading what nobody wrote shows */
        for (int t = 0; t < threads_; t++) {
            lanes_[t].wait = Wait::none;
            lanes_[t].fiber.start((*stacks_)[static_cast<size_t>(t)], &FiberBlock::enter);
        }
        FiberBlock *outer = current();
        current() = this;
        while (run_to_barrier()) {
            for (int t = 0; t < threads_; t++) lanes_[t].wait = Wait::none;
        }
        current() = outer;
    }

    /* --- for the threads */

    void *shared() const { return shared_; }
    int64_t block() const { return block_; }
    int64_t blocks() const { return blocks_; }
    int threads() const { return threads_; }

    void barrier(int thread) { suspend(thread, Wait::barrier); }

    /* Every lane gives a value; returns those of all lanes of the warp, valid until the next collective. */
    const uint64_t *collect(int thread, Wait kind, uint64_t value) {
        lanes_[thread].value = value;
        suspend(thread, kind);
        return results_ + thread / width_ * width_;
    }

    [[noreturn]] void stop(int thread, const char *why) const {
        fprintf(stderr, "kvcore: kernel %s, block %lld, thread %d: %s\n", kernel_, static_cast<long long>(block_),
                thread, why);
        abort();
    }

  private:
    struct Lane {
        Fiber fiber;
        Wait wait = Wait::none;
        uint64_t value = 0;
    };

    static FiberBlock *&current() {
        static thread_local FiberBlock *block = nullptr;
        return block;
    }

    static void enter() {
        FiberBlock &self = *current();
        int thread = self.running_;
        Lane &lane = self.lanes_[thread];
        lane.fiber.entered(self.main_);
        self.body_(self, thread, self.args_);
        lane.wait = Wait::done;
        lane.fiber.leave_for(self.main_);
    }

    void suspend(int thread, Wait wait) {
        Lane &lane = lanes_[thread];
        lane.wait = wait;
        lane.fiber.switch_to(main_);
    }

    uint64_t draw() { return seed_ == 0 ? 0 : mix(seed_ + GOLDEN * ++turns_) | 1; }

    /* Runs every warp up to the next barrier; returns whether there is one, false at the end. */
    bool run_to_barrier() {
        Order warps(threads_ / width_, draw());
        for (int i = 0; i < threads_ / width_; i++) run_warp(static_cast<int>(warps.next()) * width_);
        for (int t = 1; t < threads_; t++)
            if (lanes_[t].wait != lanes_[0].wait) diverged(0, t, "all threads of the block");
        return lanes_[0].wait == Wait::barrier;
    }

    void run_warp(int first) {
        for (;;) {
            Order lanes(width_, draw());
            for (int i = 0; i < width_; i++) {
                int t = first + static_cast<int>(lanes.next());
                if (lanes_[t].wait != Wait::none) continue;
                running_ = t;
                main_.switch_to(lanes_[t].fiber);
            }
            bool collective = false;
            for (int t = first; t < first + width_; t++)
                collective |= lanes_[t].wait != Wait::barrier && lanes_[t].wait != Wait::done;
            if (!collective) return; /* a barrier that some lanes of the warp left out is found by run_to_barrier */
            for (int t = first + 1; t < first + width_; t++)
                if (lanes_[t].wait != lanes_[first].wait) diverged(first, t, "all lanes of the warp");
            for (int t = first; t < first + width_; t++) {
                results_[t] = lanes_[t].value;
                lanes_[t].wait = Wait::none;
            }
        }
    }

    [[noreturn]] void diverged(int a, int b, const char *who) const {
        if (lanes_[a].wait == Wait::done) { int swapped = a; a = b, b = swapped; }
        static const char *const names[] = {"runs",
                                            "waits at a barrier",
                                            "waits at a ballot",
                                            "waits at a shuffle",
                                            "waits at a shuffle (64 bits)",
                                            "has ended"};
        char why[160];
        snprintf(why, sizeof why, "%s, but thread %d %s; %s must come", names[static_cast<int>(lanes_[a].wait)], b,
                 names[static_cast<int>(lanes_[b].wait)], who);
        stop(a, why);
    }

    const char *kernel_;
    int width_, threads_, shared_bytes_;
    uint64_t seed_, turns_ = 0;
    int64_t block_ = 0, blocks_ = 0;
    Body body_ = nullptr;
    const void *args_ = nullptr;
    void *shared_ = nullptr;
    bool ready_ = false;
    int running_ = 0;
    Stacks *stacks_ = nullptr;
    Fiber main_;
    std::unique_ptr<Lane[]> lanes_;
    uint64_t results_[KVCORE_MAX_THREADS];
};

/* The context of context.hpp. Without a FiberBlock (flat kernels run as plain loops) what needs one is refused. */
template <int Width> class CpuContext {
  public:
    static constexpr int warp_width = Width;

    CpuContext(FiberBlock *fibers, const char *kernel, int64_t block, int64_t blocks, int thread, int threads)
        : fibers_(fibers), kernel_(kernel), block_(block), blocks_(blocks), thread_(thread), threads_(threads) {}

    int thread() const { return thread_; }
    int threads() const { return threads_; }
    int64_t block() const { return block_; }
    int64_t blocks() const { return blocks_; }
    int lane() const { return thread_ % Width; }
    int warp() const { return thread_ / Width; }

    void barrier() const { fibers("barrier").barrier(thread_); }

    template <class T> T *shared(int byte_offset = 0) const {
        return reinterpret_cast<T *>(static_cast<char *>(fibers("shared memory").shared()) + byte_offset);
    }

    template <class T> T shuffle(T v, int from_lane) const {
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
        FiberBlock &block = fibers("shuffle");
        if (from_lane < 0 || from_lane >= Width) block.stop(thread_, "shuffle from a lane that is not in the warp");
        uint64_t value = 0;
        memcpy(&value, &v, sizeof v);
        auto kind = sizeof(T) == 4 ? FiberBlock::Wait::shuffle4 : FiberBlock::Wait::shuffle8;
        memcpy(&v, block.collect(thread_, kind, value) + from_lane, sizeof v);
        return v;
    }

    template <class T> T shuffle_xor(T v, int mask) const { return shuffle(v, lane() ^ mask); }

    uint64_t ballot(bool vote) const {
        const uint64_t *votes = fibers("ballot").collect(thread_, FiberBlock::Wait::ballot, vote);
        uint64_t mask = 0;
        for (int i = 0; i < Width; i++) mask |= votes[i] << i;
        return mask;
    }

    static int popcount(uint64_t v) { return __builtin_popcountll(v); }
    static int leading_zeros(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
    static float divide(float a, float b) { return a / b; }
    static float square_root(float v) { return __builtin_sqrtf(v); }
    static float rint(float v) { return __builtin_rintf(v); }

    static uint32_t bits(float v) {
        uint32_t u;
        memcpy(&u, &v, sizeof u);
        return u;
    }
    static float from_bits(uint32_t u) {
        float v;
        memcpy(&v, &u, sizeof v);
        return v;
    }

    template <class T> static T atomic_add(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
    template <class T> static T atomic_max(T *p, T v) {
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (old < v && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        return old;
    }
    template <class T> static T atomic_min(T *p, T v) {
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (v < old && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        return old;
    }
    static void report(uint64_t *status, int code, int64_t position) {
        atomic_min(status, static_cast<uint64_t>(position) << 8 | static_cast<uint64_t>(code));
    }

  private:
    FiberBlock &fibers(const char *what) const {
        if (fibers_ != nullptr) return *fibers_;
        fprintf(stderr, "kvcore: kernel %s, block %lld, thread %d: %s in a kernel that is declared flat\n", kernel_,
                static_cast<long long>(block_), thread_, what);
        abort();
    }

    FiberBlock *fibers_;
    const char *kernel_;
    int64_t block_, blocks_;
    int thread_, threads_;
};

}  // namespace kvcore

#endif
