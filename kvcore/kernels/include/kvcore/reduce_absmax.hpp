/* reduce_absmax: out = max |x| over some axes, in any order (see reduce.hpp). */
#ifndef KVCORE_REDUCE_ABSMAX_HPP
#define KVCORE_REDUCE_ABSMAX_HPP

#include "reduce.hpp"

namespace kvcore {

struct WriteAbsMax {
    struct Args {
        Parts<uint32_t> parts; /* of AbsMax */
        View<1> out;           /* float32, by group */
        char *to;
        const uint64_t *status;
    };
    static constexpr const char *name = "reduce_absmax_write";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t group = first_item(ctx); group < a.parts.groups; group += item_step(ctx))
            store(a.to + locate(a.out, group).at[0], narrow<f32>::from(merged<AbsMax>(a.parts, 0, group)));
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t reduce_absmax(Q &q, const kv_reduce_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    WriteAbsMax::Args write = {};
    write.to = q.template device<char>(a.out.data);
    write.out = collapse(ALL_DIMS, {&a.out});
    write.status = status;
    write.parts = reduce_parts<AbsMax>(q, a.x, nullptr, a.axes, a.nonfinite, status);
    launch_items<WriteAbsMax>(q, write.parts.groups, write);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
