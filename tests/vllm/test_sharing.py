"""One store and several engines: at once, one after the other, killed, and of other models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvcore_conformance.stores.servers import RedisServer

from .reference import assert_same
from .serving import SMALL, made_up

LENGTH, NEW = 900, 8
CACHED = 768


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return made_up(4, LENGTH, shared=300, seed=2)


@pytest.fixture(scope="module")
def expected(references, small, prompts):
    return references.of(small("gqa"), prompts, NEW, **SMALL)


@pytest.fixture(params=["fs", pytest.param("resp", marks=pytest.mark.slow)])
def store(request, tmp_path):
    """A store that two engines can reach."""
    if request.param == "fs":
        yield f"fs:{tmp_path}"
        return
    if missing := RedisServer.missing():
        pytest.skip(missing)
    server = RedisServer(tmp_path)
    server.start()
    yield server.uri
    server.kill()


def test_what_one_engine_stores_another_finds(start, small, prompts, expected, store):
    model = small("gqa")
    one, other = (start(model, {"tiers": [store]}, **SMALL) for _ in range(2))
    assert_same(one.generate(prompts[:2], tokens=NEW, together=False, pause=1.0), expected[:2])
    got = other.generate(prompts, tokens=NEW, together=False, pause=1.0)
    assert_same(got, expected)
    assert [answer.cached for answer in got[:2]] == [CACHED] * 2
    got = one.generate(prompts[2:], tokens=NEW, together=False)
    assert_same(got, expected[2:])
    assert [answer.cached for answer in got] == [CACHED] * 2


@pytest.mark.slow
def test_an_engine_is_killed_while_it_saves(start, small, prompts, expected, tmp_path):
    slow = f"fault:put.latency=300ms:fs:{tmp_path}"
    engine = start(small("gqa"), {"tiers": [slow]}, **{**SMALL, "in_process": False})
    assert_same(engine.generate(prompts, tokens=NEW), expected)
    engine.kill()  # with writes under way: there are twelve chunks, and half a second has passed
    engine = start(small("gqa"), {"tiers": [f"fs:{tmp_path}"]}, **SMALL)
    for _ in range(2):
        got = engine.generate(prompts, tokens=NEW, together=False, pause=1.0)
        assert_same(got, expected)
        engine.forget()
    assert [answer.cached for answer in got] == [CACHED] * 4


@pytest.mark.slow
def test_weights_that_were_updated_in_place_find_nothing_of_the_old_ones(start, references, small, prompts, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(small("gqa"), model)
    extra = {"tiers": [f"fs:{tmp_path}/store"]}
    with start(str(model), extra, **SMALL) as engine:
        old = engine.generate(prompts, tokens=NEW, together=False, pause=1.0)
    file = model / "model.safetensors"
    weights = load_file(file)
    changed = {name: tensor.flip(0) if "k_proj" in name else tensor for name, tensor in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
    assert not all(torch.equal(changed[name], weights[name]) for name in weights)
    expected = references.of(str(model), prompts, NEW, **SMALL)
    with start(str(model), extra, **SMALL) as engine:
        got = engine.generate(prompts, tokens=NEW, together=False)
    assert_same(got, expected)
    assert got[0].cached == 0
    assert [one.tokens for one in got] != [one.tokens for one in old]


@pytest.mark.slow
def test_another_element_type_finds_nothing_and_another_block_size_all(start, small, prompts, expected, tmp_path):
    """Keys name what changes the KV: its type does; how vLLM cuts its memory into blocks does not."""
    model, extra = small("gqa"), {"tiers": [f"fs:{tmp_path}"]}
    with start(model, extra, **SMALL) as engine:
        assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    with start(model, extra, dtype="bfloat16", **SMALL) as engine:
        first = engine.generate(prompts[:1], tokens=NEW, pause=1.0)
    assert first[0].cached == 0
    with start(model, extra, block_size=32, **SMALL) as engine:
        got = engine.generate(prompts, tokens=NEW, together=False)
    assert_same(got, expected)
    assert [answer.cached for answer in got] == [CACHED] * 4


@pytest.mark.slow
def test_a_request_is_aborted_while_its_kv_comes(start, small, prompts, expected, tmp_path):
    with start(small("gqa"), {"tiers": [f"fs:{tmp_path}"]}, **SMALL) as engine:
        assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    extra = {"tiers": [f"fault:get.latency=400ms:fs:{tmp_path}"], "local_cpu": False}
    engine = start(small("gqa"), extra, **{**SMALL, "in_process": False})
    got = engine.generate(prompts, tokens=NEW, abort=[0, 2], abort_after=0.3)
    assert [answer.aborted for answer in got] == [True, False, True, False]
    assert_same([got[1], got[3]], [expected[1], expected[3]])
    # Its blocks are free again, and what is in them is nobody else's: all that fit are asked for at once.
    for _ in range(2):
        engine.forget()
        assert_same(engine.generate(prompts, tokens=NEW), expected)
    assert engine.counters()["vllm:external_prefix_cache_hits"] >= 4 * CACHED


@pytest.mark.slow
def test_a_producer_only_saves_and_a_consumer_only_loads(start, small, prompts, expected, tmp_path):
    extra = {"tiers": [f"fs:{tmp_path}"], "local_cpu": False}
    with start(small("gqa"), extra, role="kv_consumer", **SMALL) as engine:
        got = engine.generate(prompts[:1], tokens=NEW, pause=1.0)
    assert_same(got, expected[:1])
    assert not stored(tmp_path)
    with start(small("gqa"), extra, role="kv_producer", **SMALL) as engine:
        for _ in range(2):
            got = engine.generate(prompts, tokens=NEW, together=False, pause=0.5)
            assert_same(got, expected)
            engine.forget()
    assert got[0].cached == 0
    assert stored(tmp_path)
    with start(small("gqa"), extra, role="kv_consumer", **SMALL) as engine:
        got = engine.generate(prompts, tokens=NEW, together=False)
    assert_same(got, expected)
    assert [answer.cached for answer in got] == [CACHED] * 4


def stored(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".kvf")]
