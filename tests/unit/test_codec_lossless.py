"""Codec lossless: every bit comes back, in fewer bytes where values are as in KV caches."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.codecs.tables import table_set
from kvcore.dtypes import DTYPES, finite_max
from kvcore.errors import CorruptFrameError, UnsupportedOpError

LOSSLESS = get_codec("lossless")
TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


def words(dtype: str) -> str:
    return f"<u{DTYPES[dtype].itemsize}"


def data(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng, item = np.random.default_rng(seed), DTYPES[dtype]
    if kind == "any bits":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * item.itemsize), np.uint8).view(item)
    if kind == "constant":
        return np.full(shape, rng.integers(0, 256, item.itemsize, np.uint8).view(item)[0])
    if kind == "denormal":  # and zeros of both signs
        x = rng.integers(0, 4, shape).astype(words(dtype)) | rng.integers(0, 2, shape).astype(words(dtype)) << (
            8 * item.itemsize - 1
        )
        return x.view(item)
    wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 5, shape[-1]) + rng.integers(-2, 3, shape[-1])
    x = np.clip(wide, -finite_max(item), finite_max(item)).astype(item)
    if kind == "rare":  # NaNs, infinities and negative zeros among values as usual
        special = rng.integers(0, 256, (64, item.itemsize), np.uint8).view(item)[:, 0]
        place = rng.random(shape) < 0.02
        x[place] = rng.choice(special.view(words(dtype)), int(place.sum())).view(item)
    return x


KINDS = ("any bits", "constant", "denormal", "usual", "rare")


def same(decoded: dict[str, np.ndarray], parts: dict[str, np.ndarray]) -> bool:
    return all(decoded[name].tobytes() == x.tobytes() for name, x in parts.items())


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(TYPES),
    layers=st.integers(1, 2),
    heads=st.integers(1, 2),
    tokens=st.one_of(st.integers(1, 40), st.sampled_from([256, 257])),
    width=st.sampled_from([1, 2, 3, 31, 32, 33, 64, 65, 130]),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_bits_come_back(coding, kind, dtype, layers, heads, tokens, width, seed):
    chunk = coding.chunk(data(kind, (layers, 2, heads, tokens, width), dtype, seed))
    assert same(coding.check_contract(LOSSLESS, chunk), chunk.parts)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_bit_pattern_of_16_bits_or_fewer_comes_back(coding, dtype):
    bits = np.arange(1 << min(16, 8 * DTYPES[dtype].itemsize), dtype=np.uint32)
    high = bits << 16 | bits if dtype == "float32" else bits
    x = high.astype(words(dtype)).view(DTYPES[dtype]).reshape(1, 2, 1, -1, 8)
    chunk = coding.chunk(x)
    assert same(coding.check_contract(LOSSLESS, chunk), chunk.parts)


@pytest.mark.parametrize("dtype", TYPES)
def test_latent_rows_come_back(coding, dtype):
    chunk = coding.chunk(data("usual", (2, 40, 96 + 32), dtype, 1), mla=True)
    assert same(coding.check_contract(LOSSLESS, chunk), chunk.parts)


def test_a_group_may_have_only_keys_or_only_values(coding):
    chunk = coding.chunk(data("usual", (2, 2, 2, 9, 5), "bfloat16", 2))
    layers = coding.encode(LOSSLESS, chunk)
    for index, name in enumerate("KV"):
        group = replace(chunk.group, parts=(chunk.group.parts[index],))
        half = LOSSLESS.encode(coding.backend, chunk.rows(), group)
        assert half == [layer[2 * index : 2 * index + 2] for layer in layers]
        empty = coding.chunk(np.zeros((2, 2, 2, 9, 5), DTYPES["bfloat16"]))
        LOSSLESS.decode(coding.backend, half, group, empty.rows())
        assert empty.parts[name].tobytes() == chunk.parts[name].tobytes()
        assert not empty.parts["VK"[index]].any()


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("bfloat16", 10.7), ("float16", 13.7), ("float32", 26.7), ("float8_e4m3fn", 6.8), ("float8_e5m2", 5.8)],
)
def test_the_size_of_values_as_in_caches(coding, dtype, most):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 2, 256, 64)) * np.exp(rng.standard_normal(64)) + rng.standard_normal(64)
    chunk = coding.chunk(x.astype(DTYPES[dtype]))
    nbytes = sum(len(s.data) for s in coding.encode(LOSSLESS, chunk)[0])
    assert 8 * nbytes / x.size < most


def test_the_header_names_all_three_table_sets():
    digests = b"".join(table_set(name).digest for name in ("exponent", "e4m3fn", "e5m2"))
    assert LOSSLESS.tables == hashlib.sha256(digests).digest()[:8]
    assert (LOSSLESS.codec_id, LOSSLESS.preset, LOSSLESS.precision) == (2, 0, 11)
    assert codec_of(2, 0) == LOSSLESS
    assert LOSSLESS.lossless


def test_a_segment_to_the_byte(coding):
    # Values of 1 to 2, each channel of one sign: a constant tile (classes, bases, the symbol of z = 0), then mantissas.
    bits = np.array([[0x3F81, 0xBF82], [0x3F83, 0xBFFC]], np.uint16)
    chunk = coding.chunk(np.stack([bits, bits]).view(DTYPES["bfloat16"])[None, :, None])
    first, second = coding.encode(LOSSLESS, chunk)[0]
    assert first == second
    assert first.tiles == ((0, 0),)
    classes, bases, symbol = first.data[:2], first.data[2:4], first.data[4]
    assert (classes[0] >> 7, classes[1] >> 7) in {(0, 1), (1, 0)}
    assert bases[0] == bases[1] == 127 + (symbol - 1) // 2
    assert first.data[5:8] == bytes(3)
    assert int.from_bytes(first.data[8:], "little") == 0x01 | 0x02 << 7 | 0x03 << 14 | 0x7C << 21
    assert len(first.data) == 12


@pytest.mark.parametrize(
    ("dtype", "bits", "mantissas"),
    [
        ("float16", [0x3EA5, 0x3D5A], bytes([0b0110, 0xA5, 0x5A])),
        ("float32", [0x3FAA1234, 0x3FD55678], (0x2A | 0x55 << 7).to_bytes(2, "little") + b"\x34\x12\x78\x56"),
    ],
)
def test_mantissas_are_cut_into_bits_and_whole_bytes(coding, dtype, bits, mantissas):
    x = np.array(bits, words(dtype)).view(DTYPES[dtype]).reshape(1, 1, 1, 1, 2)
    segment = coding.encode(LOSSLESS, coding.chunk(np.concatenate([x, x], axis=1)))[0][0]
    assert segment.data[-len(mantissas) :] == mantissas
    assert (len(segment.data) - len(mantissas)) % 4 == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["constant", "usual", "any bits"])
def test_altered_bytes_are_noticed_or_harmless(coding, dtype, kind):
    coding.check_hostile(LOSSLESS, coding.chunk(data(kind, (1, 2, 1, 3, 2), dtype, 3)))


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(TYPES),
    segments=st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 3), st.integers(0, 30)), min_size=2, max_size=2),
)
def test_no_bytes_do_harm(coding, dtype, segments):
    chunk = coding.chunk(np.zeros((1, 2, 1, 3, 2), DTYPES[dtype]))
    layer = [CodedSegment(content, ((mode, words),)) for content, mode, words in segments]
    decoded = coding.try_decode(LOSSLESS, [layer], chunk)
    assert decoded is None or list(decoded) == ["K", "V"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_values_beyond_sign_and_exponent_are_refused(coding, dtype):
    chunk = coding.chunk(np.zeros((1, 2, 1, 1, 1), DTYPES[dtype]))
    first, second = coding.encode(LOSSLESS, chunk)[0]
    mantissas = len(first.data) - 4  # a constant tile of one channel; a packed one of width 0 has 4 bytes too
    for value, fits in [(511, dtype == "bfloat16"), (255, dtype != "float16"), (512, False), (-1, False)]:
        tile = value.to_bytes(2, "little", signed=True) + bytes(2)
        broken = CodedSegment(tile + bytes(first.data)[4 : 4 + mantissas], ((1, 0),))
        if fits:
            coding.decode(LOSSLESS, [[broken, second]], chunk)
        else:
            with pytest.raises(CorruptFrameError, match="beyond its sign and exponent"):
                coding.decode(LOSSLESS, [[broken, second]], chunk)


def test_set_bits_after_the_last_mantissa_are_refused(coding):
    chunk = coding.chunk(np.ones((1, 2, 1, 1, 1), DTYPES["bfloat16"]))
    first, second = coding.encode(LOSSLESS, chunk)[0]
    broken = CodedSegment(bytes(first.data)[:-1] + bytes([0x80]), first.tiles)
    with pytest.raises(CorruptFrameError, match="after the last mantissa"):
        coding.decode(LOSSLESS, [[broken, second]], chunk)


def test_other_types_are_refused_with_what_takes_them(coding):
    chunk = coding.chunk(np.zeros((1, 2, 1, 2, 2), np.int8))
    with pytest.raises(UnsupportedOpError, match="part K is int8: raw may take it"):
        coding.encode(LOSSLESS, chunk)
