/* Memory of the emulated device. Its addresses carry a tag that no host address has: a host that dereferences one faults,
 * and a kernel that is given a host address is refused before it runs. Each block is an allocation of its own, so that
 * address sanitizer sees where it ends. */
#ifndef KVCORE_EMU_MEMORY_HPP
#define KVCORE_EMU_MEMORY_HPP

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <iterator>
#include <map>
#include <memory>

namespace kvcore_emu {

constexpr uint64_t TAG = uint64_t(1) << 60;
constexpr int FRESH = 0xA5, FREED = 0xDD; /* reading what nobody wrote, or what is gone, shows */

/* Aligned as the memory of GPUs is; null if there is none. */
inline void *allocate_block(int64_t bytes) {
    void *block = nullptr;
    if (bytes < 0 || posix_memalign(&block, 256, bytes > 0 ? static_cast<size_t>(bytes) : 1) != 0) return nullptr;
    memset(block, FRESH, static_cast<size_t>(bytes));
    return block;
}

class Memory {
  public:
    /* Returns a tagged address, 0 if there is no memory. */
    uint64_t allocate(int64_t bytes) {
        std::unique_ptr<void, decltype(&free)> block(allocate_block(bytes), &free);
        if (block == nullptr) return 0;
        const auto place = reinterpret_cast<uintptr_t>(block.get());
        blocks_[place] = bytes;
        block.release();
        return place | TAG;
    }

    void release(uint64_t address) {
        auto found = blocks_.find(address & ~TAG);
        if (found == blocks_.end()) {
            fprintf(stderr, "kvcore: emu: memory at 0x%llx is freed twice\n", static_cast<unsigned long long>(address));
            abort();
        }
        void *block = reinterpret_cast<void *>(found->first);
        memset(block, FREED, static_cast<size_t>(found->second));
        blocks_.erase(found);
        free(block);
    }

    /* What a kernel dereferences for a tagged address; null unless these bytes lie in one block. The end of a block counts
     * as its own, for arrays without elements. */
    char *reach(uint64_t address, int64_t bytes) const {
        if (!(address & TAG)) return nullptr;
        auto block = below(address & ~TAG);
        if (block == blocks_.end()) return nullptr;
        const int64_t offset = static_cast<int64_t>((address & ~TAG) - block->first);
        if (offset > block->second || bytes > block->second - offset) return nullptr;
        return reinterpret_cast<char *>(block->first) + offset;
    }

    /* Says why `reach` refuses an address. */
    void describe(uint64_t address, char *text, size_t size) const {
        const auto shown = static_cast<unsigned long long>(address);
        if (!(address & TAG)) {
            snprintf(text, size, "0x%llx is memory of the host, which the device emu:0 cannot reach; copy it over with "
                     "copy_batch", shown);
            return;
        }
        auto near = below(address & ~TAG);
        if (near == blocks_.end()) near = blocks_.begin();
        if (near == blocks_.end()) {
            snprintf(text, size, "0x%llx is in no allocation of emu:0, which has none", shown);
            return;
        }
        snprintf(text, size, "0x%llx is in no allocation of emu:0 that holds what is wanted; the nearest has %lld B at 0x%llx",
                 shown, static_cast<long long>(near->second), static_cast<unsigned long long>(near->first | TAG));
    }

  private:
    /* The last block that begins at or below a place. */
    std::map<uintptr_t, int64_t>::const_iterator below(uint64_t place) const {
        auto after = blocks_.upper_bound(static_cast<uintptr_t>(place));
        return after == blocks_.begin() ? blocks_.end() : std::prev(after);
    }

    std::map<uintptr_t, int64_t> blocks_; /* size by address */
};

}  // namespace kvcore_emu

#endif
