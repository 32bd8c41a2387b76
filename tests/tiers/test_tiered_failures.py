"""Tiers when things go wrong: at the wrong moment, in ways that nobody foresaw, or not at all for a long time."""

import threading

import pytest

from kvcore.completion import DeadlineError
from kvcore.errors import CorruptFrameError, KVCoreError, LayoutError, LeaseError, OutOfMemoryError, StoreError
from kvcore.keys import StoreKey
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc, MemoryPlan
from kvcore.serde.contract import Deserializer
from kvcore.serde.frames import FrameSerializer
from kvcore.serde.processor import AsyncSerdeProcessor
from kvcore.tiers import prefetch_controller
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.prefetch_controller import Found

from .objects import DESC, PLAN, chain, fill, holds
from .test_tiered import Flaky, Stack


@pytest.fixture
def stack():
    stacks = []

    def make(*names, **options):
        stacks.append(Stack(*names, **options))
        return stacks[-1]

    yield make
    for one in stacks:
        one.close()


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Gated(Flaky):
    """Stops at each frame that is put or read until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def put(self, key, frame):
        self.entered.set()
        assert self.go.wait(10)
        return super().put(key, frame)

    def get_batch_into(self, items):
        self.entered.set()
        assert self.go.wait(10)
        return super().get_batch_into(items)

    def shut(self):
        """From now on, stop again."""
        self.entered.clear()
        self.go.clear()


def gated(stack, **options):
    store = Gated()
    store.go.set()
    return stack(stores={"disk": store}, **options), store


# --- leases that end


def test_an_expired_write_reservation_that_was_handed_over_is_not_stored(stack):
    clock = Clock()
    tiers = stack("disk", host={"clock": clock, "write_ttl": 10.0})
    (key,) = chain(1)
    (slow,) = tiers.cache.reserve({key: PLAN}).values()
    clock.now += 11
    (fast,) = tiers.cache.reserve({key: PLAN}).values()  # it is given to somebody else
    fill(fast.memory, key)
    slow.memory.bytes()[:] = 7  # its owner goes on writing: into memory of its own
    (late,) = tiers.cache.stored(tiers.cache.commit([slow]))
    assert isinstance(late, LeaseError)
    (outcome,) = tiers.cache.stored(tiers.cache.commit([fast]))
    assert outcome.error is None
    tiers.host.clear()
    assert tiers.load([key]) == ["disk"]  # which checks every byte


def test_of_several_reservations_those_that_hold_are_stored(stack):
    clock = Clock()
    tiers = stack("disk", host={"clock": clock, "write_ttl": 10.0})
    first, second = chain(2)
    (void,) = tiers.cache.reserve({first: PLAN}).values()
    clock.now += 11
    leases = tiers.cache.reserve({first: PLAN, second: PLAN})
    for lease in leases.values():
        fill(lease.memory, lease.key)
    outcomes = tiers.cache.stored(tiers.cache.commit([void, leases[StoreKey.of(second)]]))
    assert isinstance(outcomes[0], LeaseError)
    assert outcomes[1].error is None
    assert not tiers.stores["disk"].exists(first)
    tiers.cache.cancel(leases.values())


def test_evict_while_reading_leaves_the_readers_bytes_alone(stack):
    tiers = stack("disk", chunks=2)
    keys, others = chain(2), chain(2, "other")
    tiers.save(keys)
    held = tiers.cache.load(keys, [PLAN] * 2)
    with pytest.raises(OutOfMemoryError):
        tiers.cache.reserve({others[0]: PLAN})
    assert all(holds(found.lease.memory, key) for found, key in zip(held, keys, strict=True))
    for found in held:
        tiers.cache.release(found)
    tiers.save(others)
    assert tiers.load(keys) == ["disk"] * 2


def test_a_read_that_took_too_long_is_told_so_and_its_memory_serves_others(stack):
    clock = Clock()
    tiers = stack("disk", chunks=1, host={"clock": clock, "read_ttl": 10.0})
    (key,), (other,) = chain(1), chain(1, "other")
    tiers.save([key])
    (found,) = tiers.cache.load([key], [PLAN])
    clock.now += 11
    tiers.save([other])
    with pytest.raises(LeaseError, match="must not be used"):
        tiers.cache.release(found)
    assert tiers.load([other]) == ["host"]


def test_what_waited_too_long_to_be_stored_is_not_stored_with_somebody_elses_bytes(stack):
    clock = Clock()
    store = Gated()
    tiers = stack(stores={"disk": store}, chunks=2, host={"clock": clock, "read_ttl": 10.0})
    first, second = chain(2)
    (busy, waiting) = tiers.put([first, second])
    assert store.entered.wait(10)
    clock.now += 11  # the second has not been looked at yet
    (third,) = chain(1, "third")
    (lease,) = tiers.cache.reserve({third: PLAN}).values()  # takes the memory of one of them
    fill(lease.memory, third)
    store.go.set()
    tiers.cache.stored(tiers.cache.commit([lease]))
    outcomes = [tiers.cache.stored(task)[0] for task in (busy, waiting)]
    tiers.host.clear()
    for key, outcome in zip((first, second), outcomes, strict=True):
        if outcome.error is None:
            assert tiers.load([key]) == ["disk"]  # every byte is right
        else:
            assert isinstance(outcome.error, LeaseError)
            assert not store.exists(key)
    assert any(outcome.error is not None for outcome in outcomes)
    assert tiers.load([third]) == ["disk"]


def test_host_memory_that_is_cleared_during_a_load_leaves_nothing_locked(stack):
    tiers, store = gated(stack)
    keys = chain(3)
    tiers.save(keys)
    tiers.host.delete(keys[1:])
    store.shut()
    task = tiers.cache.begin_load(keys, [PLAN] * 3)
    assert store.entered.wait(10)
    tiers.host.clear()
    store.go.set()
    first, second = tiers.cache.loaded(task)
    assert isinstance(second, LeaseError)
    assert holds(first.lease.memory, keys[0])
    tiers.cache.release(first)
    assert tiers.load(keys) == ["disk"] * 3


# --- closing while busy


def test_close_while_storing_stores_all_that_was_committed(stack):
    tiers, store = gated(stack)
    store.shut()
    keys = chain(3)
    tasks = list(tiers.put(keys))
    assert store.entered.wait(10)
    threading.Timer(0.05, store.go.set).start()
    tiers.cache.close()
    assert all(store.exists(key) for key in keys)
    assert all(tiers.cache.stored(task)[0].error is None for task in tasks)


def test_close_while_loading_ends_the_load(stack):
    tiers, store = gated(stack)
    keys = chain(3)
    tiers.save(keys)
    tiers.host.clear()
    store.shut()
    task = tiers.cache.begin_load(keys, [PLAN] * 3)
    assert store.entered.wait(10)
    threading.Timer(0.05, store.go.set).start()
    tiers.cache.close()
    found = tiers.cache.loaded(task)
    assert all(holds(one.lease.memory, key) for one, key in zip(found, keys, strict=True))
    for one in found:
        tiers.cache.release(one)


@pytest.mark.parametrize("what", ["serde", "serde_store", "store"])
def test_what_is_closed_too_early_fails_what_is_under_way_and_locks_nothing(stack, what):
    tiers, store = gated(stack)
    keys, more = chain(2), chain(3, "more")
    tiers.save(keys)
    tiers.host.clear()
    store.shut()
    task = tiers.cache.begin_load(keys, [PLAN] * 2)
    tasks = list(tiers.put(more))
    assert store.entered.wait(10)
    threading.Timer(0.05, store.go.set).start()
    {"serde": tiers.serde, "serde_store": tiers.serde_stores[0], "store": store}[what].close()
    for found in tiers.cache.loaded(task):
        if isinstance(found, Found):
            tiers.cache.release(found)
        else:
            assert found is None or isinstance(found, KVCoreError)
    for outcome in (tiers.cache.stored(task)[0] for task in tasks):
        assert outcome.error is None or isinstance(outcome.error, KVCoreError)


def test_after_close_loads_are_refused_and_commits_fail_and_leave_nothing_behind(stack):
    tiers = stack("disk")
    keys = chain(2)
    tiers.save(keys[:1])
    leases = list(tiers.cache.reserve({keys[1]: PLAN}).values())
    fill(leases[0].memory, keys[1])
    tiers.cache.close()
    tiers.cache.close()
    with pytest.raises(KVCoreError, match="closed"):
        tiers.cache.load(keys, [PLAN] * 2)
    assert len(tiers.cache._loads._done) == 0
    (outcome,) = tiers.cache.stored(tiers.cache.commit(leases))
    assert "closed" in str(outcome)
    assert tiers.cache.flush(1)
    copy = tiers.cache._stores.copy
    copy(tiers.cache.tiers[0], keys[0], memoryview(b"frame"))  # a promotion that comes too late
    assert tiers.cache.flush(1)


# --- loads of one object, loads for nobody


@pytest.mark.parametrize("late", [False, True])
def test_a_load_that_nobody_waits_for_ends_with_its_batch(stack, late):
    tiers, store = gated(stack, chunks=40)
    keys = chain(24)
    tiers.save(keys)
    tiers.host.clear()
    store.shut()
    store.gets = 0
    task = tiers.cache.begin_load(keys, [PLAN] * 24, timeout=0.1 if late else None)
    assert store.entered.wait(10)
    if late:
        assert isinstance(tiers.cache.loaded(task)[-1], DeadlineError)
    else:
        tiers.cache.forget_load(task)
    store.go.set()
    tiers.cache.close()
    assert 0 < store.gets <= 8
    assert tiers.host.stats().locked == 0


def test_an_object_is_asked_for_once(stack):
    tiers = stack("disk")
    (key,) = chain(1)
    with pytest.raises(ValueError, match="once"):
        tiers.cache.load([key, key], [PLAN] * 2)


def test_an_object_that_somebody_takes_long_to_write_is_a_miss_for_loads(stack, monkeypatch):
    monkeypatch.setattr(prefetch_controller, "OTHERS_SECONDS", 0.05)
    tiers = stack("disk", max_in_flight=2)
    keys = chain(2)
    tiers.save(keys)
    tiers.host.clear()
    writing = tiers.cache.reserve({keys[1]: PLAN})
    assert [tiers.load(keys) for _ in range(3)] == [["disk", None], ["host", None], ["host", None]]
    tiers.cache.cancel(writing.values())
    assert tiers.load(keys) == ["host", "disk"]


def test_of_a_prefix_that_is_too_long_for_host_memory_the_beginning_is_loaded(stack):
    tiers = stack("disk", chunks=3)
    keys = chain(8)
    tiers.save(keys)
    tiers.host.clear()
    places = tiers.load(keys)
    assert places[:2] == ["disk"] * 2
    assert isinstance(places[-1], OutOfMemoryError)


def test_two_layouts_under_one_key_are_never_taken_for_each_other(stack):
    tiers = stack()
    (key,) = chain(1)
    tiers.save([key])
    other = MemoryPlan.of([LayoutDesc(Layout("LKTHD", L=1, T=4, H=2, D=8), DESC.dtypes)])
    assert other.nbytes == PLAN.nbytes
    (outcome,) = tiers.cache.load([key], [other])
    assert isinstance(outcome, LayoutError)
    assert tiers.load([key]) == ["host"]


# --- what nobody foresaw


class Broken(TierObserver):
    """Fails at everything that it is told."""

    def _fail(self, *said):
        raise ZeroDivisionError(said)

    lookup = retrieve = miss = store = failure = evict = serde = _fail


def test_an_observer_that_fails_changes_nothing(stack, caplog):
    tiers = stack("disk", observer=Broken(), chunks=2)
    keys = chain(3)
    assert all(outcome.error is None for outcome in tiers.save(keys))
    assert tiers.load(keys[:2]) == ["host", "disk"]
    tiers.stores["disk"].down = True
    assert tiers.cache.lookup(keys) == ["host", "host"]
    for call in ("lookup", "retrieve", "miss", "store", "failure", "evict"):
        assert f"an observer of tiers failed at {call}" in caplog.text
    assert tiers.cache.stats()["host"].hits == 1


class Surprising(Flaky):
    """Raises what the contract does not know."""

    def get_batch_into(self, items):
        raise ZeroDivisionError

    def delete_batch(self, keys):
        raise ZeroDivisionError


def test_a_store_that_breaks_the_contract_is_passed_over(stack):
    tiers = stack(stores={"disk": Surprising(), "remote": Flaky()})
    keys = chain(2)
    tiers.save(keys)
    tiers.host.clear()
    assert tiers.load(keys) == ["remote"] * 2
    assert tiers.cache.stats()["disk"].failed == 2
    assert isinstance(tiers.cache.delete(keys)["disk"], ZeroDivisionError)
    assert not any(tiers.stores["remote"].exists(key) for key in keys)


def test_a_wrong_number_of_outcomes_does_not_pass_for_success(stack, monkeypatch):
    tiers = stack("disk")
    monkeypatch.setattr(tiers.serde_stores[0], "put", lambda keys, objs, sink=None: ())
    (task,) = tiers.put(chain(1))
    assert isinstance(tiers.cache.stored(task)[0], ValueError)
    assert tiers.cache.flush(10)


class Keyless(Deserializer):
    """Has not the key that some frames were sealed with."""

    def deserialize(self, src, dst, key):
        if bytes(src.view()[-4:]) == b"seal":
            raise CorruptFrameError("no such key here", reason="key")
        dst.bytes()[:] = src.bytes()[-dst.nbytes :]


def test_a_frame_that_cannot_be_read_here_is_found_again_once_a_copy_replaces_it(stack):
    serde = AsyncSerdeProcessor(FrameSerializer("raw"), Keyless())
    tiers = stack("disk", "remote", serde=serde)
    (key,) = chain(1)
    disk, remote = tiers.stores["disk"], tiers.stores["remote"]
    remote.put(key, bytes(PLAN.nbytes))
    disk.put(key, b"seal")
    places = []
    for _ in range(3):
        (found,) = tiers.cache.load([key], [PLAN])
        tiers.cache.release(found)
        places.append(found.tier)
        assert tiers.cache.flush(10)
        tiers.host.clear()
    assert disk.exists(key)
    assert places[0] == "remote"
    assert disk.stats().quarantined == 0
    assert places[2] == "disk"  # the copy is good, and known to be there


def test_one_store_that_cannot_be_asked_does_not_keep_others_from_being_stored_to(stack):
    tiers = stack("disk", "remote")
    keys = chain(2)
    tiers.save(keys[:1])
    tiers.host.clear()
    tiers.stores["disk"].down = True
    assert tiers.cache.stat(keys)[0][0] == "remote"
    assert tiers.cache.stat(keys)[1] is None
    tiers.stores["remote"].down = True
    assert all(isinstance(answer, StoreError) for answer in tiers.cache.stat(keys))
