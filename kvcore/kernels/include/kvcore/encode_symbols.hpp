/* encode_symbols: values and their symbols to tiles, each in the smallest of the modes constant, packed and rANS.
 *
 * A group of 32 lanes encodes a tile. Sizes of the modes constant and packed follow from a look at all values. rANS
 * (Duda 2013, "Asymmetric numeral systems"; lanes interleaved after Giesen 2014, "Interleaved entropy coders") runs
 * backwards: in each sub-step ballots say which lanes push a word, and the number of those above a lane says which word
 * is its own. The words go to scratch memory, no more than the smallest tile can have, and in reverse from there to the
 * payload.
 */
#ifndef KVCORE_ENCODE_SYMBOLS_HPP
#define KVCORE_ENCODE_SYMBOLS_HPP

#include "tiles.hpp"

namespace kvcore {

struct EncodeSymbols {
    struct Args {
        TileArray values;       /* int16 [tiles, tokens, width] */
        TileArray symbols;      /* uint8 [tiles, tokens, width] */
        TileArray classes;      /* uint8 [tiles, width] */
        TileArray offsets;      /* int8 [tiles, width] */
        TileArray payload;      /* uint8 [tiles, capacity]; capacity holds any packed tile */
        TileArray modes;        /* uint8 [tiles] */
        TileArray words;        /* uint16 [tiles] */
        const TableSet *tables; /* [1] */
        uint16_t *scratch;      /* [groups of the launch, tokens * width] */
        const uint64_t *status; /* [1] */
        int64_t tiles;
        int32_t tokens, width, use_offsets, reserved;
    };
    static constexpr const char *name = "encode_symbols";
    static constexpr bool flat = false;

    /* A tile at hand, and its smallest form so far. */
    struct Tile {
        int64_t index;
        int mode, words, size; /* size: bytes of that form */
        int least, bits;       /* of mode packed */
        uint32_t state;        /* of mode rANS, the lane's */
        TileBytes bytes;
    };

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        const TileParts parts(a.tables->kind, a.width, a.use_offsets);
        const int groups = ctx.threads() / LANES, group = ctx.thread() / LANES;
        uint16_t *pushed = a.scratch + (ctx.block() * groups + group) * a.tokens * a.width;
        for (int64_t first = ctx.block() * groups; first < a.tiles; first += ctx.blocks() * groups) {
            const bool mine = first + group < a.tiles;
            Tile tile = survey(ctx, a, parts, mine ? first + group : first);
            rans(ctx, a, parts, tile, pushed);
            ctx.barrier(); /* all words have been pushed */
            if (mine) write(ctx, a, parts, tile, pushed);
            ctx.barrier(); /* all have been read */
        }
    }

    /* Find the smaller of the modes constant and packed. */
    template <class C>
    KVCORE_DEVICE static Tile survey(const C &ctx, const Args &a, const TileParts &parts, int64_t index) {
        const int count = a.tokens * a.width, symbol = a.symbols.byte(index);
        int least = 32767, most = -32768;
        bool same = symbol != ESC;
        for (int i = group_lane(ctx); i < count; i += LANES) {
            const int t = i / a.width, c = i % a.width, value = load<int16_t>(a.values.at(index, t, c));
            least = value < least ? value : least;
            most = value > most ? value : most;
            same &= a.symbols.byte(index, t, c) == symbol;
        }
        for (int mask = 1; mask < LANES; mask *= 2) {
            const int other_least = ctx.shuffle_xor(least, mask), other_most = ctx.shuffle_xor(most, mask);
            least = other_least < least ? other_least : least;
            most = other_most > most ? other_most : most;
        }
        const bool constant = group_ballot(ctx, same) == 0xFFFFFFFFu;
        const int bits = LANES - C::leading_zeros(uint32_t(most - least)), words = (count * bits + 15) / 16;
        Tile tile = {index, PACKED, words, parts.size(PACKED, words), least, bits, LOW,
                     {&a.payload.byte(index), a.payload.stride[1]}};
        if (constant && parts.size(CONSTANT, 0) <= tile.size) {
            tile.mode = CONSTANT;
            tile.words = 0;
            tile.size = parts.size(CONSTANT, 0);
        }
        return tile;
    }

    /* Encode in mode rANS, if that can be smaller; `pushed` (at least tokens * width) receives the words. */
    template <class C>
    KVCORE_DEVICE static void rans(const C &ctx, const Args &a, const TileParts &parts, Tile &tile, uint16_t *pushed) {
        if (!ctx.ballot(parts.size(RANS, 0) < tile.size)) return;
        const int lane = group_lane(ctx), bits = a.tables->bits;
        const int kept = (tile.size - parts.words) / 2; /* words: with more it is not the smallest; below 0 none */
        int table[STEPS];
        for (int j = 0; j < STEPS; j++) {
            const int c = j * LANES + lane;
            table[j] = (c < a.width ? a.classes.byte(tile.index, c) % CLASSES : 0) * SYMBOLS;
        }
        uint32_t x = LOW;
        int count = 0;
        for (int t = a.tokens - 1; t >= 0; t--) {
            for (int j = STEPS - 1; j >= 0; j--) {
                if (j * LANES >= a.width) continue;
                const int c = j * LANES + lane;
                const bool live = c < a.width;
                const Coding coding = a.tables->coding[table[j] + (live ? a.symbols.byte(tile.index, t, c) : ESC)];
                const bool escaped = live && coding.escape;
                const uint32_t escapes = group_ballot(ctx, escaped);
                const int at = count + lanes_above<C>(escapes, lane);
                if (escaped && at < kept) pushed[at] = load<uint16_t>(a.values.at(tile.index, t, c));
                count += C::popcount(escapes);
                const bool full = live && x >= uint32_t(coding.frequency) << (31 - bits);
                const uint32_t fulls = group_ballot(ctx, full);
                if (full) {
                    const int to = count + lanes_above<C>(fulls, lane);
                    if (to < kept) pushed[to] = uint16_t(x);
                    x >>= 16;
                }
                count += C::popcount(fulls);
                if (live) x = push_symbol<C>(x, coding, bits);
            }
        }
        const int size = parts.size(RANS, count);
        if (size >= tile.size) return;
        tile.mode = RANS;
        tile.words = count;
        tile.size = size;
        tile.state = x;
    }

    template <class C>
    KVCORE_DEVICE static void write(const C &ctx, const Args &a, const TileParts &parts, const Tile &tile,
                                    const uint16_t *pushed) {
        const int lane = group_lane(ctx);
        if (lane == 0) {
            a.modes.byte(tile.index) = uint8_t(tile.mode);
            store<uint16_t>(a.words.at(tile.index), uint16_t(tile.words));
        }
        if (tile.mode == PACKED) {
            write_packed(ctx, a, tile);
            return;
        }
        const bool rans = tile.mode == RANS;
        const int side = rans ? a.width : parts.constant_symbol - parts.side; /* where the side bytes begin */
        const int head_end = rans ? parts.states : tile.size;
        for (int i = lane; i < head_end; i += LANES) {
            uint8_t byte = 0;
            if (i < side) {
                byte = a.classes.byte(tile.index, i);
            } else if (i < side + parts.side) {
                byte = a.offsets.byte(tile.index, i - side);
            } else if (!rans && i == parts.constant_symbol) {
                byte = a.symbols.byte(tile.index);
            }
            tile.bytes[i] = byte;
        }
        if (!rans) return;
        if (lane < parts.lanes) {
            tile.bytes.put_half(parts.states + 4 * lane, uint16_t(tile.state));
            tile.bytes.put_half(parts.states + 4 * lane + 2, uint16_t(tile.state >> 16));
        }
        for (int i = lane; parts.words + 2 * i < tile.size; i += LANES) {
            tile.bytes.put_half(parts.words + 2 * i, i < tile.words ? pushed[tile.words - 1 - i] : uint16_t(0));
        }
    }

    template <class C> KVCORE_DEVICE static void write_packed(const C &ctx, const Args &a, const Tile &tile) {
        const int lane = group_lane(ctx), count = a.tokens * a.width;
        if (lane == 0) {
            tile.bytes.put_half(0, uint16_t(tile.least));
            tile.bytes.put_half(2, uint16_t(tile.bits));
        }
        for (int word = lane; 4 + 2 * word < tile.size; word += LANES) {
            /* Values of which bits lie in this word, from the one that its first bit belongs to. */
            uint32_t packed = 0;
            for (int i = tile.bits ? 16 * word / tile.bits : count; i < count && i * tile.bits < 16 * word + 16; i++) {
                const int value = load<int16_t>(a.values.at(tile.index, i / a.width, i % a.width));
                const int shift = i * tile.bits - 16 * word; /* -15 .. 15 */
                const uint32_t rest = uint32_t(value - tile.least);
                packed |= shift < 0 ? rest >> -shift : rest << shift;
            }
            tile.bytes.put_half(4 + 2 * word, uint16_t(packed));
        }
    }
};

#ifndef KVCORE_DEVICE_ONLY

template <class Q> int32_t encode_symbols(Q &q, const kv_tiles_args &a, uint64_t *status) {
    if (Q::warp_width < LANES) return q.fail(KV_FAIL_UNSUPPORTED, "tiles are encoded by groups of 32 lanes");
    constexpr int threads = 128, groups = threads / LANES;
    EncodeSymbols::Args args = {};
    args.values = tile_array(q, a.values);
    args.symbols = tile_array(q, a.symbols);
    args.classes = tile_array(q, a.classes);
    args.offsets = tile_array(q, a.offsets);
    args.payload = tile_array(q, a.payload);
    args.modes = tile_array(q, a.modes);
    args.words = tile_array(q, a.words);
    args.tables = static_cast<const TableSet *>(a.tables);
    args.status = status;
    args.tiles = a.values.shape[0];
    args.tokens = int32_t(a.values.shape[1]);
    args.width = int32_t(a.values.shape[2]);
    args.use_offsets = a.use_offsets;
    const int64_t blocks = q.grid(args.tiles, groups);
    args.scratch = static_cast<uint16_t *>(q.scratch(blocks * groups * args.tokens * args.width * 2));
    q.template launch<EncodeSymbols>(blocks, threads, 0, args);
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
