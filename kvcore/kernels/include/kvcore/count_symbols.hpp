/* count_symbols: how often each byte value occurs in each channel. A thread block takes some neighbouring channels and
 * counts all their tokens in shared memory; neighbouring threads read neighbouring channels. */
#ifndef KVCORE_COUNT_SYMBOLS_HPP
#define KVCORE_COUNT_SYMBOLS_HPP

#include "views.hpp"

namespace kvcore {

struct CountSymbols {
    static constexpr int BYTES = 256;   /* values of one */
    static constexpr int CHANNELS = 32; /* counted at once, at most */
    static constexpr int PITCH = CHANNELS + 1; /* odd, so that lanes of one symbol and of one channel meet all banks */
    struct Args {
        const char *x;
        char *out;
        View<2> sets;                 /* what is counted apart: of x (uint8 [T, C]) and out (uint32 [C, 256]) */
        int64_t tokens, channels;
        int64_t token_step, channel_step;       /* of x */
        int64_t out_channel_step, symbol_step;  /* of out */
        const uint64_t *status;
        int32_t width;                /* channels counted at once: a power of two up to CHANNELS */
        int32_t reserved;
    };
    static constexpr const char *name = "count_symbols";
    static constexpr bool flat = false;
    static constexpr int shared_bytes = BYTES * PITCH * int(sizeof(uint32_t));

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        uint32_t *counts = ctx.template shared<uint32_t>(); /* [256][PITCH] by symbol, then channel */
        const int64_t pieces = (a.channels + a.width - 1) / a.width, end = a.sets.size() * pieces;
        for (int64_t item = ctx.block(); item < end; item += ctx.blocks()) {
            int64_t piece = item;
            const Offsets<2> set = locate(a.sets, divide_by(pieces, &piece));
            const int64_t first = piece * a.width, left = a.channels - first;
            const int width = left < a.width ? int(left) : a.width;
            for (int i = ctx.thread(); i < BYTES * PITCH; i += ctx.threads()) counts[i] = 0;
            ctx.barrier();
            count(ctx, a, a.x + set.at[0] + first * a.channel_step, width, counts);
            ctx.barrier();
            char *out = a.out + set.at[1] + first * a.out_channel_step;
            for (int i = ctx.thread(); i < width * BYTES; i += ctx.threads()) {
                const int channel = i / BYTES, symbol = i % BYTES;
                store(out + channel * a.out_channel_step + symbol * a.symbol_step, counts[symbol * PITCH + channel]);
            }
            ctx.barrier();
        }
    }

  private:
    template <class C>
    KVCORE_DEVICE static void count(const C &ctx, const Args &a, const char *x, int width, uint32_t *counts) {
        const int channel = ctx.thread() % a.width;
        if (channel >= width) return;
        for (int64_t token = ctx.thread() / a.width; token < a.tokens; token += ctx.threads() / a.width) {
            const uint8_t symbol = load<uint8_t>(x + token * a.token_step + channel * a.channel_step);
            ctx.atomic_add(counts + symbol * PITCH + channel, 1u);
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t count_symbols(Q &q, const kv_bits_args &a, uint64_t *status) {
    if (element_count(a.out) == 0) return q.failed();
    const int lead = a.x.ndim - 2;
    const kv_array x_sets = without(a.x, 0, 2), out_sets = without(a.out, 0, 2);
    CountSymbols::Args args = {};
    args.x = q.template device<const char>(a.x.data);
    args.out = q.template device<char>(a.out.data);
    args.sets = collapse(ALL_DIMS, {&x_sets, &out_sets});
    args.tokens = a.x.shape[lead], args.channels = a.x.shape[lead + 1];
    args.token_step = a.x.stride[lead], args.channel_step = a.x.stride[lead + 1];
    args.out_channel_step = a.out.stride[lead], args.symbol_step = a.out.stride[lead + 1];
    args.status = status;
    args.width = 1;
    while (args.width < CountSymbols::CHANNELS && args.width < args.channels) args.width *= 2;
    const int64_t items = args.sets.size() * ((args.channels + args.width - 1) / args.width);
    q.template launch<CountSymbols>(q.grid(items, 1), KVCORE_MAX_THREADS, CountSymbols::shared_bytes, args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
