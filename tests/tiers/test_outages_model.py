"""Tiers whose stores come and go, against a model: what a store acknowledged is there until it is removed, and found.

The truth is what the stores in memory behind the faults have. Probes run at once, and time passes when told.
"""

from __future__ import annotations

import errno

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.errors import StoreError
from kvcore.keys import StoreKey

from .objects import PLAN, chain
from .stores.outages import guarded
from .test_tiered import Stack

KEYS = [*chain(3, "a"), *chain(2, "b")]
NAMES = ("disk", "remote")
CODES = [errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EIO, errno.ECONNRESET, errno.ENOSPC, errno.EACCES]

names = st.sampled_from(NAMES)
some_keys = st.lists(st.sampled_from(range(len(KEYS))), min_size=1, max_size=4, unique=True).map(
    lambda places: [KEYS[place] for place in sorted(places)]
)


class Outages(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["default", "write_through"]), chunks=st.integers(2, 8))
    def open(self, policy, chunks):
        made = {name: guarded(label=name) for name in NAMES}
        self.inner = {name: store for name, (_, store, _, _) in made.items()}
        self.clocks = {name: clock for name, (_, _, clock, _) in made.items()}
        self.told = {name: told for name, (_, _, _, told) in made.items()}
        self.stacked = Stack(
            stores={name: store for name, (store, _, _, _) in made.items()}, chunks=chunks, store_policy=policy
        )
        self.cache = self.stacked.cache
        self.there = {name: set() for name in NAMES}
        self.failing = dict.fromkeys(NAMES, 0)

    # --- what users do

    @rule(keys=some_keys)
    def save(self, keys):
        for key in keys:
            if key in self.stacked.host:
                continue
            (outcome,) = self.stacked.save([key])
            for name, result in outcome.tiers.items():
                if isinstance(result, int):
                    assert not self.failing[name]
                    self.there[name].add(StoreKey.of(key))
                else:
                    assert isinstance(result, StoreError)

    @rule(keys=some_keys)
    def load(self, keys):
        refused = {name: self.refused(name) for name in NAMES}
        asked = {name: self.inner[name].injected() for name in NAMES}
        for key in keys:
            self.found(key, self.stacked.load([key])[0])  # which checks every byte
        self.promoted(keys)
        for name in NAMES:
            assert not refused[name] or self.inner[name].injected() == asked[name]  # nobody tried

    @rule(keys=some_keys)
    def lookup(self, keys):
        for key, place in zip(keys, self.cache.lookup(keys), strict=False):
            self.found(key, place)

    @rule(keys=some_keys, source=st.sampled_from(["host", *NAMES]), to=names, keep=st.booleans())
    def move(self, keys, source, to, keep):
        if source == to:
            return
        for key, outcome in zip(keys, self.cache.move(keys, source, to, keep=keep), strict=True):
            if isinstance(outcome, int):
                self.there[to].add(StoreKey.of(key))
                if source != "host" and not keep:
                    self.there[source].discard(StoreKey.of(key))

    @rule(keys=some_keys, source=names, keep=st.booleans())
    def load_by_a_move(self, keys, source, keep):
        outcomes = self.cache.move(keys, source, "host", keep=keep, plans=[PLAN] * len(keys))
        for key, outcome in zip(keys, outcomes, strict=True):
            if isinstance(outcome, int) and not keep:
                self.there[source].discard(StoreKey.of(key))
                if key not in self.cache.host:  # eviction made room for those behind it: as it may
                    assert len(keys) > 1

    @rule(keys=some_keys)
    def delete(self, keys):
        failed = self.cache.delete(keys)
        for name in set(NAMES) - failed.keys():
            self.there[name] -= {StoreKey.of(key) for key in keys}

    @rule(name=names)
    def clear(self, name):
        try:
            gone = self.cache.clear([name])[name]
        except StoreError:
            assert self.failing[name] or self.refused(name)
        else:
            assert gone == len(self.there[name])
            self.there[name].clear()

    @rule()
    def clear_host(self):
        self.cache.host.clear()

    # --- what happens to the stores

    @rule(name=names, code=st.sampled_from(CODES))
    def fail(self, name, code):
        self.inner[name].fail(code)
        self.failing[name] = code

    @rule(name=names)
    def heal(self, name):
        self.inner[name].heal()
        self.failing[name] = 0

    @rule(name=names, seconds=st.sampled_from([0.1, 0.6, 2.0, 31.0]))
    def wait(self, name, seconds):
        self.clocks[name].now += seconds

    @rule()
    def all_comes_back(self):
        for name in NAMES:
            self.heal(name)
            self.clocks[name].now += 31
        assert all(health.ok for health in self.cache.health().values())
        for name in NAMES:
            self.clocks[name].now += 31
            self.cache.tiers[NAMES.index(name)].store.store.stat_batch(KEYS)
            assert len(self.told[name].down) == len(self.told[name].up)
        self.cache.host.clear()
        for key in KEYS:
            places = self.stacked.load([key])
            assert isinstance(places[0], str) == any(StoreKey.of(key) in keys for keys in self.there.values())
        self.promoted(KEYS)

    # --- what holds

    def found(self, key, place):
        if isinstance(place, str) and place != "host":
            assert StoreKey.of(key) in self.there[place]
            assert not self.failing[place]

    def refused(self, name):
        """Whether a tier is down and it is too early to try it."""
        outage = self.cache.tiers[NAMES.index(name)].store.store.outage()
        return outage is not None and outage.refuses and outage.retry_seconds > 0

    def promoted(self, keys):
        """Frames found in the second tier may have been copied to the first one."""
        assert self.cache.flush(10)
        names = {StoreKey.of(key) for key in keys} & self.there["remote"]
        self.there["disk"] |= {name for name in names if self.inner["disk"].inner.exists(name)}

    @invariant()
    def what_was_acknowledged_is_there(self):
        if hasattr(self, "cache"):
            assert self.cache.flush(10)
            for name in NAMES:
                assert set(self.inner[name].inner.list()) == self.there[name]
                assert len(self.told[name].up) <= len(self.told[name].down) <= len(self.told[name].up) + 1

    @invariant()
    def nothing_is_locked_between_calls(self):
        if hasattr(self, "cache"):
            stats = self.stacked.host.stats()
            assert (stats.locked, stats.staging, stats.detached_bytes) == (0, 0, 0)
            assert self.stacked.arena.memcheck().ok

    def teardown(self):
        if hasattr(self, "cache"):
            self.stacked.close()


Outages.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestOutages = Outages.TestCase
