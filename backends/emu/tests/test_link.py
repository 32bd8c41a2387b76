"""Composites of a device: the bytes of the composition on the host, and only coded bytes over the link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore import Layout
from kvcore.arrays import ArrayRef
from kvcore.codecs import get_codec
from kvcore.codecs.cachegen import CacheGen
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.fp8 import Fp8
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.codecs.grouped import Grouped
from kvcore.codecs.kvs1 import Kvs1
from kvcore.dtypes import to_dtype
from kvcore.errors import CorruptFrameError, QuantizationError, SlotError, UnsupportedOpError
from kvcore.ops import fetch, send

CODECS = ("raw", "lossless", "high", "balanced", "small", "cachegen", "int8", "int4", "int2", "fp8", "fp8_e5m2")
FLOATS = ("bfloat16", "float16", "float32")
LAYOUTS = ("L|KBNHD", "L|BHN(KD)", "LKBHND", "L|BH[K:DN,V:ND]", "L|B[K:NHD,V:NHE]", "L|BNC")
BLOCK = 4


class Case:
    """A paged cache on the host, the same on the emu, and the group that its rows are."""

    def __init__(self, layout, dtype, values, tokens, *, heads=2, width=8, other=8, position=0, rope=None, layers=2):
        self.layout = layout
        blocks = -(-tokens // BLOCK) + 1
        extents = {"L": layers, "K": 2, "B": blocks, "N": BLOCK, "H": heads, "D": width, "E": other, "C": width + other}
        if layout == "L|BNC":
            heads, parts, text = 1, (PartInfo("C", dtype, width), PartInfo("R", dtype, other)), "LTC"
        else:
            other = other if "E" in layout else width
            parts, text = (PartInfo("K", dtype, width), PartInfo("V", dtype, other)), "LKHTD"
        self.group = GroupInfo(
            text, range(layers), parts, rows=tokens, head_count=heads, base_position=position, rope=rope
        )
        self.shape, self.count = tensor_shape(layout, extents)
        rng = np.random.default_rng(values)
        self.tensors = [random_values(rng, self.shape, dtype) for _ in range(self.count)]
        self.slots = rng.permutation(blocks * BLOCK)[:tokens].astype(np.int64)
        self.extents = {a: extents[a] for a in "NHDE" if a in layout and ("(" in layout or "[" in layout)}

    def bind(self, tensors):
        layout = Layout(self.layout, **self.extents)
        return layout.bind(tensors if "|" in self.layout else tensors[0])

    def on(self, backend):
        placed = [send(backend, t) for t in self.tensors]
        backend.runtime.check()
        return placed


def tensor_shape(layout, extents):
    """Return the shape of a layout's tensors, and how many there are."""
    axes, count = layout.replace("L|", ""), extents["L"] if layout.startswith("L|") else 1
    shapes = {
        "KBNHD": "KBNHD",
        "BHN(KD)": "BHN",
        "LKBHND": "LKBHND",
        "BH[K:DN,V:ND]": "BH",
        "B[K:NHD,V:NHE]": "B",
        "BNC": "BNC",
    }
    n, h, d, e = (extents[a] for a in "NHDE")
    row = {"BHN(KD)": (2 * d,), "BH[K:DN,V:ND]": (2 * n * d,), "B[K:NHD,V:NHE]": (n * h * (d + e),)}
    return (*(extents[a] for a in shapes[axes]), *row.get(axes, ())), count


def random_values(rng, shape, dtype):
    """Return what caches hold: channels of different scales and means, some zeros."""
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape[-1:])) + rng.integers(-2, 3, shape[-1:])
    wide[rng.random(shape) < 0.05] = 0
    return wide.astype(np.float32).astype(to_dtype(dtype))


def outcome(call):
    try:
        return call()
    except (QuantizationError, CorruptFrameError, SlotError, UnsupportedOpError) as error:
        return type(error), getattr(error, "reason", None)


def encode(backend, codec, case, tensors, index):
    return outcome(lambda: gather_encode(backend, codec, case.bind(tensors), index, case.group))


def decode(backend, codec, case, layers, tensors, index):
    done = outcome(lambda: decode_scatter(backend, codec, layers, index, case.group, case.bind(tensors)))
    return done if isinstance(done, tuple) else None


def check(emu, codec, case):
    """Hold a device to what the reference makes of a case; return the segments."""
    reference = kvcore.open_backend("cpu_ref")
    wanted = encode(reference, codec, case, case.tensors, case.slots)
    index = send(emu, case.slots)
    found = encode(emu, codec, case, case.on(emu), index)
    assert found == wanted
    if isinstance(wanted, tuple):
        return wanted
    known, placed = [np.zeros_like(t) for t in case.tensors], [send(emu, np.zeros_like(t)) for t in case.tensors]
    assert decode(reference, codec, case, wanted, known, case.slots) is None
    assert decode(emu, codec, case, wanted, placed, index) is None
    assert [fetch(emu, p).tobytes() for p in placed] == [k.tobytes() for k in known]
    return wanted


@st.composite
def cases(draw):
    width = draw(st.sampled_from([2, 8, 40, 66]))
    rope = draw(st.sampled_from([None, kvcore.RopeParams(2), kvcore.RopeParams(2, interleaved=True)]))
    return Case(
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(FLOATS)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([1, 4, 5, 6, 31, 33, 40])),
        width=width,
        other=draw(st.sampled_from([4, 34])),
        position=draw(st.sampled_from([-1, 0, 3])),
        rope=rope,
    )


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_those_of_the_composition_on_the_host(emu, name):
    @settings(max_examples=10, deadline=None)
    @given(cases(), st.integers(0, 5))
    def run(case, seed):
        emu.runtime.reseed(seed)
        check(emu, get_codec(name), case)

    run()


@pytest.mark.parametrize("name", ["balanced", "lossless", "int4"])
def test_more_tokens_than_a_tile_has(emu, name):
    assert isinstance(check(emu, get_codec(name), Case("L|KBNHD", "bfloat16", 1, 300, rope=kvcore.RopeParams(8))), list)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_are_coded_losslessly(emu, dtype):
    assert isinstance(check(emu, get_codec("lossless"), Case("L|KBNHD", dtype, 1, 33)), list)


def test_every_bit_pattern_comes_back(emu):
    for dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
        case = Case("L|KBNHD", dtype, 1, 64, heads=16, width=64, layers=1)
        everything = np.arange(case.tensors[0].size, dtype=np.uint32).astype(f"u{case.tensors[0].itemsize}")
        case.tensors = [everything.view(to_dtype(dtype)).reshape(case.shape)]
        assert isinstance(check(emu, get_codec("lossless"), case), list)


POLICIES = [
    *(Kvs1("balanced", nonfinite=policy) for policy in ("error", "saturate", "raw")),
    Kvs1("small", levels=(-3, 5)),
    CacheGen(nonfinite="saturate"),
    CacheGen(per_head=True),
    Grouped("int4", nonfinite="saturate"),
    Fp8(nonfinite="saturate"),
    Fp8(scaled=False),
]


@pytest.mark.parametrize("tokens", [4, 5, 9])
@pytest.mark.parametrize("codec", POLICIES, ids=lambda codec: f"{codec.name}-{codec.nonfinite}")
def test_policies_for_what_is_not_finite(emu, codec, tokens):
    done = 0
    for seed in range(6):
        case = Case("L|KBNHD", "float16", seed, tokens, width=6, other=6, position=seed % 2, rope=kvcore.RopeParams(6))
        rng = np.random.default_rng(seed)
        for tensor in case.tensors:
            flat = tensor.reshape(-1)
            flat[rng.integers(0, flat.size, seed)] = rng.choice([np.nan, np.inf, -np.inf], seed)
        done += isinstance(check(emu, codec, case), list)
    assert done  # the others are refused, by both


@pytest.mark.parametrize("codec", [get_codec("high"), get_codec("balanced"), Kvs1("small", nonfinite="raw")])
def test_values_beyond_their_segments_others(emu, codec):
    for large in (1e3, 3e4, 1e8, 1e9, 1e36):
        case = Case("L|KBNHD", "float32", 2, 40)
        for tensor in case.tensors:
            tensor[..., 0] *= np.where(np.random.default_rng(4).random(tensor.shape[:-1]) < 0.02, large, 1)
        check(emu, codec, case)


def test_steps_that_are_far_apart(emu):
    case = Case("L|KBNHD", "float32", 2, 40)
    for tensor in case.tensors:  # [K or V, block, token, head, channel]
        loudness = np.where(np.random.default_rng(6).random((*tensor.shape[:3], 1)) < 0.1, 2.0**18.7, 2.0**10)
        tensor[..., 0, :], tensor[..., 1, :] = 0, np.random.default_rng(7).standard_normal(tensor[..., 1, :].shape)
        tensor[..., 1, :] *= loudness
    assert isinstance(check(emu, get_codec("balanced"), case), list)


def test_groups_whose_ends_are_halves(emu):
    case = Case("L|KBNHD", "float32", 2, 40, width=34, other=34)
    for tensor in case.tensors:
        tensor[...] = np.random.default_rng(5).choice(np.array([0.5, 255.5, 15.5, 3.5, 1.5], np.float32), tensor.shape)
    for name in ("int8", "int4", "int2"):
        assert isinstance(check(emu, get_codec(name), case), list)


# --- what crosses the link


class Meter:
    """Counts what crosses the link in copies of a backend, and how often the host waits for it."""

    def __init__(self, backend, monkeypatch):
        self.bytes = self.waits = 0
        copy, wait = backend.copy_batch, backend.runtime.check

        def counted(src, *, out, **how):
            for one, other in zip(src, out, strict=True):
                ends = {ArrayRef.of(x).device if not isinstance(x, bytes) else "cpu" for x in (one, other)}
                self.bytes += ArrayRef.of(other).shape[0] if len(ends) == 2 else 0
            return copy(src, out=out, **how)

        def waited(stream=None):
            self.waits += 1
            return wait(stream)

        monkeypatch.setattr(backend, "copy_batch", counted)
        monkeypatch.setattr(backend.runtime, "check", waited)

    def take(self):
        taken = self.bytes, self.waits
        self.bytes = self.waits = 0
        return taken


TOKENS, WIDTH = 256, 128
# Over the link for each coded byte, of a chunk of heads with 128 channels: encoding, decoding.
LINK = {
    "high": (1.25, 1.05),
    "balanced": (1.25, 1.05),
    "small": (1.25, 1.05),
    "lossless": (1.01, 1.01),
    "cachegen": (1.15, 1.1),
    "int8": (1.4, 1.2),
    "int4": (1.7, 1.3),
    "fp8": (1.01, 1.01),
    "raw": (1.0, 1.0),
}


@pytest.mark.parametrize("name", LINK)
def test_only_coded_bytes_cross_the_link(emu, name, monkeypatch):
    case = Case("L|KBNHD", "bfloat16", 3, TOKENS, width=WIDTH, position=TOKENS, rope=kvcore.RopeParams(64), layers=1)
    codec, tensors, index = get_codec(name), case.on(emu), send(emu, case.slots)
    meter = Meter(emu, monkeypatch)
    layers = gather_encode(emu, codec, case.bind(tensors), index, case.group)  # sends the chunk's table of RoPE
    meter.take()
    assert gather_encode(emu, codec, case.bind(tensors), index, case.group) == layers
    encoding, waits = meter.take()
    coded = sum(len(segment.data) for layer in layers for segment in layer)
    assert encoding <= LINK[name][0] * coded + 256
    assert waits <= 8  # four for each part
    decode_scatter(emu, codec, layers, index, case.group, case.bind(tensors))
    meter.take()
    decode_scatter(emu, codec, layers, index, case.group, case.bind(tensors))
    decoding, waits = meter.take()
    assert decoding <= LINK[name][1] * coded + 256
    assert waits <= 4


def test_a_table_of_rope_crosses_the_link_once(emu, monkeypatch):
    case = Case("L|KBNHD", "bfloat16", 3, 40, position=77, rope=kvcore.RopeParams(8))
    tensors, index = case.on(emu), send(emu, case.slots)
    meter, table = Meter(emu, monkeypatch), 2 * 40 * 4 * 4  # cos and sin of 4 pairs, float32
    sizes = []
    for _ in range(2):
        gather_encode(emu, get_codec("balanced"), case.bind(tensors), index, case.group)
        sizes.append(meter.take()[0])
    assert sizes[0] - sizes[1] == table


# --- what a device lacks


class OnHostOnly:
    """A codec that says nothing about devices."""

    def __init__(self, codec):
        self.encode, self.decode = codec.encode, codec.decode


def test_codecs_that_know_no_device_are_run_on_the_host(emu):
    assert isinstance(check(emu, OnHostOnly(get_codec("balanced")), Case("L|KBNHD", "bfloat16", 3, 40)), list)


def test_what_the_device_lacks_is_done_on_the_host(emu, monkeypatch):
    case = Case("L|KBNHD", "bfloat16", 3, 40)
    monkeypatch.setattr(emu, "supports", lambda op, **_: op != "encode_symbols")
    check(emu, get_codec("balanced"), case)


@pytest.mark.parametrize("name", ["balanced", "lossless", "int4"])
def test_an_element_type_that_an_op_lacks_is_coded_on_the_host(emu, name, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedOpError("not of this element type")

    for op in ("reduce_moments", "dequantize", "unpack_bits"):
        monkeypatch.setattr(emu, op, refuse)
    case = Case("L|KBNHD", "bfloat16", 3, 40)
    assert isinstance(check(emu, get_codec(name), case), tuple | list)


# --- errors, and streams


def test_a_bad_slot_is_told_of_where_the_host_would_code_instead(emu, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedOpError("not of this element type")

    case = Case("L|KBNHD", "bfloat16", 3, 40)
    tensors, bad = case.on(emu), send(emu, np.where(np.arange(40) == 7, 10**6, case.slots))
    monkeypatch.setattr(emu, "reduce_absmax", refuse)  # the first op after the gather
    with pytest.raises(SlotError):
        gather_encode(emu, get_codec("balanced"), case.bind(tensors), bad, case.group)
    emu.runtime.check()


def damaged(layers, layer, segment, at):
    """Return segments, one with a byte that differs."""
    data = bytearray(layers[layer][segment].data)
    data[at] ^= 0xFF
    rows = [list(row) for row in layers]
    rows[layer][segment] = replace(rows[layer][segment], data=bytes(data))
    return rows


@pytest.mark.parametrize("name", [n for n in CODECS if n not in ("raw", "fp8", "fp8_e5m2", "int8", "int4", "int2")])
def test_a_bad_tile_writes_nothing_and_leaves_no_error_behind(emu, name):
    case, codec = Case("L|KBNHD", "bfloat16", 3, 40), get_codec(name)
    index = send(emu, case.slots)
    layers = gather_encode(emu, codec, case.bind(case.on(emu)), index, case.group)
    placed = [send(emu, np.zeros_like(t)) for t in case.tensors]
    tile = 100  # beyond every head, within the classes or states of a tile
    for broken in (damaged(layers, 1, 0, tile), damaged(damaged(layers, 0, 0, tile), 1, 3, 1)):
        with pytest.raises(CorruptFrameError):
            decode_scatter(emu, codec, broken, index, case.group, case.bind(placed))
        emu.runtime.check()
        assert not any(fetch(emu, p).any() for p in placed)
    decode_scatter(emu, codec, layers, index, case.group, case.bind(placed))
    assert all(fetch(emu, p).any() for p in placed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_values_that_are_no_sign_and_exponent_are_refused(emu, dtype):
    case, reference = Case("L|KBNHD", dtype, 1, 8, heads=1, layers=1), kvcore.open_backend("cpu_ref")
    index, placed = send(emu, case.slots), [send(emu, np.zeros_like(t)) for t in case.tensors]
    layers = gather_encode(reference, get_codec("lossless"), case.bind(case.tensors), case.slots, case.group)
    mantissas = bytes({"bfloat16": 56, "float16": 16 + 64}.get(dtype, 0))
    refused = 0
    for value in (255, 256, 511, 512, 0x7FFF, -1, -256):
        tile = value.to_bytes(2, "little", signed=True) + bytes(2)  # a packed tile of width 0: all values are the least
        made = [[CodedSegment(tile + mantissas, ((1, 0),)), layers[0][1]]]
        known = decode(
            reference, get_codec("lossless"), case, made, [np.zeros_like(t) for t in case.tensors], case.slots
        )
        found = decode(emu, get_codec("lossless"), case, made, placed, index)
        assert found == known
        refused += known == (CorruptFrameError, "stream")
        if known is not None:
            emu.runtime.check()
            assert not any(fetch(emu, p).view(np.uint8).any() for p in placed)
        placed = [send(emu, np.zeros_like(t)) for t in case.tensors]
    assert refused == {"bfloat16": 4, "float16": 6, "float8_e4m3fn": 6}[dtype]


def test_symbols_outside_the_bins_are_refused(emu):
    case, codec = Case("L|KBNHD", "bfloat16", 3, 40), get_codec("cachegen")
    reference, index = kvcore.open_backend("cpu_ref"), send(emu, case.slots)
    layers = gather_encode(reference, codec, case.bind(case.tensors), case.slots, case.group)
    fewer = [[replace(s, data=(30).to_bytes(2, "little") + s.data[2:]) for s in layer] for layer in layers]
    placed = [send(emu, np.zeros_like(t)) for t in case.tensors]
    wanted = decode(reference, codec, case, fewer, [np.zeros_like(t) for t in case.tensors], case.slots)
    assert wanted == decode(emu, codec, case, fewer, placed, index) == (CorruptFrameError, "stream")
    assert not any(fetch(emu, p).any() for p in placed)


@pytest.mark.parametrize("name", CODECS)
def test_bad_slots_are_refused(emu, name):
    case, codec = Case("L|KBNHD", "bfloat16", 3, 40), get_codec(name)
    tensors, index = case.on(emu), send(emu, case.slots)
    bad = send(emu, np.where(np.arange(40) == 7, 10**6, case.slots))
    layers = gather_encode(emu, codec, case.bind(tensors), index, case.group)
    with pytest.raises(SlotError):
        gather_encode(emu, codec, case.bind(tensors), bad, case.group)
    placed = [send(emu, np.zeros_like(t)) for t in case.tensors]
    with pytest.raises(SlotError):
        decode_scatter(emu, codec, layers, bad, case.group, case.bind(placed))
    emu.runtime.check()
    assert not any(fetch(emu, p).any() for p in placed)


@pytest.mark.parametrize("name", ["raw", "lossless", "balanced", "int4", "fp8", "cachegen"])
def test_all_is_queued_on_the_given_stream(emu, name):
    case, codec, runtime = Case("L|KBNHD", "bfloat16", 3, 40, rope=kvcore.RopeParams(8)), get_codec(name), emu.runtime
    wanted = gather_encode(kvcore.open_backend("cpu_ref"), codec, case.bind(case.tensors), case.slots, case.group)
    for seed in range(4):
        runtime.reseed(seed)
        stream, index = runtime.stream(), send(emu, case.slots)
        tensors = [emu.runtime.empty(t.shape, t.dtype) for t in case.tensors]
        runtime.check()
        held = [
            ArrayRef.at(t.address, (values.nbytes,), "uint8", device=t.device, owner=t)
            for t, values in zip(tensors, case.tensors, strict=True)
        ]
        emu.copy_batch([v.reshape(-1).view(np.uint8) for v in case.tensors], out=held, stream=stream)
        assert gather_encode(emu, codec, case.bind(tensors), index, case.group, stream=stream) == wanted
        zeros = [np.zeros(v.nbytes, np.uint8) for v in case.tensors]
        emu.copy_batch(zeros, out=held, stream=stream)
        decode_scatter(emu, codec, wanted, index, case.group, case.bind(tensors), stream=stream)
        found = [np.empty_like(v) for v in case.tensors]
        emu.copy_batch(held, out=[f.reshape(-1).view(np.uint8) for f in found], stream=stream)
        runtime.check(stream)
        assert all(f.any() for f in found)
        again = gather_encode(emu, codec, case.bind(tensors), index, case.group, stream=stream)
        assert again == wanted or not codec.lossless
