// digest and copy_batch. The digest is a sum over 16-byte blocks, so pieces may be summed in any order.

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * MIX_1;
    z = (z ^ z >> 27) * MIX_2;
    return z ^ z >> 31;
}

// What one block adds to the sum; `weight` is GOLDEN * (2 * index + 1).
inline uint64_t digest_block(const char *from, uint64_t weight) {
    return mix((mix(load<uint64_t>(from) + weight) ^ load<uint64_t>(from + 8)) + (weight + GOLDEN));
}

#if KVCORE_ISA_AVX2
inline __m256i multiply(__m256i a, uint64_t factor) {
    const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(factor)), high = _mm256_srli_epi64(low, 32);
    const __m256i high_low = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), low);
    const __m256i crossed = _mm256_add_epi64(high_low, _mm256_mul_epu32(a, high));
    return _mm256_add_epi64(_mm256_mul_epu32(a, low), _mm256_slli_epi64(crossed, 32));
}

inline __m256i mix(__m256i z) {
    z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), MIX_1);
    z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), MIX_2);
    return _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
}
#endif

// What consecutive blocks add to the sum; `index` is the first one's.
uint64_t digest_blocks(const char *from, int64_t blocks, uint64_t index) {
    uint64_t sum = 0, weight = GOLDEN * (2 * index + 1);
    int64_t i = 0;
#if KVCORE_ISA_AVX2
    // Four blocks in a vector and two beside it, which take what the vector units leave of a cycle.
    constexpr int64_t ROUND = 6;
    const auto all = [](uint64_t word) { return _mm256_set1_epi64x(static_cast<int64_t>(word)); };
    const __m256i golden = all(GOLDEN), advance = all(2 * ROUND * GOLDEN);
    constexpr auto ahead = [](int64_t block) { return static_cast<int64_t>(2 * static_cast<uint64_t>(block) * GOLDEN); };
    // In the order that unpacking gives: blocks 0, 2, 1, 3.
    __m256i weights = _mm256_add_epi64(all(weight), _mm256_setr_epi64x(0, ahead(2), ahead(1), ahead(3)));
    __m256i sums = _mm256_setzero_si256();
    for (; i + ROUND <= blocks; i += ROUND) {
        const char *at = from + 16 * i;
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 32));
        const __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
        const __m256i mixed = _mm256_xor_si256(mix(_mm256_add_epi64(low, weights)), high);
        sums = _mm256_add_epi64(sums, mix(_mm256_add_epi64(mixed, _mm256_add_epi64(weights, golden))));
        for (int64_t k = 4; k < ROUND; ++k) {
            sum += digest_block(at + 16 * k, weight + 2 * k * GOLDEN);
        }
        weights = _mm256_add_epi64(weights, advance);
        weight += 2 * ROUND * GOLDEN;
    }
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), sums);
    sum += lanes[0] + lanes[1] + lanes[2] + lanes[3];
#endif
    for (; i < blocks; ++i, weight += 2 * GOLDEN) {
        sum += digest_block(from + 16 * i, weight);
    }
    return sum;
}

uint64_t digest_piece(const char *from, int64_t bytes, int64_t offset) {
    const uint64_t index = static_cast<uint64_t>(offset / 16);
    uint64_t sum = digest_blocks(from, bytes / 16, index);
    if (bytes % 16 != 0) {
        char padded[16] = {};
        std::memcpy(padded, from + bytes / 16 * 16, static_cast<size_t>(bytes % 16));
        sum += digest_blocks(padded, 1, index + static_cast<uint64_t>(bytes / 16));
    }
    return sum;
}

// Buffers are cut into pieces, which threads take; what is digested and copied stays in the first cache in between.
constexpr int64_t PIECE = 256 << 10, STEP = 16 << 10;

int32_t move_bytes(const kv_bytes_args &a, bool copied) {
    char *const digests = reinterpret_cast<char *>(a.digests);
    int64_t pieces = 0, bytes = 0;
    for (int64_t i = 0; i < a.count; ++i) {
        pieces += (a.nbytes[i] + PIECE - 1) / PIECE;
        bytes += a.nbytes[i];
        if (digests != nullptr) {
            store(digests + 8 * i, mix(static_cast<uint64_t>(a.nbytes[i]) ^ 0xD6E8FEB86659FD93));
        }
    }
    const bool streamed = bytes >= STREAMED_BYTES;
    const auto body = [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (int64_t i = 0; i < a.count && before < end; ++i) {
            const int64_t n = (a.nbytes[i] + PIECE - 1) / PIECE;
            const int64_t start = std::max(begin - before, int64_t{0}) * PIECE;
            const int64_t stop = std::min((end - before) * PIECE, a.nbytes[i]);
            before += n;
            const char *from = reinterpret_cast<const char *>(a.src[i]);
            char *to = copied ? reinterpret_cast<char *>(a.out[i]) : nullptr;
            uint64_t sum = 0;
            for (int64_t at = start; at < stop;) {
                const int64_t size = std::min(digests == nullptr ? stop - at : STEP, stop - at);
                if (digests != nullptr) {
                    sum += digest_piece(from + at, size, at);
                }
                if (copied) {
                    streamed ? stream_row(to + at, from + at, size) : copy_row(to + at, from + at, size);
                }
                at += size;
            }
            if (sum != 0) {
                __atomic_fetch_add(reinterpret_cast<uint64_t *>(digests) + i, sum, __ATOMIC_RELAXED);
            }
        }
        end_of_stream();
    };
    if (reinterpret_cast<uintptr_t>(digests) % 8 != 0) { // no atomic addition there
        body(0, pieces);
    } else {
        parallel_for(pieces, pieces == 0 ? 0 : bytes / pieces, body);
    }
    return 0;
}

int32_t copy_batch(const kv_bytes_args &a, uint64_t *) { return move_bytes(a, true); }

int32_t digest(const kv_bytes_args &a, uint64_t *) { return move_bytes(a, false); }
