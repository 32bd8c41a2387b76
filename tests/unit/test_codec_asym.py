"""Codec asym: keys bit for bit or elsewhere, values as 8-bit floats, with scales of every scope."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs import FrameReader, GroupInfo, PartInfo, encode_frame, write_frame
from kvcore.codecs.asym import SCOPES, Asym
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.frame_format import FrameHeader, crc32c
from kvcore.codecs.inspection import inspect_frame
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.dtypes import DTYPES
from kvcore.engine import Namespace
from kvcore.engine.plain import plain_engine
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError, UnsupportedOpError
from kvcore.tiers.stores import MemoryStore

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
NAMES = ("asym_k16_v8", "asym_k_elsewhere_v8")
TYPES = ("bfloat16", "float16", "float32")
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
UNTOUCHED = 0xA5  # what `coding` decodes into


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(DTYPES[dtype])


def options(scope: str, page: int = 4) -> dict[str, Any]:
    return {"scope": scope, **({"page_tokens": page} if scope == "page" else {})}


def largest_shared(v: np.ndarray, scope: str, page: int) -> np.ndarray:
    """The largest magnitude among those that share each element's scale, ``[layers, heads, T, 1]``."""
    size = np.abs(v.astype(np.float64)).max(axis=3, keepdims=True)
    if scope == "tensor":
        return np.broadcast_to(size.max(axis=(1, 2), keepdims=True), size.shape)
    step = page if scope == "page" else v.shape[2]
    starts = range(0, v.shape[2], step)
    return np.concatenate(
        [np.broadcast_to(p.max(axis=2, keepdims=True), p.shape) for p in (size[:, :, s : s + step] for s in starts)],
        axis=2,
    )


def test_presets_and_numbers():
    assert [codec_of(7, number).name for number in (0, 1)] == list(NAMES)
    assert [codec_of(7, number).omits for number in (0, 1)] == [(), ("K",)]
    assert not get_codec("asym_k16_v8").lossless


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"scope": "layer"}, "no scope 'layer'; it has tensor, head, page"),
        ({"scope": "page"}, "page_tokens goes with scope='page'"),
        ({"page_tokens": 16}, "page_tokens goes with scope='page'"),
        ({"scope": "page", "page_tokens": 0}, "1 to 65535 tokens, not 0"),
        ({"scope": "page", "page_tokens": 65536}, "1 to 65535 tokens, not 65536"),
        ({"nonfinite": "raw"}, "no policy nonfinite='raw'"),
        ({"scale": "head"}, "scale"),
    ],
)
def test_options_that_there_are_not(given_options, message):
    with pytest.raises(ConfigError, match=message):
        get_codec("asym_k16_v8", **given_options)
    with pytest.raises(ConfigError, match="no asymmetric preset 'asym'"):
        Asym("asym")


# --- what comes back


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    scope=st.sampled_from(SCOPES),
    page=st.sampled_from([1, 4, 7, 300]),
    dtype=st.sampled_from(TYPES),
    tokens=st.integers(1, 20),
    width=st.sampled_from([1, 3, 24]),
    size=st.sampled_from([2.0**-9, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_values_come_back_within_half_a_code_and_keys_as_they_were(
    coding, name, scope, page, dtype, tokens, width, size, seed
):
    chunk = coding.chunk(data((2, 2, 2, tokens, width), dtype, seed, size))
    codec = get_codec(name, **options(scope, page))
    decoded = coding.check_contract(codec, chunk)
    untouched = np.full(chunk.parts["K"].nbytes, UNTOUCHED, np.uint8).tobytes()
    assert decoded["K"].tobytes() == (untouched if codec.omits else chunk.parts["K"].tobytes())
    v = chunk.parts["V"].astype(np.float64)
    subnormal = largest_shared(v, scope, page) / 448 * 2.0**-10
    bound = np.maximum(np.abs(v) * 2.0**-4, subnormal) * (1 + 1e-5) + np.abs(v) * ULP[dtype] * 2 + 2.0**-25
    assert (np.abs(decoded["V"].astype(np.float64) - v) <= bound).all()
    # Readers are given no options: segments say what they are.
    layers = coding.encode(codec, chunk)
    assert coding.decode(get_codec(name), layers, chunk)["V"].tobytes() == decoded["V"].tobytes()
    scales = -(-tokens // page) if scope == "page" else 1
    keys = 0 if codec.omits else tokens * width * chunk.parts["K"].itemsize
    sizes = [len(s.data) for s in layers[0]]
    assert sizes == [keys] * 2 + [4 + 4 * scales + tokens * width] * 2
    assert codec.max_sizes(chunk.group) == [(size, ()) for size in sizes]


def test_scopes_share_what_they_say(coding):
    chunk = coding.chunk(data((2, 2, 3, 10, 8), "float32", 4))
    v = chunk.parts["V"]
    for scope in SCOPES:
        layers = coding.encode(get_codec("asym_k16_v8", **options(scope)), chunk)
        for layer, segments in enumerate(layers):
            for head, segment in enumerate(segments[3:]):
                stored = np.frombuffer(segment.data[4 : -10 * 8], "<f4")
                wanted = largest_shared(v, scope, 4)[layer, head, ::4, 0].astype(np.float32)
                assert stored.tolist() == (wanted * np.float32(1 / 448))[: stored.size].tolist()


def test_a_scale_for_each_head_is_codec_fp8(coding):
    chunk = coding.chunk(data((2, 2, 2, 9, 8), "bfloat16", 1))
    ours, fp8 = (coding.encode(get_codec(name), chunk) for name in ("asym_k16_v8", "fp8"))
    for one, other in zip(ours, fp8, strict=True):
        assert [bytes(s.data[4:]) for s in one[2:]] == [bytes(s.data) for s in other[2:]]


def test_a_small_page_keeps_what_a_large_one_loses(coding):
    x = data((1, 2, 1, 32, 8), "float32", 2)
    x[:, 1, :, 20:] *= 1e6
    errors = []
    for one in (options("head"), options("page", 4)):
        v = coding.check_contract(get_codec("asym_k16_v8", **one), coding.chunk(x))["V"]
        errors.append(np.abs(v[0, 0, :20] - x[0, 1, 0, :20]).max())
    assert errors[1] < 0.2 < errors[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_every_type_and_every_bit_come_back(dtype):
    kind = DTYPES[dtype]
    parts = (PartInfo("K", dtype, 16), PartInfo("V", "bfloat16", 8))
    group = GroupInfo("LKHTD", (0, 1), parts, 6, 2)
    rows, out = allocate_rows(group), allocate_rows(group)
    rng = np.random.default_rng(0)
    for part, layer in rows.planes():
        array = rows.array(part, layer)
        bits = rng.integers(0, 256, (*array.shape, kind.itemsize), np.uint8)
        array[...] = bits.view(kind)[..., 0] if part == "K" else rng.standard_normal(array.shape).astype(array.dtype)
    codec = get_codec("asym_k16_v8")
    codec.decode(BACKEND, codec.encode(BACKEND, rows, group), group, out)
    for layer in (0, 1):
        assert out.bytes_view("K", layer).tobytes() == rows.bytes_view("K", layer).tobytes()


@pytest.mark.parametrize("part", ["K", "V"])
def test_one_part_alone(part):
    group = GroupInfo("LKHTD", (0,), (PartInfo(part, "float16", 8),), 5, 2)
    rows, out = allocate_rows(group), allocate_rows(group)
    rows.array(part, 0)[...] = data(rows.array(part, 0).shape, "float16")
    codec = get_codec("asym_k16_v8")
    layers = codec.encode(BACKEND, rows, group)
    codec.decode(BACKEND, layers, group, out)
    error = np.abs(out.array(part, 0).astype(np.float32) - rows.array(part, 0).astype(np.float32)).max()
    assert error == 0 if part == "K" else 0 < error < 0.2
    elsewhere = get_codec("asym_k_elsewhere_v8")
    if part == "V":  # there is nothing to leave out
        assert elsewhere.encode(BACKEND, rows, group) == layers
        return
    with pytest.raises(UnsupportedOpError, match="takes parts K and V, or one that it stores"):
        elsewhere.encode(BACKEND, rows, group)


def test_groups_and_types_that_it_does_not_take(coding):
    latent = coding.chunk(data((1, 2, 8), "float16"), mla=True)
    for refused in (lambda codec: coding.encode(codec, latent), lambda codec: codec.max_sizes(latent.group)):
        with pytest.raises(UnsupportedOpError, match="the group has C of 6, R of 2"):
            refused(get_codec("asym_k16_v8"))
    x = np.zeros((1, 2, 1, 2, 2), DTYPES["float8_e4m3fn"])
    with pytest.raises(UnsupportedOpError, match="part V is float8_e4m3fn"):
        coding.encode(get_codec("asym_k16_v8"), coding.chunk(x))
    wide = GroupInfo("LKHTD", (0,), (PartInfo("K", "float16", 15), PartInfo("V", "float16", 2)), 3)
    with pytest.raises(UnsupportedOpError, match="K of 15, V of 2"):
        get_codec("asym_k_elsewhere_v8").encode(BACKEND, allocate_rows(wide), wide)


# --- keys elsewhere


def filled(group: GroupInfo, keys: float = 1.0) -> kvcore.RowLayout:
    rows, rng = allocate_rows(group), np.random.default_rng(7)
    for part, layer in rows.planes():
        array = rows.array(part, layer)
        array[...] = (rng.standard_normal(array.shape) * (keys if part == "K" else 1)).astype(array.dtype)
    return rows


GROUP = GroupInfo("LKHTD", (0, 1), (PartInfo("K", "bfloat16", 6), PartInfo("V", "float16", 4)), 9, 2)
IDENTITY = {"tokens": 9, "namespace": bytes(32), "key": bytes(32)}


def frame_of(codec: Any, group: GroupInfo = GROUP) -> bytes:
    return bytes(encode_frame(BACKEND, [group], [filled(group)], codec=codec, **IDENTITY))


def read(frame: bytes) -> FrameReader:
    return FrameReader(frame, expect_namespace=None, expect_key=None, digest=BACKEND.digest)


def test_keys_that_are_elsewhere_are_not_read():
    codec = get_codec("asym_k_elsewhere_v8")
    layers = codec.encode(BACKEND, filled(GROUP), GROUP)
    assert codec.encode(BACKEND, filled(GROUP, float("nan")), GROUP) == layers
    assert [[len(s.data) for s in layer[:2]] for layer in layers] == [[0, 0], [0, 0]]


def test_frames_without_keys_leave_those_that_are_there():
    frame = frame_of("asym_k_elsewhere_v8")
    out, source = filled(GROUP, 5.0), filled(GROUP)
    before = [out.bytes_view("K", layer).tobytes() for layer in (0, 1)]
    read(frame).decode(BACKEND, [out])
    assert [out.bytes_view("K", layer).tobytes() for layer in (0, 1)] == before
    whole = filled(GROUP)
    read(frame_of("asym_k16_v8")).decode(BACKEND, [whole])
    for layer in (0, 1):
        assert out.bytes_view("V", layer).tobytes() == whole.bytes_view("V", layer).tobytes()
        assert whole.bytes_view("K", layer).tobytes() == source.bytes_view("K", layer).tobytes()
    report = inspect_frame(frame, BACKEND)
    assert (report.problems, [layer.decoded for layer in report.layers]) == ([], ["ok", "ok"])
    assert [layer.parts for layer in report.layers] == [{"K": 0, "V": 2 * (8 + 9 * 4)}] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_paged_cache_keeps_its_keys(name):
    layout, slots = kvcore.Layout("LKBNHD"), np.arange(8, dtype=np.int64)[::-1].copy()
    parts = (PartInfo("K", "bfloat16", 4), PartInfo("V", "bfloat16", 4))
    group, codec = GroupInfo("LKHTD", (0, 1), parts, 8, 3), get_codec(name, scope="page", page_tokens=4)
    source, target = (data((2, 2, 3, 4, 3, 4), "bfloat16", seed) for seed in (0, 1))
    layers = gather_encode(BACKEND, codec, layout.bind(source), slots, group)
    after = target.copy()
    decode_scatter(BACKEND, codec, layers, slots, group, layout.bind(after))
    wanted = target if codec.omits else source
    assert after[:, 0, :2].tobytes() == wanted[:, 0, :2].tobytes()
    assert after[:, :, 2].tobytes() == target[:, :, 2].tobytes()
    assert np.abs(after[:, 1, :2].astype(np.float32) - source[:, 1, :2].astype(np.float32)).max() < 0.2


def test_frames_that_lie_about_keys_that_are_elsewhere():
    codec = get_codec("asym_k_elsewhere_v8")
    layers = codec.encode(BACKEND, filled(GROUP), GROUP)
    full = [[CodedSegment(b"\0"), *layer[1:]] for layer in layers]
    frame = write_frame([GROUP], full, codec=codec, digest=BACKEND.digest, **IDENTITY)
    with pytest.raises(CorruptFrameError, match="have not the size of their rows") as caught:
        read(bytes(frame))
    assert caught.value.reason == "length"
    for wrong in (full, [layer[:3] for layer in layers], [layer[2:] for layer in layers]):
        with pytest.raises(CorruptFrameError):
            codec.decode(BACKEND, wrong, GROUP, filled(GROUP))
    with pytest.raises(CorruptFrameError):  # of the other preset
        get_codec("asym_k16_v8").decode(BACKEND, layers, GROUP, filled(GROUP))


def test_keys_without_bytes_cannot_ask_for_any_amount_of_memory():
    parts, width = (PartInfo("K", "bfloat16", 0xABCD), PartInfo("V", "float16", 4)), 2**31
    layers = get_codec("asym_k_elsewhere_v8").encode(BACKEND, filled(GROUP), GROUP)
    group = replace(GROUP, parts=parts)
    frame = bytearray(write_frame([group], layers, codec="asym_k_elsewhere_v8", digest=BACKEND.digest, **IDENTITY))
    at = frame.index(struct.pack("<I", 0xABCD))
    for wide in (0xABCD, width):
        frame[at : at + 4] = struct.pack("<I", wide)
        frame[36:44] = struct.pack("<Q", 2 * 2 * 9 * (2 * wide + 8))
        end = FrameHeader.parse(frame).head_bytes - 4
        frame[end : end + 4] = struct.pack("<I", crc32c(bytes(frame[:end])))
        with pytest.raises(CorruptFrameError, match="have not the size of their rows"):
            read(bytes(frame))


def test_the_widest_keys_that_it_takes_are_read():
    parts = (PartInfo("K", "bfloat16", 28), PartInfo("V", "float16", 4))
    group = replace(GROUP, parts=parts)
    assert read(frame_of("asym_k_elsewhere_v8", group)).groups == (group,)


@pytest.mark.parametrize("codecs", [{"codec": "asym_k_elsewhere_v8"}, {"codecs": ["raw", "asym_k_elsewhere_v8"]}])
def test_an_engine_wants_keys(codecs):
    namespace = Namespace(model="m", revision="1", chunk_tokens=8)
    with pytest.raises(ConfigError, match="frames of codec asym_k_elsewhere_v8 do not hold all parts"):
        plain_engine(MemoryStore(), namespace, layers=1, heads=1, width=4, backend=BACKEND, **codecs)


# --- values that are not finite


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_v_is_refused_and_in_k_is_held(coding, name, bad):
    x = data((2, 2, 2, 5, 4), "float16")
    x[1, 0, 1, 3, 2] = bad
    codec, chunk = get_codec(name), coding.chunk(x)
    decoded = coding.decode(codec, coding.encode(codec, chunk), chunk)
    assert codec.omits or decoded["K"].tobytes() == chunk.parts["K"].tobytes()
    x[1, 1, 0, 2, 3] = bad
    with pytest.raises(QuantizationError, match=f"codec {name} cannot hold part V"):
        coding.encode(codec, coding.chunk(x))


@pytest.mark.parametrize("scope", SCOPES)
def test_one_nan_in_v_leaves_all_other_values_as_they_would_be(coding, scope):
    x = data((2, 2, 2, 9, 4), "bfloat16", 3)
    x[1, 1, 0, 6, 1] = 0
    spoiled = x.copy()
    spoiled[1, 1, 0, 6, 1] = np.nan
    codec = get_codec("asym_k16_v8", nonfinite="saturate", **options(scope))
    assert coding.encode(codec, coding.chunk(spoiled)) == coding.encode(codec, coding.chunk(x))


def test_an_infinity_takes_its_page_and_no_other(coding):
    x = data((1, 2, 1, 12, 4), "float16", 3)
    spoiled = x.copy()
    spoiled[0, 1, 0, 5, 1] = -np.inf
    codec = get_codec("asym_k16_v8", nonfinite="saturate", **options("page"))
    before, after = (coding.decode(codec, coding.encode(codec, c), c)["V"] for c in map(coding.chunk, (x, spoiled)))
    assert after[0, 0, 5, 1] == ml_dtypes.finfo(np.float16).min
    assert np.delete(after, [4, 5, 6, 7], axis=2).tobytes() == np.delete(before, [4, 5, 6, 7], axis=2).tobytes()


# --- bytes that lie


@pytest.mark.parametrize("name", NAMES)
def test_altered_bytes_are_noticed_or_harmless(coding, name):
    chunk = coding.chunk(data((1, 2, 1, 3, 2), "bfloat16"))
    unnoticed = coding.check_hostile(get_codec(name, **options("page", 2)), chunk)
    # Keys, codes and mantissas of scales are data: frames have digests for them.
    assert 0 < unnoticed < 8 * (12 + 4 + 8 + 6)


def segment(scope: int, page: int, scales: list[float], codes: bytes) -> CodedSegment:
    return CodedSegment(struct.pack(f"<HH{len(scales)}f", scope, page, *scales) + codes)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (segment(3, 0, [1.0], b"\0" * 3), "scope 3 with pages of 0"),
        (segment(2, 0, [1.0], b"\0" * 3), "scope 2 with pages of 0"),
        (segment(1, 2, [1.0, 1.0], b"\0" * 3), "scope 1 with pages of 2"),
        (segment(1, 0, [np.nan], b"\0" * 3), "a scale outside"),
        (segment(1, 0, [0.0], b"\0" * 3), "a scale outside"),
        (segment(1, 0, [-1.0], b"\0" * 3), "a scale outside"),
        (segment(1, 0, [2.0**126], b"\0" * 3), "a scale outside"),
        (segment(1, 0, [1.0], b"\0\x7f\0"), "not finite"),
        (segment(1, 0, [1.0], b"\0\0\xff"), "not finite"),
        (segment(1, 0, [1.0], b"\0" * 2), "ends before its parts do"),
        (segment(1, 0, [1.0], b"\0" * 4), "1 bytes follow"),
        (segment(2, 2, [1.0, 1.0], b"\0" * 3), "heads of a layer differ"),
        (segment(0, 0, [1.0], b"\0" * 3), "heads of a layer differ"),
    ],
)
def test_what_cannot_have_been_written_is_refused(coding, broken, message):
    chunk, good = coding.chunk(np.zeros((1, 2, 2, 3, 1), np.float16)), segment(1, 0, [1.0], b"\0" * 3)
    keys = [CodedSegment(bytes(6))] * 2
    coding.decode(get_codec("asym_k16_v8"), [[*keys, good, good]], chunk)
    with pytest.raises(CorruptFrameError, match=message):
        coding.decode(get_codec("asym_k16_v8"), [[*keys, broken, good]], chunk)


def test_a_layer_s_scale_is_the_same_in_all_heads(coding):
    chunk, keys = coding.chunk(np.zeros((1, 2, 2, 3, 1), np.float16)), [CodedSegment(bytes(6))] * 2
    one, other = (segment(0, 0, [scale], b"\0" * 3) for scale in (1.0, 2.0))
    coding.decode(get_codec("asym_k16_v8"), [[*keys, one, one]], chunk)
    with pytest.raises(CorruptFrameError, match="heads of a layer differ"):
        coding.decode(get_codec("asym_k16_v8"), [[*keys, one, other]], chunk)


@settings(max_examples=100)
@given(st.sampled_from(NAMES), st.data())
def test_no_bytes_do_harm(coding, name, draw):
    chunk = coding.chunk(np.zeros((1, 2, 1, 3, 2), np.float16))
    keys = draw.draw(st.binary(min_size=12, max_size=12)) if name == NAMES[0] else b""
    head = draw.draw(
        st.sampled_from([b"\0\0\0\0", b"\1\0\0\0", b"\2\0\2\0", b"\2\0\3\0"]) | st.binary(min_size=4, max_size=4)
    )
    values = head + draw.draw(st.binary(min_size=10, max_size=14))
    decoded = coding.try_decode(get_codec(name), [[CodedSegment(keys), CodedSegment(values)]], chunk)
    assert decoded is None or np.isfinite(decoded["V"]).all()
