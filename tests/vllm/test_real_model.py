"""SmolLM2 in a vLLM as it is deployed, scheduler and worker each in a process: cold, warm, and from disk."""

from __future__ import annotations

import pytest

from kvcore.bench.engine import EngineProcess
from kvcore.bench.engine_prompts import shared_prompts

from .reference import assert_same
from .serving import kvcore_connector

SHARED, OWN, USERS, NEW = 600, 200, 8, 12
CHUNK = 256
# Steps of 256 tokens: each prompt is computed in several, among those of others.
OPTIONS = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}


class Serving:
    """An engine over a store, which can be started again."""

    def __init__(self, python: str, model: str, store: str) -> None:
        self._python, self._model = python, model
        self._connector = kvcore_connector({"tiers": [store]})
        self.engine = self._start()

    def _start(self) -> EngineProcess:
        return EngineProcess(self._python, self._model, connector=self._connector, timeout=600, **OPTIONS)

    def restart(self) -> None:
        self.engine.close()
        self.engine = self._start()

    def hits(self) -> float:
        return self.engine.counters().get("vllm:external_prefix_cache_hits", 0.0)


@pytest.fixture(scope="module")
def prompts(document) -> list[list[int]]:
    return shared_prompts(document, shared=SHARED, own=OWN, users=USERS)


@pytest.fixture(scope="module")
def expected(references, smollm, prompts):
    return references.of(smollm, prompts, NEW)


@pytest.fixture(scope="module")
def serving(engine_python, smollm, expected, tmp_path_factory):
    running = Serving(engine_python, smollm, f"fs:{tmp_path_factory.mktemp('store')}")
    yield running
    running.engine.close()


# The tests below follow one another: each begins where the one before has left the store.


def test_an_empty_cache_changes_nothing(serving, prompts, expected):
    assert serving.engine.about["chunked_prefill"]
    got = serving.engine.generate(prompts[:2], tokens=NEW, together=False, pause=1.0)
    assert_same(got, expected[:2])
    assert got[0].cached == 0
    assert serving.hits() == 0


def test_what_was_stored_is_found_when_vllm_has_forgotten_it(serving, prompts, expected):
    assert serving.engine.forget()
    got = serving.engine.generate(prompts[:2], tokens=NEW, together=False)
    assert_same(got, expected[:2])
    assert [one.cached for one in got] == [(SHARED + OWN) // CHUNK * CHUNK] * 2
    assert serving.hits() > 0


def test_eight_requests_at_once_share_what_they_have_in_common(serving, prompts, expected):
    assert serving.engine.forget()
    before = serving.hits()
    got = serving.engine.generate(prompts, tokens=NEW)
    assert_same(got, expected)
    assert all(one.cached >= SHARED // CHUNK * CHUNK for one in got)
    assert serving.hits() > before


def test_a_new_engine_is_warm_from_disk(serving, prompts, expected):
    serving.restart()
    got = serving.engine.generate(prompts, tokens=NEW, together=False)
    assert_same(got, expected)
    assert got[0].cached == (SHARED + OWN) // CHUNK * CHUNK
    assert serving.hits() > 0


def test_its_metrics_say_so(serving):
    counters = serving.engine.counters()
    assert counters["kvcore_hit_tokens"] > 0
    assert counters["kvcore_retrieved_tokens"] >= (SHARED + OWN) // CHUNK * CHUNK
    page = serving.engine.metrics_text()
    assert "kvcore_hit_tokens_total" in page
    log = serving.engine.log()
    assert "hit tokens: " in log
    assert "need to load: " in log
