"""Re-positioning keys, against scalar float32 arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcore import RopeParams
from kvcore.rope import rope_table

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.float32


def pairs(rotary, interleaved):
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + rotary) for i in range(rotary)]


@given(
    arrays(np.float32, (3, 2, 8), elements=st.floats(-1000, 1000, width=32).filter(lambda v: v == 0 or abs(v) > 1e-20)),
    st.lists(st.integers(-5000, 5000), min_size=3, max_size=3),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_keys_are_rotated_pair_by_pair(ref, x, shift, rotary, interleaved, name):
    dtype = BF16 if name == "bfloat16" else np.dtype(name)
    x = x.astype(dtype)
    shifts = np.array(shift, np.int64)
    cos, sin = rope_table(RopeParams(2 * rotary), shifts) if rotary else (np.zeros((3, 0), F32), np.zeros((3, 0), F32))
    out = ref.shift_rope(x, cos, sin, interleaved=interleaved)
    expected = x.copy()
    for t, h in np.ndindex(3, 2):
        for i, (a, b) in enumerate(pairs(rotary, interleaved)):
            va, vb, c, s = F32(x[t, h, a]), F32(x[t, h, b]), cos[t, i], sin[t, i]
            if c == 1 and s == 0:
                continue
            expected[t, h, a] = F32(F32(va * c) - F32(vb * s)).astype(dtype)
            expected[t, h, b] = F32(F32(vb * c) + F32(va * s)).astype(dtype)
    np.testing.assert_array_equal(out.view(f"u{dtype.itemsize}"), expected.view(f"u{dtype.itemsize}"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_shift_of_nothing_keeps_every_bit_pattern(ref, dtype, interleaved):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(128, 8, 64)
    x = bits.view(BF16 if dtype == "bfloat16" else np.float16)
    cos, sin = rope_table(RopeParams(64), np.zeros(128, np.int64))
    out = ref.shift_rope(x, cos, sin, interleaved=interleaved)
    np.testing.assert_array_equal(out.view(np.uint16), bits)
    assert out is not x


def test_going_there_and_back_is_nearly_the_identity(ref):
    x = np.random.default_rng(0).normal(size=(2, 300, 3, 64)).astype(np.float32)
    shift = np.arange(300, dtype=np.int64) - 150
    there = ref.shift_rope(x, *rope_table(RopeParams(64), shift))
    back = ref.shift_rope(there, *rope_table(RopeParams(64), -shift))
    np.testing.assert_allclose(back, x, atol=2e-6)
    assert not np.allclose(there[:, 0], x[:, 0])


def test_one_shift_or_two_make_no_difference_but_rounding(ref):
    x = np.random.default_rng(1).normal(size=(4, 1, 16)).astype(np.float32)
    params = RopeParams(16)
    twice = x
    for step in (100, 23):
        twice = ref.shift_rope(twice, *rope_table(params, np.full(4, step, np.int64)))
    once = ref.shift_rope(x, *rope_table(params, np.full(4, 123, np.int64)))
    np.testing.assert_allclose(twice, once, atol=1e-5)


def test_in_place_and_into_float32(ref):
    x = np.random.default_rng(2).normal(size=(4, 2, 16)).astype(np.float16)
    table = rope_table(RopeParams(8), np.arange(4, dtype=np.int64))
    wide = ref.shift_rope(x, *table, out=np.empty(x.shape, np.float32))
    narrow = ref.shift_rope(x, *table)
    np.testing.assert_array_equal(wide.astype(np.float16), narrow)
    np.testing.assert_array_equal(wide[..., 8:], x[..., 8:].astype(np.float32))  # what lies behind is kept
    assert ref.shift_rope(x, *table, out=x) is x
    np.testing.assert_array_equal(x, narrow)


def test_finite_values_saturate_and_a_nan_is_the_quiet_one(ref):
    half = np.sqrt(F32(0.5))
    cos, sin = np.full((1, 1), half, F32), np.full((1, 1), half, F32)
    x = np.array([[[60000, 60000]]], np.float16)
    assert ref.shift_rope(x, cos, sin)[0, 0].tolist() == [0, 65504]
    out = ref.shift_rope(np.array([[[-np.nan, 1]]], F32), cos, sin)
    assert out.view(np.uint32)[0, 0].tolist() == [0x7FC00000] * 2
    largest = np.finfo(np.float32).max
    assert ref.shift_rope(np.array([[[largest, largest]]], F32), cos, sin)[0, 0].tolist() == [0, largest]
