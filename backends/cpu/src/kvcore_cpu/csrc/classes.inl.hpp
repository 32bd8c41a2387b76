// choose_classes: values to symbols, and the cheapest table for each channel.

// The mean, rounded half to even, held within -127 .. 127; 0 of nothing.
int8_t half_even_mean(int32_t total, int32_t count) {
    if (count == 0) {
        return 0;
    }
    int32_t floor = total / count, rest = total % count;
    if (rest < 0) {
        --floor;
        rest += count;
    }
    if (2 * rest > count || (2 * rest == count && floor % 2 != 0)) {
        ++floor;
    }
    return static_cast<int8_t>(std::min(std::max(floor, -127), 127));
}

void choose_offsets(Rows values, int tokens, int width, const uint8_t *skip, int8_t *offsets) {
    int32_t total[TILE_CHANNELS] = {}, count = 0;
    for (int t = 0; t < tokens; ++t) {
        if (skip != nullptr && skip[t]) {
            continue;
        }
        const int16_t *row = values.row(t);
        for (int c = 0; c < width; ++c) {
            total[c] += row[c];
        }
        ++count;
    }
    for (int c = 0; c < width; ++c) {
        offsets[c] = half_even_mean(total[c], count);
    }
}

void integer_symbols(const int16_t *row, const int16_t *offsets, int width, uint8_t *symbols) {
    for (int c = 0; c < width; ++c) {
        // Held where nothing has a symbol, so that the difference is one of 16 bits.
        const int16_t held = std::min<int16_t>(std::max<int16_t>(row[c], -300), 300);
        const int16_t k = static_cast<int16_t>(held - offsets[c]);
        const bool coded = (k >= -127) & (k <= 127);
        symbols[c] = static_cast<uint8_t>(coded ? k + ZERO : ESC);
    }
}

void code_symbols(const int16_t *row, int width, uint8_t *symbols) {
    for (int c = 0; c < width; ++c) {
        const int magnitude = row[c] & 0x7F;
        const bool negative = row[c] & 0x80;
        const int special = magnitude == 0 ? 1 : magnitude == 127 ? ESC : ZERO - magnitude;
        symbols[c] = static_cast<uint8_t>(negative ? special : ZERO + magnitude);
    }
}

// Adds what `count` symbols cost to each class's sum. Sums of 256 costs of 16 bits fit.
inline void add_costs(uint32_t *__restrict sums, const Tables &tables, int symbol, uint32_t count) {
    const uint16_t *__restrict cost = tables.cost + symbol * CLASSES;
    for (int k = 0; k < CLASSES; ++k) {
        sums[k] += count * cost[k];
    }
}

// The first class of least cost.
inline int cheapest(const uint32_t *sums) {
    uint32_t least = sums[0];
    for (int k = 1; k < CLASSES; ++k) {
        least = std::min(least, sums[k]);
    }
    int k = 0;
    while (sums[k] != least) {
        ++k;
    }
    return k;
}

// Widens the channels' ranges by a row: the number before the lowest symbol, and the highest symbol; ESC apart.
inline void widen_ranges(const uint8_t *__restrict row, uint8_t *__restrict low, uint8_t *__restrict high) {
    for (int c = 0; c < TILE_CHANNELS; ++c) {
        const uint8_t before = static_cast<uint8_t>(row[c] - 1);
        low[c] = before < low[c] ? before : low[c];
        high[c] = row[c] > high[c] ? row[c] : high[c];
    }
}

// The class of each channel, by the histogram of its symbols over the tokens that count.
void choose_tables(const Tables &tables, int tokens, int width, const uint8_t *skip, TileScratch &scratch) {
    uint8_t before_lowest[TILE_CHANNELS], highest[TILE_CHANNELS];
    std::memset(before_lowest, 255, sizeof before_lowest);
    std::memset(highest, 0, sizeof highest);
    for (int t = 0; t < tokens; ++t) {
        if (skip != nullptr && skip[t]) {
            continue;
        }
        const uint8_t *row = scratch.symbols + t * TILE_CHANNELS;
        widen_ranges(row, before_lowest, highest);
        uint16_t *histogram = scratch.histogram;
#pragma GCC unroll 8
        for (int c = 0; c < width; ++c, histogram += HISTOGRAM_STEP) {
            ++histogram[row[c]];
        }
    }
    for (int c = 0; c < width; ++c) {
        uint16_t *histogram = scratch.histogram + c * HISTOGRAM_STEP;
        uint32_t sums[CLASSES] = {};
        add_costs(sums, tables, ESC, histogram[ESC]);
        histogram[ESC] = 0;
        for (int s = before_lowest[c] + 1; s <= highest[c]; ++s) {
            if (histogram[s] != 0) {
                add_costs(sums, tables, s, histogram[s]);
                histogram[s] = 0;
            }
        }
        scratch.classes[c] = static_cast<uint8_t>(cheapest(sums));
    }
}

constexpr int EXPONENT_SPAN = 63;             // z of 0 .. 62 has a symbol
constexpr int FAR = EXPONENT_SPAN + 3;        // from this distance to the largest exponent on, all candidates escape
constexpr int BASE_LEAST = -3, BASE_MOST = 2; // candidates for the base, from the largest exponent

inline uint8_t exponent_symbol(int z, int minority) {
    return static_cast<uint8_t>(z >= 0 && z < EXPONENT_SPAN ? 1 + 2 * z + minority : ESC);
}

// Base, majority and class of each channel: the first of equal costs wins.
void choose_exponents(const Tables &tables, Rows values, int tokens, int width, TileScratch &scratch) {
    for (int c = 0; c < width; ++c) {
        int largest = 0;
        for (int t = 0; t < tokens; ++t) {
            largest = std::max(largest, values.row(t)[c] & 0xFF);
        }
        uint16_t *cells = scratch.histogram; // by distance and sign
        int farthest = 0;
        for (int t = 0; t < tokens; ++t) {
            const int value = values.row(t)[c];
            const int distance = std::min(largest - (value & 0xFF), FAR);
            farthest = std::max(farthest, distance);
            ++cells[2 * distance + (value >> 8 & 1)];
        }
        uint32_t best = UINT32_MAX;
        for (int shift = BASE_LEAST; shift <= BASE_MOST; ++shift) {
            if (largest + shift < 0 || largest + shift > 255) {
                continue;
            }
            for (int majority = 0; majority < 2; ++majority) {
                uint32_t sums[CLASSES] = {};
                for (int cell = 0; cell < 2 * (farthest + 1); ++cell) {
                    const int symbol = exponent_symbol(cell / 2 + shift, (cell % 2) ^ majority);
                    if (cells[cell] != 0) {
                        add_costs(sums, tables, symbol, cells[cell]);
                    }
                }
                const int k = cheapest(sums);
                if (sums[k] >= best) {
                    continue;
                }
                best = sums[k];
                scratch.classes[c] = static_cast<uint8_t>(k | majority << 7);
                scratch.offsets[c] = static_cast<int8_t>(largest + shift);
            }
        }
        std::memset(cells, 0, 2 * (FAR + 1) * sizeof *cells);
    }
    for (int t = 0; t < tokens; ++t) {
        uint8_t *symbols = scratch.symbols + t * TILE_CHANNELS;
        for (int c = 0; c < width; ++c) {
            const int value = values.row(t)[c], base = static_cast<uint8_t>(scratch.offsets[c]);
            symbols[c] = exponent_symbol(base - (value & 0xFF), (value >> 8 & 1) ^ (scratch.classes[c] >> 7));
        }
    }
}

// Fills the scratch memory's symbols, classes and offsets. `skip` may be null.
void choose_tile(const Tables &tables, Rows values, int tokens, int width, const uint8_t *skip, bool use_offsets,
                 TileScratch &scratch) {
    if (tables.kind == KV_EXPONENT) {
        choose_exponents(tables, values, tokens, width, scratch);
        return;
    }
    std::memset(scratch.offsets, 0, sizeof scratch.offsets);
    if (use_offsets) {
        choose_offsets(values, tokens, width, skip, scratch.offsets);
    }
    int16_t offsets[TILE_CHANNELS];
    for (int c = 0; c < TILE_CHANNELS; ++c) {
        offsets[c] = scratch.offsets[c];
    }
    for (int t = 0; t < tokens; ++t) {
        uint8_t *symbols = scratch.symbols + t * TILE_CHANNELS;
        if (skip != nullptr && skip[t]) {
            std::memset(symbols, ZERO, static_cast<size_t>(width));
        } else if (tables.kind == KV_INTEGER) {
            integer_symbols(values.row(t), offsets, width, symbols);
        } else {
            code_symbols(values.row(t), width, symbols);
        }
    }
    choose_tables(tables, tokens, width, skip, scratch);
}

int32_t choose_classes(const kv_tiles_args &args, uint64_t *) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    const int tokens = static_cast<int>(args.values.shape[1]), width = static_cast<int>(args.values.shape[2]);
    for_tiles(args.values, [&](int64_t m, TileScratch &scratch) {
        uint8_t skip[TILE_TOKENS];
        if (args.skip.data != 0) {
            line_in(skip, args.skip, m, tokens);
        }
        const Rows values = rows_of(args.values, m, tokens, width, scratch);
        choose_tile(tables, values, tokens, width, args.skip.data ? skip : nullptr, args.use_offsets != 0, scratch);
        copy_out(args.symbols, m, tokens, width, scratch.symbols, TILE_CHANNELS);
        line_out(args.classes, m, scratch.classes, width);
        line_out(args.offsets, m, scratch.offsets, width);
    });
    return 0;
}
