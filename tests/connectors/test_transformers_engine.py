"""The transformers connector beside other engines: the KV of one model, in whatever memory and shares it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.engine.engine import CacheEngine
from kvcore.engine.kv import PagedKV
from kvcore.engine.parts import CachePart
from kvcore.memory import chunk_desc
from kvcore.tiers.config import open_tiers
from kvcore.tiers.stores import MemoryStore

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("torch and transformers are not installed", allow_module_level=True)

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvcore.connectors.transformers import PrefixKVCache, cache_argument
from kvcore.connectors.transformers_memory import TensorKV, allocate

CHUNK, LAYERS, HEADS, WIDTH = 16, 3, 4, 8
BACKEND = kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=HEADS * WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiers() -> Any:
    with open_tiers({"host_bytes": 1 << 22, "pinned": False, "tiers": [{"store": "memory:"}]}, BACKEND) as tiers:
        yield tiers


def opened(model: torch.nn.Module, store: Any, **arguments: Any) -> PrefixKVCache:
    known = {"name": "tiny", "chunk_tokens": CHUNK, "backend": BACKEND}
    return PrefixKVCache.for_model(model, store=store, **{**known, **arguments})


def computed(model: torch.nn.Module, length: int = 53) -> tuple[torch.Tensor, DynamicCache]:
    tokens = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, **{cache_argument(model): cache})
    return tokens, cache


def same(old: DynamicCache, new: DynamicCache, hit: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the first tokens of one are all of the other, after a cast of the first."""
    return all(
        torch.equal(a[:, :, :hit].to(dtype).to(b.dtype), b)
        for one, two in zip(old.layers, new.layers, strict=True)
        for a, b in ((one.keys, two.keys), (one.values, two.values))
    )


def paged(kv: DynamicCache, heads: range, dtype: torch.dtype, block: int = 8) -> tuple[kvcore.RowLayout, list[int]]:
    """The KV of some heads as another engine has it, in blocks out of order; return them and the block table."""
    tokens = kv.layers[0].keys.shape[2]
    table = [5 + 2 * i for i in range(-(-tokens // block))]
    tensors = [torch.zeros(40, 2, block, len(heads), WIDTH, dtype=dtype) for _ in kv.layers]
    for tensor, layer in zip(tensors, kv.layers, strict=True):
        for t in range(tokens):
            for side, plane in enumerate((layer.keys, layer.values)):
                tensor[table[t // block], side, t % block] = plane[0, heads.start : heads.stop, t].to(dtype)
    return kvcore.Layout("L|BKNHD").bind(tensors), table


def rank(cache: PrefixKVCache, tiers: Any, rows: kvcore.RowLayout, heads: range) -> CacheEngine:
    part = CachePart(chunk_desc(rows, CHUNK), tuple(range(LAYERS)), (heads.start, heads.stop), HEADS)
    return CacheEngine(cache.engine.namespace, [part], tiers, backend=BACKEND, model_layers=LAYERS)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_what_ranks_of_another_engine_stored_is_restored(model, tiers, degree, kv_dtype):
    tokens, kv = computed(model)
    dtype, cache = getattr(torch, kv_dtype), opened(model, tiers, kv_dtype=kv_dtype)
    size = HEADS // degree
    for start in range(0, HEADS, size):
        heads = range(start, start + size)
        assert cache.lookup(tokens) == 0, "a rank is missing still"
        rows, table = paged(kv, heads, dtype)
        memory = PagedKV.of_blocks(BACKEND, [rows], [table])
        rank(cache, tiers, rows, heads).store(tokens[0].numpy(), memory, wait=True)
    restored, hit = cache.restore(tokens)
    assert hit == 48
    assert same(kv, restored, hit, dtype)
    assert cache.misses == {}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("degree", [1, 2])
def test_another_engine_reads_what_the_connector_saved(model, tiers, degree, kv_dtype):
    tokens, kv = computed(model)
    dtype, cache = getattr(torch, kv_dtype), opened(model, tiers, kv_dtype=kv_dtype)
    cache.save(tokens, kv)
    for start in range(0, HEADS, HEADS // degree):
        heads = range(start, start + HEADS // degree)
        truth, table = paged(kv, heads, dtype)
        room, _ = paged(kv, heads, dtype)
        for part, layer in room.planes():
            room.bytes_view(part, layer)[...] = 0
        engine = rank(cache, tiers, room, heads)
        mask = engine.retrieve(tokens[0].numpy(), PagedKV.of_blocks(BACKEND, [room], [table]))
        assert mask.sum() == 48
        for part, layer in room.planes():
            for t in range(48):
                at = table[t // 8], t % 8
                assert np.array_equal(room.bytes_view(part, layer)[at], truth.bytes_view(part, layer)[at])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_layer_by_layer_is_as_all_at_once(model, stored):
    tokens, kv = computed(model, 40)
    cache = opened(model, MemoryStore(), kv_dtype=str(stored).removeprefix("torch."))
    ids, pairs = tokens[0].numpy(), [(layer.keys, layer.values) for layer in kv.layers]
    assert list(cache.engine.store_layer(ids, TensorKV(BACKEND, pairs, stored))) == [0, 1, 2]
    assert cache.engine.flush(10)
    restored, hit = cache.restore(tokens)
    assert hit == 32
    assert same(kv, restored, hit, stored)
    room = allocate(LAYERS, (1, HEADS, 40, WIDTH), torch.float32, "cpu")
    *layers, mask = cache.engine.retrieve_layer(ids, TensorKV(BACKEND, room, stored))
    assert (layers, mask.sum()) == ([0, 1, 2], 32)
    for (keys, values), layer in zip(room, restored.layers, strict=True):
        assert torch.equal(keys[:, :, :32], layer.keys)
        assert torch.equal(values[:, :, :32], layer.values)


def test_engines_counters_are_at_hand(model, tiers):
    tokens, kv = computed(model)
    with opened(model, tiers) as cache:
        cache.save(tokens, kv)
        cache.restore(tokens)
        stats = cache.engine.stats()
        assert (stats.stored_tokens, stats.hit_tokens, stats.retrieved_tokens) == (48, 48, 48)
        assert cache.engine.clear(tokens=tokens[0].numpy()) == 3
        assert cache.lookup(tokens) == 0
