"""A small model shared out among two ranks: each stores its heads, and engines of other numbers of ranks read them."""

from __future__ import annotations

import pytest

from .reference import assert_same
from .serving import SMALL, made_up

pytestmark = pytest.mark.slow

NEW, CACHED = 8, 768
TWO_RANKS = {**SMALL, "in_process": False, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return made_up(4, 900, shared=300, seed=8)


@pytest.fixture(scope="module")
def expected(references, small, prompts):
    return references.of(small("gqa"), prompts, NEW, **SMALL)


@pytest.mark.parametrize("ranks_first", [2, 1])
def test_what_some_ranks_stored_others_read(start, small, prompts, expected, tmp_path, ranks_first):
    options = {1: SMALL, 2: TWO_RANKS}
    extra = {"tiers": [f"fs:{tmp_path}"]}
    with start(small("gqa"), extra, **options[ranks_first]) as engine:
        assert_same(engine.generate(prompts, tokens=NEW, together=False, pause=1.0), expected)
        engine.forget()
        got = engine.generate(prompts, tokens=NEW)
        assert_same(got, expected)
        assert [one.cached for one in got] == [CACHED] * 4
    for ranks in (3 - ranks_first, ranks_first):
        with start(small("gqa"), extra, **options[ranks]) as engine:
            got = engine.generate(prompts, tokens=NEW, together=False)
            assert_same(got, expected)
            assert [one.cached for one in got] == [CACHED] * 4
