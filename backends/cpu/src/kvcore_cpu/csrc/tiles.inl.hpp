// What choosing, encoding and decoding of tiles share: sizes, scratch memory, and tiles in and out of strided arrays.

// Steps of inner loops, whose operands must stay in registers.
#define KVCORE_INLINE __attribute__((always_inline)) inline

constexpr int TILE_TOKENS = 256;
constexpr int TILE_CHANNELS = 64;
constexpr int LANES = 32;
constexpr int ESC = 0;
constexpr int ZERO = 128;
constexpr int32_t LOW = 1 << 15; // the least state, and the one that coding starts from and decoding ends at
constexpr int MAX_WORDS = 65535;
constexpr int TOKEN_WORDS = 2 * TILE_CHANNELS; // at most: a word to renormalise and a value, for each channel

// From one channel to the next in the histograms: a cache line more than there are symbols, since the middles of all
// histograms, which are in use together, would else share a few sets of the cache.
constexpr int HISTOGRAM_STEP = SYMBOLS + 32;

enum Mode { CONSTANT = 0, PACKED = 1, RANS = 2 };

struct Escape {
    uint16_t place; // token * TILE_CHANNELS + channel
    int16_t value;
};

// The memory that one tile is coded in. Rows are TILE_CHANNELS long whatever the width, so that vectors are whole.
struct TileScratch {
    uint8_t symbols[TILE_TOKENS * TILE_CHANNELS];
    int16_t values[TILE_TOKENS * TILE_CHANNELS];
    Escape escapes[TILE_TOKENS * TILE_CHANNELS];
    uint16_t histogram[TILE_CHANNELS * HISTOGRAM_STEP]; // zero between uses
    uint8_t classes[TILE_CHANNELS];
    int8_t offsets[TILE_CHANNELS];
    uint32_t states[LANES];
    // Decoding: a tile's words, then zeros for a token that reads beyond them. Encoding: filled from the end.
    uint16_t words[MAX_WORDS + 2 * TOKEN_WORDS];
};

// Two of them: tiles are decoded in pairs.
TileScratch *tile_scratch() {
    static thread_local Scratch scratch;
    return scratch.take_zeroed<TileScratch>(2);
}

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline size_t tile_capacity(int tokens, int width) {
    return round_up(4 + 2 * static_cast<size_t>(tokens) * static_cast<size_t>(width), 4);
}

inline bool has_side_bytes(const Tables &tables, bool use_offsets) {
    return use_offsets || tables.kind == KV_EXPONENT;
}

// Size of a coded tile; 0 if there is no such mode, or it has no words.
size_t tile_bytes(int mode, int words, int width, const Tables &tables, bool use_offsets) {
    const size_t w = static_cast<size_t>(width), coded = 2 * static_cast<size_t>(words);
    const size_t side = has_side_bytes(tables, use_offsets) ? w : 0;
    if (mode == CONSTANT && words == 0) {
        return round_up(side + (tables.kind == KV_EXPONENT ? w : 0) + 1, 4);
    }
    if (mode == PACKED) {
        return round_up(4 + coded, 4);
    }
    return mode == RANS ? round_up(round_up(w + side, 4) + 4 * std::min<size_t>(LANES, w) + coded, 4) : 0;
}

// Rows of 16-bit values in memory, `step` elements apart.
struct Rows {
    const int16_t *at;
    ptrdiff_t step;

    const int16_t *row(int token) const { return at + token * step; }
};

template <class T>
void copy_in(T *out, ptrdiff_t step, const kv_array &array, int64_t tile, int rows, int columns) {
    const char *base = reinterpret_cast<const char *>(array.data) + tile * array.stride[0];
    for (int r = 0; r < rows; ++r) {
        const char *row = base + r * array.stride[1];
        if (array.stride[2] == sizeof(T)) {
            std::memcpy(out + r * step, row, static_cast<size_t>(columns) * sizeof(T));
            continue;
        }
        for (int c = 0; c < columns; ++c) {
            out[r * step + c] = load<T>(row + c * array.stride[2]);
        }
    }
}

template <class T>
void copy_out(const kv_array &array, int64_t tile, int rows, int columns, const T *from, ptrdiff_t step) {
    char *base = reinterpret_cast<char *>(array.data) + tile * array.stride[0];
    for (int r = 0; r < rows; ++r) {
        char *row = base + r * array.stride[1];
        if (array.stride[2] == sizeof(T)) {
            std::memcpy(row, from + r * step, static_cast<size_t>(columns) * sizeof(T));
            continue;
        }
        for (int c = 0; c < columns; ++c) {
            store<T>(row + c * array.stride[2], from[r * step + c]);
        }
    }
}

template <class T> void line_in(T *out, const kv_array &array, int64_t tile, int count) {
    const char *base = reinterpret_cast<const char *>(array.data) + tile * array.stride[0];
    for (int i = 0; i < count; ++i) {
        out[i] = load<T>(base + i * array.stride[1]);
    }
}

template <class T> void line_out(const kv_array &array, int64_t tile, const T *from, int count) {
    char *base = reinterpret_cast<char *>(array.data) + tile * array.stride[0];
    for (int i = 0; i < count; ++i) {
        store<T>(base + i * array.stride[1], from[i]);
    }
}

// Whether the rows of a tile of 16-bit values can be read and written where they are.
inline bool in_place(const kv_array &values) {
    return values.stride[2] == 2 && (values.data | static_cast<uint64_t>(values.stride[0] | values.stride[1])) % 2 == 0;
}

inline int16_t *place_of(const kv_array &values, int64_t tile) {
    return reinterpret_cast<int16_t *>(values.data + static_cast<uint64_t>(tile * values.stride[0]));
}

// A tile's values: where they are, or copied into the scratch memory.
Rows rows_of(const kv_array &values, int64_t tile, int tokens, int width, TileScratch &scratch) {
    if (in_place(values)) {
        return {place_of(values, tile), values.stride[1] / 2};
    }
    copy_in(scratch.values, TILE_CHANNELS, values, tile, tokens, width);
    return {scratch.values, TILE_CHANNELS};
}

// What coding a tile is worth, in bytes that are moved in the same time.
inline int64_t tile_work(int64_t tokens, int64_t width) { return 8 * 2 * tokens * width; }

// Calls body(tile, scratch) for all tiles of [M, T, W].
template <class F> void for_tiles(const kv_array &values, F &&body) {
    parallel_for(values.shape[0], tile_work(values.shape[1], values.shape[2]), [&](int64_t begin, int64_t end) {
        TileScratch &scratch = *tile_scratch();
        for (int64_t m = begin; m < end; ++m) {
            body(m, scratch);
        }
    });
}
