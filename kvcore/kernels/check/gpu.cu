// Every kernel of every op, for the compilers of GPUs.
#include <kvcore/ctx_gpu.hpp>

#include <kvcore/entry_points.hpp>

#include "compile_queue.hpp"

namespace {

struct Gpu {
    template <class K> static void use() {
        static const void *volatile kernel = nullptr;
        kernel = reinterpret_cast<const void *>(&kvcore::gpu_entry<K>);
    }
};
using Queue = CompileQueue<KVCORE_WARP_WIDTH, Gpu>;

}  // namespace

KVCORE_ENTRY_POINTS(Queue)
