/* rotate: blocks of channels times a randomised Hadamard matrix, by the fast Walsh-Hadamard transform (Hadamard 1893;
 * butterflies in the hookspec's order), with counter-based signs (see mix.hpp).
 *
 * Blocks of channels lie behind one another in C order, so a thread block takes TILE elements, whole blocks of
 * channels, into shared memory, and its threads share out the butterflies of each step. A first kernel finds values
 * that cannot be rotated.
 */
#ifndef KVCORE_ROTATE_HPP
#define KVCORE_ROTATE_HPP

#include "floats.hpp"
#include "mix.hpp"
#include "views.hpp"

namespace kvcore {

struct CheckRotatable {
    struct Args {
        const char *x;
        View<2> view; /* of x and its numbering */
        uint64_t *status;
        int32_t dtype, reserved;
    };
    static constexpr const char *name = "rotate_check";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        with_float(a.dtype, [&](auto type) {
            const int64_t end = runs(a.view);
            for (int64_t i = first_item(ctx); i < end; i += item_step(ctx)) check<decltype(type)>(ctx, a, i);
        });
    }

  private:
    template <class T, class C> KVCORE_DEVICE static void check(const C &ctx, const Args &a, int64_t index) {
        const Run<2> run = run_at(a.view, index);
        T items[RUN];
        load_run<T>(a.x + run.first.at[0], a.view.inner_stride(0), run.count, items);
        for (int i = 0; i < RUN; i++) {
            if (i >= run.count) break;
            const uint32_t size = magnitude(widen_bits(items[i]));
            if (size <= float_bits(0x1p100f)) continue;
            const int64_t position = run.first.at[1] + i * a.view.inner_stride(1);
            ctx.report(a.status, size < INFINITY32 ? KV_RANGE : KV_NONFINITE, position);
        }
    }
};

struct Rotate {
    static constexpr int TILE = 1024; /* elements; the largest block of channels */
    struct Args {
        const char *x;
        char *out;
        View<2> view; /* of x and out */
        const uint64_t *status;
        uint64_t seed;
        int64_t channels; /* extent of the last axis */
        float factor;     /* 1 / sqrt(width), correctly rounded */
        int32_t width;    /* of a block of channels: a power of two up to TILE */
        int32_t inverse;
        int32_t x_type, out_type, reserved;
    };
    static constexpr const char *name = "rotate";
    static constexpr bool flat = false;
    static constexpr int shared_bytes = TILE * int(sizeof(float));

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        float *tile = ctx.template shared<float>();
        for (int64_t first = ctx.block() * TILE; first < a.view.size(); first += ctx.blocks() * TILE) {
            const int64_t left = a.view.size() - first;
            const int count = left < TILE ? int(left) : TILE;
            with_float(a.x_type, [&](auto type) { read<decltype(type)>(ctx, a, first, count, tile); });
            for (int half = 1; half < a.width; half *= 2) {
                ctx.barrier();
                butterflies(ctx, half, count / 2, tile);
            }
            ctx.barrier();
            with_float(a.out_type, [&](auto type) { write<decltype(type)>(ctx, a, first, count, tile); });
            ctx.barrier();
        }
    }

  private:
    /* All pairs of a tile whose numbers differ by `half`. */
    template <class C> KVCORE_DEVICE static void butterflies(const C &ctx, int half, int pairs, float *tile) {
        for (int pair = ctx.thread(); pair < pairs; pair += ctx.threads()) {
            const int at = (pair & ~(half - 1)) * 2 + (pair & (half - 1));
            const float a = tile[at], b = tile[at + half];
            tile[at] = a + b;
            tile[at + half] = a - b;
        }
    }

    template <class T, class C>
    KVCORE_DEVICE static void read(const C &ctx, const Args &a, int64_t first, int count, float *tile) {
        for (int i = ctx.thread(); i < count; i += ctx.threads()) {
            uint32_t bits = widen_bits(load<T>(a.x + locate(a.view, first + i).at[0]));
            if (magnitude(bits) < float_bits(0x1p-90f)) bits = 0;
            if (!a.inverse) bits ^= sign_of(a, first + i);
            tile[i] = bits_float(bits);
        }
    }

    template <class T, class C>
    KVCORE_DEVICE static void write(const C &ctx, const Args &a, int64_t first, int count, const float *tile) {
        for (int i = ctx.thread(); i < count; i += ctx.threads()) {
            uint32_t bits = float_bits(tile[i] * a.factor);
            if (a.inverse) bits ^= sign_of(a, first + i);
            store(a.out + locate(a.view, first + i).at[1], narrow<T>::from(bits));
        }
    }

    /* The sign bit of an element's channel. */
    KVCORE_DEVICE static uint32_t sign_of(const Args &a, int64_t element) {
        divide_by(a.channels, &element);
        return uint32_t(mix(a.seed + uint64_t(element + 1) * GOLDEN) >> 32) & SIGN32;
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t rotate(Q &q, const kv_rotate_args &a, uint64_t *status) {
    const int64_t elements = element_count(a.x);
    if (elements == 0) return q.failed();
    float factor = 1.0f; /* a power of two, times sqrt(1/2) where the block is an odd one */
    int32_t width = a.block;
    for (; width >= 4; width /= 4) factor *= 0.5f;
    if (width == 2) factor *= 0x1.6a09e6p-1f;
    const kv_array numbers = numbering(a.x);
    CheckRotatable::Args check = {};
    check.x = q.template device<const char>(a.x.data);
    check.view = collapse(ALL_DIMS, {&a.x, &numbers});
    check.dtype = a.x.dtype;
    check.status = status;

    Rotate::Args rotate = {};
    rotate.x = check.x;
    rotate.out = q.template device<char>(a.out.data);
    rotate.view = collapse(ALL_DIMS, {&a.x, &a.out});
    rotate.seed = a.seed;
    rotate.channels = a.x.shape[a.x.ndim - 1];
    rotate.factor = factor;
    rotate.width = a.block, rotate.inverse = a.inverse;
    rotate.x_type = a.x.dtype, rotate.out_type = a.out.dtype;
    rotate.status = status;

    launch_items<CheckRotatable>(q, runs(check.view), check);
    q.template launch<Rotate>(q.grid(elements, Rotate::TILE), KVCORE_MAX_THREADS, Rotate::shared_bytes, rotate);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
