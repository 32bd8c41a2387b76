"""Flows over several streams: right under every seed, and seen to be wrong when one wait is left out."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore
from kvcore import Layout
from kvcore.arrays import ArrayRef
from kvcore.codecs import get_codec
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.dtypes import BFLOAT16
from kvcore.ops import fetch

LAYERS, BLOCKS, BLOCK, HEADS, WIDTH, TOKENS = 2, 6, 4, 2, 8, 10
SHAPE = (LAYERS, 2, BLOCKS, BLOCK, HEADS, WIDTH)
SEEDS = range(12)
UINT8 = np.dtype(np.uint8)


class Memory:
    """An array on the device, and its bytes."""

    def __init__(self, backend, shape, dtype):
        self.backend = backend
        self.array = ArrayRef.of(backend.runtime.empty(shape, np.dtype(dtype)))
        size = int(np.prod(shape)) * self.array.dtype.itemsize
        self.bytes = ArrayRef.at(self.array.address, (size,), "uint8", device=self.array.device, owner=self.array)

    def fill(self, values, stream=None):
        self.backend.copy_batch(
            [np.ascontiguousarray(values).reshape(-1).view(np.uint8)], out=[self.bytes], stream=stream
        )
        return self

    def read(self):
        return fetch(self.backend, self.array)


def on_device(backend, values):
    made = Memory(backend, values.shape, values.dtype).fill(values)
    backend.runtime.check()
    return made


# --- a cache that is saved to host memory through one chunk, overwritten, and restored

WAITS = (
    "the chunk is filled before it is copied out",
    "the chunk is copied out before it is filled again",
    "the host has the bytes before it reads them",
    "the bytes have arrived before they are scattered",
    "the chunk is scattered before others arrive in it",
    "the cache is whole before it is read",
)


def save_and_restore(backend, seed, without=None):
    """Return whether the cache holds again what was saved."""
    runtime = backend.runtime
    runtime.reseed(0)
    rng = np.random.default_rng(5)
    values = rng.standard_normal(SHAPE).astype(BFLOAT16)
    requests = rng.permutation(BLOCKS * BLOCK).reshape(3, 8).astype(np.int64)
    cache, indices = on_device(backend, values), [on_device(backend, r) for r in requests]
    rows = Layout("LKBNHD").bind(cache.array)
    chunk = Memory(backend, (LAYERS, 2, 8, HEADS, WIDTH), BFLOAT16)
    dense = Layout("LKTHD").bind(chunk.array)
    host = np.zeros((3, chunk.bytes.shape[0]), np.uint8)
    runtime.reseed(seed)

    compute, link = runtime.stream(), runtime.stream()

    def wait(number, event, stream):
        if WAITS[number] != without:
            runtime.wait(event, stream)

    for i, index in enumerate(indices):
        if i > 0:
            wait(1, runtime.record(link), compute)
        backend.gather_paged(rows, index.array, out=dense, stream=compute)
        wait(0, runtime.record(compute), link)
        backend.copy_batch([chunk.bytes], out=[host[i]], stream=link)
    if WAITS[2] != without:
        runtime.check(link)
    stored = host.copy()
    runtime.check(compute)
    runtime.check(link)
    cache.fill(np.zeros(SHAPE, BFLOAT16), compute)
    for i, index in enumerate(indices):
        if i > 0:
            wait(4, runtime.record(compute), link)
        backend.copy_batch([stored[i]], out=[chunk.bytes], stream=link)
        wait(3, runtime.record(link), compute)
        backend.scatter_paged(dense, index.array, out=rows, stream=compute)
    if WAITS[5] != without:
        runtime.check(compute)
    restored = cache.read()
    runtime.check(compute)
    runtime.check(link)
    return restored.tobytes() == values.tobytes()


def test_with_all_waits_the_cache_comes_back(emu):
    assert all(save_and_restore(emu, seed) for seed in (0, *SEEDS))


@pytest.mark.parametrize("without", WAITS)
def test_a_missing_wait_is_seen(emu, without):
    wrong = [seed for seed in SEEDS if not save_and_restore(emu, seed, without)]
    assert wrong, f"without this wait every seed gives the right bytes: {without}"


# --- the composites, which wait for themselves

GROUP = GroupInfo(
    "LKHTD",
    range(LAYERS),
    (PartInfo("K", "bfloat16", WIDTH), PartInfo("V", "bfloat16", WIDTH)),
    rows=TOKENS,
    head_count=HEADS,
    rope=kvcore.RopeParams(WIDTH),
)


@pytest.mark.parametrize("codec", ["raw", "lossless", "balanced", "int4", "fp8", "cachegen"])
def test_composites_give_the_references_bytes_under_every_seed(emu, codec):
    reference = kvcore.open_backend("cpu_ref")
    values = np.random.default_rng(3).standard_normal(SHAPE).astype(BFLOAT16)
    slots = np.random.default_rng(4).permutation(BLOCKS * BLOCK)[:TOKENS].astype(np.int64)
    layout, known = Layout("LKBNHD"), np.zeros(SHAPE, BFLOAT16)
    wanted = gather_encode(reference, get_codec(codec), layout.bind(values), slots, GROUP)
    decode_scatter(reference, get_codec(codec), wanted, slots, GROUP, layout.bind(known))
    cache, index = on_device(emu, values), on_device(emu, slots)
    for seed in (0, 1, 2):
        emu.runtime.reseed(seed)
        layers = gather_encode(emu, get_codec(codec), layout.bind(cache.array), index.array, GROUP)
        assert layers == wanted
        target = on_device(emu, np.zeros(SHAPE, BFLOAT16))
        decode_scatter(emu, get_codec(codec), layers, index.array, GROUP, layout.bind(target.array))
        assert target.read().tobytes() == known.tobytes()


def encode_without_waiting(backend, codec, rows, index):
    """`gather_encode`, as somebody writes it who takes a copy to be done when it returns."""
    chunk = Memory(backend, (LAYERS, 2, TOKENS, HEADS, WIDTH), BFLOAT16)
    backend.gather_paged(rows, index, out=Layout("LKTHD").bind(chunk.array))
    host = np.zeros((LAYERS, 2, TOKENS, HEADS, WIDTH), BFLOAT16)
    backend.copy_batch([chunk.bytes], out=[host.reshape(-1).view(np.uint8)])
    reference = kvcore.open_backend("cpu_ref")
    return codec.encode(reference, Layout("LKTHD").bind(host), GROUP)


def test_an_encoder_that_does_not_wait_encodes_something_else(emu):
    values = np.random.default_rng(3).standard_normal(SHAPE).astype(BFLOAT16)
    cache, index = on_device(emu, values), on_device(emu, np.arange(TOKENS))
    rows, codec = Layout("LKBNHD").bind(cache.array), get_codec("raw")
    emu.runtime.reseed(0)
    assert encode_without_waiting(emu, codec, rows, index.array) != gather_encode(emu, codec, rows, index.array, GROUP)
    emu.runtime.check()
