"""NaN and infinities in lossy codecs: each policy does what it says, wherever they are, and no head spoils another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs import PRESETS, CodedSegment, GroupInfo, PartInfo, get_codec
from kvcore.codecs.kvs1 import PRESETS as KVS1
from kvcore.codecs.segments import raw_rows_of
from kvcore.codecs.tables import table_set
from kvcore.dtypes import dtype_name, finite_max, to_dtype
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError
from kvcore.rope import RopeParams

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
LAYERS, HEADS, WIDTH = 2, 3, 8
EXACT_KEYS = ("asym_k16_v8", "asym_k_elsewhere_v8")  # which hold what is not finite in K: test_codec_asym.py
LOSSY = [name for name in PRESETS if name not in ("raw", "lossless", *EXACT_KEYS)]
OTHERS = [name for name in LOSSY if name not in KVS1]
KINDS = ["nan", "payload", "inf", "-inf"]


def odd(kind: str, dtype: Any) -> Any:
    """A value that is not finite; "payload": a negative signalling NaN with some bits of its own."""
    if kind != "payload":
        return np.array(float(kind), dtype)
    bits = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    infinity = int(np.array(-np.inf, dtype).view(bits))
    return np.array(infinity | 5, bits).view(dtype)


def finite_kv(tokens: int, dtype: str = "bfloat16", *, seed: int = 0, heads: int = HEADS, width: int = WIDTH) -> Any:
    """K and V, ``[2, layers, heads, tokens, width]``."""
    rng = np.random.default_rng(seed)
    means = 2 * rng.standard_normal((2, LAYERS, heads, 1, width))
    return (means + rng.standard_normal((2, LAYERS, heads, tokens, width))).astype(to_dtype(dtype))


def group_of(kv: Any, *, position: int = 0, rope: bool = True) -> GroupInfo:
    _, layers, heads, tokens, width = kv.shape
    parts = tuple(PartInfo(name, dtype_name(kv.dtype), width) for name in "KV")
    turned = RopeParams(width) if rope else None
    return GroupInfo("LKHTD", range(layers), parts, tokens, heads, base_position=position, rope=turned)


def bound(kv: Any) -> kvcore.RowLayout:
    return kvcore.Layout("LK|HTD").bind([[kv[0, layer], kv[1, layer]] for layer in range(kv.shape[1])])


def encode(kv: Any, codec: str, nonfinite: str = "error", **place: Any) -> list[list[CodedSegment]]:
    return get_codec(codec, nonfinite=nonfinite).encode(BACKEND, bound(kv), group_of(kv, **place))


def decode(layers: Any, like: Any, codec: str, **place: Any) -> Any:
    out = np.zeros_like(like)
    get_codec(codec).decode(BACKEND, layers, group_of(like, **place), bound(out))
    return out


def held(kv: Any) -> Any:
    """What "saturate" reads: NaN as zero, an infinity as the largest finite value."""
    wide = kv.astype(np.float64)
    limit = finite_max(kv.dtype)
    return np.where(np.isnan(wide), 0, np.clip(wide, -limit, limit)).astype(kv.dtype)


def bad_rows(kv: Any) -> Any:
    """Which token rows ``[2, layers, heads, tokens]`` have a value that is not finite."""
    return ~np.isfinite(kv.astype(np.float32)).all(axis=-1)


@st.composite
def spoiled(draw: Any, *, dtypes: tuple[str, ...], most: int = 12) -> tuple[Any, Any, dict[str, Any]]:
    """Finite KV, the same with odd values anywhere, and where the chunk stands."""
    dtype = to_dtype(draw(st.sampled_from(dtypes)))
    tokens = draw(st.sampled_from([1, 4, 5, 6, 20, 40]))
    kv = finite_kv(tokens, dtype_name(dtype), seed=draw(st.integers(0, 9)))
    other = kv.copy()
    elements = st.tuples(*(st.integers(0, n - 1) for n in kv.shape))
    for at in draw(st.lists(elements, min_size=1, max_size=most)):
        other[at] = odd(draw(st.sampled_from(KINDS)), dtype)
    return kv, other, {"position": draw(st.sampled_from([0, 7])), "rope": draw(st.booleans())}


def rows_of(layers: Any, kv: Any) -> Any:
    """Raw rows by segment, ``[2][layers][heads]``, as the segments list them."""
    shape = {"tokens": kv.shape[3], "channels": kv.shape[4], "dtype": kv.dtype}
    listed = [[raw_rows_of(s, tables=table_set("gauss"), **shape) for s in layer] for layer in layers]
    heads = kv.shape[2]
    return [[rows[part * heads : (part + 1) * heads] for rows in listed] for part in range(2)]


# --- error


@pytest.mark.parametrize("codec", LOSSY)
@given(case=spoiled(dtypes=("bfloat16", "float16", "float32")))
@settings(max_examples=20)
def test_error_refuses_them_wherever_they_are(codec, case):
    _, kv, place = case
    with pytest.raises(QuantizationError, match=f"codec {codec} cannot hold part"):
        encode(kv, codec, **place)


@pytest.mark.parametrize("codec", LOSSY)
def test_error_is_the_default(codec):
    kv = finite_kv(20)
    assert encode(kv, codec) == get_codec(codec).encode(BACKEND, bound(kv), group_of(kv))
    assert get_codec(codec) == get_codec(codec, nonfinite="error")


def test_an_error_names_layer_head_and_row():
    kv = finite_kv(300)
    kv[1, 1, 2, 260, 3] = np.inf
    with pytest.raises(QuantizationError, match=r"part V .*layer 1, head 2, tokens 256:300 .* row 4 that is inf"):
        encode(kv, "balanced")


# --- saturate


@pytest.mark.parametrize("codec", OTHERS)
@given(case=spoiled(dtypes=("float16",)))
@settings(max_examples=20)
def test_saturate_is_to_encode_the_held_values(codec, case):
    _, kv, place = case
    assert encode(kv, codec, "saturate", **place) == encode(held(kv), codec, **place)


@pytest.mark.parametrize("codec", KVS1)
@given(case=spoiled(dtypes=("float16",)))
@settings(max_examples=30)
def test_saturate_comes_before_everything_but_raw_rows_keep_theirs(codec, case):
    _, kv, place = case
    layers = encode(kv, codec, "saturate", **place)
    anyway = kv.shape[3] if kv.shape[3] <= 4 else int(place["position"] == 0)
    expected = encode(held(kv), codec, **place)
    changed = kv[..., :anyway, :].tobytes() != held(kv)[..., :anyway, :].tobytes()
    assert (layers == expected) != changed
    y = decode(layers, kv, codec, **place)
    assert y[..., :anyway, :].tobytes() == kv[..., :anyway, :].tobytes()
    assert y[..., anyway:, :].tobytes() == decode(expected, kv, codec, **place)[..., anyway:, :].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_saturate_of_kvs1_holds_nan_only_in_wide_types(dtype):
    kv = finite_kv(20, dtype)
    kv[0, 0, 1, 5, 2] = np.nan
    assert encode(kv, "small", "saturate") == encode(held(kv), "small")
    kv[0, 0, 1, 5, 2] = -np.inf
    with pytest.raises(QuantizationError, match="beyond what 16-bit codes reach"):
        encode(kv, "small", "saturate")


# --- raw


@pytest.mark.parametrize("codec", KVS1)
@given(case=spoiled(dtypes=("bfloat16", "float16", "float32"), most=8))
@settings(max_examples=40)
def test_raw_brings_such_rows_back_bit_for_bit_and_the_others_as_ever(codec, case):
    clean, kv, place = case
    bad = bad_rows(kv)
    kept = bad.copy()
    kept[..., 0] |= place["position"] == 0
    if kv.shape[3] > 4 and kept.sum(axis=-1).max() > 4:
        with pytest.raises(QuantizationError, match="rows to store as they are"):
            encode(kv, codec, "raw", **place)
        return
    layers = encode(kv, codec, "raw", **place)
    y = decode(layers, kv, codec, **place)
    assert y[bad].tobytes() == kv[bad].tobytes()
    assert np.isfinite(y[~bad].astype(np.float32)).all()
    listed = rows_of(layers, kv)
    for at in np.ndindex(kv.shape[:3]):
        part, layer, head = at
        if kv.shape[3] <= 4 or kept[at].sum() > kv.shape[3] - 2:
            assert listed[part][layer][head] == list(range(kv.shape[3]))
        else:
            assert listed[part][layer][head] == np.flatnonzero(kept[at]).tolist()
        if not bad[at].any():  # a segment without such a row is what it would be anyway
            plain = encode(clean, codec, **place)[layer][part * HEADS + head]
            assert layers[layer][part * HEADS + head] == plain


@given(case=spoiled(dtypes=("bfloat16",), most=8))
@settings(max_examples=30)
def test_a_heads_bytes_do_not_depend_on_the_others(case):
    _, kv, place = case
    try:
        together = encode(kv, "balanced", "raw", **place)
    except QuantizationError:
        return
    for head in range(HEADS):
        alone = encode(np.ascontiguousarray(kv[:, :, head : head + 1]), "balanced", "raw", **place)
        assert alone == [[layer[head], layer[HEADS + head]] for layer in together]


def test_raw_rows_do_not_count_in_the_others_step():
    kv = finite_kv(64)
    kv[0, 0, 1, [5, 9, 30], 2] = np.nan, np.inf, -np.inf
    one = encode(kv, "balanced", "raw", position=7, rope=False)
    kv[0, 0, 1, [5, 9, 30]] = np.where(np.isnan(kv[0, 0, 1, [5, 9, 30]]), np.inf, 1e30).astype(kv.dtype)
    kv[0, 0, 1, [5, 9, 30], 0] = np.nan
    other = encode(kv, "balanced", "raw", position=7, rope=False)
    changed = [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(one, other, strict=True)]
    assert changed == [[True, False, True, True, True, True], [True] * 6]
    a, b = (bytes(layers[0][1].data) for layers in (one, other))
    start, stop = 4 + 3 + 32, 4 + 3 + 32 + 3 * WIDTH * 2
    assert (a[:start], a[stop:]) == (b[:start], b[stop:]), "all but the raw rows themselves is the same"


@given(
    magnitude=st.floats(2.0**20, 2.0**127, width=32),
    row=st.integers(1, 30),
    width=st.sampled_from((8, 64, 576)),
    sign=st.sampled_from((-1, 1)),
)
@settings(deadline=None, max_examples=40)
def test_raw_holds_finite_values_beyond_every_step(magnitude, row, width, sign):
    kv = finite_kv(31, "float32", heads=1, width=width)
    kv[:, :, :, row, 3] = sign * magnitude
    group = group_of(kv, position=7, rope=False)
    back = np.empty_like(kv)
    codec = get_codec("balanced", nonfinite="raw")
    codec.decode(BACKEND, codec.encode(BACKEND, bound(kv), group), group, bound(back))
    if magnitude >= 2.0**29:
        assert back[:, :, :, row].tobytes() == kv[:, :, :, row].tobytes()
    others = [t for t in range(31) if t != row]
    assert np.isfinite(back).all()
    assert magnitude < 2.0**29 or np.abs(back - kv)[:, :, :, others].max() < 2


def test_five_rows_are_refused_and_named():
    kv = finite_kv(40)
    kv[1, 1, 0, [3, 7, 8, 9], 1] = np.nan
    assert decode(encode(kv, "high", "raw", position=7), kv, "high", position=7)[1, 1, 0, 8].tobytes() == (
        kv[1, 1, 0, 8].tobytes()
    )
    with pytest.raises(QuantizationError) as caught:
        encode(kv, "high", "raw")
    for word in ("part V", "layer 1, head 0", "5 rows", "0, 3, 7, 8, 9", "takes 4", "'saturate'", "lossless"):
        assert word in str(caught.value)


def test_each_chunk_of_256_tokens_has_its_own_four():
    kv = finite_kv(600, heads=1, width=4)
    at = [1, 2, 255, 256, 257, 300, 511, 512, 599]
    kv[0, 0, 0, at, 3] = np.nan
    layers = encode(kv, "small", "raw")
    assert rows_of(layers, kv)[0][0] == [[0, *at]]
    assert decode(layers, kv, "small")[0, 0, 0, at].tobytes() == kv[0, 0, 0, at].tobytes()
    kv[0, 0, 0, 400, 0] = np.inf
    with pytest.raises(QuantizationError, match="tokens 256:512 has 5 rows"):
        encode(kv, "small", "raw")


def test_a_latent_row_has_two_lists():
    x = finite_kv(20, width=24)[0, :, 0]
    group = GroupInfo(
        "LTC",
        range(LAYERS),
        (PartInfo("C", "bfloat16", 16), PartInfo("R", "bfloat16", 8)),
        20,
        rope=RopeParams(8),
        base_position=9,
    )
    x[0, 3, 2], x[0, 7, 20], x[1, 5] = np.nan, np.inf, np.nan
    layers = get_codec("balanced", nonfinite="raw").encode(BACKEND, kvcore.Layout("LTC").bind(x), group)
    shape = {"tables": table_set("gauss"), "tokens": 20, "dtype": x.dtype}
    listed = [[raw_rows_of(s, channels=w, **shape) for s, w in zip(layer, (16, 8), strict=True)] for layer in layers]
    assert listed == [[[3], [7]], [[5], [5]]]
    out = np.zeros_like(x)
    get_codec("balanced").decode(BACKEND, layers, group, kvcore.Layout("LTC").bind(out))
    assert out[0, 3, :16].tobytes() == x[0, 3, :16].tobytes()
    assert out[0, 7, 16:].tobytes() == x[0, 7, 16:].tobytes()
    assert np.isfinite(out[0, 3, 16:].astype(np.float32)).all()
    assert out[1, 5].tobytes() == x[1, 5].tobytes()


# --- bytes that lie


HOSTILE = finite_kv(6, seed=3, width=4)
HOSTILE[0, 0, 0, 2, 1] = HOSTILE[0, 0, 1, [1, 3, 5], 0] = HOSTILE[1, 0, 2, 4, 2] = np.nan
HOSTILE_LAYERS = encode(HOSTILE, "small", "raw")


@settings(max_examples=200)
@given(data=st.data())
def test_altered_lists_are_refused_or_harmless(data):
    broken = [list(layer) for layer in HOSTILE_LAYERS]
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, 2 * HEADS - 1))
        segment = bytearray(broken[0][which].data)
        segment[data.draw(st.integers(0, min(len(segment), 12) - 1))] = data.draw(st.integers(0, 255))
        tiles = data.draw(st.sampled_from([broken[0][which].tiles, (), *(s.tiles for s in broken[0])]))
        broken[0][which] = CodedSegment(bytes(segment), tiles)
    reason = ""
    try:
        decode(broken, HOSTILE, "small")
    except CorruptFrameError as error:
        reason = error.reason
    assert reason in {"", "stream", "length"}


def test_any_mixture_of_wellformed_segments_decodes():
    """Segments of other raw rows, and of none, side by side: each comes back as it would alone."""
    plain = encode(held(HOSTILE), "small", position=7, rope=False)
    raw = encode(HOSTILE, "small", "raw", position=7, rope=False)
    mixed = [[(plain, raw)[i % 2][n][i] for i in range(2 * HEADS)] for n in range(LAYERS)]
    whole = [decode(layers, HOSTILE, "small", position=7, rope=False) for layers in (plain, raw)]
    y = decode(mixed, HOSTILE, "small", position=7, rope=False)
    for i in range(2 * HEADS):
        part, head = divmod(i, HEADS)
        assert y[part, :, head].tobytes() == whole[i % 2][part, :, head].tobytes()


def test_rope_is_taken_off_in_all_segments_of_a_part_or_in_none():
    kv = finite_kv(20)
    off, on = (encode(kv, "small", rope=rope) for rope in (True, False))
    with pytest.raises(CorruptFrameError, match="in some segments of a part"):
        decode([[on[0][0], *off[0][1:]], off[1]], kv, "small")


# --- options


def test_policies_that_there_are_not_are_refused_at_once():
    for codec in LOSSY:
        with pytest.raises(ConfigError, match=f"codec {codec} has no policy nonfinite='propagate'"):
            get_codec(codec, nonfinite="propagate")
    for codec in OTHERS:
        with pytest.raises(ConfigError, match="only high, balanced and small store rows as they are"):
            get_codec(codec, nonfinite="raw")
    for codec in ("raw", "lossless"):
        with pytest.raises(ConfigError, match=f"codec {codec} holds every value as it is"):
            get_codec(codec, nonfinite="saturate")


def test_a_policy_goes_with_the_other_options():
    kv = finite_kv(20)
    kv[0, 0, 0, 4, 0] = np.nan
    codec = get_codec("balanced", levels=(8, 4), nonfinite="raw")
    layers = codec.encode(BACKEND, bound(kv), group_of(kv))
    assert rows_of(layers, kv)[0][0][0] == [0, 4]
    assert replace(codec, nonfinite="error") == get_codec("balanced", levels=(8, 4))


def test_the_largest_values_are_those_of_the_type():
    x = np.array([np.inf, -np.inf, np.nan, 1, -0.0], np.float32)
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        largest = float(ml_dtypes.finfo(dtype).max)
        assert held(x.astype(dtype)).astype(np.float64).tolist() == [largest, -largest, 0, 1, 0]
