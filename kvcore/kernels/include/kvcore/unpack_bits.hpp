/* unpack_bits: what pack_bits packed; eight values from `bits` bytes, through a 64-bit word, by one thread. */
#ifndef KVCORE_UNPACK_BITS_HPP
#define KVCORE_UNPACK_BITS_HPP

#include "views.hpp"

namespace kvcore {

struct UnpackBits {
    struct Args {
        const char *x;
        char *out;
        View<2> rows;                /* of x (uint8) and out (8 bits each) */
        int64_t count;               /* values in a row; x has ceil(count * bits / 8) bytes there */
        int64_t x_step, out_step;    /* from byte to byte, from value to value */
        const uint64_t *status;
        int32_t bits, is_signed;
    };
    static constexpr const char *name = "unpack_bits";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        const int64_t groups = (a.count + RUN - 1) / RUN, end = a.rows.size() * groups;
        const uint32_t mask = (1u << a.bits) - 1, sign = a.is_signed ? 1u << (a.bits - 1) : 0;
        for (int64_t item = first_item(ctx); item < end; item += item_step(ctx)) {
            int64_t group = item;
            const Offsets<2> row = locate(a.rows, divide_by(groups, &group));
            const int64_t left = a.count - group * RUN;
            const int count = left < RUN ? int(left) : RUN;
            const char *from = a.x + row.at[0] + group * a.bits * a.x_step;
            uint64_t word = 0;
            for (int byte = 0; byte * 8 < count * a.bits; byte++)
                word |= uint64_t(load<uint8_t>(from + byte * a.x_step)) << (byte * 8);
            uint8_t items[RUN];
            for (int i = 0; i < RUN; i++) {
                const uint32_t value = uint32_t(word >> (i * a.bits)) & mask;
                items[i] = uint8_t((value ^ sign) - sign); /* extends the sign */
            }
            store_run(a.out + row.at[1] + group * RUN * a.out_step, a.out_step, count, items);
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t unpack_bits(Q &q, const kv_bits_args &a, uint64_t *status) {
    if (element_count(a.out) == 0) return q.failed();
    const kv_array x_rows = without(a.x, 0, 1), out_rows = without(a.out, 0, 1);
    UnpackBits::Args args = {};
    args.x = q.template device<const char>(a.x.data);
    args.out = q.template device<char>(a.out.data);
    args.count = a.out.shape[out_rows.ndim];
    args.x_step = a.x.stride[out_rows.ndim], args.out_step = a.out.stride[out_rows.ndim];
    args.bits = a.bits, args.is_signed = a.out.dtype == KV_I8;
    args.status = status;
    args.rows = collapse(ALL_DIMS, {&x_rows, &out_rows});
    launch_items<UnpackBits>(q, args.rows.size() * ((args.count + RUN - 1) / RUN), args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
