"""Frequencies, and tables of cos and sin: right to the last bit or nearly, and the same on every machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from dataclasses import replace
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError, RopeParams, UnsupportedOpError
from kvcore.rope import cos_sin, rope_table

LLAMA3 = RopeParams(
    128, 5e5, scaling="llama3", factor=8.0, original_tokens=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeParams(128, 1e6, scaling="yarn", factor=4.0, original_tokens=32768)
NTK = RopeParams(128, 1e4, scaling="ntk", factor=8.0)
SCALED = [LLAMA3, YARN, replace(YARN, truncate=False), NTK]


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


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
def test_a_scaling_whose_parameters_are_not_known_is_not_guessed(scaling):
    params = RopeParams(4, scaling=scaling, factor=2.0)
    assert params.parameters == {}
    with pytest.raises(UnsupportedOpError, match=rf"{scaling}.*original_tokens.*the engine's table as inv_freq"):
        params.frequencies()


def test_scaled_frequencies_are_these_on_every_machine():
    # What is stored depends on these bits. If this fails, some machine or library computes them otherwise.
    known = {
        "llama3": [1.0, 0.0005248461609929547, 1.2297638677963614e-05, 3.068925988914511e-07],
        "yarn": [1.0, 0.0006029411764705882, 1.510740975595332e-05, 3.102344401879299e-07],
        "ntk": [1.0, 0.003477664048114574, 0.00034868697396994784, 1.4434774808618228e-05],
    }
    for params in (LLAMA3, YARN, NTK):
        assert params.frequencies()[[0, 32, 45, 63]].tolist() == known[params.scaling], params.scaling


def computed_in_floats(params):
    """Return the frequencies as docs/bitstream.md has them, by float64 and a maths library."""
    half, theta, factor = params.rotary_dims // 2, params.theta, params.factor
    i = np.arange(half)
    if params.scaling == "ntk":
        return (theta * factor ** (2 * half / (2 * half - 2))) ** (-i / half)
    plain = theta ** (-i / half)
    if params.scaling == "llama3":
        turns = params.original_tokens * plain / (2 * math.pi)
        kept = (turns - params.low_freq_factor) / (params.high_freq_factor - params.low_freq_factor)
    else:
        first, last = (
            half * math.log(params.original_tokens / (2 * math.pi * beta)) / math.log(theta)
            for beta in (params.beta_fast, params.beta_slow)
        )
        if params.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - np.clip((i - first) / (last - first if last != first else 0.001), 0, 1)
    kept = np.clip(kept, 0, 1)
    return plain * kept + plain / factor * (1 - kept)


def scalings(least_factor=1.0):
    """Parameters of each scaling that is not a plain division."""
    common = {
        "rotary_dims": st.integers(2, 40).map(lambda half: 2 * half),
        "theta": st.floats(100, 1e7),
        "factor": st.floats(least_factor, 64),
    }
    tokens, turns = st.integers(1, 2**20), st.floats(0.25, 50)
    ordered = st.tuples(turns, turns).map(sorted).filter(lambda pair: pair[1] - pair[0] > 1e-3)

    def yarn(pair, **values):
        return RopeParams(scaling="yarn", beta_slow=pair[0], beta_fast=pair[1], **values)

    def llama3(pair, **values):
        return RopeParams(scaling="llama3", low_freq_factor=pair[0], high_freq_factor=pair[1], **values)

    return st.one_of(
        st.builds(RopeParams, scaling=st.just("ntk"), **common),
        st.builds(llama3, ordered, original_tokens=tokens, **common),
        st.builds(yarn, ordered, original_tokens=tokens, truncate=st.booleans(), **common),
    )


@given(scalings())
def test_scaled_frequencies_are_those_of_the_formulas(params):
    np.testing.assert_allclose(params.frequencies(), computed_in_floats(params), rtol=1e-9)


@given(scalings())
def test_scaled_frequencies_lie_between_the_plain_and_the_interpolated_ones(params):
    frequencies = params.frequencies()
    plain = RopeParams(params.rotary_dims, params.theta).frequencies()
    interpolated = RopeParams(params.rotary_dims, params.theta, scaling="linear", factor=params.factor).frequencies()
    assert (frequencies <= plain).all()
    assert (interpolated <= frequencies).all()
    assert (np.diff(frequencies) < 0).all()
    if params.scaling == "ntk":
        assert (frequencies[0], frequencies[-1]) == (plain[0], interpolated[-1])


@given(scalings(), st.booleans())
def test_a_factor_of_one_scales_nothing(params, interleaved):
    unscaled = replace(params, factor=1.0, interleaved=interleaved)
    np.testing.assert_array_equal(unscaled.frequencies(), RopeParams(params.rotary_dims, params.theta).frequencies())


def test_llama3_keeps_high_frequencies_and_divides_low_ones():
    plain = RopeParams(128, 5e5).frequencies()
    turns = 8192 * plain / (2 * math.pi)
    scaled = LLAMA3.frequencies()
    assert (scaled[turns > 4] == plain[turns > 4]).all()
    assert (scaled[turns < 1] == plain[turns < 1] / 8).all()
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(
    ("tokens", "divisors"), [(1, [1.0] * 8), (6, [1.0] + [4.0] * 7), (2**32 - 1, [4.0] * 8)], ids=str
)
def test_a_ramp_beyond_the_channels_is_no_error(tokens, divisors):
    # The published formula then keeps what turns too seldom and divides what turns often. It is what models were
    # trained with, and not for us to improve.
    params = RopeParams(16, 10.0, scaling="yarn", factor=4.0, original_tokens=tokens)
    np.testing.assert_array_equal(params.frequencies(), RopeParams(16, 10.0).frequencies() / divisors)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not installed",
)


def of_transformers(kind, params, seq_len=None, **values):
    """Return the inverse frequencies that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=params.rotary_dims,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": kind, "rope_theta": params.theta, "factor": params.factor, **values},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=seq_len)[0].double().numpy()


@needs_transformers
@pytest.mark.parametrize("dims", [16, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
@pytest.mark.parametrize("tokens", [64, 4096, 32768])
def test_frequencies_are_those_of_transformers(dims, theta, factor, tokens):
    close = {"rtol": 3e-6}  # it computes in float32, and its ramp of yarn from a difference
    original = {"original_max_position_embeddings": tokens}
    plain = RopeParams(dims, theta, factor=factor)
    ramp = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = replace(plain, scaling="llama3", original_tokens=tokens, **ramp)
    np.testing.assert_allclose(llama3.frequencies(), of_transformers("llama3", plain, **ramp, **original), **close)
    for more in ({}, {"truncate": False}, {"beta_fast": 16.0, "beta_slow": 2.0}):
        yarn = replace(plain, scaling="yarn", original_tokens=tokens, **more)
        np.testing.assert_allclose(yarn.frequencies(), of_transformers("yarn", plain, **more, **original), **close)
    # It has the static scaling in its dynamic one only: at twice the length, that of `factor + 1`.
    ntk = replace(plain, scaling="ntk", factor=factor + 1)
    np.testing.assert_allclose(ntk.frequencies(), of_transformers("dynamic", plain, seq_len=2 * 65536), **close)


def test_parameters_have_one_form():
    same = replace(YARN, original_tokens=32768.0, beta_fast=32, beta_slow=1, truncate=1)
    assert same == YARN
    assert list(same.parameters.items()) == [
        ("beta_fast", 32.0), ("beta_slow", 1.0), ("original_tokens", 32768), ("truncate", True)
    ]  # fmt: skip
    assert [type(value) for value in same.parameters.values()] == [float, float, int, bool]
    assert list(LLAMA3.parameters.values()) == [1.0, 4.0, 8192]
    assert NTK.parameters == RopeParams(4).parameters == {}


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
        ({"original_tokens": 8192}, "scaling 'none' does not take original_tokens"),
        ({"scaling": "linear", "beta_fast": 8.0}, "scaling 'linear' does not take beta_fast"),
        ({"scaling": "ntk", "original_tokens": 8192}, "scaling 'ntk' does not take original_tokens"),
        ({"scaling": "yarn", "original_tokens": 8, "low_freq_factor": 1.0}, "'yarn' does not take low_freq_factor"),
        ({"scaling": "yarn", "beta_fast": 8.0}, "'yarn' needs original_tokens"),
        ({"scaling": "llama3", "original_tokens": 8}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"scaling": "yarn", "original_tokens": 8, "inv_freq": (1.0, 0.5)}, "inv_freq does not take original_tokens"),
        (
            {"scaling": "yarn", "original_tokens": 0},
            r"original_tokens must be a whole number in 1\.\.2\*\*32 - 1, got 0",
        ),
        ({"scaling": "yarn", "original_tokens": 2**32}, "original_tokens must be a whole number"),
        ({"scaling": "yarn", "original_tokens": 0.5 + 8}, "original_tokens must be a whole number"),
        ({"scaling": "yarn", "original_tokens": math.nan}, "original_tokens must be a whole number"),
        ({"scaling": "yarn", "original_tokens": 8, "truncate": 2}, "truncate must be true or false, got 2"),
        ({"scaling": "yarn", "original_tokens": 8, "beta_fast": math.inf}, "beta_fast must be a positive number"),
        ({"scaling": "yarn", "original_tokens": 8, "beta_slow": 0.0}, "beta_slow must be a positive number"),
        ({"scaling": "yarn", "original_tokens": 8, "beta_slow": 33.0}, "beta_slow must not be above beta_fast"),
        ({"scaling": "yarn", "original_tokens": 8, "theta": 1.0}, "'yarn' needs a theta above 1"),
        (
            {"scaling": "llama3", "original_tokens": 8, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RopeParams(**{"rotary_dims": 4, **changes})


@pytest.mark.parametrize(
    "params",
    [RopeParams(64), RopeParams(4, 5e5, True, "llama3", 8.0, (1.0, 0.25)), RopeParams(4, scaling="yarn"), *SCALED],
)
def test_parameters_survive_the_way_through_plain_values(params):
    assert RopeParams.from_dict(params.to_dict()) == params
    assert RopeParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params


def test_plain_values_name_a_scalings_parameters_only_where_there_are_any():
    names = {"factor", "interleaved", "inv_freq", "rotary_dims", "scaling", "theta"}
    assert set(RopeParams(64, scaling="linear", factor=2.0).to_dict()) == set(NTK.to_dict()) == names
    assert set(LLAMA3.to_dict()) == names | {"low_freq_factor", "high_freq_factor", "original_tokens"}
