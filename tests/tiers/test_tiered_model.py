"""Tiers against a model: whatever fails, what is loaded is what was saved under that key, and nothing leaks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import CorruptFrameError, StoreError
from kvcore.tiers.prefetch_controller import Found

from .objects import PLAN, chain
from .test_tiered import Stack

CHAINS = [chain(4, "a"), chain(3, "b"), chain(2, "c", tenant="somebody")]
KEYS = [key for keys in CHAINS for key in keys]
NAMES = ("disk", "remote")


class Tiers(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["default", "write_through", "buffer_only"]), chunks=st.integers(2, 5))
    def open(self, policy, chunks):
        self.tiers = Stack(*NAMES, chunks=chunks, store_policy=policy)
        self.policy = policy
        self.saved = set()

    @rule(key=st.sampled_from(KEYS))
    def save(self, key):
        if key in self.tiers.host:
            assert self.tiers.cache.reserve({key: PLAN}) == {}
            return
        (outcome,) = self.tiers.save([key])
        down = {name for name in NAMES if self.tiers.stores[name].down}
        assert {name for name, result in outcome.tiers.items() if isinstance(result, StoreError)} == down
        self.saved.add(key)

    @rule(which=st.sampled_from(CHAINS), length=st.integers(1, 4))
    def load(self, which, length):
        self.check(which[:length], self.tiers.load(which[:length]))

    @rule(which=st.sampled_from(CHAINS))
    def prefetch(self, which):
        cache = self.tiers.cache
        outcomes = cache.prefetched(cache.prefetch(which, [PLAN] * len(which)), timeout=10)
        self.check(which, [one.tier if isinstance(one, Found) else one for one in outcomes])

    @rule(which=st.sampled_from(CHAINS))
    def lookup(self, which):
        self.check(which, self.tiers.cache.lookup(which))

    def check(self, keys, places):
        for key, place in zip(keys, places, strict=False):
            if isinstance(place, str):
                assert key in self.saved
                assert place == "host" or not self.tiers.stores[place].down

    @rule(key=st.sampled_from(KEYS), name=st.sampled_from(NAMES), at=st.integers(0, 2**16))
    def damage(self, key, name, at):
        store = self.tiers.stores[name]
        if store.down or not store.exists(key):
            return
        frame = bytearray(store.get(key))
        frame[at % len(frame)] ^= 1 << at % 8
        store.put(key, frame)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key):
        self.tiers.cache.delete([key])
        if not any(store.down for store in self.tiers.stores.values()):
            self.saved.discard(key)

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name):
        self.tiers.stores[name].down = True

    @rule(name=st.sampled_from(NAMES))
    def heal(self, name):
        self.tiers.stores[name].down = False

    @rule()
    def clear_host(self):
        self.tiers.host.clear()

    @rule()
    def relieve(self):
        self.tiers.host.relieve()

    @precondition(lambda self: not any(store.down for store in self.tiers.stores.values()))
    @rule(which=st.sampled_from(CHAINS))
    def what_cannot_be_had_can_be_saved_again(self, which):
        for key in which:  # one by one: host memory may have no room for all
            (place,) = self.tiers.load([key])
            if not isinstance(place, str):
                assert place is None or isinstance(place, CorruptFrameError)
                assert self.tiers.cache.missing([key]) == [0]
                assert self.tiers.save([key])[0].error is None
                self.saved.add(key)
            assert self.tiers.load([key])[0] in ("host", *NAMES)

    @invariant()
    def nothing_is_locked_between_calls(self):
        if hasattr(self, "tiers"):
            assert self.tiers.cache.flush(10)
            stats = self.tiers.host.stats()
            assert (stats.locked, stats.staging, stats.detached_bytes) == (0, 0, 0)
            assert self.tiers.arena.memcheck().ok

    def teardown(self):
        if hasattr(self, "tiers"):
            self.tiers.close()


Tiers.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestTiers = Tiers.TestCase
