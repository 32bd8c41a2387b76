"""Reductions, against scalar arithmetic in the order that the definition fixes."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcore import QuantizationError

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BF16, np.dtype(np.float32)]
QUIET = 0x7FC00000
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
small_shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
axes_of_3 = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])


def bits(array):
    return array.view(np.uint32)


def groups(x, axes):
    """Yield (index of the result, the elements reduced into it, in C order of the reduced axes)."""
    for at in np.ndindex(*(1 if i in axes else n for i, n in enumerate(x.shape))):
        where = tuple(slice(None) if i in axes else p for i, p in enumerate(at))
        yield at, [np.float32(v) for v in np.asarray(x[where]).ravel()]


@given(arrays(np.float32, small_shapes, elements=finite32), axes_of_3, st.sampled_from(FLOATS))
def test_largest_magnitude_and_range(ref, x, axes, dtype):
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(dtype)
    largest, (low, high) = ref.reduce_absmax(x, axes), ref.reduce_minmax(x, axes)
    for at, values in groups(x, axes):
        assert largest[at] == max(abs(v) for v in values)
        assert (low[at], high[at]) == (min(values), max(values))
    for result in (largest, low, high):
        assert not np.signbit(result[result == 0]).any()  # a result of zero is +0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["reduce_absmax", "reduce_minmax", "reduce_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_policies(ref, op, dtype, value):
    x = np.array([[1, value, 2], [3, 4, 0]], np.float32).astype(dtype)
    run = getattr(ref, op)
    out = np.full((2, 2, 1) if op == "reduce_minmax" else (2, 1), 7, np.float32)
    with pytest.raises(QuantizationError, match=r"x\[0, 1\] is .*nonfinite='saturate'"):
        run(x, 1, out=out)
    assert (out == 7).all()
    held = x.copy()
    largest = float(ml_dtypes.finfo(dtype).max)
    held[0, 1] = 0 if np.isnan(value) else math.copysign(largest, value)
    np.testing.assert_array_equal(run(x, 1, nonfinite="saturate"), run(held, 1))
    through = run(x, 1, nonfinite="propagate")
    if np.isnan(value):
        assert (bits(through[..., 0, 0]) == QUIET).all()
    elif op == "reduce_minmax":
        assert through[:, 0, 0].tolist() == ([1, np.inf] if value > 0 else [-np.inf, 2])
    else:
        assert through[0, 0] == np.inf
    assert np.isfinite(through[..., 1, 0]).all()


def test_nan_of_any_payload_and_sign_becomes_the_one_nan(ref):
    x = np.array([0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
    for op in ("reduce_absmax", "reduce_minmax", "reduce_norm"):
        assert (bits(getattr(ref, op)(x, 0, nonfinite="propagate")) == QUIET).all()


# --- norm


def norm(values):
    """Definition of `reduce_norm` in scalars: scaled, squared, added by the tree, rooted, scaled back."""
    largest = max(abs(v) for v in values)
    if largest < 2.0**-126:
        return np.float32(0)
    e = min(max(math.frexp(float(largest))[1] - 1, -126), 126)
    scaled = [np.float32(math.ldexp(float(v), -e)) for v in values]
    squares = [np.float32(0) if abs(s) < 2.0**-24 else np.float32(s * s) for s in scaled]
    squares += [np.float32(0)] * ((1 << math.ceil(math.log2(len(squares)))) - len(squares))
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [np.float32(squares[i] + squares[i + half]) for i in range(half)]
    with np.errstate(over="ignore"):
        return np.ldexp(np.sqrt(squares[0]), e, dtype=np.float32)


@given(arrays(np.float32, small_shapes, elements=finite32), axes_of_3)
def test_norms_are_those_of_the_tree(ref, x, axes):
    result = ref.reduce_norm(x, axes)
    for at, values in groups(x, axes):
        assert bits(result[at]) == bits(norm(values))


@given(arrays(np.float32, st.integers(1, 70), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
def test_norms_are_nearly_right(ref, x):
    exact = math.sqrt(sum(Fraction(float(v)) ** 2 for v in x))
    assert float(ref.reduce_norm(x, 0)[0]) == pytest.approx(exact, rel=1e-6, abs=2.0**-126)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 4], 5),
        ([3e38, 3e38], np.inf),
        ([2.0**-127, 2.0**-127], 0),
        ([2.0**-126], 2.0**-126),
        ([-0.0], 0),
        ([3e-30, 4e-30], 5e-30),
    ],
)
def test_norms_at_the_ends_of_the_range(ref, values, expected):
    assert ref.reduce_norm(np.float32(values), 0)[0] == np.float32(expected)


# --- moments


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8), st.integers(-4, 5))
def test_moments_are_exact_sums_of_values_rounded_once(ref, values, exponent):
    x = np.float32(values)
    result = ref.reduce_moments(x, np.int32([exponent]), 0)
    q = [round(Fraction(float(v)) * Fraction(2) ** exponent) for v in x]  # Python rounds half to even, exactly
    assert result[:, 0].tolist() == [sum(q), sum(v * v for v in q)]


def test_moments_of_int16_are_those_of_the_integers(ref):
    x = np.random.default_rng(0).integers(-32768, 32768, (5, 7, 3)).astype(np.int16)
    result = ref.reduce_moments(x, np.zeros((1, 1, 1), np.int32), (0, 2))
    wide = x.astype(object)
    assert result[0, 0, :, 0].tolist() == wide.sum(axis=(0, 2)).tolist()
    assert result[1, 0, :, 0].tolist() == (wide**2).sum(axis=(0, 2)).tolist()


def test_exponents_by_channel(ref):
    x = np.float32([[1.5, 1.5], [2.5, 2.5]])
    result = ref.reduce_moments(x, np.int32([[0, 1]]), 0)
    assert result[0].tolist() == [[2 + 2, 3 + 5]]


@pytest.mark.parametrize(
    ("values", "exponent", "message"),
    [
        ([np.nan], 0, "NaN or infinity"),
        ([np.inf], -40, "NaN or infinity"),
        ([32767.5], 0, "magnitude of 32768, beyond int16"),
        ([-32769], 0, "beyond int16"),
        ([1.0], 15, "beyond int16"),
        ([3e38], 127, "beyond int16"),
    ],
)
def test_moments_that_do_not_fit_are_refused(ref, values, exponent, message):
    out = np.full((2, 1), 7, np.int64)
    with pytest.raises(QuantizationError, match=message):
        ref.reduce_moments(np.float32(values), np.int32([exponent]), 0, out=out)
    assert (out == 7).all()


def test_moments_at_the_ends_of_int16(ref):
    result = ref.reduce_moments(np.float32([-32768, 32767, 1e-30]), np.int32([0]), 0)
    assert result[:, 0].tolist() == [-1, 32768**2 + 32767**2]


def test_views_of_any_strides_give_the_same(ref):
    x = np.random.default_rng(0).normal(size=(6, 8, 10)).astype(np.float32)
    view = x[::2, ::-1, 1::3].transpose(2, 0, 1)
    for op in ("reduce_absmax", "reduce_minmax", "reduce_norm"):
        np.testing.assert_array_equal(getattr(ref, op)(view, (0, 2)), getattr(ref, op)(view.copy(), (0, 2)))
