"""Any sequence of calls, against a dict."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule, run_state_machine_as_test

from kvcore.tiers.stores import StoreKey, StoreStat
from kvcore_conformance.profiles import PROFILES
from kvcore_conformance.stores.effort import Effort
from kvcore_conformance.stores.space import Space, content
from kvcore_conformance.stores.targets import Target

FRAMES = st.one_of(
    st.binary(max_size=64), st.builds(content, st.sampled_from([4095, 4096, 4097, 70_000]), st.integers(0, 9))
)
NAMESPACES = st.integers(0, 2)


class StoreMachine(RuleBasedStateMachine):
    """Calls of a store, each beside what a dict says."""

    target: Target
    keys: Bundle[StoreKey] = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(type(self).target)
        self.frames: dict[StoreKey, bytes] = {}
        self.views: list[tuple[memoryview, bytes]] = []

    def teardown(self) -> None:
        """Hold all that was read against what it was, and the list against the model."""
        with self.space:
            assert self.space.listed() == sorted(self.frames)
        for view, frame in self.views:
            assert view == frame

    @rule(target=keys, digests=st.lists(st.binary(min_size=32, max_size=32), max_size=6), namespace=NAMESPACES)
    def name(self, digests: list[bytes], namespace: int) -> Any:
        return multiple(*(self.space.key(digest, namespace) for digest in digests))

    @rule(key=keys, frame=FRAMES)
    def put(self, key: StoreKey, frame: bytes) -> None:
        assert self.space.store.put(key, bytearray(frame)) == len(frame)
        self.frames[key] = frame

    @rule(key=keys)
    def get(self, key: StoreKey) -> None:
        self._read(key, self.space.store.get(key))

    @rule(key=keys, more=st.integers(0, 3))
    def get_into(self, key: StoreKey, more: int) -> None:
        frame = self.frames.get(key)
        memory = bytearray(len(frame or b"") + more)
        nbytes = self.space.store.get_into(key, memoryview(memory))
        assert nbytes == (None if frame is None else len(frame))
        assert frame is None or memory[:nbytes] == frame

    @rule(key=keys)
    def look(self, key: StoreKey) -> None:
        stat = self._stat(key)
        assert self.space.store.stat(key) == stat
        assert self.space.store.exists(key) == (stat is not None)

    @rule(key=keys)
    def delete(self, key: StoreKey) -> None:
        assert self.space.store.delete(key) == (self.frames.pop(key, None) is not None)

    @rule(key=keys, reason=st.sampled_from(["crc", "digest"]))
    def quarantine(self, key: StoreKey, reason: str) -> None:
        assert self.space.store.quarantine(key, reason) == (self.frames.pop(key, None) is not None)

    @rule(items=st.lists(st.tuples(keys, FRAMES), max_size=8))
    def put_batch(self, items: list[tuple[StoreKey, bytes]]) -> None:
        assert self.space.store.put_batch(items) == [len(frame) for _, frame in items]
        self.frames.update(items)

    @rule(names=st.lists(keys, max_size=8))
    def get_batch(self, names: list[StoreKey]) -> None:
        found = self.space.store.get_batch(names)
        assert len(found) == len(names)
        for key, view in zip(names, found, strict=True):
            self._read(key, view)

    @rule(names=st.lists(keys, max_size=8))
    def stat_batch(self, names: list[StoreKey]) -> None:
        assert self.space.store.stat_batch(names) == [self._stat(key) for key in names]

    @rule(names=st.lists(keys, max_size=8))
    def delete_batch(self, names: list[StoreKey]) -> None:
        expected = [self.frames.pop(key, None) is not None for key in names]
        assert self.space.store.delete_batch(names) == expected

    @rule(namespace=NAMESPACES)
    def list_one(self, namespace: int) -> None:
        digest = self.space.namespace(namespace)
        assert sorted(self.space.store.list(digest)) == sorted(key for key in self.frames if key.namespace == digest)

    @rule()
    def list_all(self) -> None:
        assert self.space.listed() == sorted(self.frames)

    @rule()
    def reopen(self) -> None:
        self.space.reopen()
        if not self.space.target.persistent:
            self.frames.clear()

    def _read(self, key: StoreKey, view: object) -> None:
        frame = self.frames.get(key)
        assert view == frame
        if frame is not None:
            assert isinstance(view, memoryview)
            self.views.append((view, frame))

    def _stat(self, key: StoreKey) -> StoreStat | None:
        frame = self.frames.get(key)
        return None if frame is None else StoreStat(len(frame))


def test_any_sequence_of_calls(store_target: Target, effort: Effort) -> None:
    machine = type("Machine", (StoreMachine,), {"target": store_target})
    derandomize = PROFILES[effort.name].derandomize
    chosen = settings(
        max_examples=effort.sequences,
        stateful_step_count=effort.steps,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings(chosen, database=None) if derandomize else chosen)
