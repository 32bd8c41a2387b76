/* What quantize and dequantize share: the limits of scales, and the check of those that are given. */
#ifndef KVCORE_SCALES_HPP
#define KVCORE_SCALES_HPP

#include "floats.hpp"
#include "views.hpp"

namespace kvcore {

constexpr float SCALE_MIN = 0x1p-100f;
constexpr float SCALE_MAX = 0x1p125f;

struct CheckScales {
    struct Args {
        const char *scale; /* float32 */
        View<1> view;
        uint64_t *status;
    };
    static constexpr const char *name = "check_scales";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        for (int64_t i = first_item(ctx); i < a.view.size(); i += item_step(ctx)) {
            const float scale = widen(load<f32>(a.scale + locate(a.view, i).at[0]));
            if (!(scale >= SCALE_MIN && scale <= SCALE_MAX)) ctx.report(a.status, KV_SCALE, i);
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

/* Report scales that are out of range; `data` is what kernels read `scale` at. */
template <class Q> void check_scales(Q &q, const kv_array &scale, const char *data, uint64_t *status) {
    launch_items<CheckScales>(q, element_count(scale), {data, collapse(ALL_DIMS, {&scale}), status});
}

#endif

}  // namespace kvcore

#endif
