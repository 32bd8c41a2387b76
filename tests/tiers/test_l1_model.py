"""L1 against a dict and a clock: whatever is done in whatever order, both see the same."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.errors import LeaseError
from kvcore.memory import ALIGNMENT, MemoryPlan
from kvcore.runtime import HostRuntime
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_limits import HostLimits
from kvcore.tiers.l1 import L1Cache

SMALL = MemoryPlan.of_bytes(100)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class L1AgainstModel(RuleBasedStateMachine):
    """L1 against a dict: key -> the number that was written, the deadlines of its leases, and whether it is visible."""

    KEYS = st.sampled_from("abcd")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.arena = HostArena(HostRuntime(), 64 * ALIGNMENT, pinned=False, limits=HostLimits())
        self.l1 = L1Cache(self.arena, clock=self.clock)
        self.events = []
        self.l1.add_listener(lambda event: self.events.append(event))
        self.model = {}  # key -> {"mark", "visible", "temporary", "until", "readers": {lease number: deadline}}
        self.writes = []  # (lease, its model entry)
        self.reads = []
        self.marks = 0

    @rule(seconds=st.sampled_from([1, 299, 300, 600]))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: len(self.writes) < 8)
    @rule(key=KEYS, temporary=st.booleans())
    def reserve_write(self, key, temporary):
        entry = self.model.get(key)
        possible = entry is None or (not entry["visible"] and entry["until"] <= self.clock.now)
        leases = self.l1.reserve_write({key: SMALL}, temporary=temporary)
        assert set(leases) == ({key} if possible else set())
        if possible:
            self.marks += 1
            mark = self.marks % 251
            until = self.clock.now + 600
            entry = {"mark": mark, "visible": False, "temporary": temporary, "until": until, "readers": {}}
            self.model[key] = entry
            leases[key].memory.bytes()[:] = mark
            self.writes.append((leases[key], entry))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), way=st.sampled_from(["finish", "finish and read", "cancel"]))
    def end_write(self, data, way):
        lease, entry = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        finish = {
            "finish": self.l1.finish_write,
            "finish and read": self.l1.finish_write_and_reserve_read,
            "cancel": self.l1.cancel_write,
        }[way]
        if self.model.get(lease.key) is not entry:
            with pytest.raises(LeaseError, match="void"):
                finish(lease)
            return
        reading = finish(lease)
        if way == "cancel":
            del self.model[lease.key]
            return
        entry["visible"] = True
        if way == "finish and read":
            self.add_reader(reading, entry)

    def add_reader(self, lease, entry):
        entry["readers"][lease.number] = self.clock.now + 300
        self.reads.append((lease, entry))

    @rule(keys=st.sets(KEYS))
    def reserve_read(self, keys):
        leases = self.l1.reserve_read(sorted(keys))
        assert set(leases) == {key for key in keys if key in self.model and self.model[key]["visible"]}
        for key, lease in leases.items():
            assert (lease.memory.bytes() == self.model[key]["mark"]).all()
            self.add_reader(lease, self.model[key])

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish_read(self, data):
        lease, entry = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        if lease.number not in entry["readers"]:
            with pytest.raises(LeaseError, match="void"):
                self.l1.finish_read(lease)
            return
        assert (lease.memory.bytes() == entry["mark"]).all()  # whatever happened meanwhile
        self.l1.finish_read(lease)
        del entry["readers"][lease.number]
        if not entry["readers"] and entry["temporary"] and self.model.get(lease.key) is entry:
            del self.model[lease.key]

    def give_up(self, entry):
        """An object that is no longer in the cache: void once no reader is in time."""
        if all(deadline <= self.clock.now for deadline in entry["readers"].values()):
            entry["readers"].clear()

    @rule(keys=st.sets(KEYS))
    def delete(self, keys):
        now, gone = self.clock.now, set()
        for key in keys & set(self.model):
            entry = self.model[key]
            limits = entry["readers"].values() if entry["visible"] else [entry["until"]]
            if all(deadline <= now for deadline in limits):
                gone.add(key)
                self.give_up(self.model.pop(key))
        assert self.l1.delete(sorted(keys)) == gone

    @rule()
    def clear(self):
        assert self.l1.clear() == len(self.model)
        for entry in self.model.values():
            self.give_up(entry)
        self.model = {}

    @rule()
    def expire(self):
        self.l1.expire()
        now = self.clock.now
        for key, entry in list(self.model.items()):
            late = [number for number, deadline in entry["readers"].items() if deadline <= now]
            for number in late:
                del entry["readers"][number]
            if (not entry["visible"] and entry["until"] <= now) or (
                entry["temporary"] and late and not entry["readers"]
            ):
                del self.model[key]
        for _, entry in self.reads:
            if entry not in self.model.values():
                self.give_up(entry)

    @invariant()
    def the_books_agree(self):
        stats = self.l1.stats()
        assert stats.ready == sum(entry["visible"] for entry in self.model.values())
        assert stats.staging == sum(not entry["visible"] for entry in self.model.values())
        assert stats.locked == sum(bool(entry["readers"]) for entry in self.model.values())
        assert stats.nbytes == len(self.model) * ALIGNMENT
        assert self.arena.live_bytes == stats.nbytes + stats.detached_bytes
        assert set(self.l1) == {key for key, entry in self.model.items() if entry["visible"]}
        present = set()  # as a listener sees it
        for event in self.events:
            if event.kind == "ready":
                present |= set(event.objects)
            elif event.kind == "removed":
                present -= set(event.objects)
        assert present == set(self.l1)

    def teardown(self):
        self.clock.now += 5000
        self.l1.clear()
        self.l1.expire()
        assert self.arena.live_leases == 0
        assert self.arena.memcheck().ok


TestL1AgainstModel = L1AgainstModel.TestCase
