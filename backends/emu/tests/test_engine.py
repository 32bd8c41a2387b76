"""The cache engine over a device's memory: caches on the device, chunks in host memory, frames in a store."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.arrays import ArrayRef
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import Namespace
from kvcore.engine.kv import PagedKV
from kvcore.engine.parts import CachePart
from kvcore.layout import Layout
from kvcore.memory import chunk_desc
from kvcore.ops.staging import fetch, send
from kvcore.tiers.config import open_tiers

CHUNK, BLOCK, LAYERS, HEADS, WIDTH = 8, 4, 2, 2, 4
TOKENS = list(range(3 * CHUNK + 1))
SHAPE = (16, 2, BLOCK, HEADS, WIDTH)


def placed(emu, arrays):
    """Caches on the device, with these contents, and the same bound."""
    there = [send(emu, array) for array in arrays]
    refs = [ArrayRef.of(one) for one in there]
    return there, Layout("L|BKNHD").bind(refs)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("serde", ["raw", {"type": "kvs1", "preset": "lossless"}])
def test_kv_of_a_device_is_stored_and_comes_back(emu, serde, layerwise):
    rng = np.random.default_rng(3)
    full = [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(LAYERS)]
    _, rows = placed(emu, full)
    part = CachePart(chunk_desc(rows, CHUNK), (0, 1), (0, HEADS), HEADS)
    namespace = Namespace("m", "1", kv_dtype="float32", chunk_tokens=CHUNK)
    config = {"host_bytes": 1 << 20, "tiers": [{"store": "memory:", "serde": serde}]}
    blocks = [5, 3, 11, 0, 1, 2, 9]
    with open_tiers(config, emu) as tiers:
        engine = CacheEngine(namespace, [part], tiers, backend=emu, block_tokens=BLOCK)
        keys = engine.keys(TOKENS)
        kv = PagedKV.of_blocks(emu, [rows], [blocks])
        if layerwise:
            store = engine.begin_store(keys, kv)
            for layer in range(LAYERS):
                store.layer(0, layer)
            assert store.finish().chunks_written == 3
        else:
            assert engine.store_keys(keys, kv).chunks_written == 3
        assert engine.flush(60)
        tiers.host.clear()
        empty, target = placed(emu, [np.zeros_like(one) for one in full])
        there = PagedKV.of_blocks(emu, [target], [blocks])
        if layerwise:
            with engine.begin_retrieve(keys, there, start=BLOCK, stop=3 * CHUNK) as load:
                for layer in range(LAYERS):
                    load.layer(0, layer)
                assert load.finish() == 3 * CHUNK
        else:
            assert engine.retrieve_keys(keys, there, start=BLOCK, stop=3 * CHUNK) == 3 * CHUNK
        emu.runtime.check()
        wanted = blocks[1:6]
        for one, truth in zip(empty, full, strict=True):
            found = fetch(emu, one)
            assert np.array_equal(found[wanted], truth[wanted])
            assert not np.delete(found, wanted, 0).any()
