"""Grouped integers: keys by channel, values by token, never off by more than half a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.dtypes import DTYPES
from kvcore.errors import CorruptFrameError, QuantizationError, UnsupportedOpError

BITS = {"int8": 8, "int4": 4, "int2": 2}
TYPES = ("bfloat16", "float16", "float32")
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
TINY = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}  # half of the least float16


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, offset: float = 0.0, size: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (offset * rng.standard_normal(shape[-1]) + size * rng.standard_normal(shape)).astype(DTYPES[dtype])


def groups(extent: int) -> list[slice]:
    return [slice(start, min(start + 32, extent)) for start in range(0, extent, 32)]


def half_steps(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Half a step of each element's group of 32 along an axis, with what rounding a step to bfloat16 adds."""
    result = np.empty_like(x)
    for part in groups(x.shape[axis]):
        place = tuple(part if i == axis else slice(None) for i in range(x.ndim))
        low, high = x[place].min(axis=axis, keepdims=True), x[place].max(axis=axis, keepdims=True)
        step = np.maximum((high - low) / (2**bits - 1), np.maximum(abs(low), abs(high)) * 2.0**-14)
        result[place] = step * (1 + 2.0**-7) / 2
    return result


def size(tokens: int, width: int, bits: int, by_channel: bool) -> int:
    count = len(groups(tokens)) * width if by_channel else tokens * len(groups(width))
    return 4 * count + -(-tokens * width * bits // 8)


def test_presets_are_numbered_by_their_bits():
    assert [codec_of(3, bits).name for bits in BITS.values()] == list(BITS)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(BITS)),
    dtype=st.sampled_from(TYPES),
    tokens=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257])),
    width=st.sampled_from([1, 3, 31, 32, 33, 64, 80]),
    offset=st.sampled_from([0.0, 1.0, 50.0]),
    magnitude=st.sampled_from([2.0**-10, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_values_come_back_within_half_a_step(coding, name, dtype, tokens, width, offset, magnitude, seed):
    codec, bits = get_codec(name), BITS[name]
    chunk = coding.chunk(data((2, 2, 2, tokens, width), dtype, seed, offset, magnitude))
    for part, decoded in coding.check_contract(codec, chunk).items():
        x = chunk.parts[part].astype(np.float64)
        half = half_steps(x, bits, axis=2 if part == "K" else 3)
        # What is added: fp32's rounding of up to 2**14 steps, and the rounding of what comes back.
        assert (np.abs(decoded.astype(np.float64) - x) <= half * 1.005 + np.abs(x) * ULP[dtype] + TINY[dtype]).all()
    layer = coding.encode(codec, chunk)[0]
    assert [len(s.data) for s in layer] == [size(tokens, width, bits, k) for k in (True, True, False, False)]


def test_bits_of_an_element(coding):
    chunk = coding.chunk(data((1, 2, 1, 256, 64), "bfloat16"))
    for name, bits in BITS.items():
        assert {8 * len(s.data) / (256 * 64) for s in coding.encode(get_codec(name), chunk)[0]} == {bits + 1}


def test_a_large_channel_costs_keys_nothing_and_a_large_token_costs_values_nothing(coding):
    x = data((1, 2, 1, 64, 32), "float32")
    x[:, 0, :, :, 5] *= 1000
    x[:, 1, :, 7, :] *= 1000
    decoded = coding.check_contract(get_codec("int4"), coding.chunk(x))
    k, v = (np.abs(y - x[:, i]) for i, y in enumerate(decoded.values()))
    assert np.delete(k, 5, axis=3).max() < 0.3 < k[..., 5].max()
    assert np.delete(v, 7, axis=2).max() < 0.3 < v[:, :, 7].max()


@pytest.mark.parametrize("name", sorted(BITS))
@pytest.mark.parametrize("value", [0.0, 1.0, -(2.0**-30), 3e4])
def test_constants_come_back(coding, name, value):
    chunk = coding.chunk(np.full((1, 2, 1, 33, 33), value, np.float32))
    for y in coding.check_contract(get_codec(name), chunk).values():
        assert np.abs(y - np.float32(value)).max() <= abs(value) * 2.0**-14


def test_ends_that_are_both_halves_are_held(coding):
    # A step of 1 and ends at -1.5 and 1.5 would round to -2 and 2: five integers for two bits.
    x = np.array([-1.5, 1.5, 0.0, 1.0], np.float32).reshape(1, 1, 1, 4, 1)
    decoded = coding.check_contract(get_codec("int2"), coding.chunk(np.concatenate([x, x], axis=1)))
    assert decoded["K"].ravel().tolist() == [-2.0, 1.0, 0.0, 1.0]


def test_a_segment_to_the_byte(coding):
    x = np.array([[0.0, 8.0], [30.0, 8.0], [12.0, 8.0]], np.float32)  # K: steps of 2 and of 8 * 2**-14
    first, second = coding.encode(get_codec("int4"), coding.chunk(np.stack([x, x])[None, :, None]))[0]
    assert first.data[:4] == np.array([0x4000, 0x3A00], "<u2").tobytes()
    assert first.data[4:8] == np.array([0, 16384], "<i2").tobytes()
    assert first.data[8:] == bytes([0x00, 0x0F, 0x06])
    assert np.frombuffer(second.data[6:12], "<i2").tolist()[2] == 30  # V's last token: 8 to 12 in steps of 4/15, about
    assert len(second.data) == 3 * 4 + 3


def test_latent_rows_are_coded_by_token_and_their_rope_part_by_channel(coding):
    chunk = coding.chunk(data((2, 40, 12), "bfloat16"), mla=True)
    decoded = coding.check_contract(get_codec("int8"), chunk)
    for name, y in decoded.items():
        assert np.abs(y.astype(np.float32) - chunk.parts[name].astype(np.float32)).max() < 0.05
    layer = coding.encode(get_codec("int8"), chunk)[0]
    assert [len(s.data) for s in layer] == [size(40, 9, 8, False), size(40, 3, 8, True)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [5, 64])
def test_what_is_not_finite_is_refused(coding, bad, tokens):
    x = data((2, 2, 2, tokens, 4), "float32")
    x[0, 0, 1, tokens - 1, 3] = bad
    with pytest.raises(QuantizationError, match="codec int4 cannot hold part K"):
        coding.encode(get_codec("int4"), coding.chunk(x))


def test_what_no_step_reaches_is_refused(coding):
    x = np.array([-3e38, 3e38], np.float32).reshape(1, 1, 1, 2, 1)
    with pytest.raises(QuantizationError, match="a scale beyond"):
        coding.encode(get_codec("int2"), coding.chunk(np.concatenate([x, x], axis=1)))


def test_other_types_are_refused(coding):
    with pytest.raises(UnsupportedOpError, match="part K is float8_e5m2"):
        coding.encode(get_codec("int8"), coding.chunk(np.zeros((1, 2, 1, 2, 2), DTYPES["float8_e5m2"])))


@pytest.mark.parametrize("name", sorted(BITS))
def test_altered_bytes_are_noticed_or_harmless(coding, name):
    chunk = coding.chunk(data((1, 2, 1, 3, 3), "bfloat16"))
    unnoticed = coding.check_hostile(get_codec(name), chunk)  # codes and scales are data: frames have digests for them
    assert 0 < unnoticed < sum(8 * len(s.data) for s in coding.encode(get_codec(name), chunk)[0])


@pytest.mark.parametrize(
    ("scale", "zero", "code", "message"),
    [
        (0x0000, 0, 0, "a scale outside"),
        (0x7FC0, 0, 0, "a scale outside"),
        (0xBF80, 0, 0, "a scale outside"),
        (0x7F00, 0, 0, "a scale outside"),
        (0x3F80, 32767, 0, "a zero point of 32767"),
        (0x3F80, 0, 0x10, "bits after the last code"),
    ],
)
def test_what_cannot_have_been_written_is_refused(coding, scale, zero, code, message):
    chunk = coding.chunk(np.zeros((1, 2, 1, 1, 1), np.float16))
    good = coding.encode(get_codec("int4"), chunk)[0][1]
    broken = CodedSegment(np.array([scale, zero], "<u2").tobytes() + bytes([code]))
    with pytest.raises(CorruptFrameError, match=message):
        coding.decode(get_codec("int4"), [[broken, good]], chunk)


@settings(max_examples=100)
@given(st.sampled_from(sorted(BITS)), st.data())
def test_no_bytes_do_harm(coding, name, draw):
    chunk = coding.chunk(np.zeros((1, 2, 1, 3, 3), np.float16))
    lengths = [size(3, 3, BITS[name], by_channel) for by_channel in (True, False)]
    contents = [draw.draw(st.binary(min_size=n, max_size=n)) for n in lengths]
    decoded = coding.try_decode(get_codec(name), [[CodedSegment(content) for content in contents]], chunk)
    assert decoded is None or all(np.isfinite(y).all() for y in decoded.values())
