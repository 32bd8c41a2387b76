// The rANS part of encoding: from `scratch.symbols` and `scratch.classes` to `scratch.states` and the words, which fill
// `scratch.words` from its end.

struct RansInput {
    const Tables &tables;
    Rows values;
    int tokens, width;
};

uint16_t *end_of_words(TileScratch &scratch) { return scratch.words + std::size(scratch.words); }

const uint16_t *encode_rans_scalar(const RansInput &in, TileScratch &scratch) {
    uint16_t *word = end_of_words(scratch);
    const EncodeEntry *entries[TILE_CHANNELS];
    for (int c = 0; c < in.width; ++c) {
        entries[c] = in.tables.encode + (scratch.classes[c] & (CLASSES - 1)) * SYMBOLS;
    }
    uint32_t states[LANES];
    std::fill_n(states, LANES, LOW);
    for (int t = in.tokens - 1; t >= 0; --t) {
        const uint8_t *symbols = scratch.symbols + t * TILE_CHANNELS;
        const int16_t *values = in.values.row(t);
        for (int first = (in.width - 1) / LANES * LANES; first >= 0; first -= LANES) {
            const int last = std::min(first + LANES, in.width);
            int escaped = 0;
            for (int c = first; c < last; ++c) {
                escaped |= entries[c][symbols[c]].escape;
            }
            for (int c = last - 1; escaped && c >= first; --c) {
                if (entries[c][symbols[c]].escape) {
                    *--word = static_cast<uint16_t>(values[c]);
                }
            }
            for (int c = last - 1; c >= first; --c) {
                const EncodeEntry &entry = entries[c][symbols[c]];
                uint32_t x = states[c - first];
                const bool full = x >= entry.limit;
                word[-1] = static_cast<uint16_t>(x); // no branch: it would be taken at random
                word -= full;
                x >>= 16 * full;
                const uint32_t quotient = static_cast<uint32_t>(uint64_t{x} * entry.reciprocal >> entry.shift);
                states[c - first] = x + entry.start + quotient * entry.complement;
            }
        }
    }
    std::memcpy(scratch.states, states, sizeof states);
    return word;
}

#if KVCORE_ISA_AVX2

// For each mask of 8 lanes, the bytes that move its lanes' words to the end of 16 bytes, in order.
struct CompressTable {
    alignas(16) uint8_t bytes[256][16];

    constexpr CompressTable() : bytes() {
        for (int mask = 0; mask < 256; ++mask) {
            int at = 8;
            for (int lane = 7; lane >= 0; --lane) {
                if (mask >> lane & 1) {
                    --at;
                    bytes[mask][2 * at] = static_cast<uint8_t>(2 * lane);
                    bytes[mask][2 * at + 1] = static_cast<uint8_t>(2 * lane + 1);
                }
            }
            while (at-- > 0) {
                bytes[mask][2 * at] = bytes[mask][2 * at + 1] = 0x80;
            }
        }
    }
};

constexpr CompressTable COMPRESS;

// The first of 8 lanes, as many as have a channel.
KVCORE_INLINE __m256i live_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Four entries of a table, and eight. Not by the instruction for it, which is slower than loads: it is microcode in
// AMD's processors, and in many of Intel's since they were mended.
KVCORE_INLINE __m128i load_four(const uint32_t *table, __m128i index) {
    const uint64_t low = static_cast<uint64_t>(_mm_cvtsi128_si64(index));
    const uint64_t high = static_cast<uint64_t>(_mm_extract_epi64(index, 1));
    __m128i entries = _mm_cvtsi32_si128(static_cast<int>(table[static_cast<uint32_t>(low)]));
    entries = _mm_insert_epi32(entries, static_cast<int>(table[low >> 32]), 1);
    entries = _mm_insert_epi32(entries, static_cast<int>(table[static_cast<uint32_t>(high)]), 2);
    return _mm_insert_epi32(entries, static_cast<int>(table[high >> 32]), 3);
}

KVCORE_INLINE __m256i gather(const uint32_t *table, __m256i index) {
    const __m128i front = load_four(table, _mm256_castsi256_si128(index));
    const __m128i back = load_four(table, _mm256_extracti128_si256(index, 1));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(front), back, 1);
}

// Quotients below 2^21 by floats: one too small at most, since the estimate is held below x / f by more than three
// roundings, and by less than one. So PACKED_BITS and one bit less are taken, not fewer.
constexpr int LEAST_VECTOR_BITS = PACKED_BITS - 1;

template <bool WHOLE> struct VectorEncoder {
    __m256i x0, x1, x2, x3; // states of the 32 lanes
    uint16_t *word;
    const RansInput &in;
    TileScratch &scratch;
    const uint32_t *packed;
    __m128i shift, limit_shift;
    alignas(32) int32_t table[TILE_CHANNELS];

    VectorEncoder(const RansInput &in_, TileScratch &scratch_)
        : word(end_of_words(scratch_)), in(in_), scratch(scratch_),
          packed(in.tables.packed), shift(_mm_cvtsi32_si128(in.tables.bits)),
          limit_shift(_mm_cvtsi32_si128(31 - in.tables.bits)), table() {
        x0 = x1 = x2 = x3 = _mm256_set1_epi32(LOW);
        for (int c = 0; c < in.width; ++c) {
            table[c] = (scratch.classes[c] & (CLASSES - 1)) * SYMBOLS;
        }
    }

    // The table entries of 8 channels of a token.
    KVCORE_INLINE __m256i entries(const uint8_t *symbols, int group) const {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(symbols + 8 * group));
        const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i *>(table) + group);
        return gather(packed, _mm256_add_epi32(at, _mm256_cvtepu8_epi32(bytes)));
    }

    KVCORE_INLINE void lanes(__m256i &x, __m256i entry, int group) {
        const __m256i one = _mm256_set1_epi32(1);
        const __m256i frequency = _mm256_srli_epi32(entry, 20);
        const __m256i start = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xFFF));
        const __m256i most = _mm256_sub_epi32(_mm256_sll_epi32(frequency, limit_shift), one);
        __m256i full = _mm256_cmpgt_epi32(x, most);
        if (!WHOLE) {
            full = _mm256_and_si256(full, live_lanes(in.width - 8 * group));
        }
        const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(full)));
        const __m256i low = _mm256_blend_epi16(x, _mm256_setzero_si256(), 0xAA);
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i *>(COMPRESS.bytes[mask]));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(word - 8), _mm_shuffle_epi8(words, order));
        word -= __builtin_popcount(mask);
        const __m256i y = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), full);

        const __m256 estimate = _mm256_mul_ps(_mm256_cvtepi32_ps(y), _mm256_set1_ps(1 - 0x1p-22f));
        __m256i quotient = _mm256_cvttps_epi32(_mm256_div_ps(estimate, _mm256_cvtepi32_ps(frequency)));
        __m256i rest = _mm256_sub_epi32(y, _mm256_mullo_epi32(quotient, frequency));
        const __m256i one_short = _mm256_cmpgt_epi32(rest, _mm256_sub_epi32(frequency, one));
        quotient = _mm256_sub_epi32(quotient, one_short);
        rest = _mm256_sub_epi32(rest, _mm256_and_si256(one_short, frequency));
        const __m256i next = _mm256_add_epi32(_mm256_sll_epi32(quotient, shift), _mm256_add_epi32(rest, start));
        x = WHOLE ? next : _mm256_blendv_epi8(x, next, live_lanes(in.width - 8 * group));
    }

    void put_escapes(int token, int half) {
        const uint8_t *symbols = scratch.symbols + token * TILE_CHANNELS;
        const int16_t *values = in.values.row(token);
        for (int c = std::min(in.width, (half + 1) * LANES) - 1; c >= half * LANES; --c) {
            if (in.tables.packed[table[c] + symbols[c]] & 1) {
                *--word = static_cast<uint16_t>(values[c]);
            }
        }
    }

    KVCORE_INLINE void half_step(int token, int half) {
        const uint8_t *symbols = scratch.symbols + token * TILE_CHANNELS;
        const __m256i e0 = entries(symbols, 4 * half), e1 = entries(symbols, 4 * half + 1);
        const __m256i e2 = entries(symbols, 4 * half + 2), e3 = entries(symbols, 4 * half + 3);
        const __m256i any = _mm256_or_si256(_mm256_or_si256(e0, e1), _mm256_or_si256(e2, e3));
        if (__builtin_expect(!_mm256_testz_si256(any, _mm256_set1_epi32(1)), 0)) {
            put_escapes(token, half);
        }
        lanes(x3, e3, 4 * half + 3);
        lanes(x2, e2, 4 * half + 2);
        lanes(x1, e1, 4 * half + 1);
        lanes(x0, e0, 4 * half);
    }

    const uint16_t *finish() {
        __m256i *states = reinterpret_cast<__m256i *>(scratch.states);
        _mm256_storeu_si256(states, x0);
        _mm256_storeu_si256(states + 1, x1);
        _mm256_storeu_si256(states + 2, x2);
        _mm256_storeu_si256(states + 3, x3);
        return word;
    }
};

template <bool WHOLE> const uint16_t *encode_rans_avx2(const RansInput &in, TileScratch &scratch) {
    VectorEncoder<WHOLE> tile(in, scratch);
    for (int t = in.tokens - 1; t >= 0; --t) {
        if (in.width > LANES) {
            tile.half_step(t, 1);
        }
        tile.half_step(t, 0);
    }
    return tile.finish();
}

#endif

// Returns the first word; they end where the scratch memory's do.
const uint16_t *encode_rans(const RansInput &in, TileScratch &scratch) {
#if KVCORE_ISA_AVX2
    if (in.tables.slot != nullptr && in.tables.bits >= LEAST_VECTOR_BITS) {
        return in.width % LANES == 0 ? encode_rans_avx2<true>(in, scratch) : encode_rans_avx2<false>(in, scratch);
    }
#endif
    return encode_rans_scalar(in, scratch);
}
