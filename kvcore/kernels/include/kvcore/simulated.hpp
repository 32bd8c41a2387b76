/* Kernels by name, run on fibers: what a simulated driver has in place of device code. For tests; host code only.
 *
 *     KVCORE_SIMULATED_KERNELS(32)                    once in a library, for each width of its warps
 *
 *     const SimulatedKernel *kernel = find_simulated(32, "gather_rows");      null: there is none
 *     run_simulated(*kernel, blocks, threads, shared_bytes, args);            done when it returns
 *
 * The table has the kernels that the ops of entry_points.hpp launch, noted as kernel_list.hpp does it.
 */
#ifndef KVCORE_SIMULATED_HPP
#define KVCORE_SIMULATED_HPP

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "entry_points.hpp"
#include "queue_cpu.hpp"

namespace kvcore {

struct SimulatedKernel {
    const char *name;
    size_t args_bytes; /* of its Args */
    void (*run)(int64_t blocks, int threads, int shared_bytes, const void *args);
};

/* By width of the warp, and name. */
inline std::map<std::pair<int, std::string>, SimulatedKernel> &simulated_kernels() {
    static auto *kernels = new std::map<std::pair<int, std::string>, SimulatedKernel>;
    return *kernels;
}

/* Mentioning `is_noted` puts a kernel into the table before anything runs. */
template <int Width, class K> struct Simulated {
    static void run(int64_t blocks, int threads, int shared_bytes, const void *args) {
        CpuQueue<Width> now(nullptr);
        now.template launch<K>(blocks, threads, shared_bytes, *static_cast<const typename K::Args *>(args));
        if (!now.failed()) return;
        fprintf(stderr, "kvcore: kernel %s: %s\n", K::name, last_error());
        abort(); /* devices have the memory that a kernel runs in */
    }
    static bool note() {
        simulated_kernels()[{Width, K::name}] = {K::name, sizeof(typename K::Args), &run};
        return true;
    }
    static inline const bool is_noted = note();
};

/* A queue that is never used: that the launchers are compiled for it notes what they launch. */
template <int Width> class NotingQueue : public CpuQueue<Width> {
  public:
    using CpuQueue<Width>::CpuQueue;
    template <class K> void launch(int64_t, int, int, const typename K::Args &) {
        if (!Simulated<Width, K>::is_noted) abort();
    }
};

inline const SimulatedKernel *find_simulated(int width, const char *name) {
    const auto found = simulated_kernels().find({width, name});
    return found == simulated_kernels().end() ? nullptr : &found->second;
}

inline void run_simulated(const SimulatedKernel &kernel, int64_t blocks, int threads, int shared_bytes,
                          const void *args) {
    kernel.run(blocks, threads, shared_bytes, args);
}

/* The same by name; false: there is no such kernel. */
inline bool run_simulated(int width, const char *name, int64_t blocks, int threads, int shared_bytes, const void *args) {
    const SimulatedKernel *kernel = find_simulated(width, name);
    if (kernel != nullptr) run_simulated(*kernel, blocks, threads, shared_bytes, args);
    return kernel != nullptr;
}

}  // namespace kvcore

#define KVCORE_SIMULATED_OP(Queue, op, Args, reports)                                                                  \
    [](const Args *args, void *stream, uint64_t *status) {                                                             \
        return kvcore::call<Queue>(stream, status, reports, [&](auto &queue) { kvcore::op(queue, *args, status); });   \
    },

#define KVCORE_SIMULATED_KERNELS(Width)                                                                                \
    [[maybe_unused]] static const auto kvcore_simulated_##Width =                                                      \
        std::make_tuple(KVCORE_EACH_OP(KVCORE_SIMULATED_OP, kvcore::NotingQueue<Width>) 0);

#endif
