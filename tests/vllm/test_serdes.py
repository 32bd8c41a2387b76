"""The real model with KV that was coded on the way: exact where the serde is, else sane, and how far it agrees."""

from __future__ import annotations

import json

import pytest

from kvcore.bench.engine_prompts import shared_prompts

from .reference import agreement, assert_same

pytestmark = pytest.mark.slow

NEW = 24
CACHED = 768

SERDES = {
    "raw": ("raw", 1.0),
    "lossless": ("lossless", 1.0),
    "fp8": ({"type": "fp8"}, 0.2),
    "kvs1 high": ({"type": "kvs1", "preset": "high"}, 0.2),
    "kvs1 balanced": ({"type": "kvs1", "preset": "balanced"}, 0.2),
    "encrypted": ({"type": "chain", "steps": ["lossless", {"type": "aesgcm"}]}, 1.0),
}
"""The serde, and the share of new tokens up to the first that differs, which is asked for."""


@pytest.fixture(scope="module")
def prompts(document) -> list[list[int]]:
    return shared_prompts(document[2000:], shared=600, own=200, users=4, seed=3)


@pytest.fixture(scope="module")
def expected(references, smollm, prompts):
    return references.of(smollm, prompts, NEW)


@pytest.fixture(scope="module")
def decode(smollm):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{smollm}/tokenizer.json").decode


@pytest.mark.parametrize("name", SERDES)
def test_a_serde(start, smollm, prompts, expected, decode, tmp_path, name):
    serde, least = SERDES[name]
    if name == "encrypted":
        key = tmp_path / "key"
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
        serde["steps"][1]["key_file"] = str(key)
    # Host memory is only a buffer, so that what comes back was coded.
    extra = {"tiers": [{"store": f"fs:{tmp_path}/store", "serde": serde}], "local_cpu": False}
    engine = start(smollm, extra, in_process=True, timeout=900)
    assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
    engine.forget()
    got = engine.generate(prompts, tokens=NEW, together=False)
    assert got[0].cached == CACHED
    if least == 1.0:
        assert_same(got, expected)
    agreed = agreement(got, expected)
    stored = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*.kvf"))
    text = decode(got[0].tokens)
    print(json.dumps({"serde": name, "agreement": round(agreed, 3), "stored": stored, "text": text}))
    assert agreed >= least
    for one, other in zip(got, expected, strict=True):
        parting = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)]
        if False in parting:  # at two tokens that were as likely before
            at = parting.index(False)
            assert abs(one.logprobs[at] - other.logprobs[at]) < 0.5, (at, one, other)
    words = text.split()
    assert len(words) >= NEW // 4
    assert len(set(words)) > len(words) // 3, "it repeats itself"


def test_a_store_of_a_coarser_serde_is_read_as_it_says(start, smollm, prompts, expected, tmp_path):
    """An engine that wants every bit takes nothing that lost some: a miss, not a guess."""
    store = f"fs:{tmp_path}"
    with start(smollm, {"tiers": [{"store": store, "serde": {"type": "fp8"}}]}, in_process=True) as engine:
        assert_same(engine.generate(prompts[:1], tokens=NEW, pause=1.0), expected[:1])
    engine = start(smollm, {"tiers": [{"store": store, "serde": "raw"}]}, in_process=True)
    got = engine.generate(prompts[:2], tokens=NEW, together=False)
    assert_same(got, expected[:2])
    assert got[0].cached == 0
