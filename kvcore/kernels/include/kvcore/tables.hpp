/* Frequency tables as kernels use them: a `kv_tables_args` turned once, on the host, into one block of plain data.
 *
 * Decoding finds a symbol by a binary search among the starts: of a whole set they fit into the shared memory of every
 * GPU, which lookup tables by slot do not (32 classes of 2^bits bytes and more).
 *
 * Encoding divides by frequencies. With k = ceil(log2 f) and r = ceil(2^(31+k) / f), the quotient of x < 2^31 by f is
 * `x * r >> (31 + k)`: r * f = 2^(31+k) + e with 0 <= e < f <= 2^k, so `x * r / 2^(31+k)` is too large by
 * `x * e / (f * 2^(31+k)) < 1 / f`, which never reaches the next integer. r < 2^32, since f > 2^(k-1) or f = 1.
 * (Granlund and Montgomery 1994, "Division by invariant integers using multiplication".)
 */
#ifndef KVCORE_TABLES_HPP
#define KVCORE_TABLES_HPP

#include "context.hpp"

namespace kvcore {

constexpr int CLASSES = 32;
constexpr int SYMBOLS = 256;
constexpr int ESC = 0; /* the symbol of a value that has none of its own, which then follows as a raw word */

/* How one symbol of one class is encoded. A symbol without frequency has what ESC has. */
struct Coding {
    uint32_t reciprocal; /* of the frequency, see above */
    uint16_t frequency;  /* 1 .. 2^bits */
    uint16_t start : 15; /* of the symbol's interval */
    uint16_t escape : 1; /* the value follows as a word */
};

struct alignas(16) TableSet {
    /* Starts of two neighbouring classes are an odd number of 32-bit words apart: lanes that search at the same place
     * in different classes then read different banks of shared memory. */
    static constexpr int pitch = SYMBOLS + 2;

    uint16_t start[CLASSES * pitch];  /* by class: the starts of the 256 symbols, two unused */
    Coding coding[CLASSES * SYMBOLS]; /* by class, then symbol */
    uint16_t cost[SYMBOLS * CLASSES]; /* by symbol, then class: lanes that compare classes read neighbours */
    int32_t bits;                     /* frequencies sum to 2^bits */
    int32_t kind;                     /* kv_table_kind */
};
static_assert(CLASSES * TableSet::pitch * 2 % 16 == 0, "starts are staged in blocks of 16 bytes");

/* A symbol of a table, and its interval of slots. */
struct Interval {
    uint32_t symbol, start, frequency;
};

/* Find the symbol whose interval holds a slot: the last one that starts at or below it, which is never one without
 * frequency. `starts` are a class' own 256; `total` is 2^bits; slot < total. Reads nothing else, whatever the slot. */
KVCORE_DEVICE Interval find_symbol(const uint16_t *starts, uint32_t slot, uint32_t total) {
    Interval found = {0, 0, 0};
    uint32_t end = total;
    for (uint32_t step = SYMBOLS / 2; step > 0; step /= 2) {
        const uint32_t start = starts[found.symbol + step];
        if (start <= slot) {
            found.symbol += step;
            found.start = start;
        } else {
            end = start;
        }
    }
    found.frequency = end - found.start;
    return found;
}

/* Encode a symbol of frequency f: a state x < f << (31 - bits) becomes `(x / f << bits) + x % f + start`. */
template <class C> KVCORE_DEVICE uint32_t push_symbol(uint32_t x, const Coding &symbol, int bits) {
    const uint32_t f = symbol.frequency;
    const int log2 = 32 - C::leading_zeros(f - 1);
    const uint32_t quotient = uint32_t(uint64_t(x) * symbol.reciprocal >> (31 + log2));
    return (quotient << bits) + (x - quotient * f) + symbol.start;
}

#ifndef KVCORE_DEVICE_ONLY

/* Turn a table set into what kernels use. */
inline void make_tables(const kv_tables_args &a, TableSet &out) {
    for (int table = 0; table < CLASSES; table++) {
        uint16_t *starts = out.start + table * TableSet::pitch;
        for (int symbol = 0; symbol < SYMBOLS; symbol++) {
            const int given = table * SYMBOLS + symbol;
            const int coded = a.frequency[given] != 0 ? given : table * SYMBOLS + ESC;
            const uint32_t f = a.frequency[coded];
            int log2 = 0;
            while (1u << log2 < f) log2++;
            Coding &coding = out.coding[given];
            coding.reciprocal = uint32_t(((uint64_t(1) << (31 + log2)) + f - 1) / f);
            coding.frequency = uint16_t(f);
            coding.start = a.start[coded] & 0x7FFF;
            coding.escape = coded % SYMBOLS == ESC;
            out.cost[symbol * CLASSES + table] = a.cost[given];
            starts[symbol] = uint16_t(a.start[given]);
        }
        starts[SYMBOLS] = starts[SYMBOLS + 1] = 0;
    }
    out.bits = a.bits;
    out.kind = a.kind;
}

/* kvcore_tables_create: return a table set in memory of the backend, to be given back by `Q::release`; null if there is
 * none. */
template <class Q> void *create_tables(const kv_tables_args &a) {
    TableSet made;
    make_tables(a, made);
    return Q::keep(&made, sizeof made);
}

#endif

}  // namespace kvcore

#endif
