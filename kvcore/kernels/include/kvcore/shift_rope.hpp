/* shift_rope: rotate pairs of channels by a table of cos and sin (Su et al. 2021, RoFormer). Each thread takes one
 * pair, or one of the channels behind the rotated ones; it reads both before it writes, so out may be x. */
#ifndef KVCORE_SHIFT_ROPE_HPP
#define KVCORE_SHIFT_ROPE_HPP

#include <type_traits>

#include "floats.hpp"
#include "views.hpp"

namespace kvcore {

struct ShiftRope {
    struct Args {
        const char *x;
        char *out;
        const char *cos, *sin;      /* float32 */
        View<4> heads;              /* of x, out, cos, sin: the first channel, the first pair of each head */
        int64_t pairs, channels;    /* of a head; 2 * pairs <= channels */
        int64_t x_step, out_step;   /* from channel to channel */
        int64_t cos_step, sin_step; /* from pair to pair */
        const uint64_t *status;
        int32_t interleaved;
        int32_t x_type, out_type, reserved;
    };
    static constexpr const char *name = "shift_rope";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        with_float(a.x_type, [&](auto from) {
            with_float(a.out_type, [&](auto to) { shift<decltype(from), decltype(to)>(ctx, a); });
        });
    }

  private:
    template <class From, class To, class C> KVCORE_DEVICE static void shift(const C &ctx, const Args &a) {
        const int64_t each = a.channels - a.pairs, end = a.heads.size() * each;
        for (int64_t item = first_item(ctx); item < end; item += item_step(ctx)) {
            int64_t i = item;
            const Offsets<4> head = locate(a.heads, divide_by(each, &i));
            const char *x = a.x + head.at[0];
            char *out = a.out + head.at[1];
            if (i >= a.pairs) {
                const int64_t channel = i + a.pairs;
                store(out + channel * a.out_step, convert<To>(load<From>(x + channel * a.x_step)));
                continue;
            }
            const int64_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? first + 1 : i + a.pairs;
            const From p = load<From>(x + first * a.x_step), q = load<From>(x + second * a.x_step);
            const f32 c = load<f32>(a.cos + head.at[2] + i * a.cos_step);
            const f32 s = load<f32>(a.sin + head.at[3] + i * a.sin_step);
            To rotated_p = convert<To>(p), rotated_q = convert<To>(q);
            if (c.bits != float_bits(1.0f) || magnitude(s.bits) != 0) {
                const float cos = widen(c), sin = widen(s), a0 = widen(p), b0 = widen(q);
                const bool finite = is_finite(widen_bits(p)) && is_finite(widen_bits(q));
                rotated_p = round<To>(a0 * cos - b0 * sin, finite);
                rotated_q = round<To>(b0 * cos + a0 * sin, finite);
            }
            store(out + first * a.out_step, rotated_p);
            store(out + second * a.out_step, rotated_q);
        }
    }

    /* What overflowed float32 from finite input is a finite value. */
    template <class To> KVCORE_DEVICE static To round(float value, bool from_finite) {
        const uint32_t bits = float_bits(value);
        return narrow<To>::from(from_finite && !is_nan(bits) ? hold_overflow(bits) : bits);
    }

    /* As it is: where the types are equal, every bit pattern stays. */
    template <class To, class From> KVCORE_DEVICE static To convert(From x) {
        if constexpr (std::is_same_v<To, From>) return x;
        else return narrow<To>::from(widen_bits(x));
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t shift_rope(Q &q, const kv_rope_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    const int lead = a.x.ndim - 1, token = a.x.ndim - 3;
    const kv_array x_heads = without(a.x, 0, 1), out_heads = without(a.out, 0, 1);
    kv_array cos_heads = x_heads, sin_heads = x_heads; /* the tables [T, R], for every head of a token */
    for (int d = 0; d < lead; d++) {
        cos_heads.stride[d] = d == token ? a.cos.stride[0] : 0;
        sin_heads.stride[d] = d == token ? a.sin.stride[0] : 0;
    }
    ShiftRope::Args args = {};
    args.x = q.template device<const char>(a.x.data);
    args.out = q.template device<char>(a.out.data);
    args.pairs = a.cos.shape[1], args.channels = a.x.shape[lead];
    if (args.pairs > 0) {
        args.cos = q.template device<const char>(a.cos.data);
        args.sin = q.template device<const char>(a.sin.data);
    }
    args.heads = collapse(ALL_DIMS, {&x_heads, &out_heads, &cos_heads, &sin_heads});
    args.x_step = a.x.stride[lead], args.out_step = a.out.stride[lead];
    args.cos_step = a.cos.stride[1], args.sin_step = a.sin.stride[1];
    args.interleaved = a.interleaved;
    args.x_type = a.x.dtype, args.out_type = a.out.dtype;
    args.status = status;
    launch_items<ShiftRope>(q, args.heads.size() * (args.channels - args.pairs), args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
