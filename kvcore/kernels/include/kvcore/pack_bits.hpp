/* pack_bits: 1 to 8 bits each, least significant first. Eight values fill `bits` whole bytes, which one thread packs
 * through a 64-bit word; a first kernel finds values that do not fit. */
#ifndef KVCORE_PACK_BITS_HPP
#define KVCORE_PACK_BITS_HPP

#include "views.hpp"

namespace kvcore {

struct CheckFits {
    struct Args {
        const char *x;
        View<2> view; /* of x (8 bits each) and its numbering */
        uint64_t *status;
        int32_t bits, is_signed;
    };
    static constexpr const char *name = "pack_bits_check";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        const int low = a.is_signed ? -(1 << (a.bits - 1)) : 0, high = low + (1 << a.bits) - 1;
        const int64_t end = runs(a.view);
        for (int64_t r = first_item(ctx); r < end; r += item_step(ctx)) {
            const Run<2> run = run_at(a.view, r);
            uint8_t items[RUN];
            load_run(a.x + run.first.at[0], a.view.inner_stride(0), run.count, items);
            for (int i = 0; i < RUN; i++) {
                if (i >= run.count) break;
                const int value = a.is_signed ? int8_t(items[i]) : items[i];
                if (value < low || value > high)
                    ctx.report(a.status, KV_RANGE, run.first.at[1] + i * a.view.inner_stride(1));
            }
        }
    }
};

struct PackBits {
    struct Args {
        const char *x;
        char *out;
        View<2> rows;                /* of x (8 bits each) and out (uint8) */
        int64_t count;               /* values in a row; out has ceil(count * bits / 8) bytes there */
        int64_t x_step, out_step;    /* from value to value, from byte to byte */
        const uint64_t *status;
        int32_t bits, reserved;
    };
    static constexpr const char *name = "pack_bits";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        const int64_t groups = (a.count + RUN - 1) / RUN, end = a.rows.size() * groups;
        for (int64_t item = first_item(ctx); item < end; item += item_step(ctx)) {
            int64_t group = item;
            const Offsets<2> row = locate(a.rows, divide_by(groups, &group));
            const int64_t left = a.count - group * RUN;
            const int count = left < RUN ? int(left) : RUN;
            uint8_t items[RUN];
            load_run(a.x + row.at[0] + group * RUN * a.x_step, a.x_step, count, items);
            uint64_t word = 0;
            for (int i = 0; i < RUN; i++)
                if (i < count) word |= uint64_t(items[i] & ((1 << a.bits) - 1)) << (i * a.bits);
            char *to = a.out + row.at[1] + group * a.bits * a.out_step;
            for (int byte = 0; byte * 8 < count * a.bits; byte++)
                store(to + byte * a.out_step, uint8_t(word >> (byte * 8)));
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t pack_bits(Q &q, const kv_bits_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    const kv_array numbers = numbering(a.x), x_rows = without(a.x, 0, 1), out_rows = without(a.out, 0, 1);
    PackBits::Args pack = {};
    pack.x = q.template device<const char>(a.x.data);
    pack.out = q.template device<char>(a.out.data);
    pack.rows = collapse(ALL_DIMS, {&x_rows, &out_rows});
    pack.count = a.x.shape[x_rows.ndim];
    pack.x_step = a.x.stride[x_rows.ndim], pack.out_step = a.out.stride[x_rows.ndim];
    pack.bits = a.bits;
    pack.status = status;

    const CheckFits::Args check = {pack.x, collapse(ALL_DIMS, {&a.x, &numbers}), status, a.bits, a.x.dtype == KV_I8};
    launch_items<CheckFits>(q, runs(check.view), check);
    launch_items<PackBits>(q, pack.rows.size() * ((pack.count + RUN - 1) / RUN), pack);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
