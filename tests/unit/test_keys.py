"""Namespaces and chunk keys: who may share, who must not, and golden vectors."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine import ChunkKey, ExtraKey, Namespace, chunk_keys
from kvcore.errors import ConfigError
from kvcore.rope import RopeParams

GOLDEN = Path(__file__).parent.parent / "golden"
ROOT = GOLDEN.parent.parent
NS = Namespace("tiny", "r1", chunk_tokens=4)
CONTENT = bytes(range(32))
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_tokens": 8192}


def regenerate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_regenerate", GOLDEN / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digests(keys: list[ChunkKey]) -> list[bytes]:
    return [key.digest for key in keys]


def test_golden_vectors() -> None:
    assert regenerate().keys() == json.loads((GOLDEN / "keys.json").read_text())


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_golden_files_do_not_depend_on_the_hash_seed(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, str(GOLDEN / "regenerate.py")],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


DISTINCT = [
    Namespace("tiny", "r1"),
    Namespace("tinyr", "1"),
    Namespace("tiny", "r1", adapter="a"),
    Namespace("tiny", "r1", salt="a"),
    Namespace("tiny", "r1", cache_class="a"),
    Namespace("tiny", "r1", scales=b"a"),
    Namespace("tiny", "r1", kv_dtype="float16"),
    Namespace("tiny", "r1", kv_dtype=("bfloat16", "float16")),
    Namespace("tiny", "r1", kv_dtype=("float16", "bfloat16")),
    Namespace("tiny", "r1", rope=RopeParams(64)),
    Namespace("tiny", "r1", rope=RopeParams(64, theta=20000.0)),
    Namespace("tiny", "r1", rope=RopeParams(64, interleaved=True)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="linear")),
    Namespace("tiny", "r1", rope=RopeParams(64, factor=2.0)),
    Namespace("tiny", "r1", rope=RopeParams(2, inv_freq=(1.0,))),
    Namespace("tiny", "r1", rope=RopeParams(2)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn")),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn", original_tokens=4096)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn", original_tokens=8192)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn", original_tokens=8192, beta_fast=16.0)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn", original_tokens=8192, beta_slow=16.0)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="yarn", original_tokens=8192, truncate=False)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="ntk")),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="llama3")),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="llama3", **LLAMA3)),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="llama3", **{**LLAMA3, "original_tokens": 4096})),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="llama3", **{**LLAMA3, "low_freq_factor": 2.0})),
    Namespace("tiny", "r1", rope=RopeParams(64, scaling="llama3", **{**LLAMA3, "high_freq_factor": 2.0})),
    Namespace("tiny", "r1", chunk_tokens=128),
    Namespace("tiny", "r1", hash="sha256"),
]


def test_every_field_separates_namespaces() -> None:
    for a, b in itertools.combinations(DISTINCT, 2):
        assert a.digest != b.digest, (a, b)


@given(st.text(min_size=1), st.text(), st.text(), st.text())
def test_text_fields_cannot_run_into_each_other(model: str, revision: str, adapter: str, salt: str) -> None:
    namespace = Namespace(model, revision, adapter, salt=salt)
    shifted = Namespace(model + revision[:1], revision[1:], adapter, salt=salt)
    assert (namespace.digest == shifted.digest) == (namespace == shifted)


def test_aliases_of_one_dtype_share() -> None:
    assert Namespace("tiny", "r1", kv_dtype="bf16") == Namespace("tiny", "r1", kv_dtype=("bfloat16", "bf16"))


@pytest.mark.parametrize(
    "fields",
    [{"model": ""}, {"hash": "md5"}, {"chunk_tokens": 0}, {"kv_dtype": "int3"}, {"kv_dtype": ("fp8",) * 3}],
)
def test_a_meaningless_namespace_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Namespace(**{"model": "tiny", "revision": "r1", **fields})  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_chunks_tile_the_tokens_and_are_prefix_chained(tokens: list[int]) -> None:
    full = chunk_keys(NS, tokens)
    every = chunk_keys(NS, tokens, partial=True)
    assert [(key.start, key.stop) for key in full] == [(i, i + 4) for i in range(0, len(tokens) // 4 * 4, 4)]
    assert every[: len(full)] == full
    assert [key.stop for key in every][len(full) :] == ([len(tokens)] if len(tokens) % 4 else [])
    assert all(key.namespace == NS.digest and len(key.digest) == 32 for key in every)
    for stop in range(len(tokens) + 1):
        assert chunk_keys(NS, tokens[:stop]) == full[: stop // 4]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16), st.data())
def test_a_changed_token_changes_its_chunk_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] ^= data.draw(st.integers(1, 2**32 - 1))
    before, after = (digests(chunk_keys(NS, t, partial=True)) for t in (tokens, other))
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < at // 4 for i in range(len(before))]


def test_a_partial_chunk_is_not_the_full_one_with_zeros() -> None:
    assert digests(chunk_keys(NS, [1, 2, 3], partial=True)) != digests(chunk_keys(NS, [1, 2, 3, 0]))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64", "uint64", ">i4"])
def test_arrays_of_any_integer_type_are_the_same_tokens(dtype: str) -> None:
    tokens = list(range(9))
    assert chunk_keys(NS, np.array(tokens, dtype)) == chunk_keys(NS, tokens)
    assert chunk_keys(NS, np.array(tokens, dtype)[::-1]) == chunk_keys(NS, tokens[::-1])


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], [2**64], [2**80], [1.0], ["1"], [True], [[1, 2], [3, 4]], [[1], [2, 3]], 7, [None]],
)
def test_tokens_that_are_none_are_refused(tokens: object) -> None:
    with pytest.raises(ConfigError, match="token"):
        chunk_keys(NS, tokens, partial=True)  # type: ignore[arg-type]


def test_the_largest_token_id_is_accepted() -> None:
    assert len(chunk_keys(NS, [2**32 - 1] * 4)) == 1
    assert chunk_keys(NS, []) == chunk_keys(NS, [], partial=True) == []


def test_an_extra_key_enters_exactly_the_chunks_it_touches_and_those_after() -> None:
    tokens = list(range(20))
    plain = digests(chunk_keys(NS, tokens))
    keyed = digests(chunk_keys(NS, tokens, extra_keys=[ExtraKey(5, 9, CONTENT)]))
    assert [a == b for a, b in zip(plain, keyed, strict=True)] == [True, False, False, False, False]
    # In chunk 2 itself too, not only through the chain.
    longer = digests(chunk_keys(NS, tokens, extra_keys=[ExtraKey(5, 8, CONTENT)]))
    assert longer[0] == keyed[0]
    assert longer[2] != keyed[2]


def test_extra_keys_differ_by_content_and_place_and_not_by_order() -> None:
    tokens, a, b = list(range(12)), ExtraKey(0, 2, b"a"), ExtraKey(1, 3, b"b")
    seen = [
        tuple(digests(chunk_keys(NS, tokens, extra_keys=extras)))
        for extras in (
            None,
            [a],
            [b],
            [a, b],
            [ExtraKey(1, 3, b"a")],
            [ExtraKey(0, 2, b"ab")],
            [ExtraKey(4, 6, b"a")],
        )
    ]
    assert len(set(seen)) == len(seen)
    assert chunk_keys(NS, tokens, extra_keys=[b, a]) == chunk_keys(NS, tokens, extra_keys=[a, b])


def test_an_item_past_the_tokens_at_hand_changes_nothing_yet() -> None:
    extras = [ExtraKey(8, 12, CONTENT)]
    assert chunk_keys(NS, range(8), extra_keys=extras) == chunk_keys(NS, range(8))
    assert chunk_keys(NS, range(12), extra_keys=extras)[:2] == chunk_keys(NS, range(8))


@pytest.mark.parametrize(("start", "stop", "content"), [(0, 1, b""), (1, 1, b"x"), (-1, 1, b"x"), (3, 2, b"x")])
def test_an_item_that_cannot_be_identified_is_refused(start: int, stop: int, content: bytes) -> None:
    with pytest.raises(ConfigError, match="extra key"):
        ExtraKey(start, stop, content)
