// Vectors of fp32 lanes, of the width that the instruction set has, and conversions between them and stored numbers.
// Arithmetic is plain C++ on vector types; intrinsics stand where the compiler does not find the instruction.

#if KVCORE_ISA_AVX2
constexpr int VECTOR = 8;
#else
constexpr int VECTOR = 4;
#endif
constexpr int PAIR = 2 * VECTOR; // what loops take at a time: packing to fewer bits joins two vectors

typedef float Floats __attribute__((vector_size(4 * VECTOR)));
typedef int32_t Ints __attribute__((vector_size(4 * VECTOR)));
typedef uint32_t Words __attribute__((vector_size(4 * VECTOR)));
typedef uint64_t Longs __attribute__((vector_size(4 * VECTOR)));

// --- stored numbers: tags with the size and alignment 1, so that pointers to them step by elements

struct __attribute__((packed)) F32 {
    typedef int32_t Bits;
    static constexpr uint32_t INF = 0x7F800000, NAN_BITS = 0x7FC00000;
    static constexpr float LARGEST = 0x1.FFFFFEp127f;
    uint32_t bits;
};
struct __attribute__((packed)) F16 {
    typedef int16_t Bits;
    static constexpr uint32_t INF = 0x7C00, NAN_BITS = 0x7E00;
    static constexpr float LARGEST = 65504;
    uint16_t bits;
};
struct __attribute__((packed)) BF16 {
    typedef int16_t Bits;
    static constexpr uint32_t INF = 0x7F80, NAN_BITS = 0x7FC0;
    static constexpr float LARGEST = 0x1.FEp127f;
    uint16_t bits;
};
struct __attribute__((packed)) S16 {
    int16_t bits;
};
struct S8 {
    int8_t bits;
};
struct U8 {
    uint8_t bits;
};
struct E4M3 {
    static constexpr uint8_t FINITE = 0x7E; // the code of the largest finite value
    static constexpr float LARGEST = 448;
    uint8_t bits;
};
struct E5M2 {
    static constexpr uint8_t FINITE = 0x7B;
    static constexpr float LARGEST = 57344;
    uint8_t bits;
};

// Calls body(tag) with the type of a kv_dtype.
template <class Body> int32_t with_float(int32_t dtype, Body body) {
    switch (dtype) {
    case KV_F16: return body(F16{});
    case KV_BF16: return body(BF16{});
    case KV_F32: return body(F32{});
    default: return refuse(KV_FAIL_UNSUPPORTED, "a dtype that is no float");
    }
}

inline float as_float(uint32_t bits) { return load<float>(&bits); }
inline uint32_t as_bits(float value) { return load<uint32_t>(&value); }

inline Floats all(float value) { return value - Floats{}; }

inline bool any(Ints mask) {
#if KVCORE_ISA_AVX2
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    const Longs halves = (Longs)mask;
    return halves[0] | halves[1];
#endif
}

inline Words magnitude(Floats v) { return (Words)v & 0x7FFFFFFF; }

// -limit .. limit; a NaN becomes the limit.
inline Floats clamp(Floats v, float limit) {
    v = v < limit ? v : all(limit);
    return v > -limit ? v : all(-limit);
}

// The nearest integer, ties to even, for magnitudes up to 2**22: those that are added to 1.5 * 2**23 are rounded there.
inline Ints nearest(Floats v) { return (Ints)(v + 0x1.8p23f) - 0x4B400000; }

// --- small floats by integer arithmetic, without subnormal fp32 operands: no result depends on how those are treated

// Bits of a magnitude that is in range, rounded to nearest even.
template <int MANTISSA, int BIAS> inline Words shrink(Words v) {
    constexpr int DROPPED = 23 - MANTISSA;
    constexpr uint32_t HALF = (1u << (DROPPED - 1)) - 1, REBIAS = uint32_t{127 - BIAS} << 23;
    constexpr uint32_t MAGIC = uint32_t{127 + 24 - BIAS - MANTISSA} << 23; // its last bit is that of the subnormals
    const Words normal = (v - (REBIAS - HALF) + ((v >> DROPPED) & 1)) >> DROPPED;
    const Words small = (Words)((Floats)v + as_float(MAGIC)) - MAGIC;
    return (Ints)v < int32_t{128 - BIAS} << 23 ? small : normal;
}

// The fp32 magnitude of a small float's, save infinities and NaN.
template <int MANTISSA, int BIAS> inline Floats grow(Words v) {
    constexpr uint32_t REBIAS = uint32_t{127 - BIAS} << 23, ONE = 1u << 23;
    const Words bits = v << (23 - MANTISSA);
    const Floats small = (Floats)(bits + (REBIAS + ONE)) - as_float(REBIAS + ONE);
    return (Ints)bits < int32_t{ONE} ? small : (Floats)(bits + REBIAS);
}

// --- bits in words <-> fp32

inline Floats widen(F32, Words bits) { return (Floats)bits; }
inline Floats widen(BF16, Words bits) { return (Floats)(bits << 16); }
inline Floats widen(F16, Words bits) {
#if KVCORE_ISA_AVX2
    const __m256i pairs = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
    return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
    const Words low = bits & 0x7FFF;
    const Words special = (low << 13) + (224u << 23); // infinity and NaN
    const Words value = (Ints)low >= int32_t{F16::INF} ? special : (Words)grow<10, 15>(low);
    return (Floats)(value | (bits & 0x8000) << 16);
#endif
}
inline Floats widen(E5M2, Words bits) { return widen(F16{}, bits << 8); } // the upper half of an fp16
inline Floats widen(E4M3, Words bits) { // but its NaN is 480: see has_special
    return (Floats)((Words)grow<3, 7>(bits & 0x7F) | (bits & 0x80) << 24);
}
inline Floats widen(U8, Words bits) { return __builtin_convertvector((Ints)bits, Floats); }
inline Floats widen(S8, Words bits) { return __builtin_convertvector((Ints)(bits << 24) >> 24, Floats); }
inline Floats widen(S16, Words bits) { return __builtin_convertvector((Ints)(bits << 16) >> 16, Floats); }

// Rounds to nearest even what is within the type.
inline Words rounded(F32, Floats v) { return (Words)v; }
inline Words rounded(BF16, Floats v) {
    const Words bits = (Words)v;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
inline Words rounded(F16, Floats v) {
#if KVCORE_ISA_AVX2
    return (Words)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    return shrink<10, 15>(magnitude(v)) | (Words)v >> 31 << 15;
#endif
}
inline Words rounded(E4M3, Floats v) { return shrink<3, 7>(magnitude(v)) | (Words)v >> 31 << 7; }
inline Words rounded(E5M2, Floats v) { return shrink<2, 15>(magnitude(v)) | (Words)v >> 31 << 7; }

// The same; what is beyond the type, infinities too, becomes its largest finite value. No NaN.
template <class T> inline Words narrow(T, Floats v) { return rounded(T{}, clamp(v, T::LARGEST)); }

// The same, but infinities stay infinite and a NaN becomes the quiet one with sign bit 0.
template <class T> inline Words narrow_any(T, Floats v) {
    const Words size = magnitude(v), sign = (Words)v >> 31 << (8 * sizeof(T) - 1);
    const Words special = (Ints)size == int32_t{F32::INF} ? (sign | T::INF) : sign - sign + T::NAN_BITS;
    return (Ints)size < int32_t{F32::INF} ? narrow(T{}, v) : special;
}

// --- memory -> lanes

inline Words words(uint32_t, const void *p) { return load<Words>(p); }
inline Words words(uint16_t, const void *p) {
#if KVCORE_ISA_AVX2
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    typedef uint16_t Shorts __attribute__((vector_size(2 * VECTOR)));
    return __builtin_convertvector(load<Shorts>(p), Words);
#endif
}
inline Words words(uint8_t, const void *p) {
#if KVCORE_ISA_AVX2
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    const uint8_t *bytes = static_cast<const uint8_t *>(p);
    return Words{bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

template <class T> inline Floats lanes(const T *p) {
    if constexpr (sizeof(T) == 4) {
        return widen(T{}, words(uint32_t{}, p));
    } else if constexpr (sizeof(T) == 2) {
        return widen(T{}, words(uint16_t{}, p));
    } else {
        return widen(T{}, words(uint8_t{}, p));
    }
}
#if KVCORE_ISA_AVX2
template <> inline Floats lanes(const F16 *p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
template <> inline Floats lanes(const E5M2 *p) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return (Floats)_mm256_cvtph_ps(_mm_slli_epi16(codes, 8));
}
template <> inline Floats lanes(const E4M3 *p) {
    // Sign and the other bits at their places in an fp16, whose exponent is biased by 8 more.
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xBFFF));
    return (Floats)_mm256_cvtph_ps(half) * 256.0f;
}
#endif

// --- lanes -> memory: PAIR elements

inline void put_words(uint32_t, void *p, Words a, Words b) {
    store(p, a);
    store(static_cast<char *>(p) + sizeof a, b);
}
inline void put_words(uint16_t, void *p, Words a, Words b) {
#if KVCORE_ISA_AVX2
    const __m256i packed = _mm256_packus_epi32((__m256i)a, (__m256i)b);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
#else
    typedef uint16_t Shorts __attribute__((vector_size(2 * VECTOR)));
    store(p, __builtin_convertvector(a, Shorts));
    store(static_cast<char *>(p) + sizeof(Shorts), __builtin_convertvector(b, Shorts));
#endif
}
inline void put_words(uint8_t, void *p, Words a, Words b) {
#if KVCORE_ISA_AVX2
    const __m256i pairs = _mm256_packus_epi32((__m256i)a, (__m256i)b);
    const __m256i bytes = _mm256_permutevar8x32_epi32(
        _mm256_packus_epi16(pairs, pairs), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(bytes));
#else
    uint8_t *bytes = static_cast<uint8_t *>(p);
    for (int i = 0; i < VECTOR; ++i) {
        bytes[i] = (uint8_t)a[i];
        bytes[VECTOR + i] = (uint8_t)b[i];
    }
#endif
}

template <class T> inline void put_bits(T *p, Words a, Words b) {
    if constexpr (sizeof(T) == 4) {
        put_words(uint32_t{}, p, a, b);
    } else if constexpr (sizeof(T) == 2) {
        put_words(uint16_t{}, p, a, b);
    } else {
        put_words(uint8_t{}, p, a, b);
    }
}
inline void put(S16 *p, Ints a, Ints b) { put_bits(p, (Words)a & 0xFFFF, (Words)b & 0xFFFF); }
inline void put(S8 *p, Ints a, Ints b) { put_bits(p, (Words)a & 0xFF, (Words)b & 0xFF); }
inline void put(U8 *p, Ints a, Ints b) { put_bits(p, (Words)a, (Words)b); }
template <class T> inline void put(T *p, Floats a, Floats b) { put_bits(p, narrow(T{}, a), narrow(T{}, b)); }
#if KVCORE_ISA_AVX2
template <> inline void put(F16 *p, Floats a, Floats b) {
    const auto half = [](Floats v) {
        return _mm256_cvtps_ph((__m256)clamp(v, F16::LARGEST), _MM_FROUND_TO_NEAREST_INT);
    };
    _mm_storeu_si128((__m128i *)p, half(a));
    _mm_storeu_si128((__m128i *)p + 1, half(b));
}
#endif

// --- loops and single elements

// Calls body(in + i, out + i, i) for PAIR elements at a time. The last ones go through padded copies: body must bear an
// i up to n + PAIR. `in` and `out` may be the same memory.
template <class In, class Out, class Body> inline void map_steps(const In *in, Out *out, int64_t n, Body body) {
    int64_t i = 0;
    for (; i + PAIR <= n; i += PAIR) {
        body(in + i, out + i, i);
    }
    if (i < n) {
        In last[PAIR] = {};
        Out result[PAIR];
        std::memcpy(last, in + i, (n - i) * sizeof(In));
        body(static_cast<const In *>(last), static_cast<Out *>(result), i);
        std::memcpy(out + i, result, (n - i) * sizeof(Out));
    }
}

// Whether there are infinities or NaN among PAIR codes.
template <class T> inline bool has_special(const T *p) {
#if KVCORE_ISA_AVX2
    const __m128i size = _mm_and_si128(_mm_loadu_si128((const __m128i *)p), _mm_set1_epi8(0x7F));
    return _mm_movemask_epi8(_mm_cmpgt_epi8(size, _mm_set1_epi8(T::FINITE)));
#else
    constexpr uint64_t BYTES = 0x0101010101010101;
    uint64_t beyond = 0;
    for (int i = 0; i < PAIR; i += 8) {
        beyond |= (load<uint64_t>(p + i) & BYTES * 0x7F) + BYTES * (0x7F - T::FINITE);
    }
    return beyond & BYTES * 0x80;
#endif
}

template <class T> inline float widened(T x) { return widen(T{}, Words{} + (uint32_t)x.bits)[0]; }

// What policy "saturate" makes of the bits of a value: a NaN becomes 0, an infinity the largest finite value.
template <class T> inline typename T::Bits saturated(typename T::Bits bits) {
    typedef typename T::Bits Bits;
    constexpr Bits SIGN = (Bits)(1u << (8 * sizeof(Bits) - 1)), INF = (Bits)T::INF;
    const Bits size = (Bits)(bits & (Bits)~SIGN);
    return size > INF ? Bits{0} : size == INF ? (Bits)((bits & SIGN) | (INF - 1)) : bits;
}
