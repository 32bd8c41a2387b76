"""Long runs of the scheduler side in the model of vLLM: many requests that share prefixes, and all that goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from .requests_made import KINDS, Maker
from .scheduler_model import Model, Setup

SETUPS = {
    "async": Setup(),
    "sync": Setup(asynchronous=False),
    "chunks that no block divides": Setup(chunk=6, budget=7, partial=True),
    "sync, partial chunks": Setup(chunk=6, partial=True, asynchronous=False),
    "prompts only": Setup(save_decode=False),
    "little memory": Setup(num_blocks=13, budget=64),
    "little memory, sync": Setup(num_blocks=13, asynchronous=False),
    "old engine": Setup(says_tables=False),
    "old engine, sync, v2": Setup(says_tables=False, asynchronous=False, resumed_are_new=True),
    "two groups": Setup(groups=2, num_blocks=36),
    "a window": Setup(groups=2, num_blocks=36, window=12, partial=True),
    "small steps": Setup(budget=3, chunk=4, asynchronous=False),
}


def run(model: Model, seed: int, requests: int) -> dict[str, int]:
    """Random events until so many requests have come, then to the end; return how often what happened."""
    rng = random.Random(seed)
    seen: dict[str, int] = dict.fromkeys(("loads", "failures", "saves", "aborts", "preemptions"), 0)
    watch(model, seen)
    while model.count < requests or model.live:
        event = rng.random()
        if event < 0.3 and len(model.live) < 6 and model.count < requests:
            shared = [rng.randrange(2)] * 9 + [rng.randrange(2, 4)] * 9
            model.add((shared + [rng.randrange(9) for _ in range(16)])[: rng.randint(1, 34)], rng.randint(1, 12))
        elif event < 0.33 and model.live:
            model.abort(rng.choice(sorted(model.live)))
            seen["aborts"] += 1
        elif event < 0.5 and model.inflight:
            model.receive(rng.choice(sorted(model.inflight)), rng.choice([0, 5, 9, 12, 1000, 1000, 1000]))
        elif event < 0.52:
            model.fail_sync = rng.choice([0, 5, 9, 12])
        elif event < 0.55 and model.running:
            model.preempt(model.running[-1])
        elif event < 0.56:
            model.lookups.stored.clear()
        elif event < 0.6:
            model.lookups.age, model.lookups.slow = rng.choice([0.0, 10.0]), rng.randrange(3)
        else:
            model.step()
    model.step()
    for name in sorted(model.inflight):
        model.receive(name, 1000)
    left = {name: len(value) for name, value in vars(model.side).items() if isinstance(value, (dict, list, set))}
    assert not any(left.values()), f"remembered though all requests are finished: {left}"
    assert not model.lookups.questions
    assert not any(model.refs.values()), "blocks that nobody gives back"
    return seen


def watch(model: Model, seen: dict[str, int]) -> None:
    for method, what in (("begin", "loads"), ("quarantine", "failures"), ("save", "saves"), ("preempt", "preemptions")):
        setattr(model, method, partial(_counted, seen, what, getattr(model, method)))


def _counted(seen: dict[str, int], what: str, call: Callable[..., Any], *args: Any) -> Any:
    seen[what] += 1
    return call(*args)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=list(SETUPS))
def test_nothing_wrong_is_loaded_or_saved_and_nothing_is_left(setup: Setup, kind: str, seed: int) -> None:
    seen = run(Model(Maker(kind), setup), seed, 200)
    assert all(count > 5 for count in seen.values()), f"a run in which too little happened: {seen}"
