/* decode_symbols: tiles of modes constant, packed and rANS to values.
 *
 * A group of 32 lanes decodes a tile. In mode rANS the lanes share one stream of words (Giesen 2014, "Interleaved
 * entropy coders"): in each sub-step a ballot says which lanes need a word, and the number of those below a lane says
 * which word is its own. States are those of range ANS (Duda 2013, "Asymmetric numeral systems").
 *
 * The bytes may be anything. A tile that is larger than its row of the payload is not looked at; words are read only
 * below the tile's word count, tables only at masked indices, and every loop is bounded by tokens and channels. So a
 * lane that finds something wrong reports it and goes on; nothing but `values` is written.
 */
#ifndef KVCORE_DECODE_SYMBOLS_HPP
#define KVCORE_DECODE_SYMBOLS_HPP

#include "tiles.hpp"

namespace kvcore {

/* The decoding kernel reports to the status word while it runs, so what was there before is put aside: were some tiles
 * left out because of others, the least error would depend on the order of evaluation. */
struct KeepStatus {
    struct Args {
        const uint64_t *status; /* [1] */
        uint64_t *kept;         /* [1] */
    };
    static constexpr const char *name = "keep_status";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        if (ctx.block() == 0 && ctx.thread() == 0) *a.kept = *a.status;
    }
};

struct DecodeSymbols {
    struct Args {
        TileArray payload;      /* uint8 [tiles, capacity] */
        TileArray modes;        /* uint8 [tiles] */
        TileArray words;        /* uint16 [tiles] */
        TileArray values;       /* int16 [tiles, tokens, width] */
        const TableSet *tables; /* [1] */
        const uint64_t *kept;   /* [1]: the status before this op */
        uint64_t *status;       /* [1] */
        int64_t tiles, capacity;
        int32_t tokens, width, use_offsets, reserved;
    };
    static constexpr const char *name = "decode_symbols";
    static constexpr bool flat = false;
    static constexpr int shared_bytes = CLASSES * TableSet::pitch * 2;

    /* A tile at hand. */
    struct Tile {
        int64_t index;
        int mode, words;
        TileBytes bytes; /* parts.size(mode, words) of them */
    };

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.kept);
        uint16_t *starts = ctx.template shared<uint16_t>();
        stage(ctx, a.tables->start, starts);
        ctx.barrier();
        const TileParts parts(a.tables->kind, a.width, a.use_offsets);
        const int groups = ctx.threads() / LANES;
        for (int64_t first = ctx.block() * groups; first < a.tiles; first += ctx.blocks() * groups) {
            const Tile tile = open(ctx, a, parts, first + ctx.thread() / LANES);
            if (tile.mode == CONSTANT) constant(ctx, a, parts, tile);
            if (tile.mode == PACKED) packed(ctx, a, tile);
            if (ctx.ballot(tile.mode == RANS)) rans(ctx, a, parts, tile, starts);
        }
    }

    /* Copy the starts of all classes to shared memory. */
    template <class C> KVCORE_DEVICE static void stage(const C &ctx, const uint16_t *from, uint16_t *to) {
        struct alignas(16) Block {
            uint32_t part[4];
        };
        for (int i = ctx.thread(); i < shared_bytes / 16; i += ctx.threads()) {
            reinterpret_cast<Block *>(to)[i] = reinterpret_cast<const Block *>(from)[i];
        }
    }

    /* Return a tile, with mode NO_TILE if there is none or it cannot be one. */
    template <class C>
    KVCORE_DEVICE static Tile open(const C &ctx, const Args &a, const TileParts &parts, int64_t index) {
        Tile tile = {index, NO_TILE, 0, {nullptr, 0}};
        if (index >= a.tiles) return tile;
        const int mode = a.modes.byte(index), words = load<uint16_t>(a.words.at(index));
        const int size = parts.size(mode, words);
        if (size < 0 || size > a.capacity) {
            ctx.report(a.status, KV_TILE_SIZE, index);
            return tile;
        }
        tile.mode = mode;
        tile.words = words;
        tile.bytes = {&a.payload.byte(index), a.payload.stride[1]};
        return tile;
    }

    template <class C>
    KVCORE_DEVICE static void constant(const C &ctx, const Args &a, const TileParts &parts, const Tile &tile) {
        const int kind = a.tables->kind, symbol = tile.bytes[parts.constant_symbol];
        if (symbol == ESC) ctx.report(a.status, KV_TILE_VALUE, tile.index);
        for (int i = parts.constant_symbol + 1; i < parts.size(CONSTANT, 0); i++) {
            if (tile.bytes[i] != 0) ctx.report(a.status, KV_TILE_PADDING, tile.index);
        }
        for (int c = group_lane(ctx); c < a.width; c += LANES) {
            const uint8_t class_byte = kind == KV_EXPONENT ? tile.bytes[c] : uint8_t(0);
            const uint8_t side_byte = parts.side ? tile.bytes[parts.constant_symbol - parts.side + c] : uint8_t(0);
            if (class_byte & no_class(kind)) ctx.report(a.status, KV_TILE_CLASS, tile.index);
            const int value = value_of(kind, symbol, channel_of(kind, class_byte, side_byte));
            for (int t = 0; t < a.tokens; t++) store<uint16_t>(a.values.at(tile.index, t, c), uint16_t(value));
        }
    }

    template <class C> KVCORE_DEVICE static void packed(const C &ctx, const Args &a, const Tile &tile) {
        const int least = int16_t(tile.bytes.half(0)), bits = tile.bytes[2], count = a.tokens * a.width;
        if (bits > 16 || (count * bits + 15) / 16 != tile.words) {
            ctx.report(a.status, bits > 16 ? KV_TILE_VALUE : KV_TILE_WORDS, tile.index);
            return;
        }
        const int unused = 16 * tile.words - count * bits; /* bits that fill the last word up */
        bool wrong = tile.bytes[3] != 0;
        if (unused > 0) wrong |= tile.bytes.half(2 + 2 * tile.words) >> (16 - unused) != 0;
        if (tile.words % 2 != 0) wrong |= tile.bytes.half(4 + 2 * tile.words) != 0;
        if (wrong) ctx.report(a.status, KV_TILE_PADDING, tile.index);
        const uint32_t mask = (1u << bits) - 1;
        for (int i = group_lane(ctx); i < count; i += LANES) {
            const int word = i * bits / 16, shift = i * bits % 16;
            uint32_t rest = 0;
            if (bits > 0) rest = tile.bytes.half(4 + 2 * word);
            if (shift + bits > 16) rest |= uint32_t(tile.bytes.half(6 + 2 * word)) << 16;
            const int value = least + int(rest >> shift & mask);
            if (value > 32767) ctx.report(a.status, KV_TILE_VALUE, tile.index);
            store<uint16_t>(a.values.at(tile.index, i / a.width, i % a.width), uint16_t(value));
        }
    }

    /* Lanes whose tile has another mode take part in the ballots only. */
    template <class C>
    KVCORE_DEVICE static void rans(const C &ctx, const Args &a, const TileParts &parts, const Tile &tile,
                                   const uint16_t *starts) {
        const int kind = a.tables->kind, bits = a.tables->bits, lane = group_lane(ctx);
        const uint32_t total = 1u << bits;
        const bool mine = tile.mode == RANS;
        bool live[STEPS];
        TileChannel channel[STEPS] = {};
        const uint16_t *table[STEPS];
        for (int j = 0; j < STEPS; j++) {
            const int c = j * LANES + lane;
            live[j] = mine && c < a.width;
            table[j] = starts;
            if (!live[j]) continue;
            const uint8_t class_byte = tile.bytes[c];
            if (class_byte & no_class(kind)) ctx.report(a.status, KV_TILE_CLASS, tile.index);
            channel[j] = channel_of(kind, class_byte, parts.side ? tile.bytes[a.width + c] : uint8_t(0));
            table[j] = starts + class_byte % CLASSES * TableSet::pitch;
        }
        uint32_t x = LOW;
        if (live[0]) {
            x = tile.bytes.word(parts.states + 4 * lane);
            if (x < LOW || x >> 31) ctx.report(a.status, KV_TILE_STATE, tile.index);
        }
        if (mine) check_padding(ctx, a, parts, tile);
        int read = 0;
        for (int t = 0; t < a.tokens; t++) {
            for (int j = 0; j < STEPS; j++) {
                if (j * LANES >= a.width) break;
                const uint32_t slot = x & (total - 1);
                const Interval found = find_symbol(table[j], slot, total);
                uint32_t next = found.frequency * (x >> bits) + slot - found.start;
                const bool low = live[j] && next < LOW;
                const uint32_t lows = group_ballot(ctx, low);
                if (low) next = next << 16 | take(parts, tile, read + lanes_below<C>(lows, lane));
                read += C::popcount(lows);
                const bool escaped = live[j] && found.symbol == ESC;
                const uint32_t escapes = group_ballot(ctx, escaped);
                if (live[j]) {
                    x = next;
                    const uint16_t value = escaped ? take(parts, tile, read + lanes_below<C>(escapes, lane))
                                                   : uint16_t(value_of(kind, int(found.symbol), channel[j]));
                    store<uint16_t>(a.values.at(tile.index, t, j * LANES + lane), value);
                }
                read += C::popcount(escapes);
            }
        }
        if (live[0] && x != LOW) ctx.report(a.status, KV_TILE_STATE, tile.index);
        if (mine && read != tile.words) ctx.report(a.status, KV_TILE_WORDS, tile.index);
    }

    /* Word `i` of a rANS tile; beyond its words 0, which is noticed at the end. */
    KVCORE_DEVICE static uint16_t take(const TileParts &parts, const Tile &tile, int i) {
        return i < tile.words ? tile.bytes.half(parts.words + 2 * i) : uint16_t(0);
    }

    template <class C>
    KVCORE_DEVICE static void check_padding(const C &ctx, const Args &a, const TileParts &parts, const Tile &tile) {
        bool wrong = tile.words % 2 != 0 && tile.bytes.half(parts.words + 2 * tile.words) != 0;
        for (int i = a.width + parts.side; i < parts.states; i++) wrong |= tile.bytes[i] != 0;
        if (wrong) ctx.report(a.status, KV_TILE_PADDING, tile.index);
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t decode_symbols(Q &q, const kv_tiles_args &a, uint64_t *status) {
    if (Q::warp_width < LANES) return q.fail(KV_FAIL_UNSUPPORTED, "tiles are decoded by groups of 32 lanes");
    DecodeSymbols::Args args = {};
    args.payload = tile_array(q, a.payload);
    args.modes = tile_array(q, a.modes);
    args.words = tile_array(q, a.words);
    args.values = tile_array(q, a.values);
    args.tables = static_cast<const TableSet *>(a.tables);
    uint64_t *const kept = static_cast<uint64_t *>(q.scratch(sizeof(uint64_t)));
    args.kept = kept;
    args.status = status;
    args.tiles = a.values.shape[0];
    args.capacity = a.payload.shape[1];
    args.tokens = int32_t(a.values.shape[1]);
    args.width = int32_t(a.values.shape[2]);
    args.use_offsets = a.use_offsets;
    constexpr int threads = 128;
    q.template launch<KeepStatus>(1, 64, 0, {status, kept});
    q.template launch<DecodeSymbols>(q.grid(args.tiles, threads / LANES), threads, DecodeSymbols::shared_bytes, args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
