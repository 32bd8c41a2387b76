/* quantize: values to codes, group by group.
 *
 * Three kernels: the range of each group (MinMax of reduce.hpp, which also finds what is not finite), or the check of
 * given scales; scale and zero point by group; codes by element, in runs. The last one divides once per group and run.
 */
#ifndef KVCORE_QUANTIZE_HPP
#define KVCORE_QUANTIZE_HPP

#include "reduce.hpp"
#include "scales.hpp"

namespace kvcore {

struct QuantizeGroups {
    struct Args {
        Parts<uint32_t> range; /* of MinMax; unused where scales are given */
        View<3> groups;        /* of scale, zero, given */
        char *scale, *zero;    /* float32; int32, kind affine only */
        const char *given;     /* float32, or null */
        const uint64_t *status;
        float reciprocal;      /* of the largest code, correctly rounded */
        int32_t kind;
    };
    static constexpr const char *name = "quantize_groups";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t group = first_item(ctx); group < a.groups.size(); group += item_step(ctx)) {
            const Offsets<3> at = locate(a.groups, group);
            if (a.given != nullptr) {
                store(a.scale + at.at[0], load<f32>(a.given + at.at[2]));
                continue;
            }
            const uint32_t low = MinMax::result(a.range, 0, group), high = MinMax::result(a.range, 1, group);
            const float scale = scale_of(a, low, high);
            store(a.scale + at.at[0], f32{float_bits(scale)});
            if (a.kind == KV_AFFINE) {
                const int32_t zero = -int32_t(C::rint(bits_float(low) * C::divide(1.0f, scale)));
                store(a.zero + at.at[1], zero);
            }
        }
    }

  private:
    KVCORE_DEVICE static float scale_of(const Args &a, uint32_t low, uint32_t high) {
        const float largest = bits_float(AbsMax::merge(magnitude(low), magnitude(high)));
        float scale = largest * a.reciprocal;
        if (a.kind == KV_AFFINE) {
            const float range = bits_float(high) * a.reciprocal - bits_float(low) * a.reciprocal;
            const float least = largest * 0x1p-20f;
            scale = range > least ? range : least;
        }
        if (scale < SCALE_MIN) return 1.0f;
        return scale < SCALE_MAX ? scale : SCALE_MAX;
    }
};

struct QuantizeElements {
    struct Args {
        const char *x;
        char *codes;
        const char *scale, *zero; /* as the kernel before wrote them */
        View<4> view;             /* of x, codes, scale, zero */
        const float *middles;     /* codebook: [middle_count], between neighbouring levels, ascending */
        const uint64_t *status;
        float code_max;
        int32_t middle_count;
        int32_t x_type, code_type; /* kv_dtype */
        int32_t kind, nonfinite;
    };
    static constexpr const char *name = "quantize_elements";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        with_float(a.x_type, [&](auto type) {
            const int64_t end = runs(a.view);
            for (int64_t i = first_item(ctx); i < end; i += item_step(ctx)) encode<decltype(type), C>(a, i);
        });
    }

  private:
    template <class T, class C> KVCORE_DEVICE static void encode(const Args &a, int64_t index) {
        const Run<4> run = run_at(a.view, index);
        const int64_t *at = run.first.at;
        const int64_t scale_step = a.view.inner_stride(2), zero_step = a.view.inner_stride(3);
        T items[RUN];
        load_run<T>(a.x + at[0], a.view.inner_stride(0), run.count, items);
        uint16_t wide[RUN];
        uint8_t codes[RUN];
        float inverse = 0.0f;
        int32_t zero = 0;
        for (int i = 0; i < RUN; i++) {
            if (i >= run.count) break;
            if (i == 0 || scale_step != 0)
                inverse = C::divide(1.0f, widen(load<f32>(a.scale + at[2] + i * scale_step)));
            if (a.kind == KV_AFFINE && (i == 0 || zero_step != 0)) zero = load<int32_t>(a.zero + at[3] + i * zero_step);
            const uint32_t bits = admit(items[i], a.nonfinite);
            const uint32_t product = float_bits(bits_float(bits) * inverse);
            const uint32_t code = encode_one<C>(a, is_finite(bits) ? hold_overflow(product) : bits, zero);
            wide[i] = uint16_t(code);
            codes[i] = uint8_t(code);
        }
        if (a.code_type == KV_I16) store_run(a.codes + at[1], a.view.inner_stride(1), run.count, wide);
        else store_run(a.codes + at[1], a.view.inner_stride(1), run.count, codes);
    }

    /* The code of a scaled value, in the low bits. */
    template <class C> KVCORE_DEVICE static uint32_t encode_one(const Args &a, uint32_t scaled, int32_t zero) {
        switch (a.kind) {
            case KV_INT: return uint32_t(int32_t(clamp(C::rint(bits_float(scaled)), -a.code_max, a.code_max)));
            case KV_AFFINE: { /* scaled is at most about 2^20 in magnitude */
                const int32_t shifted = int32_t(C::rint(bits_float(scaled))) + zero, top = int32_t(a.code_max);
                return uint32_t(shifted < 0 ? 0 : shifted > top ? top : shifted);
            }
            case KV_FP8:
                if (a.code_type == KV_E4M3) return narrow<e4m3>::from(scaled).bits;
                return narrow<e5m2>::from(scaled).bits;
            default: return nearest_level(a, magnitude(scaled) < float_bits(0x1p-30f) ? 0.0f : bits_float(scaled));
        }
    }

    KVCORE_DEVICE static float clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

    /* The number of middles below a value. */
    KVCORE_DEVICE static uint32_t nearest_level(const Args &a, float value) {
        int low = 0, high = a.middle_count;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (a.middles[middle] < value) low = middle + 1;
            else high = middle;
        }
        return uint32_t(low);
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t quantize(Q &q, const kv_quant_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    float middles[256];
    QuantizeElements::Args elements = {};
    elements.middle_count = a.kind == KV_CODEBOOK ? a.level_count - 1 : 0;
    for (int i = 0; i < elements.middle_count; i++) middles[i] = (a.levels[i] + a.levels[i + 1]) * 0.5f;
    if (elements.middle_count > 0) elements.middles = q.upload(middles, elements.middle_count);
    elements.x = q.template device<const char>(a.x.data);
    elements.codes = q.template device<char>(a.codes.data);
    elements.view = collapse(ALL_DIMS, {&a.x, &a.codes, &a.scale, &a.zero});
    elements.code_max = a.code_max;
    elements.x_type = a.x.dtype, elements.code_type = a.codes.dtype;
    elements.kind = a.kind, elements.nonfinite = a.nonfinite;
    elements.status = status;

    QuantizeGroups::Args groups = {};
    elements.scale = groups.scale = q.template device<char>(a.scale.data);
    if (a.kind == KV_AFFINE) elements.zero = groups.zero = q.template device<char>(a.zero.data);
    if (a.given.data != 0) groups.given = q.template device<const char>(a.given.data);
    groups.groups = collapse(ALL_DIMS, {&a.scale, &a.zero, &a.given});
    groups.reciprocal = 1.0f / a.code_max;
    groups.kind = a.kind;
    groups.status = status;

    if (a.given.data == 0 || a.nonfinite == KV_ERROR) {
        const int32_t policy = a.nonfinite == KV_PROPAGATE ? IGNORE_NONFINITE : a.nonfinite;
        groups.range = reduce_parts<MinMax>(q, a.x, nullptr, a.axes, policy, status);
    }
    if (a.given.data != 0) check_scales(q, a.given, groups.given, status);
    launch_items<QuantizeGroups>(q, element_count(a.scale), groups);
    launch_items<QuantizeElements>(q, runs(elements.view), elements);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
