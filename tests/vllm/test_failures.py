"""What goes wrong around the connector: the engine goes on, right, without a cache, and with one again when it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.errors import KVCoreError
from kvcore_conformance.stores.servers import RedisServer

from .reference import assert_same
from .serving import SMALL, loading, made_up

LENGTH, NEW = 900, 8
CACHED = 768
# No KV in host memory but on its way: every hit is a load from the store.
NO_HOST = {"local_cpu": False, "max_local_cpu_size": "64MiB"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return made_up(4, LENGTH, shared=300, seed=1)


@pytest.fixture(scope="module")
def expected(references, small, prompts):
    return references.of(small("gqa"), prompts, NEW, **SMALL)


def frames(folder: Path) -> list[Path]:
    """The frames of a store fs:, the largest files."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_frames_that_are_damaged_are_misses_and_are_stored_again(start, small, prompts, expected, tmp_path):
    engine = start(small("gqa"), {**NO_HOST, "tiers": [f"fs:{tmp_path}"]}, **SMALL)
    assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    stored = frames(tmp_path)
    assert len(stored) > 4
    for number, path in enumerate(stored):
        data = bytearray(path.read_bytes())
        if number % 2:
            del data[len(data) // 2 :]
        else:
            data[len(data) // 2] ^= 4
        path.write_bytes(data)
    engine.forget()
    got = engine.generate(prompts, tokens=NEW, together=False, pause=1.0)
    assert_same(got, expected)
    assert got[0].cached == 0
    engine.forget()
    got = engine.generate(prompts, tokens=NEW, together=False)
    assert_same(got, expected)
    assert [one.cached for one in got] == [CACHED] * 4


@pytest.mark.slow
@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
def test_reads_that_fail_now_and_then(start, small, prompts, expected, tmp_path, load):
    store = f"fault:get.flip=0.3,get.short=0.2,get.eio=0.1,get.lost=0.1,seed=3:fs:{tmp_path}"
    engine = start(small("gqa"), {**NO_HOST, "load": load, "tiers": [store]}, **SMALL, **loading(load))
    for round_ in range(5):
        got = engine.generate(prompts, tokens=NEW, together=round_ % 2 == 1, pause=0.5)
        assert_same(got, expected)
        engine.forget()
    counters = engine.counters()
    assert counters["kvcore_retrieved_tokens"] > 0
    assert counters["vllm:external_prefix_cache_hits"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["put.eio=1", "put.enospc=1", "put.half=1", "put.short=1", "put.flip=1"])
def test_nothing_can_be_stored(start, small, prompts, expected, tmp_path, fault):
    engine = start(small("gqa"), {**NO_HOST, "tiers": [f"fault:{fault}:fs:{tmp_path}"]}, **SMALL)
    for _ in range(2):
        got = engine.generate(prompts, tokens=NEW, together=False, pause=0.5)
        assert_same(got, expected)
        engine.forget()
    assert got[0].cached == 0


@pytest.mark.slow
@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
def test_a_request_is_aborted_while_its_load_fails(start, small, prompts, expected, tmp_path, load):
    """vLLM forgets the request before it learns that its blocks hold nothing: nobody may find them in its own cache."""
    with start(small("gqa"), {"tiers": [f"fs:{tmp_path}"]}, **SMALL) as engine:
        assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    store = f"fault:get.latency=500ms,get.eio=@1:fs:{tmp_path}"
    options = {**SMALL, "in_process": False, **loading(load)}
    engine = start(small("gqa"), {**NO_HOST, "load": load, "tiers": [store]}, **options)
    (aborted,) = engine.generate(prompts[:1], tokens=NEW, abort=[0], abort_after=0.2)
    assert aborted.aborted
    engine.idle(2.0)
    for _ in range(2):
        assert_same(engine.generate(prompts, tokens=NEW, together=False), expected)


@pytest.mark.slow
@pytest.mark.skipif(RedisServer.missing() != "", reason=RedisServer.missing())
def test_a_server_that_comes_late_goes_and_comes_back(start, small, prompts, expected, tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    uri = server.uri
    server.kill()
    extra = {**NO_HOST, "tiers": [{"store": uri, "retry_seconds": [0.2, 0.5]}]}
    engine = start(small("gqa"), extra, **SMALL)

    def run() -> int:
        got = engine.generate(prompts, tokens=NEW, together=False, pause=1.0)
        assert_same(got, expected)
        engine.forget()
        return got[0].cached

    try:
        assert run() == 0  # nobody there
        assert run() == 0
        server.start()
        engine.idle(1.0)
        run()
        run()
        assert run() == CACHED
        server.kill()
        assert run() == 0
        assert run() == 0
        server.start()
        engine.idle(1.0)
        run()
        assert run() == CACHED
    finally:
        server.kill()
    log = engine.log()
    assert "is down" in log or "unavailable" in log


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_setting_that_means_nothing_stops_the_start(start, small, in_process):
    with pytest.raises(KVCoreError, match="did you mean 'chunk_tokens'"):
        start(small("gqa"), {"chunk_tokenz": 256}, **{**SMALL, "in_process": in_process})
