"""The step of a segment, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.codecs.quantizer import MULTIPLIERS, fit_codes, fits, rms_exponent, steps, token_multipliers
from kvcore.errors import QuantizationError


@given(
    squares=st.integers(0, 2**54),
    tokens=st.integers(2, 256),
    channels=st.integers(1, 576),
)
def test_rms_exponent_is_the_least_that_bounds_the_variance(squares: int, tokens: int, channels: int) -> None:
    variance = Fraction(squares, tokens * tokens * channels)
    if tokens < 32:
        variance *= Fraction(tokens, tokens - 1)
    j = rms_exponent(squares, tokens, channels)
    # (2**(j/4))**4 = 2**j, so fourth powers compare exactly; the grid's rounding is allowed for.
    assert variance**4 <= 2**j * (1 + Fraction(1, 2**25))
    assert j == 0 or variance**4 > 2 ** (j - 1)


@given(
    squares=st.lists(st.integers(0, 2**38), min_size=1, max_size=8),
    j=st.integers(0, 112),
    channels=st.integers(1, 576),
)
def test_token_multiplier_is_the_largest_that_the_token_reaches(squares: list[int], j: int, channels: int) -> None:
    low, high = MULTIPLIERS
    for total, m in zip(squares, token_multipliers(np.array(squares, np.int64), j, channels).tolist(), strict=True):
        reached = Fraction(total, channels) ** 4
        assert m == low or reached * (1 + Fraction(1, 2**25)) >= Fraction(2) ** (j + 4 * m - 2)
        assert m == high or reached < Fraction(2) ** (j + 4 * (m + 1) - 2) * (1 + Fraction(1, 2**25))


def test_steps_are_correctly_rounded_eighths_of_octaves() -> None:
    index = np.arange(-16, 270)
    got = steps(index)
    assert got.dtype == np.float32
    for i, step in zip(index.tolist(), got.tolist(), strict=True):
        exact = Fraction(2) ** (i - 128)  # the eighth power of 2**(i/8 - 16)
        below, above = (Fraction(float(np.nextafter(np.float32(step), np.float32(t)))) for t in (0, np.inf))
        middle_low, middle_high = (below + Fraction(step)) / 2, (above + Fraction(step)) / 2
        assert middle_low**8 <= exact <= middle_high**8


def test_a_step_is_raised_until_every_value_fits_an_int16() -> None:
    k = fit_codes(np.array([0, 128]), np.zeros((2, 1), np.int64), np.array([[1.0], [1.0]], np.float32), ["a", "b"])
    assert k.tolist() == [9, 128]
    assert round(1.0 / float(steps(np.array([8]))[0])) == 32768  # one too many: k = 8 does not do


def test_values_beyond_every_step_are_refused() -> None:
    with pytest.raises(QuantizationError, match="V of layer 3 has values up to 1e\\+30"):
        fit_codes(np.array([0]), np.zeros((1, 1), np.int64), np.array([[1e30]], np.float32), ["V of layer 3"])


@given(
    k=st.lists(st.integers(-5, 260), min_size=1, max_size=3),
    m=st.integers(*MULTIPLIERS),
    largest=st.floats(0, 2.0**31, width=32),
)
def test_what_fits_is_left_as_it_is(k: list[int], m: int, largest: float) -> None:
    wanted, multipliers = np.array(k), np.full((len(k), 1), m)
    values = np.full((len(k), 1), largest, np.float32)
    try:
        raised = fit_codes(wanted, multipliers, values, ["a segment"] * len(k)).tolist()
    except QuantizationError:
        raised = None
    assert fits(wanted, multipliers, values) == (raised == [max(n, 0) for n in k])
