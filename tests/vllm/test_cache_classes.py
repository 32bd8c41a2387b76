"""Small models of other classes of cache: the plain engine's tokens, cold, from the cache, and in a new engine."""

from __future__ import annotations

import pytest

from kvcore.bench.engine import EngineProcess
from kvcore.errors import KVCoreError

from .reference import assert_same
from .serving import SMALL, made_up

pytestmark = pytest.mark.slow

LENGTH, SHARED, NEW = 900, 600, 12
CACHED = 768
ALIGNED = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return made_up(4, LENGTH, shared=SHARED, seed=6)


def run(start, model, prompts, expected, extra, options, near=2e-3) -> None:
    """Cold, with what the same engine has stored, and with what another one has."""
    with start(model, extra, **options) as engine:
        got = engine.generate(prompts[:2], tokens=NEW, together=False, pause=1.0)
        assert_same(got, expected[:2], near=near)
        engine.forget()
        got = engine.generate(prompts, tokens=NEW, together=False, pause=1.0)
        assert_same(got, expected, near=near)
        assert all(one.cached for one in got), [one.cached for one in got]
    with start(model, extra, **options) as engine:
        got = engine.generate(prompts, tokens=NEW)
        assert_same(got, expected, near=near)
        assert [one.cached for one in got] == [CACHED] * 4
        assert engine.counters()["vllm:external_prefix_cache_hits"] >= CACHED


# window: attention looks back 256 tokens; what slid out of vLLM's window is nowhere, and is not needed.
@pytest.mark.parametrize("name", ["gqa", "window", "mixed_window"])
def test_attention(start, references, small, prompts, tmp_path, name):
    expected = references.of(small(name), prompts, NEW, **SMALL)
    run(start, small(name), prompts, expected, {"tiers": [f"fs:{tmp_path}"]}, SMALL)


@pytest.mark.parametrize(
    ("name", "chunk", "dtype"),
    [
        ("gdn", 384, "bfloat16"),  # its kernel for the processor takes no other type; vLLM's block is 384 tokens then
        ("short_conv", 256, "float32"),
        ("mamba2", 256, "float32"),
        ("hybrid", 256, "float32"),
    ],
)
def test_recurrent_states(start, references, small, engine_python, prompts, tmp_path, name, chunk, dtype):
    """vLLM 0.32 has wrong or missing kernels for some on a processor: a test begins where its own cache is right."""
    options = {**SMALL, "dtype": dtype}
    near = 2e-3 if dtype == "float32" else 0.2
    try:
        expected = references.of(small(name), prompts, NEW, **options, enable_prefix_caching=False)
        with EngineProcess(engine_python, small(name), **options, **ALIGNED) as plain:
            own = [plain.generate(prompts, tokens=NEW, together=False) for _ in range(2)]
    except KVCoreError as error:
        pytest.skip(f"vLLM itself does not run it with a prefix cache here: {str(error).partition(chr(10))[0]}")
    if any([one.tokens for one in answers] != [one.tokens for one in expected] for answers in own):
        pytest.skip("vLLM's own prefix cache changes what this model generates here")
    extra = {"tiers": [f"fs:{tmp_path}"], "chunk_tokens": chunk}
    run(start, small(name), prompts, expected, extra, {**options, **ALIGNED}, near)


def test_latent_attention(start, references, small, prompts, tmp_path):
    """vLLM's MLA for the processor takes whole prompts only: whatever is stored, nothing may be loaded for it."""
    options = {**SMALL, "max_model_len": 2048}
    expected = references.of(small("mla"), prompts, NEW, **options)
    engine = start(small("mla"), {"tiers": [f"fs:{tmp_path}"]}, **options)
    assert not engine.about["prefix_caching"]
    for _ in range(2):
        assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    assert list(tmp_path.rglob("*.kvf"))
