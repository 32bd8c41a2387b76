"""Codec raw: every element type, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.raw import Raw, layer_arrays, layer_bytes
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.dtypes import DTYPES
from kvcore.errors import ConfigError, CorruptFrameError

RAW = get_codec("raw")


def any_bits(shape, dtype, seed=0):
    item = DTYPES[dtype]
    data = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * item.itemsize), np.uint8)
    return data.view(item)


def test_it_is_found_by_name_and_by_number():
    assert isinstance(RAW, Raw)
    assert codec_of(0, 0) == RAW
    assert (RAW.chain, RAW.precision, RAW.tables, RAW.lossless) == (("raw",), 0, bytes(8), True)
    with pytest.raises(ConfigError, match="raw"):
        get_codec("raw", level=1)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 300), st.integers(1, 9),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_all_bits_come_back(coding, dtype, layers, heads, tokens, width, mla, seed):
    x = any_bits((layers, tokens, width + 1) if mla else (layers, 2, heads, tokens, width), dtype, seed)
    chunk = coding.chunk(x, mla=mla)
    for name, y in coding.check_contract(RAW, chunk).items():
        assert y.tobytes() == chunk.parts[name].tobytes()


def test_segments_are_what_a_raw_frame_holds(coding):
    chunk = coding.chunk(any_bits((1, 2, 3, 5, 7), "bfloat16"))
    layer = memoryview(bytearray(layer_bytes(chunk.group)))
    for array, part in zip(layer_arrays(chunk.group, layer), chunk.parts.values(), strict=True):
        array[...] = part[0]
    stored = [head.tobytes() for array in layer_arrays(chunk.group, layer) for head in array]
    assert [s.data for s in coding.encode(RAW, chunk)[0]] == stored


def test_parts_may_differ_in_type(coding):
    chunk = coding.chunk(any_bits((2, 2, 2, 4, 6), "float16"))
    chunk.parts["V"] = any_bits((2, 2, 4, 6), "float8_e4m3fn")
    for name, y in coding.check_contract(RAW, chunk).items():
        assert y.tobytes() == chunk.parts[name].tobytes()


def test_only_the_right_number_of_bytes_is_taken(coding):
    chunk = coding.chunk(any_bits((1, 2, 1, 3, 2), "float16"))
    # A flipped bit of raw data is data: frames have digests for that.
    assert coding.check_hostile(RAW, chunk) == 2 * 8 * 12
    segments = coding.encode(RAW, chunk)[0]
    with pytest.raises(CorruptFrameError, match="12 bytes and 1 tiles, not of 12 bytes"):
        coding.decode(RAW, [[CodedSegment(segments[0].data, ((0, 0),)), segments[1]]], chunk)
