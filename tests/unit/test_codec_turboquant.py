"""Codec turboquant: the levels are those of Lloyd and Max, the error is theirs, and the bytes are those of the page."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.codecs.turboquant import LEVELS, MAX_WIDTH, SCALES, TurboQuant
from kvcore.dtypes import BFLOAT16, DTYPES
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError, UnsupportedOpError

BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit": (4, 4),
    "turboquant_k3v4": (3, 4),
    "turboquant_3bit": (3, 3),
}
ERROR = {3: 0.1859, 4: 0.0975}  # relative, of normal values: the square roots of 0.03455 and 0.009501
TYPES = ("bfloat16", "float16", "float32")


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(DTYPES[dtype])


def relative(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(x))


def nbytes(tokens: int, width: int, bits: int) -> int:
    return 2 * tokens + -(-tokens * width * bits // 8)


def test_presets_and_numbers():
    assert {codec_of(6, 16 * k + v).name: (k, v) for k, v in BITS.values()} == BITS
    assert not get_codec("turboquant_4bit").lossless
    with pytest.raises(ConfigError, match=r"'turboquant_2bit'; there are turboquant_k8v4, "):
        TurboQuant("turboquant_2bit")
    with pytest.raises(ConfigError, match="seed"):
        get_codec("turboquant_4bit", seed=1)


# --- levels


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_lloyd_and_max_s_for_the_normal_distribution(bits):
    """Lloyd's iteration: borders half way between levels, each level the mean of what lies between its borders."""
    half = 2 ** (bits - 1)
    levels = [(i + 0.5) * 3 / half for i in range(half)]  # the positive ones; 0 is a border
    for _ in range(4000):
        borders = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 40.0]
        cells = list(itertools.pairwise(borders))
        levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in cells]
    assert np.array(levels, np.float32).tolist() == np.array(LEVELS[bits], np.float32).tolist()
    # A quantiser whose levels are means loses the variance that the levels lack.
    error = 1 - 2 * sum(level**2 * (below(b) - below(a)) for level, (a, b) in zip(levels, cells, strict=True))
    assert math.sqrt(error) == pytest.approx(ERROR[bits], abs=1e-4)


# --- errors


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 96, 128, 576])
def test_the_error_of_normal_rows_is_the_theory_s(coding, name, dtype, width):
    chunk = coding.chunk(data((1, 2, 2, 50, width), dtype, width))
    decoded = coding.check_contract(get_codec(name), chunk)
    for part, bits in zip("KV", BITS[name], strict=True):
        error = relative(chunk.parts[part], decoded[part])
        if bits == 8:
            assert error < 0.0095
        else:
            assert 0.96 * ERROR[bits] < error < 1.02 * ERROR[bits]


@pytest.mark.parametrize("width", [24, 64, 80, 96])
@pytest.mark.parametrize("channel", [0, 7, -1])
def test_a_channel_that_is_large_in_all_rows_spoils_no_others(coding, width, channel):
    x = data((1, 2, 1, 64, width), "float32", width)
    x[..., channel] *= 100
    decoded = coding.check_contract(get_codec("turboquant_4bit"), coding.chunk(x))
    assert relative(x[:, 0], decoded["K"]) < 1.2 * ERROR[4]


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(TYPES),
    tokens=st.integers(1, 9),
    width=st.sampled_from([1, 2, 3, 5, 8, 31, 33, 64, 72, 130]),
    size=st.sampled_from([2.0**-12, 1.0, 300.0]),
    heavy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_8_bit_rows_come_back_within_half_a_step_of_each_coordinate(coding, dtype, tokens, width, size, heavy, seed):
    x = data((2, 2, 2, tokens, width), dtype, seed, size)
    if heavy:
        x = (x.astype(np.float64) ** 3).clip(-60000, 60000).astype(x.dtype)
    chunk = coding.chunk(x)
    y = coding.check_contract(get_codec("turboquant_k8v4"), chunk)["K"].astype(np.float64)
    rows = chunk.parts["K"].astype(np.float64)
    # A step is the largest coordinate / 127, which is no more than the norm / 127; rotations keep distances.
    norm = np.linalg.norm(rows, axis=3)
    bound = norm / 127 / 2 * math.sqrt(width) * 1.01 + norm * 2.0**-8 + 2.0**-24 * math.sqrt(width)
    assert (np.linalg.norm(y - rows, axis=3) <= bound).all()
    sizes = [len(s.data) for s in coding.encode(get_codec("turboquant_k8v4"), chunk)[0]]
    assert sizes == [nbytes(tokens, width, 8)] * 2 + [nbytes(tokens, width, 4)] * 2
    assert get_codec("turboquant_k8v4").max_sizes(chunk.group) == [(size, ()) for size in sizes]


@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(BITS)),
    width=st.sampled_from([3, 16, 40]),
    power=st.integers(-60, 60),
    seed=st.integers(0, 9),
)
def test_codes_do_not_depend_on_the_size_of_a_row(coding, name, width, power, seed):
    chunk, codec = coding.chunk(data((1, 2, 1, 5, width), "float32", seed)), get_codec(name)
    other = coding.chunk(np.stack([np.ldexp(x, power) for x in chunk.parts.values()], axis=1))
    for one, scaled in zip(*(coding.encode(codec, c)[0] for c in (chunk, other)), strict=True):
        assert one.data[10:] == scaled.data[10:]
    for part, y in coding.decode(codec, coding.encode(codec, chunk), chunk).items():
        assert np.array_equal(np.ldexp(y, power), coding.decode(codec, coding.encode(codec, other), other)[part])


def test_bits_of_an_element(coding):
    chunk = coding.chunk(data((1, 2, 1, 256, 64), "bfloat16"))
    for name, bits in BITS.items():
        sizes = [8 * len(s.data) / (256 * 64) for s in coding.encode(get_codec(name), chunk)[0]]
        assert sizes == [b + 0.25 for b in bits]


# --- the page


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def sign(channel: int) -> int:
    return -1 if mix((channel + 1) * 0x9E3779B97F4A7C15 % 2**64) >> 63 else 1


def turned_back(row: list[np.float32]) -> list[np.float32]:
    """The reverse of H(m), element by element, as docs/bitstream.md describes it."""
    m, row, h = len(row), list(row), 1
    while h < m:
        for a in range(m):
            if not a & h:
                row[a], row[a | h] = row[a] + row[a | h], row[a] - row[a | h]
        h *= 2
    return [v * np.float32(1 / math.sqrt(m)) * np.float32(sign(c)) for c, v in enumerate(row)]


def by_the_page(segment: bytes, tokens: int, width: int, bits: int) -> np.ndarray:
    """Decode a segment as docs/bitstream.md describes it."""
    string = int.from_bytes(segment[2 * tokens :], "little")
    rows, m = [], 2 ** int(math.log2(width))
    for t in range(tokens):
        scale = np.frombuffer(segment[2 * t : 2 * t + 2], BFLOAT16).astype(np.float32)[0]
        codes = [string >> bits * (t * width + c) & 2**bits - 1 for c in range(width)]
        if bits == 8:
            row = [np.float32(code - 256 * (code > 127)) * scale for code in codes]
        else:
            high = 2 ** (bits - 1)
            row = [
                np.float32(LEVELS[bits][c - high] if c >= high else -LEVELS[bits][high - 1 - c]) * scale for c in codes
            ]
        if m == width:
            row = turned_back(row)
        else:
            for start in (0, width - m, 0):
                row[start : start + m] = turned_back(row[start : start + m])
            row = [v * np.float32(sign(c)) for c, v in enumerate(row)]
        rows.append(row)
    return np.array(rows, np.float32)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("width", [1, 6, 16, 21, 40])
def test_a_decoder_by_the_page_gives_the_same_values(coding, name, width):
    x = data((1, 2, 1, 4, width), "float32", width)
    x[0, :, 0, 2] = 0
    chunk, codec = coding.chunk(x), get_codec(name)
    layers = coding.encode(codec, chunk)
    decoded = coding.decode(codec, layers, chunk)
    for part, segment, bits in zip("KV", layers[0], BITS[name], strict=True):
        assert np.array_equal(by_the_page(bytes(segment.data), 4, width, bits), decoded[part][0, 0])


# --- rows that are special


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("width", [1, 24, 64])
def test_rows_of_zeros_come_back_beside_others(coding, name, width):
    x = data((1, 2, 2, 6, width), "float32", 5)
    x[:, :, 1, [0, 3]] = 0
    x[:, :, 0, 2] = np.float32(2.0**-100)
    decoded = coding.check_contract(get_codec(name), coding.chunk(x))
    for part, y in zip((0, 1), decoded.values(), strict=True):
        assert not y[:, 1, [0, 3]].any()
        assert not y[:, 0, 2].any()
        assert (np.abs(y).max(axis=3) > 0).sum() == 9
        assert relative(x[:, part], y) < 0.3


def test_latent_rows(coding):
    chunk = coding.chunk(data((2, 20, 40), "bfloat16"), mla=True)
    codec = get_codec("turboquant_k8v4")
    decoded = coding.check_contract(codec, chunk)
    assert relative(chunk.parts["C"], decoded["C"]) < 1.05 * ERROR[4]
    assert relative(chunk.parts["R"], decoded["R"]) < 0.0095
    assert [len(s.data) for s in coding.encode(codec, chunk)[0]] == [nbytes(20, 30, 4), nbytes(20, 10, 8)]


@pytest.mark.parametrize("width", [1024, 1025, MAX_WIDTH])
def test_wide_rows(coding, width):
    x = data((1, 2, 1, 2, width), "float32", 2)
    decoded = coding.check_contract(get_codec("turboquant_4bit"), coding.chunk(x))
    assert relative(x[:, 0], decoded["K"]) < 1.05 * ERROR[4]


def test_rows_that_are_too_wide_are_refused(coding):
    chunk = coding.chunk(np.zeros((1, 2, 1, 1, MAX_WIDTH + 1), np.float16))
    with pytest.raises(UnsupportedOpError, match="rows of up to 2047 channels; part K has 2048"):
        coding.encode(get_codec("turboquant_4bit"), chunk)
    with pytest.raises(UnsupportedOpError, match="part K has 2048"):
        get_codec("turboquant_4bit").max_sizes(chunk.group)
    with pytest.raises(CorruptFrameError, match="does not write 2048 x float16"):
        coding.decode(get_codec("turboquant_4bit"), [[CodedSegment(b"")] * 2], chunk)


def test_other_types_are_refused(coding):
    with pytest.raises(UnsupportedOpError, match="part K is float8_e5m2"):
        coding.encode(get_codec("turboquant_3bit"), coding.chunk(np.zeros((1, 2, 1, 2, 2), DTYPES["float8_e5m2"])))


# --- values that no scale reaches


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [4, 6])
def test_what_is_not_finite_is_refused(coding, bad, width):
    x = data((2, 2, 2, 3, width), "float16")
    x[1, 1, 0, 2, 3] = bad
    with pytest.raises(QuantizationError, match="codec turboquant_3bit cannot hold part V"):
        coding.encode(get_codec("turboquant_3bit"), coding.chunk(x))


@pytest.mark.parametrize("width", [8, 12])
def test_one_nan_changes_its_own_row_alone(coding, width):
    x = data((2, 2, 2, 5, width), "bfloat16", 3)
    clean = coding.chunk(x)
    x[1, 0, 1, 3, 2] = np.nan
    codec = get_codec("turboquant_4bit", nonfinite="saturate")
    decoded, before = (coding.decode(codec, coding.encode(codec, c), c) for c in (coding.chunk(x), clean))
    assert decoded["V"].tobytes() == before["V"].tobytes()
    same = (decoded["K"] == before["K"]).all(axis=3)
    assert np.argwhere(~same).tolist() == [[1, 1, 3]]
    assert np.isfinite(decoded["K"].astype(np.float32)).all()


def test_infinities_of_wide_types_are_beyond_the_scales(coding):
    x = data((1, 2, 1, 3, 4), "bfloat16")
    x[0, 1, 0, 1, 2] = np.inf
    with pytest.raises(QuantizationError, match="cannot hold part V"):
        coding.encode(get_codec("turboquant_4bit", nonfinite="saturate"), coding.chunk(x))


@pytest.mark.parametrize("name", ["turboquant_k8v4", "turboquant_3bit"])
def test_a_row_beyond_the_scales_is_refused(coding, name):
    x = data((1, 2, 1, 2, 16), "float32")
    held = np.ldexp(x, 78)
    decoded = coding.check_contract(get_codec(name), coding.chunk(held))
    assert relative(held[:, 1], decoded["V"]) < 0.3
    for power in (90, 95, 120):
        with pytest.raises(QuantizationError, match="cannot hold part K"):
            coding.encode(get_codec(name), coding.chunk(np.ldexp(x, power)))


# --- bytes that lie


@pytest.mark.parametrize("name", ["turboquant_k8v4", "turboquant_3bit"])
def test_altered_bytes_are_noticed_or_harmless(coding, name):
    chunk = coding.chunk(data((1, 2, 1, 3, 3), "bfloat16"))
    # Codes and mantissas of scales are data: frames have digests for them. Not so what cannot have been written.
    unnoticed = coding.check_hostile(get_codec(name), chunk)
    assert 0 < unnoticed < sum(8 * len(s.data) for s in coding.encode(get_codec(name), chunk)[0])


@pytest.mark.parametrize(
    ("name", "scale", "codes", "message"),
    [
        ("turboquant_4bit", np.nan, b"\0", "a scale that"),
        ("turboquant_4bit", -0.0, b"\0", "a scale that"),
        ("turboquant_4bit", -1.0, b"\0", "a scale that"),
        ("turboquant_4bit", SCALES[0] / 2, b"\0", "a scale that"),
        ("turboquant_4bit", SCALES[1] * 2, b"\0", "a scale that"),
        ("turboquant_4bit", 1.0, b"\x10", "bits after the last code"),
        ("turboquant_3bit", 1.0, b"\x08", "bits after the last code"),
        ("turboquant_k8v4", 1.0, b"\x80", "a code of -128"),
        ("turboquant_k8v4", 1.0, b"", "ends before its parts do"),
        ("turboquant_k8v4", 1.0, b"\0\0", "1 bytes follow"),
    ],
)
def test_what_cannot_have_been_written_is_refused(coding, name, scale, codes, message):
    chunk = coding.chunk(np.zeros((1, 2, 1, 1, 1), np.float16))
    good = coding.encode(get_codec(name), chunk)[0][1]
    broken = CodedSegment(np.array(scale, BFLOAT16).tobytes() + codes)
    with pytest.raises(CorruptFrameError, match=message):
        coding.decode(get_codec(name), [[broken, good]], chunk)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("width", [1024, MAX_WIDTH])
def test_the_largest_that_bytes_can_say_is_finite_in_every_type(coding, name, width):
    """The codes of a row with one large channel meet in that channel again; here with the largest scale there is."""
    x = np.zeros((1, 2, 1, 1, width), np.float32)
    x[..., width // 2] = 1
    (layer,) = coding.encode(get_codec(name), coding.chunk(x))
    largest = np.array(SCALES[1], BFLOAT16).tobytes()
    segments = [CodedSegment(largest + bytes(segment.data[2:])) for segment in layer]
    for dtype in TYPES:
        like = coding.chunk(np.zeros(x.shape, DTYPES[dtype]))
        for y in coding.decode(get_codec(name), [segments], like).values():
            wide = y.astype(np.float32)
            assert np.isfinite(wide).all()
            assert np.abs(wide).max() >= min(2.0**83, float(ml_dtypes.finfo(y.dtype).max))


@settings(max_examples=100)
@given(st.sampled_from(sorted(BITS)), st.data())
def test_no_bytes_do_harm(coding, name, draw):
    chunk = coding.chunk(np.zeros((1, 2, 1, 3, 3), np.float16))
    contents = [draw.draw(st.binary(min_size=n, max_size=n)) for n in (nbytes(3, 3, b) for b in BITS[name])]
    decoded = coding.try_decode(get_codec(name), [[CodedSegment(content) for content in contents]], chunk)
    assert decoded is None or all(np.isfinite(y).all() for y in decoded.values())
