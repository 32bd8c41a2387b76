/* Reductions whose result is the same in any order: what reduce_absmax, reduce_minmax, reduce_moments and quantize
 * share.
 *
 * Elements that differ only along the reduced axes are a group. First kernel: each group is cut into `parts`, each part
 * is folded by `lanes` neighbouring lanes, which meet by shuffles; what the data has wrong is reported; partial results
 * go to scratch. Second kernel, the op's own: merges the parts of each group and writes, unless something was reported.
 *
 * What is folded (`R`): `words` words of type `Word` that start at zero; `R::merge` of two of them is commutative and
 * associative; `R::add(item, nonfinite, extra, sums)` folds an element in, and returns a kv_code where it is wrong,
 * else 0.
 */
#ifndef KVCORE_REDUCE_HPP
#define KVCORE_REDUCE_HPP

#include "floats.hpp"
#include "views.hpp"

namespace kvcore {

constexpr int32_t IGNORE_NONFINITE = 3; /* beyond kv_nonfinite: NaN and infinity are read as zero */

/* Read a float under a policy (kv_nonfinite or IGNORE_NONFINITE): returns its float32 bits; what is an error stays. */
template <class T> KVCORE_DEVICE uint32_t admit(T item, int32_t nonfinite) {
    const uint32_t bits = widen_bits(item);
    if (is_finite(bits) || nonfinite == KV_PROPAGATE || nonfinite == KV_ERROR) return bits;
    return nonfinite == KV_SATURATE ? saturate(bits, finite_max_bits(item)) : 0;
}

/* What is wrong with float32 bits under a policy: KV_NONFINITE or 0. */
KVCORE_DEVICE int fault_of(uint32_t bits, int32_t nonfinite) {
    return nonfinite == KV_ERROR && !is_finite(bits) ? KV_NONFINITE : 0;
}

/* Partial results of a reduction. */
template <class Word> struct Parts {
    const Word *word; /* [words][parts][groups] */
    int64_t groups;
    int32_t parts, reserved;
};

/* Merge what the parts of a group have as their word number `index`. */
template <class R> KVCORE_DEVICE typename R::Word merged(const Parts<typename R::Word> &p, int index, int64_t group) {
    typename R::Word whole = 0;
    for (int part = 0; part < p.parts; part++)
        whole = R::merge(whole, p.word[(int64_t(index) * p.parts + part) * p.groups + group]);
    return whole;
}

template <class R> struct ReduceParts {
    using Word = typename R::Word;
    struct Args {
        const char *x, *extra;
        View<3> kept;       /* the groups: offsets in x, in the numbering of x, in extra */
        View<3> reduced;    /* the elements of a group: likewise */
        Word *word;         /* as in Parts */
        uint64_t *status;
        int32_t parts;
        int32_t lanes;      /* of a part: a power of two, at most the warp's width */
        int32_t dtype;      /* of x */
        int32_t nonfinite;
    };
    static constexpr const char *name = R::parts_name;
    static constexpr bool flat = false;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        R::with_type(a.dtype, [&](auto type) { fold<decltype(type)>(ctx, a); });
    }

  private:
    template <class T, class C> KVCORE_DEVICE static void fold(const C &ctx, const Args &a) {
        const int64_t groups = a.kept.size(), items = groups * a.parts;
        const int64_t lane = ctx.lane() % a.lanes, step = int64_t(a.parts) * a.lanes, end = runs(a.reduced);
        const int64_t per_warp = C::warp_width / a.lanes, per_block = ctx.threads() / a.lanes;
        int64_t first = ctx.block() * per_block + ctx.warp() * per_warp;
        for (; first < items; first += ctx.blocks() * per_block) { /* the same for all lanes of a warp */
            const int64_t item = first + ctx.lane() / a.lanes;
            Word sums[R::words] = {};
            if (item < items) {
                int64_t group = item;
                const int64_t part = divide_by(groups, &group);
                const Offsets<3> base = locate(a.kept, group);
                for (int64_t i = part * a.lanes + lane; i < end; i += step) add_run<T>(ctx, a, group, base, i, sums);
            }
            for (int mask = a.lanes / 2; mask > 0; mask /= 2)
                for (Word &sum : sums) sum = R::merge(sum, ctx.shuffle_xor(sum, mask));
            if (lane == 0 && item < items)
                for (int w = 0; w < R::words; w++) a.word[w * items + item] = sums[w];
        }
    }

    template <class T, class C>
    KVCORE_DEVICE static void add_run(const C &ctx, const Args &a, int64_t group, const Offsets<3> &base, int64_t index,
                                      Word (&sums)[R::words]) {
        const Run<3> run = run_at(a.reduced, index);
        const char *extra = a.extra + base.at[2] + run.first.at[2];
        T items[RUN];
        load_run<T>(a.x + base.at[0] + run.first.at[0], a.reduced.inner_stride(0), run.count, items);
        int fault = 0, wrong = 0; /* the first of the run */
        for (int i = 0; i < RUN; i++) {
            if (i >= run.count) break;
            const int found = R::add(items[i], a.nonfinite, extra + i * a.reduced.inner_stride(2), sums);
            if (found != 0 && fault == 0) fault = found, wrong = i;
        }
        if (fault == 0) return; /* the position is looked up afresh, so that who finds nothing carries nothing */
        const int64_t position = locate(a.kept, group).at[1] + run_at(a.reduced, index).first.at[1];
        ctx.report(a.status, fault, position + wrong * a.reduced.inner_stride(1));
    }
};

/* Of float32 magnitudes the largest: as integers, so that a NaN is larger than an infinity. */
struct AbsMax {
    using Word = uint32_t;
    static constexpr int words = 1;
    static constexpr const char *parts_name = "reduce_absmax_parts";

    template <class F> KVCORE_DEVICE static void with_type(int32_t dtype, const F &f) { with_float(dtype, f); }
    KVCORE_DEVICE static Word merge(Word a, Word b) { return a > b ? a : b; }

    template <class T> KVCORE_DEVICE static int add(T item, int32_t nonfinite, const char *, Word (&sums)[1]) {
        const uint32_t bits = admit(item, nonfinite);
        sums[0] = merge(sums[0], magnitude(bits));
        return fault_of(bits, nonfinite);
    }
};

/* Smallest and largest value, as keys that order like the values: word 0 has the complement of the least key, so that
 * both words are maxima. Zero has one sign. A NaN, if policy lets it in, makes both words all ones. */
struct MinMax {
    using Word = uint32_t;
    static constexpr int words = 2;
    static constexpr const char *parts_name = "reduce_minmax_parts";
    static constexpr Word nan = ~Word(0);

    template <class F> KVCORE_DEVICE static void with_type(int32_t dtype, const F &f) { with_float(dtype, f); }
    KVCORE_DEVICE static Word merge(Word a, Word b) { return a > b ? a : b; }

    template <class T> KVCORE_DEVICE static int add(T item, int32_t nonfinite, const char *, Word (&sums)[2]) {
        const uint32_t bits = admit(item, nonfinite);
        const Word key = bits == SIGN32 || !(bits & SIGN32) ? bits | SIGN32 : ~bits;
        sums[0] = merge(sums[0], is_nan(bits) ? nan : ~key);
        sums[1] = merge(sums[1], is_nan(bits) ? nan : key);
        return fault_of(bits, nonfinite);
    }

    /* Float32 bits of the least (`which` 0) or greatest value (1) of a group. */
    KVCORE_DEVICE static uint32_t result(const Parts<Word> &parts, int which, int64_t group) {
        const Word word = merged<MinMax>(parts, which, group);
        if (word == nan) return NAN32;
        const Word key = which == 0 ? ~word : word;
        return key & SIGN32 ? key ^ SIGN32 : ~key;
    }
};

#ifndef KVCORE_DEVICE_ONLY

/* Lanes that share a group: those of a warp, as far as there is work; one where neighbouring groups are closer together
 * in memory than neighbouring elements, so that neighbouring lanes read neighbours. View 0 counts. */
template <int N> int lanes_for(int warp_width, const View<N> &kept, const View<N> &reduced, int64_t elements) {
    const auto distance = [](int64_t stride) { return stride < 0 ? -stride : stride; };
    if (kept.size() >= warp_width && distance(kept.inner_stride(0)) < distance(reduced.inner_stride(0))) return 1;
    int lanes = 1;
    while (lanes < warp_width && lanes < elements) lanes *= 2;
    return lanes;
}

/* Launch the first kernel; `x` has no empty axis among `axes`, and at least one group. `extra`: an array that
 * broadcasts to x, for R::add, or null. */
template <class R, class Q>
Parts<typename R::Word> reduce_parts(Q &q, const kv_array &x, const kv_array *extra, uint32_t axes, int32_t nonfinite,
                                     uint64_t *status) {
    using Kernel = ReduceParts<R>;
    const kv_array numbers = numbering(x), absent = {};
    const kv_array *beside = extra != nullptr ? extra : &absent;
    typename Kernel::Args args = {};
    args.kept = collapse(~axes, {&x, &numbers, beside});
    args.reduced = collapse(axes, {&x, &numbers, beside});
    const int64_t groups = args.kept.size(), elements = runs(args.reduced);
    const int lanes = lanes_for(Q::warp_width, args.kept, args.reduced, elements);
    int32_t parts = 1; /* more, where there are few groups to keep a GPU busy, and enough elements for each lane */
    while (groups * lanes * parts < (1 << 15) && elements > int64_t(8) * lanes * parts) parts *= 2;

    const int64_t items = groups * parts;
    args.word = static_cast<typename R::Word *>(q.scratch(items * R::words * int64_t(sizeof(typename R::Word))));
    args.x = q.template device<const char>(x.data);
    args.extra = extra != nullptr ? q.template device<const char>(extra->data) : nullptr;
    args.status = status;
    args.parts = parts, args.lanes = lanes, args.dtype = x.dtype, args.nonfinite = nonfinite;
    q.template launch<Kernel>(q.grid(items, KVCORE_MAX_THREADS / lanes), KVCORE_MAX_THREADS, 0, args);
    return {args.word, groups, parts, 0};
}

#endif

}  // namespace kvcore

#endif
