"""`FailedBlocks` against a model that keeps every slot by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore.connectors.vllm.failures import FailedBlocks

SIZE, BLOCKS = 4, 6
TABLES = st.lists(st.integers(1, BLOCKS), min_size=1, max_size=4, unique=True)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.failed = FailedBlocks(SIZE)
        self.empty: set[int] = set()  # slots
        self.told: set[int] = set()

    @rule(blocks=st.sets(st.integers(1, BLOCKS)))
    def add(self, blocks):
        self.failed.add(blocks)
        self.empty |= {block * SIZE + i for block in blocks for i in range(SIZE)}
        self.told |= blocks

    @rule()
    def take(self):
        assert self.failed.take() == self.told
        self.told = set()

    @rule(slots=st.lists(st.integers(-1, (BLOCKS + 1) * SIZE - 1)))
    def written(self, slots):
        self.failed.written(np.array(slots, np.int64))
        self.empty -= set(slots)

    @rule(table=TABLES, data=st.data())
    def computed(self, table, data):
        stop = data.draw(st.integers(0, len(table) * SIZE))
        start = data.draw(st.integers(0, stop))
        self.failed.computed(table, start, stop)
        self.empty -= {table[t // SIZE] * SIZE + t % SIZE for t in range(start, stop)}

    @rule(table=TABLES, data=st.data())
    def touch(self, table, data):
        tokens = data.draw(st.integers(0, len(table) * SIZE))
        slots = {table[t // SIZE] * SIZE + t % SIZE for t in range(tokens)}
        assert self.failed.touch(table, tokens) == bool(slots & self.empty)

    @invariant()
    def says_whether_there_are_any(self):
        assert bool(self.failed) == bool(self.empty)


TestFailedBlocks = Machine.TestCase
