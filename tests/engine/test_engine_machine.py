"""Any sequence of stores, retrieves, evictions, damage and loss: KV that comes back is right, or it does not come."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.engine.kv import PagedKV

from .world import BLOCK, CHUNK, HEADS, Pages, backend, blocks_for, engine, tiers

WINDOW = 6
FIRST = 32
"""Block where requests are restored to; they are computed in those from 0 on."""


def models() -> dict[str, list[list[Pages]]]:
    """By name: for each rank the caches of its parts."""
    half = HEADS // 2
    return {
        "whole": [[Pages((0, 1), (0, HEADS))]],
        "window": [[Pages((0,), (0, HEADS)), Pages((1,), (0, HEADS))]],
        "two ranks": [[Pages((0, 1), (0, half))], [Pages((0, 1), (half, HEADS))]],
    }


class EngineMachine(RuleBasedStateMachine):
    """Some engines over one set of tiers, and the model: what each token's KV must be."""

    @initialize(name=st.sampled_from(sorted(models())), partial=st.booleans(), small=st.booleans())
    def open(self, name: str, partial: bool, small: bool) -> None:
        self.pages = models()[name]
        self.windows = [None, WINDOW] if name == "window" else [None] * len(self.pages[0])
        self.over = tiers("memory:", host_bytes=(24 if small else 4000) * 256)
        self.store = self.over.tiers[0].store.store
        self.engines = [
            engine(
                [one.part(window=w) for one, w in zip(rank, self.windows, strict=True)],
                self.over,
                save_partial_chunk=partial,
                reshard=False,
            )
            for rank in self.pages
        ]
        self.stored: set[tuple[int, ...]] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4 * CHUNK), wait=st.booleans())
    def put(self, tokens: list[int], wait: bool) -> None:
        blocks = blocks_for(len(tokens))
        for rank, cache in zip(self.pages, self.engines, strict=True):
            for one in rank:
                one.compute(tokens, blocks)
            cache.store_keys(cache.keys(tokens), self._kv(rank, blocks), total=len(tokens))
            if wait:
                cache.flush()
        self.stored.update(tuple(tokens[:n]) for n in range(1, len(tokens) + 1))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5 * CHUNK),
        skip=st.integers(0, 4),
        layerwise=st.booleans(),
    )
    def get(self, tokens: list[int], skip: int, layerwise: bool) -> None:
        blocks, start = blocks_for(len(tokens), FIRST), skip * BLOCK
        for rank, cache in zip(self.pages, self.engines, strict=True):
            for one in rank:
                for tensor in one.tensors:
                    tensor[FIRST:] = -1
            keys = cache.keys(tokens)
            hit = cache.lookup_keys(keys, len(tokens), computed=start)
            assert hit < len(tokens)
            assert hit % BLOCK == 0
            if hit <= start:
                assert hit == 0
                continue
            assert tuple(tokens[:hit]) in self.stored
            kv = self._kv(rank, blocks)
            if layerwise:
                with cache.begin_retrieve(keys, kv, start=start, stop=hit) as load:
                    for number, part in enumerate(cache.parts):
                        for index in range(len(part.layers)):
                            load.layer(number, index)
                    upto = load.finish()
            else:
                upto = cache.retrieve_keys(keys, kv, start=start, stop=hit)
            assert start <= upto <= hit
            for one, window in zip(rank, self.windows, strict=True):
                low = start if window is None or upto < hit else max(start, hit - window + 1)
                assert all(one.right(tokens, blocks, range(low, upto)))
                assert not any(one.right(tokens, blocks, range(start)))

    @rule()
    def host_memory_is_lost(self) -> None:
        self.over.host.clear()

    @rule(number=st.integers(0, 50), bit=st.integers(0, 10_000))
    def a_frame_is_damaged(self, number: int, bit: int) -> None:
        self.over.flush()
        names = sorted(self.store.list(), key=lambda name: name.digest)
        if names:
            key = names[number % len(names)]
            frame = np.frombuffer(bytes(self.store.get(key)), np.uint8).copy()
            frame[bit % len(frame)] ^= 1 << bit % 8
            self.store.delete(key)
            self.store.put(key, frame)

    @rule(number=st.integers(0, 50))
    def a_frame_is_gone(self, number: int) -> None:
        self.over.flush()
        names = sorted(self.store.list(), key=lambda name: name.digest)
        if names:
            self.store.delete(names[number % len(names)])

    @rule()
    def everything_is_cleared(self) -> None:
        self.over.flush()
        self.engines[0].clear()
        self.stored.clear()

    @invariant()
    def nothing_stays_locked(self) -> None:
        if hasattr(self, "over"):
            self.over.flush()
            assert self.over.host.stats().locked == 0
            assert self.over.host.stats().staging == 0

    def teardown(self) -> None:
        if hasattr(self, "over"):
            self.over.close()

    def _kv(self, rank: list[Pages], blocks: list[int]) -> PagedKV:
        return PagedKV.of_blocks(backend(), [one.rows for one in rank], [blocks] * len(rank), missing=-1)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
test_any_order = EngineMachine.TestCase
