"""The scheduler side in a model of vLLM: whatever happens, it loads and saves nothing that is not right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .requests_made import KINDS, Maker
from .scheduler_model import Model, Setup

SETUPS = st.one_of(
    st.builds(
        Setup,
        chunk=st.sampled_from([4, 6, 8]),
        budget=st.sampled_from([3, 10, 64]),
        num_blocks=st.sampled_from([12, 24]),
        asynchronous=st.booleans(),
        save_decode=st.booleans(),
        partial=st.booleans(),
        says_tables=st.booleans(),
        resumed_are_new=st.booleans(),
        loads=st.sampled_from([True, True, True, False]),
        saves=st.sampled_from([True, True, True, False]),
    ),
    st.builds(
        Setup,
        groups=st.just(2),
        num_blocks=st.sampled_from([24, 48]),
        window=st.sampled_from([None, 6, 12]),
        budget=st.sampled_from([3, 10, 64]),
        asynchronous=st.booleans(),
        partial=st.booleans(),
    ),
)
# Few prefixes, so that requests share and diverge.
PROMPTS = st.builds(
    lambda first, second, length: ([first] * 9 + [second] * 9 + list(range(20)))[:length],
    st.integers(0, 1),
    st.integers(2, 3),
    st.integers(1, 34),
)


class Machine(RuleBasedStateMachine):
    make: Maker

    @initialize(setup=SETUPS)
    def start(self, setup: Setup) -> None:
        self.model = Model(self.make, setup)

    @precondition(lambda self: len(self.model.live) < 6)
    @rule(tokens=PROMPTS, outputs=st.integers(1, 12))
    def add(self, tokens: list[int], outputs: int) -> None:
        self.model.add(tokens, outputs)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.model.step()

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.model.abort(data.draw(st.sampled_from(sorted(self.model.live))))

    @precondition(lambda self: self.model.inflight)
    @rule(data=st.data(), upto=st.sampled_from([0, 5, 9, 12, 1000, 1000, 1000]))
    def receive(self, data: st.DataObject, upto: int) -> None:
        self.model.receive(data.draw(st.sampled_from(sorted(self.model.inflight))), upto)

    @rule(upto=st.sampled_from([0, 5, 9, 12]))
    def fail_the_next_synchronous_load(self, upto: int) -> None:
        self.model.fail_sync = upto

    @precondition(lambda self: self.model.running)
    @rule()
    def preempt(self) -> None:  # from outside, as `reset_prefix_cache` does
        if not self.model.setup.says_tables:
            return
        name = self.model.running[-1]
        self.model.preempt(name)

    @rule(age=st.sampled_from([0.0, 10.0]), slow=st.integers(0, 3))
    def lookups(self, age: float, slow: int) -> None:
        self.model.lookups.age, self.model.lookups.slow = age, slow

    @rule()
    def evict(self) -> None:
        self.model.lookups.stored.clear()

    @invariant()
    def remembers_no_more_than_there_is(self) -> None:
        if hasattr(self, "model"):
            assert len(self.model.side) == len(self.model.live)
            assert self.model.lookups.questions.keys() <= self.model.live.keys()

    def teardown(self) -> None:
        """Whatever has happened: with stores that work, all requests come to an end."""
        if not hasattr(self, "model"):
            return
        model = self.model
        model.lookups.slow, model.fail_sync = 0, None
        for _ in range(600):
            for name in sorted(model.inflight):
                model.receive(name, 1000)
            if not model.live:
                break
            model.step()
        assert not model.live, "requests that never end"
        assert not any(model.refs.values()), "blocks that nobody gives back"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_vllms_scheduler(kind: str) -> None:
    maker = Maker(kind)

    class Of(Machine):
        make = maker

    run_state_machine_as_test(Of, settings=settings(max_examples=150, stateful_step_count=30))
