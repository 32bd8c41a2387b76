/* reduce_norm: the L2 norm over some axes, in float32, summed by the hookspec's tree.
 *
 * Squares s[0 .. n-1], n a power of two, are added upper half onto lower half until one is left. With L lanes, lane t
 * has those of number t + k*L. The tree pairs k with k + n/(2L) first, and lanes last: so each lane adds its own by the
 * same tree, then lanes meet by shuffles. A lane takes its k in bit-reversed order, which makes the pairs neighbours,
 * and keeps one sum per level: the carries of a binary counter.
 *
 * What scales a group is its largest magnitude, which a first kernel finds (AbsMax of reduce.hpp).
 */
#ifndef KVCORE_REDUCE_NORM_HPP
#define KVCORE_REDUCE_NORM_HPP

#include "reduce.hpp"

namespace kvcore {

struct NormTree {
    struct Args {
        const char *x;
        char *to;
        View<2> kept;             /* the groups: offsets in x and in out (float32) */
        View<1> reduced;          /* the elements of a group */
        Parts<uint32_t> largest;  /* of AbsMax */
        const uint64_t *status;
        int32_t lanes;            /* of a group: a power of two, at most the warp's width */
        int32_t levels;           /* each lane adds 2^levels squares, zeros among them */
        int32_t dtype, nonfinite;
    };
    static constexpr const char *name = "reduce_norm_tree";
    static constexpr bool flat = false;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        with_float(a.dtype, [&](auto type) { add_groups<decltype(type)>(ctx, a); });
    }

  private:
    template <class T, class C> KVCORE_DEVICE static void add_groups(const C &ctx, const Args &a) {
        const int64_t groups = a.kept.size();
        const int64_t per_warp = C::warp_width / a.lanes, per_block = ctx.threads() / a.lanes;
        int64_t first = ctx.block() * per_block + ctx.warp() * per_warp;
        for (; first < groups; first += ctx.blocks() * per_block) { /* the same for all lanes of a warp */
            const int64_t group = first + ctx.lane() / a.lanes;
            const bool present = group < groups;
            const Offsets<2> at = locate(a.kept, present ? group : 0);
            const uint32_t largest = merged<AbsMax>(a.largest, 0, present ? group : 0);
            const int exponent = clamped_exponent(largest);
            float sum = present && is_finite(largest) ? add_lane<T>(ctx, a, a.x + at.at[0], exponent) : 0.0f;
            for (int mask = a.lanes / 2; mask > 0; mask /= 2) sum = sum + ctx.shuffle_xor(sum, mask);
            if (!present || ctx.lane() % a.lanes != 0) continue;
            float norm = C::square_root(sum) * power_of_two(exponent);
            if (largest < 0x00800000u) norm = 0.0f;
            store(a.to + at.at[1], is_finite(largest) ? f32{float_bits(norm)} : narrow<f32>::from(largest));
        }
    }

    /* The sum of a lane's squares. */
    template <class T, class C>
    KVCORE_DEVICE static float add_lane(const C &ctx, const Args &a, const char *x, int exponent) {
        const int64_t elements = a.reduced.size(), lane = ctx.lane() % a.lanes;
        float sums[32];
        for (int64_t i = 0; i >> a.levels == 0; i++) {
            const int64_t element = lane + reversed(i, a.levels) * a.lanes;
            float sum = 0.0f;
            if (element < elements) {
                const T item = load<T>(x + locate(a.reduced, element).at[0]);
                sum = scaled(magnitude(admit(item, a.nonfinite)), exponent);
                sum = sum * sum;
            }
            int level = 0;
            for (; i >> level & 1; level++) sum = sums[level] + sum;
            sums[level] = sum;
        }
        return sums[a.levels];
    }

    KVCORE_DEVICE static int64_t reversed(int64_t index, int bits) {
        int64_t found = 0;
        for (int i = 0; i < bits; i++) found |= (index >> i & 1) << (bits - 1 - i);
        return found;
    }

    /* e of the hookspec: 2^e <= largest < 2^(e+1), held within -126 .. 126. */
    KVCORE_DEVICE static int clamped_exponent(uint32_t largest) {
        const int e = int(largest >> 23) - 127;
        return e < -126 ? -126 : e > 126 ? 126 : e;
    }

    /* |x| * 2^-e, below 2^-24 zero; exact. */
    KVCORE_DEVICE static float scaled(uint32_t a, int e) {
        if (a >> 23 == 0) { /* subnormal: large enough only where e is near -126 */
            if (e > -100) return 0.0f;
            const float value = float(a) * power_of_two(-149 - e);
            return value < power_of_two(-24) ? 0.0f : value;
        }
        return int(a >> 23) - 127 - e < -24 ? 0.0f : bits_float(uint32_t(int32_t(a) - e * (1 << 23)));
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t reduce_norm(Q &q, const kv_reduce_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    NormTree::Args tree = {};
    tree.x = q.template device<const char>(a.x.data);
    tree.to = q.template device<char>(a.out.data);
    tree.kept = collapse(~a.axes, {&a.x, &a.out});
    tree.reduced = collapse(a.axes, {&a.x});
    const int64_t elements = tree.reduced.size();
    tree.lanes = lanes_for(Q::warp_width, collapse(~a.axes, {&a.x}), tree.reduced, elements);
    while (int64_t(tree.lanes) << tree.levels < elements) tree.levels++;
    tree.status = status;
    tree.dtype = a.x.dtype, tree.nonfinite = a.nonfinite;
    tree.largest = reduce_parts<AbsMax>(q, a.x, nullptr, a.axes, a.nonfinite, status);
    const int64_t blocks = q.grid(tree.largest.groups, KVCORE_MAX_THREADS / tree.lanes);
    q.template launch<NormTree>(blocks, KVCORE_MAX_THREADS, 0, tree);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
