// floats.hpp and views.hpp, called over whole arrays.
#include <kvcore/floats.hpp>
#include <kvcore/views.hpp>

#define CONVERSIONS(T, Bits)                                                                    \
    extern "C" void widen_##T(const Bits *from, uint32_t *to, int64_t count) {                  \
        for (int64_t i = 0; i < count; i++) to[i] = kvcore::widen_bits(kvcore::T{from[i]});     \
    }                                                                                           \
    extern "C" void narrow_##T(const uint32_t *from, Bits *to, int64_t count) {                 \
        for (int64_t i = 0; i < count; i++) to[i] = kvcore::narrow<kvcore::T>::from(from[i]).bits; \
    }

CONVERSIONS(f32, uint32_t)
CONVERSIONS(f16, uint16_t)
CONVERSIONS(bf16, uint16_t)
CONVERSIONS(e4m3, uint8_t)
CONVERSIONS(e5m2, uint8_t)

#define SATURATE(T, Bits)                                                                       \
    extern "C" void saturate_##T(const Bits *from, uint32_t *to, int64_t count) {               \
        for (int64_t i = 0; i < count; i++) {                                                   \
            const kvcore::T item{from[i]};                                                      \
            to[i] = kvcore::saturate(kvcore::widen_bits(item), kvcore::finite_max_bits(item));  \
        }                                                                                       \
    }

SATURATE(f32, uint32_t)
SATURATE(f16, uint16_t)
SATURATE(bf16, uint16_t)

// The dims that are left of two arrays, and where each element of both lies: [count][2].
extern "C" int32_t locate_all(const kv_array *a, const kv_array *b, uint32_t dims, int64_t *offsets) {
    const auto view = kvcore::collapse(dims, {a, b});
    for (int64_t i = 0; i < view.size(); i++) {
        const auto found = kvcore::locate(view, i);
        for (int n = 0; n < 2; n++) offsets[2 * i + n] = found.at[n];
    }
    return view.ndim;
}

// Copies 16-bit elements run by run, through the kernels' loads and stores.
extern "C" void copy_runs(const kv_array *from, const kv_array *to) {
    const auto view = kvcore::collapse(kvcore::ALL_DIMS, {from, to});
    for (int64_t r = 0; r < kvcore::runs(view); r++) {
        const auto run = kvcore::run_at(view, r);
        uint16_t items[kvcore::RUN];
        kvcore::load_run(reinterpret_cast<const char *>(from->data) + run.first.at[0], view.inner_stride(0), run.count,
                         items);
        kvcore::store_run(reinterpret_cast<char *>(to->data) + run.first.at[1], view.inner_stride(1), run.count, items);
    }
}
