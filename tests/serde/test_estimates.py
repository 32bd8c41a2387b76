"""Estimates: nothing that is ever written is larger, whatever the values; where values do not matter, it is exact."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore import BufferPool, KVMeta, Layout, LayoutDesc, RopeParams
from kvcore.codecs import get_codec
from kvcore.codecs.cachegen import CacheGenConfig
from kvcore.codecs.registry import PRESETS
from kvcore.dtypes import finite_max, to_dtype
from kvcore.errors import UnsupportedOpError
from kvcore.memory import MemoryPlan
from kvcore.serde import FrameSerializer

from .objects import key, kv_desc

EXACT = ("raw", "fp8", "fp8_e5m2", "int8", "int4", "int2")
CODECS = {
    **{name: partial(get_codec, name) for name in PRESETS},
    "levels": partial(get_codec, "small", levels=(-20, 20)),
    "high-raw": partial(get_codec, "high", nonfinite="raw"),
    "small-raw": partial(get_codec, "small", nonfinite="raw"),
    "cachegen-per-head": partial(get_codec, "cachegen", per_head=True),
    "cachegen-256": partial(
        get_codec,
        "cachegen",
        config=CacheGenConfig(2, *[({"start_layer": 0, "end_layer": 2, "bins": 256},)] * 0, kspecs=(), vspecs=())
        if False
        else None,
    ),
}


def noise(rng, shape, dtype):
    """Any bit patterns that are finite numbers."""
    item = to_dtype(dtype)
    x = rng.integers(0, 256, (*shape, item.itemsize), np.uint8).view(item)[..., 0]
    return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), item))


def huge_range(rng, shape, dtype):
    """Magnitudes from the smallest to the largest that every codec takes: the worst for steps, and for tables."""
    top = min(18.0, np.log2(finite_max(to_dtype(dtype))))
    return (rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-30, top, shape)).astype(to_dtype(dtype))


def spikes(rng, shape, dtype):
    """One large value in each row of small ones: all others need a fine step, and this one many of them."""
    x = rng.normal(size=shape)
    x[..., 0] = 1000 * rng.choice([-1, 1], shape[:-1])
    return x.astype(to_dtype(dtype))


def constant(rng, shape, dtype):
    return np.full(shape, rng.normal()).astype(to_dtype(dtype))


def zeros(_rng, shape, dtype):
    return np.zeros(shape, to_dtype(dtype))


def normal(rng, shape, dtype):
    return rng.normal(size=shape).astype(to_dtype(dtype))


KINDS = (noise, huge_range, spikes, constant, zeros, normal)


def written(backend, codec, desc, kind, seed, rows_with_nan=0, **meta):
    """Return what is written and what was estimated; None where the codec refuses the values."""
    pool, rng = BufferPool(1 << 26), np.random.default_rng(seed)
    src = pool.allocate([desc], KVMeta(**meta))
    rows = src.rows()
    for part, layer in rows.planes():
        x = rows.array(part, layer)
        x[...] = kind(rng, x.shape, str(x.dtype))
        for token in range(1, rows_with_nan + 1):
            x[0, token % x.shape[1]] = np.nan
    serializer = FrameSerializer(codec, backend)
    estimate = serializer.estimate_serialized_size(src.plan)
    return serializer.serialize(src, pool.allocate_bytes(estimate), key()), estimate


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(CODECS)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    tokens=st.sampled_from([1, 2, 4, 5, 6, 31, 33, 257, 260]),
    width=st.sampled_from([1, 3, 8, 64, 65]),
    position=st.sampled_from([None, 0, 256]),
    seed=st.integers(0, 99),
)
@example("balanced", noise, "float32", 5, 64, 0, 0)
@example("lossless", noise, "bfloat16", 257, 65, 0, 0)
def test_no_frame_is_larger_than_estimated(backend, name, kind, dtype, tokens, width, position, seed):
    codec = CODECS[name]()
    desc = LayoutDesc(Layout("LKTHD", L=2, T=tokens, H=2, D=width), {"K": dtype, "V": dtype})
    rope = RopeParams(width - width % 2) if width > 1 else None
    raw_rows = {"high-raw": 3, "small-raw": 2}.get(name, 0) if tokens > 30 else 0
    kind = huge_range if kind is noise and not codec.lossless else kind  # all others refuse most of it
    size, estimate = written(backend, codec, desc, kind, seed, raw_rows, base_position=position, rope=rope)
    assert size <= estimate
    if name in EXACT:
        assert size == estimate


@pytest.mark.parametrize("name", [*EXACT, "turboquant_k8v4", "turboquant_3bit", "asym_k16_v8", "asym_k_elsewhere_v8"])
def test_sizes_that_do_not_depend_on_values_are_exact(backend, name):
    for desc in (kv_desc(), kv_desc(tokens=33, heads=1, width=33, dtype="float16")):
        size, estimate = written(backend, get_codec(name), desc, spikes, 1)
        assert size == estimate


@pytest.mark.parametrize("options", [{"scope": "tensor"}, {"scope": "page", "page_tokens": 7}])
def test_every_scope_of_scales_is_counted(backend, options):
    size, estimate = written(backend, get_codec("asym_k16_v8", **options), kv_desc(), normal, 1)
    assert size == estimate


@pytest.mark.parametrize("bins", [4, 33, 256])
def test_bins_are_counted(backend, bins):
    from kvcore.codecs.cachegen import QuantizationSpec

    specs = (QuantizationSpec(0, 2, bins),)
    codec = get_codec("cachegen", config=CacheGenConfig(2, specs, specs))
    size, estimate = written(backend, codec, kv_desc(tokens=256, width=64), noise_of_bins, 2)
    assert size <= estimate
    assert size > 0.8 * estimate, "values that fill the bins evenly take nearly all of it"


def noise_of_bins(rng, shape, dtype):
    return rng.uniform(-1, 1, shape).astype(to_dtype(dtype))


def test_fp8_takes_a_byte_an_element_and_4_a_scale():
    """Beside the head and the padding that every frame has."""
    raw, fp8 = (FrameSerializer(name) for name in ("raw", "fp8"))
    plan = MemoryPlan.of([kv_desc(layers=1, tokens=256, heads=1, width=64)])
    elements = 2 * 256 * 64
    head = raw.estimate_serialized_size(plan) - 2 * elements
    assert fp8.estimate_serialized_size(plan) == head + elements + 2 * 4 + 12  # 12: V's segment starts at 16 bytes


def test_an_estimate_is_of_the_layout_alone(backend):
    """It is asked for once for a batch, whose chunks are at many positions."""
    for name in ("balanced", "raw", "cachegen"):
        serializer = FrameSerializer(name, backend)
        sizes = {
            serializer.estimate_serialized_size(MemoryPlan.of([kv_desc()], KVMeta(position, layers=(4, 6))))
            for position in (None, 0, 256, 10**6)
        }
        assert len(sizes) == 1


def test_a_layout_that_the_codec_does_not_take_is_refused_by_the_estimate_too(backend):
    pages = MemoryPlan.of([LayoutDesc(Layout("L[page:T33]", L=3, T=2), {"page": "uint8"})])
    for name in ("lossless", "balanced", "fp8", "int4", "cachegen", "turboquant_4bit", "asym_k16_v8"):
        with pytest.raises(UnsupportedOpError, match=name):
            FrameSerializer(name, backend).estimate_serialized_size(pages)
    assert FrameSerializer("raw", backend).estimate_serialized_size(pages) > 0
