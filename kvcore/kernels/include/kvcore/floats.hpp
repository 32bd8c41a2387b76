/* Float formats and their conversions, in integer arithmetic: the same bits on every machine, whatever it does with
 * subnormals. Plain functions of host and device; no context is needed.
 *
 * The rules are the hookspecs': widening is exact; narrowing rounds to nearest, half to even; a finite value beyond the
 * target becomes its largest finite one; an infinity stays one where the target has it; every NaN becomes the quiet one
 * with sign bit 0.
 */
#ifndef KVCORE_FLOATS_HPP
#define KVCORE_FLOATS_HPP

#include "context.hpp"

namespace kvcore {

/* What memory holds. Formats after IEEE 754 (binary16, binary32), bfloat16, and "FP8 Formats for Deep Learning"
 * (Micikevicius et al. 2022): e5m2 like a short binary16; e4m3 without infinities, one NaN of either sign. */
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct f32 { uint32_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

constexpr uint32_t SIGN32 = 0x80000000u;
constexpr uint32_t INFINITY32 = 0x7F800000u;
constexpr uint32_t NAN32 = 0x7FC00000u;
constexpr uint32_t FINITE_MAX32 = 0x7F7FFFFFu;

KVCORE_HOST_DEVICE uint32_t float_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

KVCORE_HOST_DEVICE float bits_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^exponent, for -126 .. 127. */
KVCORE_HOST_DEVICE float power_of_two(int exponent) { return bits_float(uint32_t(exponent + 127) << 23); }

/* The magnitude of float32 bits: as integers these order as the values do, infinity after them, NaNs last. */
KVCORE_HOST_DEVICE uint32_t magnitude(uint32_t bits) { return bits & ~SIGN32; }
KVCORE_HOST_DEVICE bool is_finite(uint32_t bits) { return magnitude(bits) < INFINITY32; }
KVCORE_HOST_DEVICE bool is_nan(uint32_t bits) { return magnitude(bits) > INFINITY32; }

/* --- widening: float32 bits of the same value; a NaN keeps its sign and payload */

namespace detail {

/* A small float with `mantissa` bits of mantissa, whose exponents are `rebias` below those of float32. */
template <int mantissa, int rebias> KVCORE_HOST_DEVICE uint32_t widen_magnitude(uint32_t a) {
    if (a >> mantissa != 0) return (a << (23 - mantissa)) + (uint32_t(rebias) << 23);
    return float_bits(float(a) * power_of_two(rebias - 126 - mantissa)); /* both factors and the product are normal */
}

}  // namespace detail

KVCORE_HOST_DEVICE uint32_t widen_bits(f32 x) { return x.bits; }
KVCORE_HOST_DEVICE uint32_t widen_bits(bf16 x) { return uint32_t(x.bits) << 16; }

KVCORE_HOST_DEVICE uint32_t widen_bits(f16 x) {
    const uint32_t a = x.bits & 0x7FFFu, sign = (uint32_t(x.bits) & 0x8000u) << 16;
    return sign | (a < 0x7C00u ? detail::widen_magnitude<10, 112>(a) : a << 13 | INFINITY32);
}

KVCORE_HOST_DEVICE uint32_t widen_bits(e5m2 x) { return widen_bits(f16{uint16_t(x.bits << 8)}); }

KVCORE_HOST_DEVICE uint32_t widen_bits(e4m3 x) {
    const uint32_t a = x.bits & 0x7Fu, sign = (uint32_t(x.bits) & 0x80u) << 24;
    return sign | (a < 0x7Fu ? detail::widen_magnitude<3, 120>(a) : NAN32);
}

template <class T> KVCORE_HOST_DEVICE float widen(T x) { return bits_float(widen_bits(x)); }

/* --- narrowing */

namespace detail {

/* value / 2^shift, to nearest, half to even; value < 2^31, shift of 1 .. 30. */
KVCORE_HOST_DEVICE uint32_t shift_half_even(uint32_t value, int shift) {
    return (value + (1u << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
}

/* Round the magnitude of a finite float32; what is beyond the target comes out as a code beyond `finite_max`. */
template <int mantissa, int rebias> KVCORE_HOST_DEVICE uint32_t narrow_magnitude(uint32_t a, uint32_t finite_max) {
    const int exponent = int(a >> 23), dropped = 23 - mantissa;
    uint32_t code;
    if (exponent > rebias) {
        code = shift_half_even(a - (uint32_t(rebias) << 23), dropped);
    } else { /* a subnormal of the target; below half of the smallest one is zero */
        const int shift = dropped + 1 + rebias - exponent;
        code = shift > 24 ? 0 : shift_half_even((a & 0x7FFFFFu) | 0x800000u, shift);
    }
    return code < finite_max ? code : finite_max;
}

}  // namespace detail

/* `narrow<T>::from(bits)`: the T nearest to the float32 of these bits. */
template <class T> struct narrow;

template <> struct narrow<f32> {
    static KVCORE_HOST_DEVICE f32 from(uint32_t bits) { return f32{is_nan(bits) ? NAN32 : bits}; }
};

template <> struct narrow<bf16> {
    static KVCORE_HOST_DEVICE bf16 from(uint32_t bits) {
        if (is_nan(bits)) return bf16{0x7FC0};
        const uint32_t sign = bits >> 16 & 0x8000u, a = magnitude(bits);
        const uint32_t code = (a + 0x7FFFu + (a >> 16 & 1)) >> 16;
        return bf16{uint16_t(sign | (a < INFINITY32 && code > 0x7F7Fu ? 0x7F7Fu : code))};
    }
};

template <> struct narrow<f16> {
    static KVCORE_HOST_DEVICE f16 from(uint32_t bits) {
        if (is_nan(bits)) return f16{0x7E00};
        const uint32_t sign = bits >> 16 & 0x8000u, a = magnitude(bits);
        return f16{uint16_t(sign | (a == INFINITY32 ? 0x7C00u : detail::narrow_magnitude<10, 112>(a, 0x7BFFu)))};
    }
};

template <> struct narrow<e5m2> {
    static KVCORE_HOST_DEVICE e5m2 from(uint32_t bits) {
        if (is_nan(bits)) return e5m2{0x7E};
        const uint32_t sign = bits >> 24 & 0x80u, a = magnitude(bits);
        return e5m2{uint8_t(sign | (a == INFINITY32 ? 0x7Cu : detail::narrow_magnitude<2, 112>(a, 0x7Bu)))};
    }
};

template <> struct narrow<e4m3> { /* an infinity, of which there is none, becomes NaN */
    static KVCORE_HOST_DEVICE e4m3 from(uint32_t bits) {
        if (!is_finite(bits)) return e4m3{0x7F};
        return e4m3{uint8_t((bits >> 24 & 0x80u) | detail::narrow_magnitude<3, 120>(magnitude(bits), 0x7Eu))};
    }
};

/* --- non-finite input */

/* Bits of the largest finite value of a format, as a float32. */
KVCORE_HOST_DEVICE uint32_t finite_max_bits(f16) { return 0x477FE000u; }
KVCORE_HOST_DEVICE uint32_t finite_max_bits(bf16) { return 0x7F7F0000u; }
KVCORE_HOST_DEVICE uint32_t finite_max_bits(f32) { return FINITE_MAX32; }

/* Policy saturate: NaN is read as zero, an infinity as `limit` with its sign. */
KVCORE_HOST_DEVICE uint32_t saturate(uint32_t bits, uint32_t limit) {
    if (is_finite(bits)) return bits;
    return is_nan(bits) ? 0 : (bits & SIGN32) | limit;
}

/* What came out of finite factors beyond float32 is a finite value that saturates; `bits` is not NaN. */
KVCORE_HOST_DEVICE uint32_t hold_overflow(uint32_t bits) {
    return is_finite(bits) ? bits : (bits & SIGN32) | FINITE_MAX32;
}

/* --- dtypes known at run time */

/* Call `f` with a value of the float type that a kv_dtype names: f16, bf16 or f32. */
template <class F> KVCORE_HOST_DEVICE void with_float(int32_t dtype, const F &f) {
    switch (dtype) {
        case KV_F16: return f(f16{0});
        case KV_BF16: return f(bf16{0});
        default: return f(f32{0});
    }
}

}  // namespace kvcore

#endif
