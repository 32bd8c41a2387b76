/* reduce_moments: q = rint(x * 2^exponent); out[0] = sum q, out[1] = sum q*q, in integers and so in any order (see
 * reduce.hpp). The product is never formed in floating point: the significand is shifted, and rounded half to even. */
#ifndef KVCORE_REDUCE_MOMENTS_HPP
#define KVCORE_REDUCE_MOMENTS_HPP

#include "reduce.hpp"

namespace kvcore {

/* Sums modulo 2^64 of two's complement. The extra array is the exponent, int32. */
struct Moments {
    using Word = uint64_t;
    static constexpr int words = 2;
    static constexpr const char *parts_name = "reduce_moments_parts";

    template <class F> KVCORE_DEVICE static void with_type(int32_t dtype, const F &f) {
        if (dtype == KV_I16) f(int16_t(0));
        else with_float(dtype, f);
    }
    KVCORE_DEVICE static Word merge(Word a, Word b) { return a + b; }

    template <class T> KVCORE_DEVICE static int add(T item, int32_t, const char *exponent, Word (&sums)[2]) {
        const Scaled x = take_apart(item);
        if (x.nonfinite) return KV_NONFINITE;
        const int64_t rounded = round(x.significand, int64_t(x.exponent) + load<int32_t>(exponent));
        const int64_t q = x.negative ? -rounded : rounded;
        if (q < -32768 || q > 32767) return KV_RANGE;
        sums[0] += uint64_t(q);
        sums[1] += uint64_t(q * q);
        return 0;
    }

  private:
    /* significand * 2^exponent, significand < 2^24 */
    struct Scaled {
        uint32_t significand;
        int32_t exponent;
        bool negative, nonfinite;
    };

    KVCORE_DEVICE static Scaled take_apart(int16_t x) {
        return {uint32_t(x < 0 ? -int32_t(x) : int32_t(x)), 0, x < 0, false};
    }

    template <class T> KVCORE_DEVICE static Scaled take_apart(T x) {
        const uint32_t bits = widen_bits(x), field = magnitude(bits) >> 23, fraction = bits & 0x7FFFFFu;
        const bool subnormal = field == 0;
        return {subnormal ? fraction : fraction | 0x800000u, subnormal ? -149 : int32_t(field) - 150, bits >> 31 != 0,
                !is_finite(bits)};
    }

    /* rint(significand * 2^exponent); 2^40 stands for all that is larger. */
    KVCORE_DEVICE static int64_t round(uint32_t significand, int64_t exponent) {
        if (significand == 0 || exponent < -24) return 0; /* below one half */
        if (exponent > 15) return int64_t(1) << 40;
        if (exponent >= 0) return int64_t(significand) << exponent;
        return detail::shift_half_even(significand, int(-exponent));
    }
};

struct WriteMoments {
    struct Args {
        Parts<uint64_t> parts; /* of Moments */
        View<1> out;           /* int64, by group: out[0] */
        char *to;
        int64_t second;        /* bytes from out[0] to out[1] */
        const uint64_t *status;
    };
    static constexpr const char *name = "reduce_moments_write";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t group = first_item(ctx); group < a.parts.groups; group += item_step(ctx)) {
            char *to = a.to + locate(a.out, group).at[0];
            store(to, merged<Moments>(a.parts, 0, group));
            store(to + a.second, merged<Moments>(a.parts, 1, group));
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t reduce_moments(Q &q, const kv_reduce_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    const kv_array sums = without(a.out, 1, 0);
    WriteMoments::Args write = {};
    write.to = q.template device<char>(a.out.data);
    write.out = collapse(ALL_DIMS, {&sums});
    write.second = a.out.stride[0];
    write.status = status;
    write.parts = reduce_parts<Moments>(q, a.x, &a.exponent, a.axes, KV_ERROR, status);
    launch_items<WriteMoments>(q, write.parts.groups, write);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
