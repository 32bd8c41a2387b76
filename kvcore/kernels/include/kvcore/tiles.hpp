/* What the entropy-coding kernels share: symbols and values, the parts of a tile, groups of 32 lanes.
 *
 * The bitstream is defined by the hookspecs of choose_classes, encode_symbols and decode_symbols. Its unit is a tile of
 * up to 256 tokens x 64 channels, coded in 32 lanes: a warp of 32, or half of a warp of 64.
 */
#ifndef KVCORE_TILES_HPP
#define KVCORE_TILES_HPP

#include "tables.hpp"
#include "views.hpp"

namespace kvcore {

constexpr int LANES = 32;
constexpr int STEPS = 2;           /* at most, for each token: channel 32*j + l is lane l of sub-step j */
constexpr uint32_t LOW = 1u << 15; /* the least state; encoding begins with it, decoding ends there */
constexpr int EXPONENTS = 63;      /* z of 0 .. 62 has a symbol in kind exponent */
constexpr int SKIPPED = 128;       /* the symbol of skipped tokens: that of 0 */

enum { CONSTANT = 0, PACKED = 1, RANS = 2, NO_TILE = 3 };

/* --- memory */

/* An array of up to 3 dims; strides are bytes. Elements of more than a byte are read and written by `load`, `store`. */
struct TileArray {
    char *data;
    int64_t stride[3];

    KVCORE_DEVICE char *at(int64_t i, int64_t j = 0, int64_t k = 0) const {
        return data + i * stride[0] + j * stride[1] + k * stride[2];
    }
    KVCORE_DEVICE uint8_t &byte(int64_t i, int64_t j = 0, int64_t k = 0) const {
        return *reinterpret_cast<uint8_t *>(at(i, j, k));
    }
};

/* The bytes of one tile, little-endian. */
struct TileBytes {
    uint8_t *data;
    int64_t stride;

    KVCORE_DEVICE uint8_t &operator[](int i) const { return data[i * stride]; }
    KVCORE_DEVICE uint16_t half(int i) const {
        if (stride == 1) return load<uint16_t>(reinterpret_cast<const char *>(data + i));
        return uint16_t((*this)[i] | (*this)[i + 1] << 8);
    }
    KVCORE_DEVICE uint32_t word(int i) const { return half(i) | uint32_t(half(i + 2)) << 16; }
    KVCORE_DEVICE void put_half(int i, uint16_t value) const {
        if (stride == 1) {
            store<uint16_t>(reinterpret_cast<char *>(data + i), value);
        } else {
            (*this)[i] = uint8_t(value);
            (*this)[i + 1] = uint8_t(value >> 8);
        }
    }
};

/* --- the parts of a tile */

KVCORE_HOST_DEVICE int padded(int bytes) { return (bytes + 3) & ~3; }

/* Where the parts of a tile begin. */
struct TileParts {
    int lanes;           /* that have a channel */
    int side;            /* bytes of offsets or bases */
    int constant_symbol; /* of a constant tile, after its side bytes */
    int states;          /* of a rANS tile, after classes, side bytes and padding */
    int words;           /* of a rANS tile, after the states */

    KVCORE_DEVICE TileParts(int kind, int width, bool use_offsets) {
        lanes = width < LANES ? width : LANES;
        side = use_offsets || kind == KV_EXPONENT ? width : 0;
        constant_symbol = kind == KV_EXPONENT ? 2 * width : side;
        states = padded(width + side);
        words = states + 4 * lanes;
    }

    /* Bytes of a tile of a mode, a multiple of 4; -1 if there is no such tile. */
    KVCORE_DEVICE int size(int mode, int count) const {
        if (mode == CONSTANT) return count == 0 ? padded(constant_symbol + 1) : -1;
        if (mode == PACKED) return padded(4 + 2 * count);
        return mode == RANS ? padded(words + 2 * count) : -1;
    }
};

/* --- symbols */

/* How the values of a channel become symbols. */
struct TileChannel {
    int origin;   /* offset -127 .. 127, or base 0 .. 255 */
    int majority; /* kind exponent: 0 or 1 */
};

KVCORE_DEVICE int exponent_symbol(int z, int minority) {
    return z >= 0 && z < EXPONENTS ? 1 + 2 * z + minority : ESC;
}

/* The symbol of a value; ESC if it has none. */
KVCORE_DEVICE int symbol_of(int kind, int value, const TileChannel &channel) {
    if (kind == KV_INTEGER) {
        const int k = value - channel.origin;
        return k >= -127 && k <= 127 ? k + 128 : ESC;
    }
    if (kind == KV_EXPONENT) {
        return exponent_symbol(channel.origin - (value & 0xFF), (value >> 8 & 1) ^ channel.majority);
    }
    const int magnitude = value & 0x7F;
    if (!(value & 0x80)) return 128 + magnitude;
    return magnitude == 0 ? 1 : magnitude == 127 ? ESC : 128 - magnitude;
}

/* The value of a symbol other than ESC. */
KVCORE_DEVICE int value_of(int kind, int symbol, const TileChannel &channel) {
    if (kind == KV_INTEGER) return symbol - 128 + channel.origin;
    if (kind == KV_EXPONENT) {
        const int z = (symbol - 1) / 2, sign = ((symbol - 1) & 1) ^ channel.majority;
        return sign << 8 | ((channel.origin - z) & 0xFF);
    }
    const int k = symbol - 128;
    return symbol == 1 ? 0x80 : k < 0 ? 0x80 | -k : k;
}

/* A channel from its bytes; majority is bit 7 of the class byte. */
KVCORE_DEVICE TileChannel channel_of(int kind, uint8_t class_byte, uint8_t side_byte) {
    if (kind == KV_EXPONENT) return {side_byte, class_byte >> 7};
    return {int8_t(side_byte), 0};
}

/* Bits of a class byte that no class has. */
KVCORE_DEVICE int no_class(int kind) { return kind == KV_EXPONENT ? 0x60 : 0xE0; }

/* --- groups: 32 neighbouring lanes of a warp */

template <class C> KVCORE_DEVICE int group_lane(const C &ctx) { return ctx.thread() % LANES; }

/* Bit i is that of the group's lane i. All lanes of the warp take part. */
template <class C> KVCORE_DEVICE uint32_t group_ballot(const C &ctx, bool mine) {
    return uint32_t(ctx.ballot(mine) >> (ctx.lane() & ~(LANES - 1)));
}

/* How many of the lanes below, or above, have their bit set. */
template <class C> KVCORE_DEVICE int lanes_below(uint32_t votes, int lane) {
    return C::popcount(votes & ((1u << lane) - 1));
}
template <class C> KVCORE_DEVICE int lanes_above(uint32_t votes, int lane) { return C::popcount(votes >> lane >> 1); }

#ifndef KVCORE_DEVICE_ONLY

template <class Q> TileArray tile_array(Q &q, const kv_array &a) {
    TileArray made = {a.data ? q.template device<char>(a.data) : nullptr, {0, 0, 0}};
    for (int i = 0; i < a.ndim; i++) made.stride[i] = a.stride[i];
    return made;
}

#endif

}  // namespace kvcore

#endif
