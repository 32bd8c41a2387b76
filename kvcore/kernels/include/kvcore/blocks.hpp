/* Memory of a device, kept for its next user instead of being given back. Host code, for drivers whose allocations are
 * not in the order of a stream, or whose stream-ordered memory other processes cannot import.
 *
 * A block that was freed on a stream serves the next allocation of that stream: its users come one after the other. To
 * give memory back to a driver stops all that the device does, so that it is done when more is kept than is allowed, or
 * when there is no other memory.
 */
#ifndef KVCORE_BLOCKS_HPP
#define KVCORE_BLOCKS_HPP

#include <stdint.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kvcore {

/* Those of one device. Raw: a struct with static functions void *allocate(int64_t), which gives null where there is no
 * memory, and void free(void *), which waits until the device has done all its work. */
template <class Raw> class Blocks {
  public:
    /* Null: there is no memory, even without that which is kept. At most `most_kept` bytes wait for a user. */
    void *allocate(int64_t bytes, void *stream) {
        const int64_t size = rounded(bytes);
        std::lock_guard<std::mutex> guard(lock_);
        const auto found = kept_.lower_bound({stream, size});
        if (found != kept_.end() && found->first.first == stream && found->first.second <= 2 * size) {
            void *block = found->second;
            kept_bytes_ -= found->first.second;
            kept_.erase(found);
            return block;
        }
        void *block = Raw::allocate(size);
        if (block == nullptr && kept_bytes_ > 0) {
            give_back_to(0);
            block = Raw::allocate(size);
        }
        if (block != nullptr) sizes_[block] = size;
        return block;
    }

    void free(void *block, void *stream, int64_t most_kept) {
        if (block == nullptr) return;
        std::lock_guard<std::mutex> guard(lock_);
        const int64_t size = sizes_.at(block);
        kept_.emplace(std::make_pair(stream, size), block);
        kept_bytes_ += size;
        if (kept_bytes_ > most_kept) give_back_to(most_kept / 2);
    }

  private:
    /* Powers of two up to 1 MiB, so that what is asked for again is of the same size; multiples of it above. */
    static int64_t rounded(int64_t bytes) {
        constexpr int64_t step = 1 << 20;
        if (bytes > step) return (bytes + step - 1) / step * step;
        int64_t size = 256;
        while (size < bytes) size *= 2;
        return size;
    }

    void give_back_to(int64_t bytes) {
        while (kept_bytes_ > bytes) {
            const auto last = std::max_element(kept_.begin(), kept_.end(), [](const auto &a, const auto &b) {
                return a.first.second < b.first.second; /* the largest: each one that is given back stops the device */
            });
            Raw::free(last->second);
            sizes_.erase(last->second);
            kept_bytes_ -= last->first.second;
            kept_.erase(last);
        }
    }

    std::mutex lock_;
    std::multimap<std::pair<void *, int64_t>, void *> kept_; /* by stream and size */
    std::unordered_map<void *, int64_t> sizes_;              /* of all blocks */
    int64_t kept_bytes_ = 0;
};

}  // namespace kvcore

#endif
