/* Division and square root of float32, correctly rounded by integer arithmetic alone: for devices whose own may be off
 * by some units in the last place. Schoolbook: two bits more than a float has, and whether anything is left over,
 * decide the rounding. NaNs that are computed are the quiet one with sign bit 0.
 */
#ifndef KVCORE_PORTABLE_HPP
#define KVCORE_PORTABLE_HPP

#include "floats.hpp"

namespace kvcore {
namespace detail {

/* mantissa * 2^exponent, with 2^23 <= mantissa < 2^24; of a finite magnitude that is not zero. */
struct Normal {
    uint64_t mantissa;
    int exponent;
};

KVCORE_HOST_DEVICE Normal normalize(uint32_t magnitude) {
    Normal n = {magnitude & 0x7FFFFFu, int(magnitude >> 23) - 150};
    if (magnitude >> 23 != 0) {
        n.mantissa |= 0x800000u;
    } else {
        n.exponent++;
        for (; n.mantissa < 0x800000u; n.exponent--) n.mantissa *= 2;
    }
    return n;
}

/* Bits of the float nearest to value * 2^exponent, half to even; the lowest bit of value may stand for all below it.
 * 2^25 <= value < 2^28. */
KVCORE_HOST_DEVICE uint32_t nearest(uint64_t value, int exponent) {
    int spare = value >= 1u << 27 ? 4 : value >= 1u << 26 ? 3 : 2; /* bits beyond the 24 of a normal number */
    if (exponent + spare < -149) spare = -149 - exponent;           /* a subnormal has fewer */
    if (spare > 30) return 0;
    const uint64_t kept = value >> spare, rest = value - (kept << spare), half = uint64_t(1) << (spare - 1);
    const uint64_t rounded = kept + (rest > half || (rest == half && kept % 2 == 1));
    /* Adding lets a carry of the mantissa move into the exponent, up to infinity. */
    const int64_t biased = kept < 0x800000u ? 0 : exponent + spare + 149;
    const uint64_t bits = (uint64_t(biased) << 23) + rounded;
    return bits < INFINITY32 ? uint32_t(bits) : INFINITY32;
}

}  // namespace detail

KVCORE_HOST_DEVICE float portable_divide(float dividend, float divisor) {
    const uint32_t sign = (float_bits(dividend) ^ float_bits(divisor)) & SIGN32;
    const uint32_t a = magnitude(float_bits(dividend)), b = magnitude(float_bits(divisor));
    if (a > INFINITY32 || b > INFINITY32 || (a == b && (a == 0 || a == INFINITY32))) return bits_float(NAN32);
    if (a == INFINITY32 || b == 0) return bits_float(sign | INFINITY32);
    if (a == 0 || b == INFINITY32) return bits_float(sign);
    const detail::Normal x = detail::normalize(a), y = detail::normalize(b);
    const uint64_t quotient = (x.mantissa << 26) / y.mantissa; /* 2^25 .. 2^27 */
    const bool exact = quotient * y.mantissa == x.mantissa << 26;
    return bits_float(sign | detail::nearest(quotient | !exact, x.exponent - y.exponent - 26));
}

KVCORE_HOST_DEVICE float portable_square_root(float value) {
    const uint32_t bits = float_bits(value);
    if (bits == SIGN32 || bits == 0 || bits == INFINITY32) return value;
    if (bits > INFINITY32) return bits_float(NAN32); /* NaNs, and all that is negative */
    const detail::Normal x = detail::normalize(bits);
    const int odd = x.exponent & 1;
    const uint64_t square = x.mantissa << (28 + odd); /* 2^51 .. 2^53 */
    uint64_t root = 0;
    for (uint64_t bit = uint64_t(1) << 26; bit != 0; bit /= 2)
        if ((root + bit) * (root + bit) <= square) root += bit;
    return bits_float(detail::nearest(root | (root * root != square), (x.exponent - 28 - odd) / 2));
}

}  // namespace kvcore

#endif
