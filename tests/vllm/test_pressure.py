"""A small model in a vLLM with little room: chunked prefill on and off, preemption, caches that are too small."""

from __future__ import annotations

import pytest

from .reference import assert_same
from .serving import SMALL, loading, made_up

CHUNK = 256
LONG, SHARED, USERS, NEW = 700, 300, 8, 200
# 2,560 tokens of KV for eight requests of 900: most of them are preempted.
BLOCKS = 20


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return made_up(USERS, LONG, shared=SHARED)


@pytest.fixture(scope="module")
def expected(references, small, prompts):
    return references.of(small("gqa"), prompts, NEW, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "options"),
    [
        ("async", {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}),
        ("sync", {"enable_chunked_prefill": False, "enable_prefix_caching": False}),
        ("layerwise", {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}),
    ],
)
def test_requests_are_preempted_and_come_back(start, small, prompts, expected, tmp_path, load, options):
    extra = {"load": load, "tiers": [f"fs:{tmp_path}"]}
    options = {**SMALL, "max_model_len": 1024, **options, **loading(load)}
    engine = start(small("gqa"), extra, num_gpu_blocks_override=BLOCKS, **options)
    assert engine.about["blocks"] == BLOCKS
    for _ in range(2):
        assert_same(engine.generate(prompts, tokens=NEW, pause=1.0), expected)
        engine.forget()
    counters = engine.counters()
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:external_prefix_cache_hits"] > 0


@pytest.mark.slow
def test_a_prefix_is_longer_than_any_memory_but_the_store(start, references, small, tmp_path):
    """3,800 tokens, of which host memory takes 1,024, and vLLM's own cache, 30 blocks, nothing beside the request's."""
    prompts = made_up(3, 3800, shared=3500, seed=4)
    expected = references.of(small("gqa"), prompts, 8, **SMALL)
    # 4 layers of K and V of 2 heads of 32 in float32: 2 KiB a token.
    extra = {"tiers": [f"fs:{tmp_path}"], "max_local_cpu_size": "2MiB", "pinned": False}
    engine = start(small("gqa"), extra, num_gpu_blocks_override=31, **{**SMALL, "max_model_len": 3840})
    cold = engine.generate(prompts, tokens=8, together=False, pause=1.0)
    assert_same(cold, expected)
    assert engine.forget()
    warm = engine.generate(prompts, tokens=8, together=False)
    assert_same(warm, expected)
    # What a step completes has to fit into host memory until it is written, or it is left out: here not all did.
    assert warm[0].cached > 8 * CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("block", [64, 192])
def test_blocks_and_chunks_of_other_sizes(start, references, small, tmp_path, block):
    prompts = made_up(4, 900, shared=500, seed=5)
    expected = references.of(small("gqa"), prompts, 8, **SMALL)
    engine = start(small("gqa"), {"tiers": [f"fs:{tmp_path}"], "chunk_tokens": 160}, block_size=block, **SMALL)
    assert engine.about["block_tokens"] == block
    for _ in range(2):
        got = engine.generate(prompts, tokens=8, pause=1.0)
        assert_same(got, expected)
        engine.forget()
    assert [one.cached for one in got] == [900 // 160 * 160 // block * block] * 4
