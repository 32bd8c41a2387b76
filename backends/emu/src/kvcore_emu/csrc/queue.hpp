/* The launch queue of context.hpp for the emulated device: launches are put on a stream, with copies of their arguments. */
#ifndef KVCORE_EMU_QUEUE_HPP
#define KVCORE_EMU_QUEUE_HPP

#include "streams.hpp"

namespace kvcore_emu {

constexpr int NOT_COPIED_YET = 0xDB; /* what the host finds in the target of a copy that it did not wait for */

template <int Width> class EmuQueue : public kvcore::Failure {
  public:
    static constexpr int warp_width = Width;

    /* The device is locked until the op is queued as a whole. */
    explicit EmuQueue(void *stream) : held_(Device::one().lock), stream_(static_cast<Stream *>(stream)) {}
    EmuQueue(const EmuQueue &) = delete;
    EmuQueue &operator=(const EmuQueue &) = delete;
    ~EmuQueue() {
        if (failed()) {
            Device::one().take_back(stream_, pushed_);
        } else {
            for (const auto &[target, bytes] : targets_) memset(target, NOT_COPIED_YET, static_cast<size_t>(bytes));
        }
        for (void *memory : owned_) stream_->owned.push_back({stream_->queued, memory});
        Device::one().maybe_run_some();
    }

    template <class K> void launch(int64_t blocks, int threads, int shared_bytes, const typename K::Args &args) {
        if (failed() || blocks <= 0) return;
        launched_ = K::name;
        push([blocks, threads, shared_bytes, args] {
            kvcore::CpuQueue<Width> now(nullptr);
            now.template launch<K>(blocks, threads, shared_bytes, args);
            if (now.failed()) {
                fprintf(stderr, "kvcore: kernel %s: %s\n", K::name, kvcore::last_error());
                abort();
            }
        });
    }

    /* Few blocks, so that grid-stride loops go round with little data too. */
    int64_t grid(int64_t items, int64_t per_block) const {
        const int64_t blocks = (items + per_block - 1) / per_block;
        return blocks < 5 ? blocks : 5;
    }

    template <class T> const T *upload(const T *host, int64_t count) {
        void *copy = scratch(count * static_cast<int64_t>(sizeof(T)));
        if (copy != nullptr && count > 0) memcpy(copy, host, static_cast<size_t>(count) * sizeof(T));
        return static_cast<const T *>(copy);
    }

    void *scratch(int64_t bytes) {
        if (failed()) return nullptr;
        must_come_first("scratch memory");
        void *memory = allocate_block(bytes);
        if (memory == nullptr) {
            char why[64];
            snprintf(why, sizeof why, "no memory: %lld B were asked for", static_cast<long long>(bytes));
            fail(KV_FAIL_MEMORY, why);
            return nullptr;
        }
        owned_.push_back(memory);
        return memory;
    }

    void zero(void *memory, int64_t bytes) {
        if (bytes > 0) push([=] { memset(memory, 0, static_cast<size_t>(bytes)); });
    }

    template <class T> T *device(uint64_t address) {
        return address == 0 ? nullptr : reinterpret_cast<T *>(reach(address, 0));
    }

    bool reaches(uint64_t address) const { return address & TAG; }

    int64_t engine_bytes() const { return INT64_MAX; }
    void submit() {}

    void transfer(uint64_t to, uint64_t from, int64_t bytes) {
        if (bytes <= 0) return;
        char *target = reaches(to) ? reach(to, bytes) : host(to);
        /* Until the copy has been made the host finds nonsense there; unless one that was queued before is to read it. */
        if (!failed() && !reaches(to) && !Device::one().is_to_be_read(target, bytes))
            targets_.push_back({target, bytes});
        transfer(target, from, bytes);
    }

    void transfer(void *to, uint64_t from, int64_t bytes) {
        if (bytes <= 0) return;
        const char *source = reaches(from) ? reach(from, bytes) : host(from);
        if (failed()) return;
        if (!reaches(from)) Device::one().will_read(stream_, source, bytes);
        push([=] { memcpy(to, source, static_cast<size_t>(bytes)); });
    }

    static void *keep(const void *host, int64_t bytes) {
        void *copy = allocate_block(bytes);
        if (copy != nullptr && bytes > 0) memcpy(copy, host, static_cast<size_t>(bytes));
        return copy;
    }

    static void release(void *kept) { free(kept); }

  private:
    static char *host(uint64_t address) { return reinterpret_cast<char *>(static_cast<uintptr_t>(address)); }

    char *reach(uint64_t address, int64_t bytes) {
        if (failed()) return nullptr;
        must_come_first("an address");
        char *reached = Device::one().memory.reach(address, bytes);
        if (reached == nullptr) {
            char why[200];
            Device::one().memory.describe(address, why, sizeof why);
            fail(KV_FAIL_POINTER, why);
        }
        return reached;
    }

    void push(std::function<void()> run) {
        if (failed()) return;
        Device::one().push(stream_, std::move(run));
        pushed_++;
    }

    /* What may be refused is asked for before anything is launched: other devices cannot take a launch back. */
    void must_come_first(const char *what) const {
        if (launched_ == nullptr) return;
        fprintf(stderr, "kvcore: kernel %s was launched before its op asked for %s\n", launched_, what);
        abort();
    }

    std::lock_guard<std::mutex> held_;
    Stream *stream_;
    const char *launched_ = nullptr; /* the last kernel */
    int pushed_ = 0;
    std::vector<void *> owned_;
    std::vector<std::pair<char *, int64_t>> targets_; /* of copies into the host's memory, and their bytes */
};

}  // namespace kvcore_emu

#endif
