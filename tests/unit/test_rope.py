"""Tables of cos and sin: right to the last float32 bit or nearly, and the same on every machine."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError, RopeParams, UnsupportedOpError
from kvcore.rope import cos_sin, rope_table


def exact_cos_sin(angle: float) -> tuple[float, float]:
    """Return cos and sin of a float64 angle by Taylor series in 60 digits, after taking whole turns off."""
    getcontext().prec = 60
    # Machin's formula, so that pi comes from nothing but integers.
    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    x = Decimal(angle)
    x -= (x / (2 * pi)).to_integral_value() * 2 * pi
    cos, sin, term = Decimal(0), Decimal(0), Decimal(1)
    for n in range(60):
        if n % 2 == 0:
            cos += term if n % 4 == 0 else -term
        else:
            sin += term if n % 4 == 1 else -term
        term = term * x / (n + 1)
    return float(cos), float(sin)


def arctan_of_inverse(n: int) -> Decimal:
    return sum(
        ((Decimal(1) if k % 2 == 0 else Decimal(-1)) / ((2 * k + 1) * Decimal(n) ** (2 * k + 1)) for k in range(50)),
        Decimal(0),
    )


@given(
    st.floats(-1e6, 1e6)
    | st.integers(-(1 << 20), 1 << 20).map(float)
    | st.integers(-600000, 600000).map(lambda n: n * math.pi / 2)
)
def test_cos_and_sin_are_within_the_stated_error(angle):
    cos, sin = cos_sin(np.array([angle]))
    expected = exact_cos_sin(angle)
    assert abs(cos[0] - expected[0]) < 2e-15
    assert abs(sin[0] - expected[1]) < 2e-15


@pytest.mark.parametrize(
    ("rotary", "theta", "factor"), [(64, 10000.0, 1.0), (128, 500000.0, 1.0), (2, 10000.0, 4.0), (80, 1e6, 8.0)]
)
def test_frequencies_are_the_powers_rounded_once(rotary, theta, factor):
    frequencies = RopeParams(rotary, theta, scaling="linear", factor=factor).frequencies()
    assert frequencies[0] == 1 / factor
    getcontext().prec = 60
    for i, frequency in enumerate(frequencies):
        expected = Decimal(theta) ** (Decimal(-2 * i) / Decimal(rotary)) / Decimal(factor)
        assert frequency == float(expected)


def test_a_table_holds_float32_values_of_shift_times_frequency():
    params = RopeParams(64)
    shift = np.array([-131072, -1, 0, 1, 255, 1048575], np.int64)
    cos, sin = rope_table(params, shift)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (6, 32)
    angle = shift[:, None] * params.frequencies()
    expected = np.vectorize(exact_cos_sin)(angle)
    for table, values in zip((cos, sin), expected, strict=True):
        assert np.abs(table - values).max() <= 2.0**-25 + 3e-15  # half a unit of float32 below one


def test_a_shift_of_nothing_is_the_identity():
    cos, sin = rope_table(RopeParams(128, 500000.0), np.array([0, 5, 0], np.int64))
    for row in (0, 2):
        assert (cos[row] == 1).all()
        assert (sin[row] == 0).all()
        assert not np.signbit(sin[row]).any()
    assert (sin[1] != 0).all()
    assert rope_table(RopeParams(4), np.zeros(0, np.int64))[0].shape == (0, 2)


@given(st.integers(-(1 << 20) + 1, (1 << 20) - 1))
def test_going_back_is_the_mirror_image(shift):
    cos, sin = rope_table(RopeParams(16), np.array([shift, -shift], np.int64))
    np.testing.assert_array_equal(cos[0], cos[1])
    np.testing.assert_array_equal(sin[0], -sin[1])


def test_the_table_is_the_same_on_every_machine():
    # What is stored depends on these bits. If this fails, some machine or library computes them otherwise.
    digest = hashlib.sha256()
    for params in (RopeParams(64), RopeParams(128, 500000.0), RopeParams(96, 1e6, scaling="linear", factor=8.0)):
        for table in rope_table(params, np.arange(-4096, 1 << 20, 4093, dtype=np.int64)):
            digest.update(table.astype("<f4").tobytes())
    assert digest.hexdigest() == "7b169228ef23c7181861b373f25ac9ce06e234c0ab87203579a499eef171cf0c"


@pytest.mark.parametrize("shift", [1 << 20, -(1 << 20), 1 << 40])
def test_shifts_beyond_the_accuracy_of_the_reduction_are_refused(shift):
    with pytest.raises(ConfigError, match=rf"position shift {abs(shift)} is 2\*\*20 or more; re-base"):
        rope_table(RopeParams(4), np.array([0, shift], np.int64))


def test_an_explicit_table_of_frequencies_is_taken_as_it_is():
    params = RopeParams(4, scaling="yarn", factor=2.0, inv_freq=(0.5, 0.125))
    np.testing.assert_array_equal(params.frequencies(), [0.5, 0.125])


@pytest.mark.parametrize("scaling", ["ntk", "yarn", "llama3"])
def test_scalings_of_engines_are_not_guessed(scaling):
    with pytest.raises(UnsupportedOpError, match=rf"{scaling}.*pass the engine's table as inv_freq"):
        RopeParams(4, scaling=scaling, factor=2.0).frequencies()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dims": 3}, "even and at least 2, got 3"),
        ({"rotary_dims": 0}, "even and at least 2, got 0"),
        ({"theta": 0.0}, "theta must be a positive number"),
        ({"theta": math.inf}, "theta must be a positive number"),
        ({"theta": math.nan}, "theta must be a positive number"),
        ({"scaling": "dynamic"}, "unknown RoPE scaling 'dynamic'; known are none, linear"),
        ({"factor": -1.0}, "factor must be a positive number"),
        ({"inv_freq": (1.0,)}, r"inv_freq needs rotary_dims / 2 = 2 entries, got 1"),
    ],
)
def test_parameters_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RopeParams(**{"rotary_dims": 4, **changes})


@pytest.mark.parametrize("params", [RopeParams(64), RopeParams(4, 5e5, True, "llama3", 8.0, (1.0, 0.25))])
def test_parameters_survive_the_way_through_plain_values(params):
    assert RopeParams.from_dict(params.to_dict()) == params
