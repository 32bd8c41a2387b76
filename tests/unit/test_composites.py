"""Gather and encode, decode and scatter; and backends that fuse them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import kvcore
from kvcore import BackendSpec, Layout, Probe, hookimpl
from kvcore.codecs import get_codec
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.codecs.parts import Reader
from kvcore.codecs.segments import decode_segments, encode_segments
from kvcore.dtypes import BFLOAT16
from kvcore.errors import BackendLoadError, CorruptFrameError, SlotError
from kvcore.plugins import API_VERSION
from kvcore.plugins.discover import Candidate
from kvcore_cpu_ref import ops

LAYERS, BLOCKS, BLOCK, HEADS, WIDTH, TOKENS = 2, 6, 4, 2, 8, 10
GROUP = GroupInfo(
    "LKHTD",
    range(LAYERS),
    (PartInfo("K", "bfloat16", WIDTH), PartInfo("V", "bfloat16", WIDTH)),
    rows=TOKENS,
    head_count=HEADS,
    rope=kvcore.RopeParams(WIDTH),
)


def cache(seed=None):
    shape = (2, BLOCKS, BLOCK, HEADS, WIDTH)
    if seed is None:
        return [np.zeros(shape, BFLOAT16) for _ in range(LAYERS)]
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(BFLOAT16) for _ in range(LAYERS)]


def bound(tensors):
    return Layout("L|KBNHD").bind(tensors)


def slots(seed=1):
    return np.random.default_rng(seed).permutation(BLOCKS * BLOCK)[:TOKENS].astype(np.int64)


@pytest.fixture
def reference():
    return kvcore.open_backend("cpu_ref")


def fusing(name, **fused):
    """Return a backend with the reference's ops and some fused composites."""
    module = ModuleType(f"kvcore_test_fusing_{name}")
    for attribute, function in vars(ops).items():
        if attribute.startswith("kvcore_op_"):
            setattr(module, attribute, function)
    for composite, function in fused.items():
        function.__name__ = f"kvcore_fused_{composite}"
        setattr(module, function.__name__, hookimpl(function))
    sys.modules[module.__name__] = module
    spec = BackendSpec(name, ("cpu",), 0, API_VERSION, lambda: Probe(True, "for tests"), {"fused": module.__name__})
    return kvcore.open_backend(name, fallback="error", found=[Candidate(name, "usable", "for tests", spec)])


@pytest.mark.parametrize("codec", ["raw", "lossless", "balanced", "int8", "fp8", "cachegen"])
def test_a_paged_cache_comes_back_as_the_codec_alone_would_give_it(reference, codec):
    source, index = cache(0), slots()
    layers = gather_encode(reference, get_codec(codec), bound(source), index, GROUP)
    chunk = reference.gather_paged(bound(source), index)
    assert layers == get_codec(codec).encode(reference, chunk, GROUP)
    target, wanted = cache(), cache()
    assert decode_scatter(reference, get_codec(codec), layers, index, GROUP, bound(target)).layers == LAYERS
    get_codec(codec).decode(reference, layers, GROUP, chunk)
    reference.scatter_paged(chunk, index, out=bound(wanted))
    assert [t.tobytes() for t in target] == [w.tobytes() for w in wanted]
    if get_codec(codec).lossless:
        again = reference.gather_paged(bound(target), index)
        original = reference.gather_paged(bound(source), index)
        assert all((again.array(p, n) == original.array(p, n)).all() for p, n in original.planes())


def test_bad_bytes_and_bad_slots_write_nothing(reference):
    codec, source, index = get_codec("balanced"), cache(0), slots()
    layers = gather_encode(reference, codec, bound(source), index, GROUP)
    target = cache()
    damaged = [[type(s)(bytes(s.data)[:-4], s.tiles) for s in layer] for layer in layers]
    with pytest.raises(CorruptFrameError):
        decode_scatter(reference, codec, damaged, index, GROUP, bound(target))
    with pytest.raises(SlotError):
        decode_scatter(reference, codec, layers, index + BLOCKS * BLOCK, GROUP, bound(target))
    with pytest.raises(SlotError):
        gather_encode(reference, codec, bound(source), index - BLOCKS * BLOCK, GROUP)
    assert not any(t.any() for t in target)


def test_fused_segments_are_used_and_give_the_same_bytes(reference):
    calls = []

    def encode(
        x, *, tables, rule, raw_rows=(), raw_values=None, unroped=False, names=None, stream=None, workspace=None
    ):
        calls.append("encode")
        known = {"raw_rows": raw_rows, "raw_values": raw_values, "unroped": unroped, "names": names}
        return encode_segments(reference, x, tables=tables, rule=rule, **known)

    def decode(segments, *, tables, tokens, channels, dtype, stream=None, workspace=None):
        calls.append("decode")
        readers, tiles = [Reader(s.data) for s in segments], [s.tiles for s in segments]
        shape = {"tokens": tokens, "channels": channels, "dtype": dtype}
        return decode_segments(reference, readers, tiles, tables=tables, **shape)

    backend = fusing("segments", encode_segments=encode, decode_segments=decode)
    codec, source, index = get_codec("small"), cache(0), slots()
    layers = gather_encode(backend, codec, bound(source), index, GROUP)
    assert layers == gather_encode(reference, codec, bound(source), index, GROUP)
    targets = cache(), cache()
    for target, one in zip(targets, (backend, reference), strict=True):
        decode_scatter(one, codec, layers, index, GROUP, bound(target))
    assert [t.tobytes() for t in targets[0]] == [t.tobytes() for t in targets[1]]
    assert calls == ["encode", "encode", "decode", "decode"]  # K and V


def test_fused_movement_is_used_and_may_hand_back(reference):
    calls = []

    def gather(src, index, *, codec, group, unit="slot", stream=None, workspace=None):
        calls.append(codec.name)
        return [[]] if codec.name == "raw" else None

    def scatter(layers, index, *, codec, group, unit="slot", out, stream=None, workspace=None):
        calls.append(codec.name)
        return out if codec.name == "raw" else None

    backend = fusing("movement", gather_encode=gather, decode_scatter=scatter)
    assert gather_encode(backend, get_codec("raw"), bound(cache(0)), slots(), GROUP) == [[]]
    layers = gather_encode(backend, get_codec("lossless"), bound(cache(0)), slots(), GROUP)
    assert layers == gather_encode(reference, get_codec("lossless"), bound(cache(0)), slots(), GROUP)
    target = cache()
    decode_scatter(backend, get_codec("raw"), [[]], slots(), GROUP, bound(target))
    assert not any(t.any() for t in target)
    decode_scatter(backend, get_codec("lossless"), layers, slots(), GROUP, bound(target))
    assert all(t.any() for t in target)
    assert calls == ["raw", "lossless", "raw", "lossless"]


def test_a_fused_composite_is_held_to_its_hookspec():
    def gather(src, index, *, codec, group, stream=None, workspace=None):
        return None

    with pytest.raises(BackendLoadError, match=r"kvcore_fused_gather_encode.*does not follow its hookspec"):
        fusing("wrong", gather_encode=gather)


def test_a_stream_reaches_fused_composites(reference):
    calls = []

    def gather(src, index, *, codec, group, unit="slot", stream=None, workspace=None):
        calls.append(stream)

    def scatter(layers, index, *, codec, group, unit="slot", out, stream=None, workspace=None):
        calls.append(stream)

    backend, stream = fusing("streams", gather_encode=gather, decode_scatter=scatter), object()
    layers = gather_encode(backend, get_codec("int4"), bound(cache(0)), slots(), GROUP, stream=stream)
    assert layers == gather_encode(reference, get_codec("int4"), bound(cache(0)), slots(), GROUP)
    target, known = cache(), cache()
    decode_scatter(backend, get_codec("int4"), layers, slots(), GROUP, bound(target), stream=stream)
    decode_scatter(reference, get_codec("int4"), layers, slots(), GROUP, bound(known))
    assert [t.tobytes() for t in target] == [k.tobytes() for k in known]
    assert calls == [stream, stream]
