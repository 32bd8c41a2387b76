/* The launch queue of context.hpp on host memory: each launch is done when it returns. */
#ifndef KVCORE_QUEUE_CPU_HPP
#define KVCORE_QUEUE_CPU_HPP

#include <atomic>

#include "ctx_cpu.hpp"
#include "failure.hpp"

namespace kvcore {

/* From what the order of blocks, warps and lanes is drawn; 0: they run in order. */
inline std::atomic<uint64_t> cpu_seed{1};

template <int Width> class CpuQueue : public Failure {
  public:
    static constexpr int warp_width = Width;
    static constexpr int shared_limit = 48 << 10; /* what every GPU has */

    explicit CpuQueue(void *stream) : seed_(cpu_seed.load()) { (void)stream; }
    CpuQueue(const CpuQueue &) = delete;
    CpuQueue &operator=(const CpuQueue &) = delete;
    ~CpuQueue() {
        for (void *memory : owned_) free(memory);
    }

    template <class K> void launch(int64_t blocks, int threads, int shared_bytes, const typename K::Args &args) {
        if (failed() || blocks <= 0) return;
        if (threads < 64 || threads % 64 != 0 || threads > KVCORE_MAX_THREADS || shared_bytes > shared_limit) {
            fprintf(stderr, "kvcore: kernel %s: no device runs blocks of %d threads with %d B shared\n", K::name,
                    threads, shared_bytes);
            abort();
        }
        Order order(blocks, seed_);
        if constexpr (K::flat) {
            for (int64_t i = 0; i < blocks; i++) {
                int64_t block = order.next();
                Order thread_order(threads, seed_);
                for (int t = 0; t < threads; t++) {
                    int thread = static_cast<int>(thread_order.next());
                    K::body(CpuContext<Width>(nullptr, K::name, block, blocks, thread, threads), args);
                }
            }
        } else {
            FiberBlock fibers(K::name, Width, threads, shared_bytes, seed_);
            if (!fibers.ready()) {
                fail(KV_FAIL_MEMORY, "no memory for the threads of a block");
                return;
            }
            for (int64_t i = 0; i < blocks; i++) fibers.run(order.next(), blocks, &thread_body<K>, &args);
        }
    }

    /* Few blocks, so that grid-stride loops go round with little data too. */
    int64_t grid(int64_t items, int64_t per_block) const {
        int64_t blocks = (items + per_block - 1) / per_block;
        return blocks < 5 ? blocks : 5;
    }

    template <class T> const T *upload(const T *host, int64_t count) {
        void *copy = allocate(count * static_cast<int64_t>(sizeof(T)));
        if (copy != nullptr && count > 0) memcpy(copy, host, static_cast<size_t>(count) * sizeof(T));
        return static_cast<const T *>(copy);
    }

    void *scratch(int64_t bytes) {
        void *memory = allocate(bytes);
        if (memory != nullptr) memset(memory, 0xA5, static_cast<size_t>(bytes)); /* reading what nobody wrote shows */
        return memory;
    }

    void zero(void *memory, int64_t bytes) {
        if (!failed() && bytes > 0) memset(memory, 0, static_cast<size_t>(bytes));
    }

    template <class T> T *device(uint64_t address) {
        return failed() ? nullptr : reinterpret_cast<T *>(static_cast<uintptr_t>(address));
    }

    bool reaches(uint64_t address) const { return address != 0; }

    int64_t engine_bytes() const { return INT64_MAX; }
    void submit() {}
    void transfer(uint64_t to, uint64_t from, int64_t bytes) { transfer(device<char>(to), from, bytes); }
    void transfer(void *to, uint64_t from, int64_t bytes) {
        const char *source = device<const char>(from);
        if (!failed() && bytes > 0) memmove(to, source, static_cast<size_t>(bytes));
    }

    static void *keep(const void *host, int64_t bytes) {
        void *copy = malloc(bytes > 0 ? static_cast<size_t>(bytes) : 1);
        if (copy != nullptr && bytes > 0) memcpy(copy, host, static_cast<size_t>(bytes));
        return copy;
    }

    static void release(void *kept) { free(kept); }

  private:
    template <class K> static void thread_body(FiberBlock &block, int thread, const void *args) {
        CpuContext<Width> ctx(&block, K::name, block.block(), block.blocks(), thread, block.threads());
        K::body(ctx, *static_cast<const typename K::Args *>(args));
    }

    void *allocate(int64_t bytes) {
        if (failed()) return nullptr;
        void *memory = bytes < 0 ? nullptr : malloc(bytes > 0 ? static_cast<size_t>(bytes) : 1);
        if (memory == nullptr) {
            char why[64];
            snprintf(why, sizeof why, "no memory: %lld B were asked for", static_cast<long long>(bytes));
            fail(KV_FAIL_MEMORY, why);
            return nullptr;
        }
        owned_.push_back(memory);
        return memory;
    }

    uint64_t seed_;
    std::vector<void *> owned_;
};

}  // namespace kvcore

#endif
