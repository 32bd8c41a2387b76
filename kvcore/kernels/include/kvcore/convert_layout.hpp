/* convert_layout: one dense chunk into another dense layout, a warp for a few tokens of a layer (rows.hpp). */
#ifndef KVCORE_CONVERT_LAYOUT_HPP
#define KVCORE_CONVERT_LAYOUT_HPP

#include "rows.hpp"
#include "views.hpp"

#ifndef KVCORE_DEVICE_ONLY
#include <stddef.h>

#include <vector>
#endif

namespace kvcore {

/* Copies one part. */
struct ConvertLayout {
    struct Args {
        const kv_plane *src, *out; /* [layers] each */
        int64_t tokens;
        RowShape shape;
        int32_t layers;
        const uint64_t *status;
    };
    static constexpr const char *name = "convert_layout";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        const int warps = ctx.threads() / C::warp_width;
        const int64_t groups = (a.tokens + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER;
        for (int64_t item = ctx.block() * warps + ctx.warp(); item < groups * a.layers; item += ctx.blocks() * warps) {
            int64_t group = item;
            const int64_t layer = divide_by(groups, &group);
            const kv_plane src = a.src[layer], out = a.out[layer];
            TokenMove moves[TOKENS_TOGETHER];
            for (int k = 0; k < TOKENS_TOGETHER; k++) {
                const int64_t token = group * TOKENS_TOGETHER + k;
                moves[k].to = nullptr;
                if (token >= a.tokens) continue;
                moves[k].to = reinterpret_cast<char *>(uintptr_t(out.base)) + token * out.token_stride;
                moves[k].from = reinterpret_cast<const char *>(uintptr_t(src.base)) + token * src.token_stride;
            }
            copy_rows(ctx, a.shape, moves, out, src);
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t convert_layout(Q &q, const kv_convert_args &a, uint64_t *status) {
    constexpr int threads = 256;
    const int64_t planes = int64_t(a.part_count) * a.layers;
    const int64_t items = (a.tokens + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER * a.layers;
    if (items == 0) return q.failed();
    std::vector<kv_plane> src(a.src, a.src + planes), out(a.out, a.out + planes);
    make_reachable(q, src.data(), planes);
    make_reachable(q, out.data(), planes);
    const kv_plane *src_table = q.upload(src.data(), planes), *out_table = q.upload(out.data(), planes);
    for (int32_t part = 0; part < a.part_count; part++) {
        const int64_t first = int64_t(part) * a.layers;
        RowPlanner planner(a.parts[part]);
        for (int64_t layer = 0; layer < a.layers; layer++) {
            planner.add(src[size_t(first + layer)], false);
            planner.add(out[size_t(first + layer)], false);
        }
        const ConvertLayout::Args args = {src_table + first, out_table + first, a.tokens, planner.shape(), a.layers,
                                          status};
        q.template launch<ConvertLayout>(q.grid(items, threads / Q::warp_width), threads, 0, args);
    }
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
