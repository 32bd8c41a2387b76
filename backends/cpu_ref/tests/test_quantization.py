"""Quantisers and the rotation, against scalar float32 arithmetic and exact integers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcore import QuantizationError, Quantized, QuantSpec
from kvcore.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, finite_max

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.float32
ROW = (1,)
ordinary = st.floats(-(2.0**40), 2.0**40, width=32)
LEVELS = (-1.0, -0.25, 0.0, 0.5, 1.0)
SPECS = [
    *(QuantSpec.symmetric(b, ROW) for b in range(2, 9)),
    *(QuantSpec.affine(b, ROW) for b in range(1, 9)),
    QuantSpec.fp8("float8_e4m3fn", ROW),
    QuantSpec.fp8("float8_e5m2", ROW),
    QuantSpec.codebook(LEVELS, ROW),
]


def exact(value):
    return Fraction(float(value))


def scale_of(row, spec):
    """Scale of a group, every operation on float32 scalars."""
    reciprocal = F32(1) / F32(spec.code_max)
    largest = F32(max(abs(v) for v in row))
    scale = F32(largest * reciprocal)
    if spec.kind == "affine":
        low, high = F32(min(row)), F32(max(row))
        scale = max(F32(F32(high * reciprocal) - F32(low * reciprocal)), F32(largest * F32(2.0**-20)))
    return F32(1) if scale < F32(2.0**-100) else min(scale, F32(2.0**125))


def code_of(value, scale, zero, spec):
    scaled = F32(F32(value) * F32(F32(1) / scale))
    if spec.kind == "int":
        return min(max(round(exact(scaled)), -int(spec.code_max)), int(spec.code_max))
    if spec.kind == "affine":
        return min(max(round(exact(scaled)) + zero, 0), int(spec.code_max))
    if spec.kind == "codebook":
        middles = [(a + b) / 2 for a, b in itertools.pairwise(LEVELS)]
        return sum(float(scaled) > m for m in middles)
    held = min(max(float(scaled), -spec.code_max), spec.code_max)
    return nearest_fp8(held, spec.code_dtype)


def nearest_fp8(value, dtype):
    """The finite code nearest to a value; of two, the one whose last bit is 0."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    usable = [int(c) for c in codes if np.isfinite(values[c]) and (values[c] != 0 or (c >= 128) == np.signbit(value))]
    return min(usable, key=lambda c: (abs(Fraction(values[c]) - Fraction(value)), c & 1))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}{s.bits}{s.code_dtype}")
@settings(max_examples=30)
@given(x=arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=ordinary))
def test_codes_are_those_of_the_definition(ref, spec, x):
    q = ref.quantize(x, spec)
    for i, row in enumerate(x):
        scale = scale_of(row, spec)
        assert q.scale[i, 0] == scale
        zero = None
        if spec.kind == "affine":
            zero = -round(exact(F32(F32(min(row)) * F32(F32(1) / scale))))
            assert q.zero[i, 0] == zero
        for j, value in enumerate(row):
            expected = code_of(value, scale, zero, spec)
            assert int(q.codes[i, j : j + 1].view(np.uint8 if spec.kind == "fp8" else q.codes.dtype)[0]) == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}{s.bits}{s.code_dtype}")
@settings(max_examples=30)
@given(x=arrays(np.float32, (3, 7), elements=st.floats(-100, 100, width=32)))
def test_values_come_back_within_half_a_step(ref, spec, x):
    q = ref.quantize(x, spec)
    back = ref.dequantize(q, spec)
    step = {
        "int": 0.5,
        "affine": 1.0,
        "fp8": 0.0625 * 448 if spec.code_dtype == FLOAT8_E4M3FN else 0.125 * 57344,
        "codebook": 0.4,
    }
    assert (np.abs(back - x) <= q.scale * step[spec.kind] * 1.001 + 1e-30).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@given(codes=arrays(np.int8, (2, 5)), scale=st.floats(2.0**-100, 2.0**125, width=32))
def test_dequantised_values_are_one_product_rounded_once(ref, dtype, codes, scale):
    spec = QuantSpec.symmetric(8, ROW)
    q = Quantized(codes, np.full((2, 1), scale, F32))
    out = ref.dequantize(q, spec, dtype=dtype)
    limit = finite_max(out.dtype)
    for at in np.ndindex(2, 5):
        product = F32(min(max(exact(codes[at]) * exact(F32(scale)), -(2**127 * (2 - 2**-23))), 2**127 * (2 - 2**-23)))
        held = F32(min(max(float(product), -limit), limit))
        assert out[at] == held.astype(out.dtype)


def test_ties_go_to_even_codes_and_to_the_lower_level(ref):
    x = F32([[0.5, 1.5, 2.5, -0.5, -1.5, 7.0]])
    assert ref.quantize(x, QuantSpec.symmetric(4, ROW)).codes.tolist() == [[0, 2, 2, 0, -2, 7]]
    x = F32([[-0.625, -0.125, 0.25, 0.75, 1.0]])
    assert ref.quantize(x, QuantSpec.codebook(LEVELS, ROW)).codes.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("dtype", "largest", "nan"), [(FLOAT8_E4M3FN, 448.0, 0x7F), (FLOAT8_E5M2, 57344.0, 0x7E)])
def test_fp8_saturates_and_has_one_nan(ref, dtype, largest, nan):
    spec = QuantSpec.fp8(dtype, ROW)
    x = F32([[largest * 1.5, -largest * 3, np.nan, np.inf, -np.inf, 1.0]])
    one = np.ones((1, 1), np.float32)
    with pytest.raises(QuantizationError, match=r"x\[0, 2\] is nan"):
        ref.quantize(x, spec, scale=one)
    codes = ref.quantize(x, spec, scale=one, nonfinite="propagate").codes
    infinity = [nan, nan] if dtype == FLOAT8_E4M3FN else [0x7C, 0xFC]
    assert codes.view(np.uint8)[0, 2:5].tolist() == [nan, *infinity]
    assert codes.astype(np.float32)[0, [0, 1, 5]].tolist() == [largest, -largest, 1]
    held = ref.quantize(x, spec, scale=one, nonfinite="saturate").codes.astype(np.float32)
    assert held[0].tolist() == [largest, -largest, 0, largest, -largest, 1]


def test_groups_too_small_or_too_large_to_scale(ref):
    spec = QuantSpec.symmetric(8, ROW)
    x = F32([[2.0**-110, -(2.0**-120)], [3e38, -3e38], [0, 0]])
    q = ref.quantize(x, spec)
    assert q.scale[:, 0].tolist() == [1, F32(3e38) * (F32(1) / F32(127)), 1]
    assert q.codes.tolist() == [[0, 0], [127, -127], [0, 0]]
    huge = ref.quantize(F32([[3.4e38, -1]]), QuantSpec.codebook((-1.0, 1.0), ROW))
    assert huge.scale[0, 0] == 2.0**125


def test_a_sign_does_not_depend_on_subnormals(ref):
    # The middle of these levels is 0: what is too small to tell from it counts as it, and a tie goes down.
    spec = QuantSpec.codebook((-1.0, 1.0), ())
    x = F32([1e-40, -1e-40, 2.0**-31, 2.0**-30, -(2.0**-30), 0])
    assert ref.quantize(x, spec, scale=np.ones(6, F32)).codes.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("scale", [2.0**-101, 2.0**126, 0.0, -1.0, np.nan, np.inf])
def test_scales_out_of_range_are_refused(ref, scale):
    spec = QuantSpec.symmetric(8, ROW)
    given_scale = np.full((1, 1), scale, F32)
    out = Quantized(np.full((1, 2), 5, np.int8), np.full((1, 1), 5, F32))
    with pytest.raises(QuantizationError, match=r"a scale of .* is outside 2\*\*-100 .. 2\*\*125"):
        ref.quantize(F32([[1, 2]]), spec, scale=given_scale, out=out)
    assert (out.codes == 5).all()
    with pytest.raises(QuantizationError, match="is outside"):
        ref.dequantize(Quantized(np.int8([[1, 2]]), given_scale), spec)


def test_a_code_without_a_level_is_refused(ref):
    spec = QuantSpec.codebook(LEVELS, ROW)
    with pytest.raises(QuantizationError, match="code 5 has no level; the codebook has 5"):
        ref.dequantize(Quantized(np.uint8([[4, 5]]), np.ones((1, 1), F32)), spec)


def test_given_scales_are_used_and_kept(ref):
    q = ref.quantize(F32([[1, 2, 300]]), QuantSpec.symmetric(8, ROW), scale=F32([[0.5]]))
    assert (q.codes.tolist(), q.scale.tolist()) == ([[2, 4, 127]], [[0.5]])


def test_nothing_shares_a_scale_when_no_axis_is_named(ref):
    q = ref.quantize(F32([[3, -5, 0]]), QuantSpec.symmetric(8, ()))
    assert q.codes.tolist() == [[127, -127, 0]]


# --- rotation


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def rotated(x, seed, block):
    """Rotation by the matrix itself, in exact integers; the factor 1/sqrt(block) is left out."""
    signs = [-1 if mix((seed + (c + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 63 else 1 for c in range(x.shape[-1])]
    result = np.zeros(x.shape, object)
    for start in range(0, x.shape[-1], block):
        for row in range(block):
            total = 0
            for column in range(block):
                hadamard = -1 if (row & column).bit_count() % 2 else 1
                total = total + hadamard * signs[start + column] * x[..., start + column].astype(object)
            result[..., start + row] = total
    return result


@given(
    arrays(np.int16, st.tuples(st.integers(1, 2), st.just(32)), elements=st.integers(-100, 100)),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 4, 16]),
)
def test_the_rotation_is_the_signed_hadamard_matrix(ref, x, seed, block):
    # Where the block is a power of four, the factor is a power of two, and small integers rotate exactly.
    out = ref.rotate(x.astype(np.float32), seed=seed, block=block)
    expected = rotated(x, seed, block)
    root = int(block**0.5)
    assert (out.astype(object) * root == expected).all()
    back = ref.rotate(out, seed=seed, block=block, inverse=True)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("block", [2, 8, 128, 1024])
def test_the_inverse_undoes_the_rotation_up_to_rounding(ref, block):
    x = np.random.default_rng(block).normal(size=(3, 2048)).astype(np.float32)
    out = ref.rotate(x, seed=7, block=block)
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(ref.rotate(out, seed=7, block=block, inverse=True), x, atol=1e-5)
    assert not np.array_equal(out, ref.rotate(x, seed=8, block=block))


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**101])
def test_rotation_refuses_what_it_cannot_hold(ref, value):
    out = np.full((1, 4), 7, F32)
    with pytest.raises(QuantizationError):
        ref.rotate(F32([[0, value, 0, 0]]), seed=0, block=4, out=out)
    assert (out == 7).all()


def test_rotation_reads_tiny_values_as_zero(ref):
    out = ref.rotate(F32([[2.0**-91, -(2.0**-91)]]), seed=0, block=2)
    assert (out == 0).all()


def test_a_rotation_too_large_for_its_type_saturates(ref):
    out = ref.rotate(F32([[60000, 60000]]), seed=3, block=2, dtype="float16")
    assert np.abs(out.astype(np.float32)).max() == 65504
