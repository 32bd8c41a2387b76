// Transposition: element [r][c] of `from` (adjacent in c) goes to [c][r] of `to` (adjacent in r), in tiles.

template <class T>
void transpose_part(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t rows, int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) {
            store(to + c * to_stride + r * sizeof(T), load<T>(from + r * from_stride + c * sizeof(T)));
        }
    }
}

template <class T> struct Tile {
    static constexpr int64_t ROWS = 8, COLUMNS = 8;

    static void transpose(char *to, int64_t to_stride, const char *from, int64_t from_stride) {
        transpose_part<T>(to, to_stride, from, from_stride, ROWS, COLUMNS);
    }
};

#if KVCORE_ISA_AVX2
template <> struct Tile<uint16_t> {
    static constexpr int64_t ROWS = 8, COLUMNS = 16;

    static void transpose(char *to, int64_t to_stride, const char *from, int64_t from_stride) {
        __m256i a[ROWS], b[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i * from_stride));
        }
        shuffle(b, a);
        shuffle(a, b);
        shuffle(b, a);
        for (int i = 0; i < ROWS; ++i) { // columns 0 .. 7 are in the lower lanes, 8 .. 15 in the upper ones
            char *low = to + i * to_stride, *high = low + ROWS * to_stride;
            _mm_storeu_si128(reinterpret_cast<__m128i *>(low), _mm256_castsi256_si128(b[i]));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(high), _mm256_extracti128_si256(b[i], 1));
        }
    }

    // A perfect shuffle of all elements within each lane; three of them are a transposition.
    static void shuffle(__m256i *to, const __m256i *from) {
        for (int i = 0; i < 4; ++i) {
            to[2 * i] = _mm256_unpacklo_epi16(from[i], from[i + 4]);
            to[2 * i + 1] = _mm256_unpackhi_epi16(from[i], from[i + 4]);
        }
    }
};
#endif

template <class T>
void transpose_tiles(
    char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t rows, int64_t columns
) {
    constexpr int64_t HIGH = Tile<T>::ROWS, WIDE = Tile<T>::COLUMNS;
    for (int64_t r = 0; r < rows; r += HIGH) { // what is read is used up at once
        for (int64_t c = 0; c < columns; c += WIDE) {
            char *target = to + c * to_stride + r * sizeof(T);
            const char *source = from + r * from_stride + c * sizeof(T);
            if (r + HIGH <= rows && c + WIDE <= columns) {
                for (int64_t i = 0; i < HIGH; ++i) { // processors do not foresee columns
                    __builtin_prefetch(source + (i + 2 * HIGH) * from_stride, 0, 1);
                }
                Tile<T>::transpose(target, to_stride, source, from_stride);
            } else {
                const int64_t high = std::min(HIGH, rows - r), wide = std::min(WIDE, columns - c);
                transpose_part<T>(target, to_stride, source, from_stride, high, wide);
            }
        }
    }
}

// Where rows of `to` are far apart, they are put together in a buffer first: strides that are powers of two would make
// lines that are not yet full evict one another, and whole lines can be streamed.
template <class T>
void transpose(
    char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t rows, int64_t columns, bool streamed
) {
    constexpr int64_t ROW = 2 * LINE, HIGH = ROW / sizeof(T), WIDE = 128, FAR = 512;
    alignas(LINE) char buffer[WIDE * ROW];
    for (int64_t c0 = 0; c0 < columns; c0 += WIDE) {
        const int64_t wide = std::min(WIDE, columns - c0);
        for (int64_t r0 = 0; r0 < rows; r0 += HIGH) {
            const int64_t high = std::min(HIGH, rows - r0), bytes = high * sizeof(T);
            const char *source = from + r0 * from_stride + c0 * sizeof(T);
            char *target = to + c0 * to_stride + r0 * sizeof(T);
            if (to_stride == bytes && streamed) {
                transpose_tiles<T>(buffer, bytes, source, from_stride, high, wide);
                stream_row(target, buffer, wide * bytes);
            } else if (to_stride >= FAR || to_stride <= -FAR) {
                transpose_tiles<T>(buffer, ROW, source, from_stride, high, wide);
                for (int64_t c = 0; c < wide; ++c) {
                    char *row = target + c * to_stride;
                    streamed ? stream_row(row, buffer + c * ROW, bytes) : copy_row(row, buffer + c * ROW, bytes);
                }
            } else {
                transpose_tiles<T>(target, to_stride, source, from_stride, high, wide);
            }
        }
    }
}
