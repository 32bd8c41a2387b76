"""Codec cachegen: LMCache's bins, with its bound on errors, in KVS1's tiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.codecs.cachegen import FAMILIES, CacheGen, CacheGenConfig, QuantizationSpec
from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.frame_values import Flags
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.codecs.tables import table_set
from kvcore.dtypes import DTYPES
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError, QuantizationError, UnsupportedOpError

CACHEGEN = get_codec("cachegen")
TYPES = ("bfloat16", "float16", "float32")
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
TINY = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}  # half of the least float16


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, magnitude: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (magnitude * (rng.standard_normal(shape[-1]) + rng.standard_normal(shape))).astype(DTYPES[dtype])


def one_range(layers: int, k: int, v: int) -> CacheGenConfig:
    return CacheGenConfig(layers, (QuantizationSpec(0, layers, k),), (QuantizationSpec(0, layers, v),))


@settings(max_examples=20)
@given(
    dtype=st.sampled_from(TYPES),
    bins=st.tuples(st.integers(4, 256), st.sampled_from([4, 5, 16, 32, 33, 255, 256])),
    per_head=st.booleans(),
    heads=st.integers(1, 3),
    tokens=st.one_of(st.integers(1, 40), st.sampled_from([256, 257])),
    width=st.sampled_from([1, 3, 32, 64, 65]),
    magnitude=st.sampled_from([2.0**-12, 1.0, 200.0]),
    seed=st.integers(0, 99),
)
def test_no_value_is_off_by_more_than_half_a_bin(coding, dtype, bins, per_head, heads, tokens, width, magnitude, seed):
    codec = CacheGen("cachegen", one_range(2, *bins), per_head)
    chunk = coding.chunk(data((2, 2, heads, tokens, width), dtype, seed, magnitude))
    decoded = coding.check_contract(codec, chunk)
    for part, number in zip("KV", bins, strict=True):
        x = chunk.parts[part].astype(np.float64)
        absmax = np.abs(x).max(axis=3 if per_head else (1, 3), keepdims=True)
        bound = absmax / (2 * (number // 2 - 1)) * (1 + 1e-5) + absmax * ULP[dtype] + TINY[dtype]
        assert (np.abs(decoded[part].astype(np.float64) - x) <= bound).all()


def test_bins_follow_the_number_of_the_layer(coding):
    x = np.broadcast_to(data((2, 1, 16, 8), "float32"), (12, 2, 1, 16, 8))
    layers = coding.encode(CACHEGEN, coding.chunk(x))
    bins = [[int.from_bytes(segment.data[:2], "little") for segment in layer] for layer in layers]
    assert [k for k, _ in bins] == [32] * 10 + [16] * 2
    assert [v for _, v in bins] == [32] * 2 + [16] * 10
    later = coding.encode(CACHEGEN, coding.chunk(x[:1], first_layer=10))
    assert later[0] == layers[10]
    shallow = get_codec("cachegen", config=CacheGenConfig.for_model(nlayers=9))
    layers = coding.encode(shallow, coding.chunk(x[:9]))
    assert {int.from_bytes(segment.data[:2], "little") for layer in layers for segment in layer} == {32}


@pytest.mark.parametrize(
    ("model", "given_layers", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", None, (32, [(0, 10, 32), (10, 32, 16)], [(0, 2, 32), (2, 32, 16)])),
        ("THUDM/glm-4-9b-chat", None, (40, [(0, 10, 32), (10, 40, 16)], [(0, 2, 32), (2, 40, 16)])),
        ("qwen-7b", 16, (16, [(0, 10, 32), (10, 16, 16)], [(0, 2, 32), (2, 16, 16)])),
        ("", 30, (30, [(0, 10, 32), (10, 30, 16)], [(0, 2, 32), (2, 30, 16)])),
        ("", 10, (10, [(0, 10, 32)], [(0, 2, 32), (2, 10, 16)])),
        ("", 9, (9, [(0, 9, 32)], [(0, 9, 32)])),
    ],
)
def test_default_bins(model, given_layers, expected):
    nlayers, k, v = expected
    config = CacheGenConfig.for_model(model, given_layers)
    assert config == CacheGenConfig(nlayers, [QuantizationSpec(*s) for s in k], [QuantizationSpec(*s) for s in v])


def test_families_have_lmcaches_layers():
    assert sorted(FAMILIES.values()) == [32, 32, 32, 32, 40]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheGenConfig.for_model("some/model"), "how many layers has model 'some/model'"),
        (lambda: CacheGenConfig.for_model(nlayers=0), "give nlayers of at least 1"),
        (lambda: QuantizationSpec(0, 2, 3), "bins must be 4 to 256, got 3"),
        (lambda: QuantizationSpec(0, 2, 257), "got 257"),
        (lambda: QuantizationSpec(2, 2, 16), "layers 2:2 are no range"),
        (lambda: one_range(2, 16, 16).bins("V", 2), "none for layer 2"),
        (lambda: CacheGenConfig(3, (QuantizationSpec(0, 2, 16),), (QuantizationSpec(0, 3, 16),)), "kspecs .* once"),
        (
            lambda: CacheGenConfig(2, (QuantizationSpec(0, 2, 16),), (QuantizationSpec(0, 2, 16),) * 2),
            "vspecs .* must cover each of the layers 0 to 1 once",
        ),
    ],
)
def test_bins_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_scales_of_a_token_are_stored_once_or_with_every_head(coding):
    chunk = coding.chunk(data((1, 2, 3, 8, 4), "bfloat16"))
    shared, own = (coding.encode(CacheGen(per_head=flag), chunk)[0] for flag in (False, True))
    assert [s.data[2] for s in shared] == [1, 0, 0] * 2
    assert [s.data[2] for s in own] == [1] * 6
    absmax = np.abs(chunk.parts["V"].astype(np.float32)).max(axis=(1, 3))[0]
    assert np.frombuffer(shared[3].data[4:20], DTYPES["bfloat16"]).astype(np.float32).tolist() == absmax.tolist()


def test_what_the_header_says():
    assert (CACHEGEN.codec_id, CACHEGEN.preset, CACHEGEN.precision) == (5, 0, 11)
    assert CACHEGEN.tables == table_set("gauss").digest[:8]
    assert codec_of(5, 0) == CACHEGEN
    assert not CACHEGEN.lossless


def test_offsets_are_flagged(coding):
    assert CACHEGEN.flags(coding.chunk(data((1, 2, 1, 1, 1), "float16")).group) == Flags.OFFSET


def test_the_size_is_far_below_a_byte_a_value(coding):
    chunk = coding.chunk(data((1, 2, 3, 256, 64), "bfloat16"), first_layer=10)
    nbytes = sum(len(s.data) for s in coding.encode(CACHEGEN, chunk)[0])
    assert 8 * nbytes / (2 * 3 * 256 * 64) < 3.3


def test_tokens_of_zeros_and_of_next_to_nothing_become_zeros(coding):
    x = data((1, 2, 2, 4, 8), "float32")
    x[..., 1, :], x[..., 2, :] = 0, 2.0**-110
    for y in coding.check_contract(CACHEGEN, coding.chunk(x)).values():
        assert not y[..., 1:3, :].any()
        assert y[..., 0, :].any()


def test_latent_rows_are_coded_with_the_bins_of_keys(coding):
    chunk = coding.chunk(data((2, 40, 12), "bfloat16"), mla=True)
    for name, y in coding.check_contract(CACHEGEN, chunk).items():
        x = chunk.parts[name].astype(np.float32)
        assert np.abs(y.astype(np.float32) - x).max() <= np.abs(x).max() * (1 / 30 + 2.0**-8)
    assert {s.data[0] for layer in coding.encode(CACHEGEN, chunk) for s in layer} == {32}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_not_finite_is_refused(coding, bad, per_head):
    x = data((2, 2, 2, 5, 4), "bfloat16")
    x[1, 1, 1, 4, 0] = bad
    with pytest.raises(QuantizationError, match="codec cachegen cannot hold part V"):
        coding.encode(CacheGen(per_head=per_head), coding.chunk(x))


def test_what_no_scale_reaches_is_refused(coding):
    x = np.full((1, 2, 1, 1, 1), 3e38, np.float32)
    with pytest.raises(QuantizationError, match="a scale beyond"):
        coding.encode(CacheGen(config=one_range(1, 4, 4)), coding.chunk(x))


def test_rows_and_group_must_have_the_same_layers(coding):
    chunk = coding.chunk(data((2, 2, 1, 2, 2), "float16"))
    with pytest.raises(LayoutError, match="the group names 2 layers, the rows have 1"):
        CACHEGEN.encode(coding.backend, chunk.layer(0).rows(), chunk.group)


def test_other_types_are_refused(coding):
    with pytest.raises(UnsupportedOpError, match="part K is float8_e5m2"):
        coding.encode(CACHEGEN, coding.chunk(np.zeros((1, 2, 1, 2, 2), DTYPES["float8_e5m2"])))


@pytest.mark.parametrize("per_head", [False, True])
def test_altered_bytes_are_noticed_or_harmless(coding, per_head):
    coding.check_hostile(CacheGen(per_head=per_head), coding.chunk(data((1, 2, 2, 3, 2), "bfloat16")))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 3, "a segment of 3 bins"),
        (1, 2, "a segment of 544 bins"),
        (0, 16, "heads differ in their bins"),
        (2, 2, "with flags 2"),
        (2, 0, "or in whether they have scales"),
        (3, 1, "with flags 1"),
        (5, 0xBF, "negative or not finite"),
        (5, 0x7F, "negative or not finite"),
        (6, 1, "padding"),
    ],
)
def test_heads_that_cannot_have_been_written_are_refused(coding, place, value, message):
    chunk = coding.chunk(np.ones((1, 2, 2, 1, 1), DTYPES["bfloat16"]))
    layer = coding.encode(CACHEGEN, chunk)[0]
    assert layer[0].data[:8] == b"\x20\0\1\0\x80\x3f\0\0"
    broken = bytearray(layer[0].data)
    broken[place] = value
    with pytest.raises(CorruptFrameError, match=message):
        coding.decode(CACHEGEN, [[CodedSegment(bytes(broken), layer[0].tiles), *layer[1:]]], chunk)


def test_symbols_outside_the_bins_are_refused(coding):
    chunk = coding.chunk(np.ones((1, 2, 1, 1, 1), np.float16))
    layer = coding.encode(CACHEGEN, chunk)[0]
    packed = CodedSegment(bytes(layer[0].data[:8]) + (16).to_bytes(2, "little") + bytes(2), ((1, 0),))
    with pytest.raises(CorruptFrameError, match="outside the bins"):
        coding.decode(CACHEGEN, [[packed, layer[1]]], chunk)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=2))
def test_no_bytes_do_harm(coding, segments):
    chunk = coding.chunk(np.zeros((1, 2, 1, 2, 2), np.float16))
    layer = [CodedSegment(b"\x20\0\1\0" + content, ((mode, words),)) for content, mode, words in segments]
    decoded = coding.try_decode(CACHEGEN, [layer], chunk)
    assert decoded is None or all(np.isfinite(y).all() for y in decoded.values())
