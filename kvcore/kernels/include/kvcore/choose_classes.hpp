/* choose_classes: the symbols of tiles, and the cheapest table, offset or base, and majority of each channel.
 *
 * A block treats 16 channels of a tile at a time: statistics, symbols and a histogram of each channel in shared memory.
 * Then 32 neighbouring threads, one for each class, add up what a channel's histogram costs. Costs are exact: at most
 * 256 symbols of at most 65535 each, below 2^24. They compete as one number, `cost << 16 | candidate << 8 | class`, so
 * that of equal costs the first candidate and then the lowest class wins, in whatever order the threads come.
 *
 * Kind exponent has up to 12 candidates for base and majority. One histogram serves all of them: it counts (distance to
 * the channel's largest exponent, sign), from which each candidate's symbols follow.
 */
#ifndef KVCORE_CHOOSE_CLASSES_HPP
#define KVCORE_CHOOSE_CLASSES_HPP

#include "tiles.hpp"

namespace kvcore {

struct ChooseClasses {
    struct Args {
        TileArray values;       /* int16 [tiles, tokens, width] */
        TileArray skip;         /* uint8 [tiles, tokens]; data null: no token is skipped */
        TileArray symbols;      /* uint8 [tiles, tokens, width] */
        TileArray classes;      /* uint8 [tiles, width] */
        TileArray offsets;      /* int8 [tiles, width] */
        const TableSet *tables; /* [1] */
        const uint64_t *status; /* [1] */
        int64_t tiles;
        int32_t tokens, width, use_offsets, reserved;
    };
    static constexpr const char *name = "choose_classes";
    static constexpr bool flat = false;
    static constexpr int piece = 16;                     /* channels at a time; divides the number of threads */
    static constexpr int pieces = STEPS * LANES / piece; /* of a tile; beyond its width they are empty */
    static constexpr int lowest = -3;                    /* bases from the largest exponent - 3 on */
    static constexpr int candidates = 12;                /* 6 bases, each with majority 0, then 1 */
    static constexpr int beyond = EXPONENTS - lowest;    /* from this distance on all candidates escape */

    struct Shared {
        uint64_t best[piece];
        uint32_t sum[piece]; /* of the values that count, modulo 2^32; below 2^23 in magnitude */
        uint32_t largest[piece];
        uint32_t counted; /* tokens that are not skipped */
        uint32_t histogram[piece][SYMBOLS];
    };

    /* What a thread has to do with: tokens `first`, `first + step` ... of one channel. */
    struct Share {
        int64_t tile;
        int slot, channel, first, step; /* slot: of the piece */
        bool live;                      /* the tile has that channel */
    };

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        Shared &shared = *ctx.template shared<Shared>();
        const int kind = a.tables->kind;
        for (int64_t item = ctx.block(); item < a.tiles * pieces; item += ctx.blocks()) {
            const int first_channel = int(item % pieces) * piece;
            if (first_channel >= a.width) continue;
            const int slot = ctx.thread() % piece, channel = first_channel + slot;
            const int first = ctx.thread() / piece, step = ctx.threads() / piece;
            const Share share = {item / pieces, slot, channel, first, step, channel < a.width};
            clear(ctx, shared);
            ctx.barrier();
            if (kind == KV_EXPONENT || a.use_offsets) survey(ctx, a, share, shared);
            ctx.barrier();
            if (kind == KV_EXPONENT) {
                count_exponents(ctx, a, share, shared);
            } else {
                make_symbols(ctx, a, share, shared);
            }
            ctx.barrier();
            for (int s = ctx.thread() / CLASSES; s < piece; s += ctx.threads() / CLASSES) {
                const int table = ctx.thread() % CLASSES;
                const uint64_t mine = kind == KV_EXPONENT
                                          ? cheapest_exponent(*a.tables, shared.histogram[s], shared.largest[s], table)
                                          : cheapest(*a.tables, shared.histogram[s], table);
                ctx.atomic_min(&shared.best[s], mine);
            }
            ctx.barrier();
            write(a, share, shared, kind);
            ctx.barrier();
        }
    }

    template <class C> KVCORE_DEVICE static void clear(const C &ctx, Shared &shared) {
        for (int i = ctx.thread(); i < piece * SYMBOLS; i += ctx.threads()) {
            shared.histogram[i / SYMBOLS][i % SYMBOLS] = 0;
        }
        if (ctx.thread() < piece) {
            shared.best[ctx.thread()] = UINT64_MAX;
            shared.sum[ctx.thread()] = shared.largest[ctx.thread()] = 0;
        }
        if (ctx.thread() == 0) shared.counted = 0;
    }

    KVCORE_DEVICE static bool counts(const Args &a, int64_t tile, int t) {
        return a.skip.data == nullptr || a.skip.byte(tile, t) == 0;
    }

    /* Sum of the values and number of the tokens that count; largest exponent. */
    template <class C> KVCORE_DEVICE static void survey(const C &ctx, const Args &a, const Share &own, Shared &shared) {
        uint32_t sum = 0, counted = 0, largest = 0;
        if (!own.live) return;
        for (int t = own.first; t < a.tokens; t += own.step) {
            if (!counts(a, own.tile, t)) continue;
            const uint16_t value = load<uint16_t>(a.values.at(own.tile, t, own.channel));
            const uint32_t exponent = value & 0xFF;
            largest = exponent > largest ? exponent : largest;
            sum += uint32_t(int32_t(int16_t(value)));
            counted++;
        }
        ctx.atomic_add(&shared.sum[own.slot], sum);
        ctx.atomic_max(&shared.largest[own.slot], largest);
        if (own.slot == 0) ctx.atomic_add(&shared.counted, counted);
    }

    /* Mean rounded half to even, held within -127 .. 127; 0 of nothing. */
    KVCORE_DEVICE static int offset_of(int sum, int count) {
        if (count == 0) return 0;
        const int floor = sum / count - (sum % count < 0), rest = sum - floor * count;
        const int mean = floor + (2 * rest > count || (2 * rest == count && floor % 2 != 0));
        return mean < -127 ? -127 : mean > 127 ? 127 : mean;
    }

    /* Kinds integer and code: write symbols, and count them. */
    template <class C>
    KVCORE_DEVICE static void make_symbols(const C &ctx, const Args &a, const Share &own, Shared &shared) {
        if (!own.live) return;
        const TileChannel channel = {a.use_offsets ? offset_of(int(shared.sum[own.slot]), int(shared.counted)) : 0, 0};
        for (int t = own.first; t < a.tokens; t += own.step) {
            int symbol = SKIPPED;
            if (counts(a, own.tile, t)) {
                const int value = load<int16_t>(a.values.at(own.tile, t, own.channel));
                symbol = symbol_of(a.tables->kind, value, channel);
                ctx.atomic_add(&shared.histogram[own.slot][symbol], 1u);
            }
            a.symbols.byte(own.tile, t, own.channel) = uint8_t(symbol);
        }
        if (own.first == 0) a.offsets.byte(own.tile, own.channel) = uint8_t(channel.origin);
    }

    /* Kind exponent: count (distance to the largest exponent, sign). */
    template <class C>
    KVCORE_DEVICE static void count_exponents(const C &ctx, const Args &a, const Share &own, Shared &shared) {
        if (!own.live) return;
        for (int t = own.first; t < a.tokens; t += own.step) {
            const int value = load<uint16_t>(a.values.at(own.tile, t, own.channel));
            const int distance = int(shared.largest[own.slot]) - (value & 0xFF);
            const int cell = 2 * (distance < beyond ? distance : beyond) + (value >> 8 & 1);
            ctx.atomic_add(&shared.histogram[own.slot][cell], 1u);
        }
    }

    KVCORE_DEVICE static uint64_t cheapest(const TableSet &tables, const uint32_t *histogram, int table) {
        uint32_t cost = 0;
        for (int symbol = 0; symbol < SYMBOLS; symbol++) {
            const uint32_t count = histogram[symbol];
            if (count != 0) cost += count * tables.cost[symbol * CLASSES + table];
        }
        return uint64_t(cost) << 16 | uint64_t(table);
    }

    KVCORE_DEVICE static uint64_t cheapest_exponent(const TableSet &tables, const uint32_t *histogram, uint32_t largest,
                                                    int table) {
        uint32_t cost[candidates] = {};
        for (int cell = 0; cell < 2 * (beyond + 1); cell++) {
            const uint32_t count = histogram[cell];
            if (count == 0) continue;
            for (int i = 0; i < candidates; i++) {
                const int symbol = exponent_symbol(cell / 2 + lowest + i / 2, (cell ^ i) & 1);
                cost[i] += count * tables.cost[symbol * CLASSES + table];
            }
        }
        uint64_t best = UINT64_MAX;
        for (int i = 0; i < candidates; i++) {
            const int base = int(largest) + lowest + i / 2;
            const uint64_t mine = uint64_t(cost[i]) << 16 | uint64_t(i) << 8 | uint64_t(table);
            if (base >= 0 && base <= 255 && mine < best) best = mine;
        }
        return best;
    }

    /* The class of a channel; of kind exponent also its base and its symbols. */
    KVCORE_DEVICE static void write(const Args &a, const Share &own, const Shared &shared, int kind) {
        if (!own.live) return;
        const uint64_t best = shared.best[own.slot];
        const int table = int(best & 0xFF), candidate = int(best >> 8 & 0xFF);
        if (own.first == 0) a.classes.byte(own.tile, own.channel) = uint8_t(table | candidate % 2 << 7);
        if (kind != KV_EXPONENT) return;
        const TileChannel channel = {int(shared.largest[own.slot]) + lowest + candidate / 2, candidate % 2};
        if (own.first == 0) a.offsets.byte(own.tile, own.channel) = uint8_t(channel.origin);
        for (int t = own.first; t < a.tokens; t += own.step) {
            const int value = load<uint16_t>(a.values.at(own.tile, t, own.channel));
            a.symbols.byte(own.tile, t, own.channel) = uint8_t(symbol_of(kind, value, channel));
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t choose_classes(Q &q, const kv_tiles_args &a, uint64_t *status) {
    ChooseClasses::Args args = {};
    args.values = tile_array(q, a.values);
    args.skip = tile_array(q, a.skip);
    args.symbols = tile_array(q, a.symbols);
    args.classes = tile_array(q, a.classes);
    args.offsets = tile_array(q, a.offsets);
    args.tables = static_cast<const TableSet *>(a.tables);
    args.status = status;
    args.tiles = a.values.shape[0];
    args.tokens = int32_t(a.values.shape[1]);
    args.width = int32_t(a.values.shape[2]);
    args.use_offsets = a.use_offsets;
    const int64_t blocks = q.grid(args.tiles * ChooseClasses::pieces, 1);
    q.template launch<ChooseClasses>(blocks, KVCORE_MAX_THREADS, sizeof(ChooseClasses::Shared), args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
