// The rANS part of decoding: from `scratch.words` and `scratch.states` to `scratch.symbols`, `scratch.escapes`, and in
// the end `scratch.states`.

struct RansStream {
    const Tables &tables;
    int tokens, width;
    int words; // how many there are in `scratch.words`; zeros follow
};

// How much was read: of words no more than a token's beyond those that there are, since decoding stops then.
struct Read {
    int words, escapes;
};

template <bool PACKED_SLOTS> Read decode_rans_scalar(const RansStream &in, TileScratch &scratch) {
    const Tables &tables = in.tables;
    const int bits = tables.bits;
    const uint32_t mask = (1u << bits) - 1;
    const uint16_t *word = scratch.words, *const end = word + in.words;
    uint32_t table[TILE_CHANNELS], states[LANES];
    for (int c = 0; c < in.width; ++c) {
        table[c] = static_cast<uint32_t>(scratch.classes[c] & (CLASSES - 1)) << bits;
    }
    std::memcpy(states, scratch.states, sizeof states);
    Escape *escape = scratch.escapes;
    for (int t = 0; t < in.tokens && word <= end; ++t) {
        uint8_t *symbols = scratch.symbols + t * TILE_CHANNELS;
        for (int first = 0; first < in.width; first += LANES) {
            const int last = std::min(first + LANES, in.width);
            uint32_t least = SYMBOLS;
            for (int c = first; c < last; ++c) {
                uint32_t x = states[c - first];
                const uint32_t slot = x & mask;
                uint32_t symbol;
                if (PACKED_SLOTS) {
                    const uint32_t entry = tables.slot[table[c] + slot];
                    symbol = entry & 0xFF;
                    x = (entry >> 20) * (x >> bits) + (entry >> 8 & 0xFFF);
                } else {
                    symbol = tables.symbol[table[c] + slot];
                    const uint32_t at = (table[c] >> bits) * SYMBOLS + symbol;
                    x = tables.frequency[at] * (x >> bits) + slot - tables.start[at];
                }
                const uint32_t low = x < LOW; // no branch: it would be taken at random
                x = x << 16 * low | (*word & -low);
                word += low;
                states[c - first] = x;
                symbols[c] = static_cast<uint8_t>(symbol);
                least = std::min(least, symbol);
            }
            for (int c = first; least == ESC && c < last; ++c) {
                if (symbols[c] == ESC) {
                    *escape++ = {static_cast<uint16_t>(t * TILE_CHANNELS + c), static_cast<int16_t>(*word++)};
                }
            }
        }
    }
    std::memcpy(scratch.states, states, sizeof states);
    return {static_cast<int>(word - scratch.words), static_cast<int>(escape - scratch.escapes)};
}

#if KVCORE_ISA_AVX2

// For each mask of 8 lanes, which of the next words each of them takes.
struct ExpandTable {
    alignas(8) uint8_t lanes[256][8];

    constexpr ExpandTable() : lanes() {
        for (int mask = 0; mask < 256; ++mask) {
            uint8_t at = 0;
            for (int lane = 0; lane < 8; ++lane) {
                lanes[mask][lane] = at;
                at = static_cast<uint8_t>(at + (mask >> lane & 1));
            }
        }
    }
};

constexpr ExpandTable EXPAND;

// One tile on its way through decode_rans_avx2.
template <bool WHOLE> struct VectorDecoder {
    __m256i x0, x1, x2, x3; // states of the 32 lanes
    const uint16_t *word, *end;
    Escape *escape;
    TileScratch &scratch;
    const uint32_t *slots;
    int width;
    __m128i shift;
    __m256i slot_mask;
    alignas(32) int32_t table[TILE_CHANNELS];

    VectorDecoder(const RansStream &in, TileScratch &scratch_)
        : word(scratch_.words), end(word + in.words), escape(scratch_.escapes), scratch(scratch_),
          slots(in.tables.slot), width(in.width),
          shift(_mm_cvtsi32_si128(in.tables.bits)), slot_mask(_mm256_set1_epi32((1 << in.tables.bits) - 1)), table() {
        for (int c = 0; c < width; ++c) {
            table[c] = (scratch.classes[c] & (CLASSES - 1)) << in.tables.bits;
        }
        const __m256i *states = reinterpret_cast<const __m256i *>(scratch.states);
        x0 = _mm256_loadu_si256(states);
        x1 = _mm256_loadu_si256(states + 1);
        x2 = _mm256_loadu_si256(states + 2);
        x3 = _mm256_loadu_si256(states + 3);
    }

    // Decodes 8 lanes, and returns their symbols. `group` counts channels by 8.
    KVCORE_INLINE __m256i lanes(__m256i &x, int group) {
        const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i *>(table) + group);
        const __m256i entry = gather(slots, _mm256_add_epi32(at, _mm256_and_si256(x, slot_mask)));
        const __m256i place = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xFFF));
        const __m256i product = _mm256_mullo_epi32(_mm256_srli_epi32(entry, 20), _mm256_srl_epi32(x, shift));
        const __m256i y = _mm256_add_epi32(product, place);
        __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(LOW), y);
        __m256i live;
        if (!WHOLE) {
            live = live_lanes(width - 8 * group);
            low = _mm256_and_si256(low, live);
        }
        const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
        const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(word)));
        const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(EXPAND.lanes[mask]));
        const __m256i taken = _mm256_permutevar8x32_epi32(next, _mm256_cvtepu8_epi32(order));
        const __m256i state = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), taken), low);
        x = WHOLE ? state : _mm256_blendv_epi8(x, state, live);
        word += __builtin_popcount(mask);
        return _mm256_and_si256(entry, _mm256_set1_epi32(0xFF));
    }

    KVCORE_INLINE void half_step(int token, int half) {
        const __m256i s0 = lanes(x0, 4 * half), s1 = lanes(x1, 4 * half + 1);
        const __m256i s2 = lanes(x2, 4 * half + 2), s3 = lanes(x3, 4 * half + 3);
        const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(s0, s1), _mm256_packus_epi32(s2, s3));
        const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        const int first = token * TILE_CHANNELS + half * LANES;
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(scratch.symbols + first), bytes);
        const __m256i escaped = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
        unsigned mask = static_cast<unsigned>(_mm256_movemask_epi8(escaped));
        if (__builtin_expect(mask != 0, 0)) {
            if (!WHOLE && width - half * LANES < LANES) {
                mask &= (1u << (width - half * LANES)) - 1;
            }
            for (; mask != 0; mask &= mask - 1) {
                const int lane = __builtin_ctz(mask);
                *escape++ = {static_cast<uint16_t>(first + lane), static_cast<int16_t>(*word++)};
            }
        }
    }

    bool over() const { return word > end; }

    Read finish() const {
        __m256i *states = reinterpret_cast<__m256i *>(scratch.states);
        _mm256_storeu_si256(states, x0);
        _mm256_storeu_si256(states + 1, x1);
        _mm256_storeu_si256(states + 2, x2);
        _mm256_storeu_si256(states + 3, x3);
        return {static_cast<int>(word - scratch.words), static_cast<int>(escape - scratch.escapes)};
    }
};

template <bool WHOLE> KVCORE_INLINE void decode_token(VectorDecoder<WHOLE> &tile, int token) {
    tile.half_step(token, 0);
    if (tile.width > LANES) {
        tile.half_step(token, 1);
    }
}

template <bool WHOLE> Read decode_rest(VectorDecoder<WHOLE> &tile, int token, int tokens) {
    for (; token < tokens && !tile.over(); ++token) {
        decode_token(tile, token);
    }
    return tile.finish();
}

template <bool WHOLE> Read decode_rans_avx2(const RansStream &in, TileScratch &scratch) {
    VectorDecoder<WHOLE> tile(in, scratch);
    return decode_rest(tile, 0, in.tokens);
}

// Two tiles of one shape in turns: one has work while the other waits for its look-ups. A sixth faster than one by one.
template <bool WHOLE> void decode_pair_avx2(const RansStream *in, TileScratch *scratch, Read *read) {
    VectorDecoder<WHOLE> one(in[0], scratch[0]), two(in[1], scratch[1]);
    int t = 0;
    for (; t < in[0].tokens && !one.over() && !two.over(); ++t) {
        decode_token(one, t);
        decode_token(two, t);
    }
    read[0] = decode_rest(one, t, in[0].tokens);
    read[1] = decode_rest(two, t, in[1].tokens);
}

#endif

Read decode_rans(const RansStream &in, TileScratch &scratch) {
    if (in.tables.slot == nullptr) {
        return decode_rans_scalar<false>(in, scratch);
    }
#if KVCORE_ISA_AVX2
    return in.width % LANES == 0 ? decode_rans_avx2<true>(in, scratch) : decode_rans_avx2<false>(in, scratch);
#else
    return decode_rans_scalar<true>(in, scratch);
#endif
}

// Decodes two tiles of one table set.
void decode_rans_pair(const RansStream *in, TileScratch *scratch, Read *read) {
#if KVCORE_ISA_AVX2
    const bool alike = in[0].width == in[1].width && in[0].tokens == in[1].tokens;
    if (in[0].tables.slot != nullptr && alike && in[0].width % LANES == 0) {
        decode_pair_avx2<true>(in, scratch, read);
        return;
    }
#endif
    read[0] = decode_rans(in[0], scratch[0]);
    read[1] = decode_rans(in[1], scratch[1]);
}
