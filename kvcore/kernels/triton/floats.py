"""Float formats and their conversions in integer arithmetic, as ``include/kvcore/floats.hpp`` has them.

Values are the bits of float32, in uint32. Formats are named by the codes of ``kv_dtype`` in ``abi.h``.
"""

import triton.language as tl

from kvcore.kernels.triton.lang import device

__all__ = ["admit", "as_bits", "as_float", "hold_overflow", "narrow", "reciprocal", "rounded", "widen"]

F16 = tl.constexpr(8)
BF16 = tl.constexpr(9)
F32 = tl.constexpr(10)
E4M3 = tl.constexpr(11)
E5M2 = tl.constexpr(12)

ERROR = tl.constexpr(0)
SATURATE = tl.constexpr(1)
PROPAGATE = tl.constexpr(2)
IGNORE = tl.constexpr(3)

SIGN = tl.constexpr(0x80000000)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
FINITE_MAX = tl.constexpr(0x7F7FFFFF)


@device
def as_float(bits):
    """Return the float32 of some bits."""
    return bits.to(tl.float32, bitcast=True)


@device
def as_bits(value):
    """Return the bits of a float32."""
    return value.to(tl.uint32, bitcast=True)


# --- widening


@device
def widen_magnitude(a, mantissa: tl.constexpr, rebias: tl.constexpr):
    """Widen the magnitude of a small float whose exponents are `rebias` below those of float32."""
    normal = (a << (23 - mantissa)) + (rebias << 23)
    # Both factors and the product are normal numbers, so that nothing is rounded or flushed.
    unit = tl.full(a.shape, (rebias + 1 - mantissa) << 23, tl.uint32)
    subnormal = as_bits(a.to(tl.float32) * as_float(unit))
    return tl.where(a >> mantissa != 0, normal, subnormal)


@device
def widen(bits, dtype: tl.constexpr):
    """Return float32 bits of the same value; a NaN keeps its sign."""
    if dtype == F32:
        return bits
    elif dtype == BF16:
        return bits << 16
    elif dtype == F16 or dtype == E5M2:  # noqa: SIM109  # constants compare one by one
        half = bits if dtype == F16 else bits << 8
        a = half & 0x7FFF
        wide = tl.where(a < 0x7C00, widen_magnitude(a, 10, 112), (a << 13) | INFINITY)
        return ((half & 0x8000) << 16) | wide
    else:
        a = bits & 0x7F
        wide = tl.where(a < 0x7F, widen_magnitude(a, 3, 120), NAN)
        return ((bits & 0x80) << 24) | wide


# --- narrowing


@device
def shift_half_even(value, shift):
    """Return ``value / 2**shift`` to nearest, half to even; value < 2**31, shift of 1 .. 30."""
    one = tl.full(value.shape, 1, tl.uint32)
    return (value + ((one << (shift - 1)) - 1) + ((value >> shift) & 1)) >> shift


@device
def narrow_magnitude(a, mantissa: tl.constexpr, rebias: tl.constexpr, limit: tl.constexpr):
    """Round the magnitude of a finite float32; what is beyond the target becomes `limit`."""
    exponent = a >> 23
    dropped: tl.constexpr = 23 - mantissa
    normal = shift_half_even(a - (rebias << 23), tl.full(a.shape, dropped, tl.uint32))
    # A subnormal of the target; below half of the smallest one it is zero.
    shift = dropped + 1 + rebias - tl.minimum(exponent, rebias)
    subnormal = shift_half_even((a & 0x7FFFFF) | 0x800000, tl.minimum(shift, 25))
    code = tl.where(exponent > rebias, normal, tl.where(shift > 24, 0, subnormal))
    return tl.minimum(code, limit)


@device
def narrow(bits, dtype: tl.constexpr):
    """Return the bits of the nearest value of a format, NaN as the quiet one with sign 0, finite values saturated."""
    a = bits & 0x7FFFFFFF
    is_nan = a > INFINITY
    if dtype == F32:
        return tl.where(is_nan, NAN, bits)
    elif dtype == BF16:
        code = tl.minimum((a + 0x7FFF + ((a >> 16) & 1)) >> 16, 0x7F7F)
        code = tl.where(a == INFINITY, 0x7F80, code)
        return tl.where(is_nan, 0x7FC0, ((bits >> 16) & 0x8000) | code)
    elif dtype == F16:
        code = tl.where(a == INFINITY, 0x7C00, narrow_magnitude(a, 10, 112, 0x7BFF))
        return tl.where(is_nan, 0x7E00, ((bits >> 16) & 0x8000) | code)
    elif dtype == E5M2:
        code = tl.where(a == INFINITY, 0x7C, narrow_magnitude(a, 2, 112, 0x7B))
        return tl.where(is_nan, 0x7E, ((bits >> 24) & 0x80) | code)
    else:
        code = ((bits >> 24) & 0x80) | narrow_magnitude(a, 3, 120, 0x7E)
        return tl.where(a >= INFINITY, 0x7F, code)


# --- policies


@device
def admit(bits, limit: tl.constexpr, policy: tl.constexpr):
    """Treat what is not finite as a policy says; `limit` are the bits of the largest finite input."""
    if policy == ERROR or policy == PROPAGATE:  # noqa: SIM109  # constants compare one by one
        return bits
    else:
        a = bits & 0x7FFFFFFF
        held = tl.where(a > INFINITY, 0, (bits & SIGN) | limit) if policy == SATURATE else bits * 0
        return tl.where(a < INFINITY, bits, held)


@device
def hold_overflow(bits):
    """Saturate what came out of finite factors beyond float32."""
    return tl.where((bits & 0x7FFFFFFF) < INFINITY, bits, (bits & SIGN) | FINITE_MAX)


# --- arithmetic


@device
def rounded(bits):
    """Return the integer nearest to a float32, half to even; beyond 2**23 in magnitude 2**23 with its sign."""
    a = bits & 0x7FFFFFFF
    exponent = a >> 23
    shift = 150 - tl.minimum(tl.maximum(exponent, 126), 149)
    whole = shift_half_even((a & 0x7FFFFF) | 0x800000, shift)
    whole = tl.where(exponent < 126, 0, tl.where(exponent > 149, 0x800000, whole)).to(tl.int32)
    return tl.where(bits >= SIGN, -whole, whole)


@device
def reciprocal(bits):
    """Return bits of ``1 / value``, correctly rounded; 2**-100 <= value <= 2**125.

    Long division, bit by bit: what compilers make of a division differs, and none of it is needed here.
    """
    divisor = (bits & 0x7FFFFF) | 0x800000
    rest = tl.full(bits.shape, 0x800000, tl.uint32)
    quotient = tl.full(bits.shape, 0, tl.uint32)
    for _ in range(27):
        more = rest >= divisor
        quotient = (quotient << 1) | more.to(tl.uint32)
        rest = (rest - tl.where(more, divisor, 0)) << 1
    # The quotient of 2**49 by the divisor has two bits more than a mantissa, where the value is no power of two.
    sticky = quotient | (rest != 0).to(tl.uint32)
    power = divisor == 0x800000
    mantissa = tl.where(power, 0x800000, shift_half_even(sticky, tl.full(bits.shape, 2, tl.uint32)))
    # A carry of the mantissa moves into the exponent. 1 / (1.m * 2**e) is (2 / 1.m) * 2**(-e - 1).
    exponent = tl.where(power, 254, 253) - (bits >> 23)
    return (exponent << 23) + mantissa - 0x800000
