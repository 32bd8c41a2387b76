"""Codec fp8: a byte an element and four a segment, as exact as 8-bit floats are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.dtypes import DTYPES
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError, UnsupportedOpError

FORMATS = {"fp8": (ml_dtypes.float8_e4m3fn, 448.0, 2.0**-4), "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2.0**-3)}
TYPES = ("bfloat16", "float16", "float32")
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
TINY = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}  # half of the least float16


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(DTYPES[dtype])


def test_presets_and_numbers():
    assert (codec_of(4, 0).name, codec_of(4, 1).name) == ("fp8", "fp8_e5m2")
    assert not get_codec("fp8").lossless
    with pytest.raises(ConfigError, match="scale"):
        get_codec("fp8", scale=2)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(TYPES),
    tokens=st.one_of(st.integers(1, 9), st.sampled_from([256, 257])),
    width=st.sampled_from([1, 3, 64]),
    size=st.sampled_from([2.0**-12, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_values_come_back_within_half_a_code(coding, name, dtype, tokens, width, size, seed):
    codec, (_, largest, half) = get_codec(name), FORMATS[name]
    chunk = coding.chunk(data((2, 2, 2, tokens, width), dtype, seed, size))
    for part, decoded in coding.check_contract(codec, chunk).items():
        x = chunk.parts[part].astype(np.float64)
        absmax = np.abs(x).max(axis=(2, 3), keepdims=True)
        normal = np.abs(x) * half  # relative where codes are normal, absolute below
        subnormal = absmax / largest * (2.0**-10 if name == "fp8" else 2.0**-17)
        bound = np.maximum(normal, subnormal) * (1 + 1e-5) + np.abs(x) * ULP[dtype] * 2 + TINY[dtype]
        assert (np.abs(decoded.astype(np.float64) - x) <= bound).all()
    sizes = {len(s.data) for layer in coding.encode(codec, chunk) for s in layer}
    assert sizes == {tokens * width + 4}


def test_the_largest_magnitude_becomes_the_largest_code(coding):
    chunk = coding.chunk(data((1, 2, 2, 8, 4), "float32"))
    for segment in coding.encode(get_codec("fp8"), chunk)[0]:
        assert max(byte & 0x7F for byte in segment.data[4:]) == 0x7E


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_unscaled_is_a_plain_saturating_cast(coding, name):
    kind, largest, _ = FORMATS[name]
    x = data((2, 2, 2, 33, 16), "float32", 1, largest / 2)
    chunk = coding.chunk(x)
    codec = get_codec(name, scaled=False)
    layers = coding.encode(codec, chunk)
    assert {bytes(s.data[:4]) for layer in layers for s in layer} == {np.float32(1).tobytes()}
    # The decoder need not be told.
    decoded = coding.decode(get_codec(name), layers, chunk)
    for part, y in decoded.items():
        assert (y == np.clip(chunk.parts[part], -largest, largest).astype(kind).astype(np.float32)).all()


def test_zeros_stay_zeros(coding):
    chunk = coding.chunk(np.zeros((1, 2, 1, 2, 2), np.float16))
    assert all(not y.any() for y in coding.check_contract(get_codec("fp8"), chunk).values())


def test_latent_rows(coding):
    chunk = coding.chunk(data((2, 5, 12), "bfloat16"), mla=True)
    for name, y in coding.check_contract(get_codec("fp8"), chunk).items():
        assert np.abs(y.astype(np.float32) - chunk.parts[name].astype(np.float32)).max() < 0.2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(coding, bad):
    x = data((2, 2, 2, 3, 4), "float16")
    x[1, 1, 0, 2, 3] = bad
    with pytest.raises(QuantizationError, match=r"codec fp8 cannot hold part V .*\[1, 0, 2, 3\]"):
        coding.encode(get_codec("fp8"), coding.chunk(x))


def test_8_bit_floats_are_not_coded_again(coding):
    x = np.zeros((1, 2, 1, 2, 2), ml_dtypes.float8_e4m3fn)
    with pytest.raises(UnsupportedOpError, match="part K is float8_e4m3fn: lossless may take it"):
        coding.encode(get_codec("fp8"), coding.chunk(x))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_altered_bytes_are_noticed_or_harmless(coding, name):
    codec, chunk = get_codec(name), coding.chunk(data((1, 2, 1, 3, 2), "bfloat16"))
    # Codes and mantissas of scales are data: frames have digests for them. Not so what cannot have been written.
    unnoticed = coding.check_hostile(codec, chunk)
    assert 0 < unnoticed < 2 * 8 * (3 * 2 + 4)


@pytest.mark.parametrize(
    ("scale", "codes", "message"),
    [
        (np.nan, b"\0", "a scale outside"),
        (0.0, b"\0", "a scale outside"),
        (-1.0, b"\0", "a scale outside"),
        (2.0**126, b"\0", "a scale outside"),
        (1.0, b"\x7f", "not finite"),
        (1.0, b"\xff", "not finite"),
        (1.0, b"", "ends before its parts do"),
        (1.0, b"\0\0", "1 bytes follow"),
    ],
)
def test_what_cannot_have_been_written_is_refused(coding, scale, codes, message):
    chunk = coding.chunk(np.zeros((1, 2, 1, 1, 1), np.float16))
    good = coding.encode(get_codec("fp8"), chunk)[0][1]
    broken = CodedSegment(np.float32(scale).tobytes() + codes)
    with pytest.raises(CorruptFrameError, match=message):
        coding.decode(get_codec("fp8"), [[broken, good]], chunk)


@settings(max_examples=100)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.binary(min_size=8, max_size=12), min_size=2, max_size=2))
def test_no_bytes_do_harm(coding, name, contents):
    chunk = coding.chunk(np.zeros((1, 2, 1, 3, 2), np.float16))
    decoded = coding.try_decode(get_codec(name), [[CodedSegment(content) for content in contents]], chunk)
    assert decoded is None or all(np.isfinite(y).all() for y in decoded.values())
