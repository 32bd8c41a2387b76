// Whole segments of KVS1 in one go: what kvcore.codecs.segments composes from ops, byte for byte.

constexpr int UNROPED = 1, ALL_RAW = 2;
constexpr int LEAST_MULTIPLIER = -8, MOST_MULTIPLIER = 7;
constexpr int MOST_STEP = 255;
constexpr int TARGET_BITS = 14;  // magnitudes are scaled to below 2^14 for the statistics
constexpr int GRID_BITS = 30;
constexpr uint32_t GRID[4] = {1073741824, 1276901417, 1518500250, 1805811302};  // ceil(2^(i/4 + 30))
constexpr float STEP_MANTISSA[8] = {8388608, 9147842, 9975792, 10878679, 11863283, 12937002, 14107901, 15384775};

// Added to a float below 2^22 in magnitude, this rounds it to an integer, half to even, in its low bits.
constexpr float ROUNDER = 0x1.8p23f;

inline int32_t rounded(float x) {
    const float held = x + ROUNDER;
    return load<int32_t>(&held) - 0x4B400000; // the bits of ROUNDER
}

inline float power_of_two(int exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    return load<float>(&bits);
}

// 2^(index/8 - 16), correctly rounded; index of -16 .. 269.
inline float step_of(int index) { return STEP_MANTISSA[index & 7] * power_of_two((index >> 3) - 39); }

template <int DTYPE> float float_of(const char *at) {
    if (DTYPE == KV_F32) {
        return load<float>(at);
    }
    const uint32_t half = load<uint16_t>(at);
    uint32_t bits = half << 16;
    if (DTYPE == KV_F16) {
        const uint32_t magnitude = half & 0x7FFF, sign = (half & 0x8000) << 16;
        const uint32_t scaled = (magnitude << 13) + (magnitude < 0x7C00 ? 112u << 23 : 224u << 23);
        const uint32_t small = (magnitude << 13) + (113u << 23); // a subnormal, and 2^-14 beside it
        const float subnormal = load<float>(&small) - 0x1p-14f;
        bits = sign | (magnitude < 0x0400 ? load<uint32_t>(&subnormal) : scaled);
    }
    return load<float>(&bits);
}

template <int DTYPE> void floats_of(const char *row, int64_t stride, int channels, float *out) {
    constexpr int64_t SIZE = DTYPE == KV_F32 ? 4 : 2;
    if (stride == SIZE) {
        for (int c = 0; c < channels; ++c) {
            out[c] = float_of<DTYPE>(row + c * SIZE);
        }
        return;
    }
    for (int c = 0; c < channels; ++c) {
        out[c] = float_of<DTYPE>(row + c * stride);
    }
}

void read_row(const kv_array &x, int64_t s, int64_t t, float *out) {
    const char *row = reinterpret_cast<const char *>(x.data) + s * x.stride[0] + t * x.stride[1];
    const int channels = static_cast<int>(x.shape[2]);
    if (x.dtype == KV_BF16) {
        floats_of<KV_BF16>(row, x.stride[2], channels, out);
    } else if (x.dtype == KV_F16) {
        floats_of<KV_F16>(row, x.stride[2], channels, out);
    } else {
        floats_of<KV_F32>(row, x.stride[2], channels, out);
    }
}

// What one segment is encoded with. Rows of `x`, `y` and `largest` are valid where `skip` is 0; of `y` everywhere.
struct SegmentScratch {
    int tokens, channels, kept;
    float *x;       // [T, C]
    int16_t *y;     // [T, C]
    int32_t *sums;  // [C]
    uint8_t skip[TILE_TOKENS];
    float largest[TILE_TOKENS];
    int64_t squares[TILE_TOKENS];
    int multipliers[TILE_TOKENS];

    SegmentScratch(int tokens_, int channels_) : tokens(tokens_), channels(channels_), kept(0) {
        static thread_local Scratch memory;
        const int64_t size = int64_t{tokens} * channels;
        x = reinterpret_cast<float *>(memory.take<char>(size * 6 + channels * 4));
        sums = reinterpret_cast<int32_t *>(x + size);
        y = reinterpret_cast<int16_t *>(sums + channels);
    }

    const float *x_row(int t) const { return x + int64_t{t} * channels; }
    int16_t *y_row(int t) const { return y + int64_t{t} * channels; }
};

float largest_magnitude(const float *row, int channels) {
    uint32_t most = 0;
    for (int c = 0; c < channels; ++c) {
        most = std::max(most, load<uint32_t>(row + c) & 0x7FFFFFFF); // ordered like the magnitudes, NaN last
    }
    return load<float>(&most);
}

// Adds a row, scaled by scale[0] * scale[1] and rounded, to the channels' sums; returns its sum of squares.
int64_t add_row(const float *row, int channels, const float *scale, int32_t *sums) {
    constexpr int PIECE_CHANNELS = 4096; // halves of that many squares sum up to less than 2^32
    int64_t squares = 0;
    for (int first = 0; first < channels; first += PIECE_CHANNELS) {
        const int last = std::min(first + PIECE_CHANNELS, channels);
        uint32_t low = 0, high = 0;
        for (int c = first; c < last; ++c) {
            const int32_t v = rounded(row[c] * scale[0] * scale[1]);
            sums[c] += v;
            const uint32_t square = static_cast<uint32_t>(v * v);
            low += square & 0xFFFF;
            high += square >> 16;
        }
        squares += (int64_t{high} << 16) + low;
    }
    return squares;
}

using Wide = unsigned __int128;

int bit_length(Wide n) {
    const uint64_t high = static_cast<uint64_t>(n >> 64), low = static_cast<uint64_t>(n);
    return high ? 128 - __builtin_clzll(high) : low ? 64 - __builtin_clzll(low) : 0;
}

// The least j >= 0 with a root mean square about the channel means of at most 2^(j/8).
int rms_exponent(uint64_t spread, int tokens, int channels) {
    Wide left = spread, right = static_cast<Wide>(tokens) * tokens * channels;
    if (tokens < 32) {
        left *= tokens;
        right *= tokens - 1;
    }
    left <<= GRID_BITS;
    int j = std::max(0, 4 * (bit_length(left) - bit_length(right) - GRID_BITS - 2));
    while (left > right * GRID[j % 4] << j / 4) {
        ++j;
    }
    return j;
}

// The largest m of -8 .. 7 with squares >= C * 2^(j/4 + m - 1/2), for each token that counts.
void choose_multipliers(SegmentScratch &segment, int j) {
    constexpr int STEPS = MOST_MULTIPLIER - LEAST_MULTIPLIER;
    int64_t thresholds[STEPS];
    for (int m = 0; m < STEPS; ++m) {
        const int i = j + 4 * (LEAST_MULTIPLIER + 1 + m) - 2;
        const int64_t exact = int64_t{segment.channels} * GRID[i & 3];
        const int shift = GRID_BITS - (i >> 2);
        thresholds[m] = shift >= 0 ? -(-exact >> shift) : exact << -shift;
    }
    for (int t = 0; t < segment.tokens; ++t) {
        int reached = 0;
        for (int m = 0; m < STEPS; ++m) {
            reached += thresholds[m] <= segment.squares[t];
        }
        segment.multipliers[t] = segment.skip[t] ? 0 : LEAST_MULTIPLIER + reached;
    }
}

// The least k from `wanted` on for which every code fits 16 bits; -1 if there is none.
int fitting_step(const SegmentScratch &segment, int wanted) {
    for (int k = std::max(wanted, 0); k <= MOST_STEP; ++k) {
        bool over = false;
        for (int t = 0; t < segment.tokens; ++t) {
            const float largest = segment.skip[t] ? 0 : segment.largest[t];
            over |= largest * (1.0f / step_of(k + 2 * segment.multipliers[t])) >= 32767.5f;
        }
        if (!over) {
            return k;
        }
    }
    return -1;
}

// Chooses the step and the multipliers; -1 if no step is coarse enough.
int choose_steps(SegmentScratch &segment, const kv_encode_segments_args &args) {
    float top = 0;
    for (int t = 0; t < segment.tokens; ++t) {
        top = segment.skip[t] ? top : std::max(top, segment.largest[t]);
    }
    if (top == 0) {
        std::fill_n(segment.multipliers, segment.tokens, 0);
        return 0;
    }
    int exponent;
    std::frexp(top, &exponent);
    exponent = TARGET_BITS - exponent;
    // Two factors: the power that subnormals are scaled by is none of float32. Exact where it matters: a product
    // that is subnormal rounds to 0.
    const int first = std::min(exponent, 127);
    const float scale[2] = {power_of_two(first), power_of_two(exponent - first)};
    std::fill_n(segment.sums, segment.channels, 0);
    int64_t all_squares = 0;
    for (int t = 0; t < segment.tokens; ++t) {
        segment.squares[t] = segment.skip[t] ? 0 : add_row(segment.x_row(t), segment.channels, scale, segment.sums);
        all_squares += segment.squares[t];
    }
    // T times a channel's sum of squares, less its sum squared, over all channels: below 2^63 up to 2^18 channels.
    uint64_t spread = static_cast<uint64_t>(segment.kept) * static_cast<uint64_t>(all_squares);
    for (int c = 0; c < segment.channels; ++c) {
        spread -= static_cast<uint64_t>(int64_t{segment.sums[c]} * segment.sums[c]);
    }
    const int j = rms_exponent(spread, segment.kept, segment.channels);
    choose_multipliers(segment, j);
    const int level = j - 8 * exponent;
    return fitting_step(segment, 128 + args.constant + (args.has_level ? (level + args.level + 1) >> 1 : level));
}

void quantise_rows(SegmentScratch &segment, int k) {
    for (int t = 0; t < segment.tokens; ++t) {
        int16_t *y = segment.y_row(t);
        if (segment.skip[t]) {
            std::fill_n(y, segment.channels, 0);
            continue;
        }
        const float *x = segment.x_row(t), inverse = 1.0f / step_of(k + 2 * segment.multipliers[t]);
        for (int c = 0; c < segment.channels; ++c) {
            y[c] = static_cast<int16_t>(rounded(x[c] * inverse));
        }
    }
}

void put_row(TileWriter &writer, const kv_array &source, int64_t s, int64_t t, int itemsize) {
    const char *row = reinterpret_cast<const char *>(source.data) + s * source.stride[0] + t * source.stride[1];
    for (int64_t c = 0; c < source.shape[2]; ++c) {
        writer.put(row + c * source.stride[2], static_cast<size_t>(itemsize));
    }
}

// Encodes segment s; what cannot be is reported.
void encode_segment(const kv_encode_segments_args &args, int64_t s, TileScratch &scratch, uint64_t *status) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    const int tokens = static_cast<int>(args.x.shape[1]), channels = static_cast<int>(args.x.shape[2]);
    const int itemsize = args.source.dtype == KV_F32 ? 4 : 2, raw = args.raw_counts[s];
    const uint8_t *rows = args.raw_rows + s * KV_MAX_RAW_ROWS;
    uint8_t *out = args.out + s * args.capacity;
    const uint8_t flags = args.unroped ? UNROPED : 0;
    TileWriter writer{out};
    if (tokens <= KV_MAX_RAW_ROWS || tokens - raw < 2) {
        const uint8_t head[4] = {0, static_cast<uint8_t>(flags | ALL_RAW), static_cast<uint8_t>(tokens), 0};
        writer.put(head, sizeof head);
        for (int t = 0; t < tokens; ++t) {
            put_row(writer, args.source, s, t, itemsize);
        }
        writer.pad(out);
        args.nbytes[s] = writer.at - out;
        return;
    }
    SegmentScratch segment(tokens, channels);
    segment.kept = tokens - raw;
    std::memset(segment.skip, 0, sizeof segment.skip);
    for (int i = 0; i < raw; ++i) {
        segment.skip[rows[i]] = 1;
    }
    for (int t = 0; t < tokens; ++t) {
        if (segment.skip[t]) {
            continue;
        }
        float *row = segment.x + int64_t{t} * channels;
        read_row(args.x, s, t, row);
        segment.largest[t] = largest_magnitude(row, channels);
        if (!(segment.largest[t] <= std::numeric_limits<float>::max())) {
            report(status, s * tokens + t, KV_NONFINITE);
            return;
        }
    }
    const int k = choose_steps(segment, args);
    if (k < 0) {
        report(status, args.x.shape[0] * tokens + s, KV_RANGE);
        return;
    }
    quantise_rows(segment, k);

    const uint8_t head[4] = {static_cast<uint8_t>(k), flags, static_cast<uint8_t>(raw), 0};
    writer.put(head, sizeof head);
    writer.put(rows, static_cast<size_t>(raw));
    for (int t = 0; t < tokens; t += 2) {
        const int low = segment.multipliers[t] - LEAST_MULTIPLIER;
        const int high = t + 1 < tokens ? segment.multipliers[t + 1] - LEAST_MULTIPLIER : 0;
        *writer.at++ = static_cast<uint8_t>(low | high << 4);
    }
    for (int i = 0; i < raw; ++i) {
        put_row(writer, args.source, s, rows[i], itemsize);
    }
    writer.pad(out);
    int64_t tile = s * ((channels + TILE_CHANNELS - 1) / TILE_CHANNELS);
    for (int first = 0; first < channels; first += TILE_CHANNELS, ++tile) {
        const int width = std::min(TILE_CHANNELS, channels - first);
        const Rows values{segment.y + first, channels};
        choose_tile(tables, values, tokens, width, raw ? segment.skip : nullptr, true, scratch);
        const Coded coded = encode_tile(tables, values, tokens, width, true, scratch, writer.at);
        args.modes[tile] = static_cast<uint8_t>(coded.mode);
        args.words[tile] = static_cast<uint16_t>(coded.words);
        writer.at += coded.nbytes;
    }
    args.nbytes[s] = writer.at - out;
}

int32_t encode_segments(const kv_encode_segments_args &args, uint64_t *status) {
    parallel_for(args.x.shape[0], tile_work(args.x.shape[1], args.x.shape[2]), [&](int64_t begin, int64_t end) {
        TileScratch &scratch = *tile_scratch();
        for (int64_t s = begin; s < end; ++s) {
            encode_segment(args, s, scratch, status);
        }
    });
    return 0;
}
