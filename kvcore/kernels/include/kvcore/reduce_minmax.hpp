/* reduce_minmax: out[0] = min x, out[1] = max x over some axes, in any order (see reduce.hpp). */
#ifndef KVCORE_REDUCE_MINMAX_HPP
#define KVCORE_REDUCE_MINMAX_HPP

#include "reduce.hpp"

namespace kvcore {

struct WriteMinMax {
    struct Args {
        Parts<uint32_t> parts; /* of MinMax */
        View<1> out;           /* float32, by group: out[0] */
        char *to;
        int64_t second;        /* bytes from out[0] to out[1] */
        const uint64_t *status;
    };
    static constexpr const char *name = "reduce_minmax_write";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t group = first_item(ctx); group < a.parts.groups; group += item_step(ctx)) {
            char *to = a.to + locate(a.out, group).at[0];
            store(to, f32{MinMax::result(a.parts, 0, group)});
            store(to + a.second, f32{MinMax::result(a.parts, 1, group)});
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t reduce_minmax(Q &q, const kv_reduce_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    const kv_array least = without(a.out, 1, 0);
    WriteMinMax::Args write = {};
    write.to = q.template device<char>(a.out.data);
    write.out = collapse(ALL_DIMS, {&least});
    write.second = a.out.stride[0];
    write.status = status;
    write.parts = reduce_parts<MinMax>(q, a.x, nullptr, a.axes, a.nonfinite, status);
    launch_items<WriteMinMax>(q, write.parts.groups, write);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
