/* dequantize: codes to values, one multiply and one more rounding to the output's dtype. What codes or scales mean
 * nothing is found before; then each thread turns a run of codes. */
#ifndef KVCORE_DEQUANTIZE_HPP
#define KVCORE_DEQUANTIZE_HPP

#include "scales.hpp"

namespace kvcore {

struct CheckCodes {
    struct Args {
        const char *codes; /* uint8 */
        View<1> view;
        uint64_t *status;
        int32_t level_count, reserved;
    };
    static constexpr const char *name = "check_codes";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        for (int64_t i = first_item(ctx); i < a.view.size(); i += item_step(ctx))
            if (load<uint8_t>(a.codes + locate(a.view, i).at[0]) >= a.level_count) ctx.report(a.status, KV_LEVEL, i);
    }
};

struct Dequantize {
    struct Args {
        const char *codes;
        char *x;
        const char *scale, *zero; /* float32; int32, kind affine only */
        View<4> view;             /* of codes, x, scale, zero */
        const float *levels;      /* codebook: one for each code that occurs */
        const uint64_t *status;
        int32_t x_type, code_type; /* kv_dtype */
        int32_t kind, reserved;
    };
    static constexpr const char *name = "dequantize";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        with_float(a.x_type, [&](auto type) {
            const int64_t end = runs(a.view);
            for (int64_t i = first_item(ctx); i < end; i += item_step(ctx)) {
                if (a.code_type == KV_I16) decode<decltype(type), uint16_t>(a, i);
                else decode<decltype(type), uint8_t>(a, i);
            }
        });
    }

  private:
    template <class T, class Code> KVCORE_DEVICE static void decode(const Args &a, int64_t index) {
        const Run<4> run = run_at(a.view, index);
        const int64_t *at = run.first.at;
        const int64_t scale_step = a.view.inner_stride(2), zero_step = a.view.inner_stride(3);
        Code codes[RUN];
        T items[RUN];
        load_run<Code>(a.codes + at[0], a.view.inner_stride(0), run.count, codes);
        for (int i = 0; i < RUN; i++) {
            if (i >= run.count) break;
            const int32_t zero = a.kind == KV_AFFINE ? load<int32_t>(a.zero + at[3] + i * zero_step) : 0;
            const uint32_t value = value_of(a, codes[i], zero);
            const float scale = widen(load<f32>(a.scale + at[2] + i * scale_step));
            const uint32_t product = float_bits(bits_float(value) * scale);
            items[i] = narrow<T>::from(is_finite(value) ? hold_overflow(product) : value);
        }
        store_run(a.x + at[1], a.view.inner_stride(1), run.count, items);
    }

    /* Float32 bits of what a code stands for at scale 1. */
    KVCORE_DEVICE static uint32_t value_of(const Args &a, uint32_t code, int32_t zero) {
        switch (a.kind) {
            case KV_INT: return float_bits(float(a.code_type == KV_I16 ? int16_t(code) : int8_t(code)));
            case KV_AFFINE: return float_bits(float(int64_t(code) - zero));
            case KV_FP8:
                if (a.code_type == KV_E4M3) return widen_bits(e4m3{uint8_t(code)});
                return widen_bits(e5m2{uint8_t(code)});
            default: return float_bits(a.levels[code]);
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t dequantize(Q &q, const kv_quant_args &a, uint64_t *status) {
    if (element_count(a.x) == 0) return q.failed();
    Dequantize::Args args = {};
    args.codes = q.template device<const char>(a.codes.data);
    args.x = q.template device<char>(a.x.data);
    args.scale = q.template device<const char>(a.scale.data);
    if (a.kind == KV_AFFINE) args.zero = q.template device<const char>(a.zero.data);
    if (a.kind == KV_CODEBOOK) args.levels = q.upload(a.levels, a.level_count);
    args.view = collapse(ALL_DIMS, {&a.codes, &a.x, &a.scale, &a.zero});
    args.x_type = a.x.dtype, args.code_type = a.codes.dtype, args.kind = a.kind;
    args.status = status;

    check_scales(q, a.scale, args.scale, status);
    if (a.kind == KV_CODEBOOK && a.level_count < 256) {
        CheckCodes::Args check = {args.codes, collapse(ALL_DIMS, {&a.codes}), status, a.level_count, 0};
        launch_items<CheckCodes>(q, element_count(a.codes), check);
    }
    launch_items<Dequantize>(q, runs(args.view), args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
