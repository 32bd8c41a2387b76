"""A store that goes away is not asked until it is back: by which errors, for how long, and what is said of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import MemoryStore, StoreStat, StoreUnavailableError
from kvcore.tiers.stores.breaker import UNAVAILABLE, Breaker, is_unavailable
from kvcore.tiers.stores.fault import FaultPlan, FaultStore
from kvcore.tiers.stores.guarded import GuardedStore, open_guarded

from .outages import Clock, Probes, Told, guarded, key, lines

CERTAIN = [errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTUNREACH]
DOUBTFUL = [errno.EIO, errno.ECONNRESET, errno.ESTALE]
OTHERS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOENT]


def calls(store):
    """Every call of a store that asks its medium."""
    out = memoryview(bytearray(8))
    return [
        lambda: store.put(key(1), b"frame"),
        lambda: store.get(key(1)),
        lambda: store.get_into(key(1), out),
        lambda: store.stat(key(1)),
        lambda: store.exists(key(1)),
        lambda: store.delete(key(1)),
        lambda: store.quarantine(key(1), "crc"),
        lambda: list(store.list()),
    ]


def batches(store):
    out = memoryview(bytearray(8))
    return [
        lambda: store.put_batch([(key(1), b"frame"), (key(2), b"frame")]),
        lambda: store.get_batch([key(1), key(2)]),
        lambda: store.get_batch_into([(key(1), out), (key(2), out)]),
        lambda: store.stat_batch([key(1), key(2)]),
        lambda: store.delete_batch([key(1), key(2)]),
    ]


def fails(call, kind=StoreError):
    with pytest.raises(kind) as caught:
        call()
    return caught.value


# --- what begins an outage


@pytest.mark.parametrize("code", CERTAIN)
def test_nobody_who_answers_is_an_outage_at_once_and_no_further_call_is_made(code, caplog):
    store, inner, _, told = guarded()
    store.put(key(1), b"frame")
    inner.fail(code)
    first = fails(lambda: store.stat(key(1)))
    assert not isinstance(first, StoreUnavailableError)
    asked = inner.injected()
    for call in calls(store):
        error = fails(call, StoreUnavailableError)
        assert error.errno == code
        assert "memory: is not asked: it is down since 0.0 s" in str(error)
    for batch in batches(store):
        assert [type(outcome) for outcome in batch()] == [StoreUnavailableError] * 2
    assert inner.injected() == asked
    assert len(told.down) == 1
    assert len(lines(caplog)) == 1
    assert "tier remote is down: " in lines(caplog)[0]
    assert "asked again every 0.5 to 30 s" in lines(caplog)[0]


@pytest.mark.parametrize("code", DOUBTFUL)
def test_what_may_be_bad_luck_is_an_outage_when_it_happens_three_times_in_a_row(code):
    store, inner, _, told = guarded()
    store.put(key(1), b"frame")
    inner.fail(code)
    for _ in range(2):
        fails(lambda: store.get(key(1)))
    inner.heal()
    assert store.get(key(1)) == b"frame"  # which ends the row
    inner.fail(code)
    for _ in range(2):
        fails(lambda: store.get(key(1)))
    fails(lambda: store.put(key(1), b"frame"))  # another op has a row of its own
    assert told.down == []
    assert store.outage() is None
    fails(lambda: store.get(key(1)))
    assert len(told.down) == 1


@pytest.mark.parametrize("code", OTHERS)
def test_what_does_not_say_that_the_medium_is_gone_is_no_outage(code):
    store, inner, _, told = guarded()
    inner.fail(code)
    for _ in range(10):
        for call in calls(store):
            assert fails(call).errno == code
    assert told.down == []
    assert not is_unavailable(StoreError(code, "no"))


def test_a_full_disk_takes_nothing_and_gives_what_it_has():
    inner = FaultStore(MemoryStore(), FaultPlan.parse("put.enospc=@2+3+4+5"))
    store, *_ = guarded(inner)
    store.put(key(1), b"frame")
    for n in range(2, 6):
        assert fails(lambda n=n: store.put(key(n), b"frame")).errno == errno.ENOSPC
        assert store.get(key(1)) == b"frame"
    assert store.put(key(6), b"frame") == 5


def test_one_bad_block_among_good_ones_is_no_outage_and_a_batch_of_bad_ones_is():
    class Blocks(MemoryStore):
        def get(self, key):
            if key.digest[0] > 2:
                raise StoreError(errno.EIO, "a bad block")
            return super().get(key)

    store, _, _, told = guarded(Blocks())
    store.put_batch([(key(n), b"frame") for n in range(6)])
    for _ in range(10):
        assert isinstance(store.get_batch([key(1), key(3), key(4), key(5)])[3], StoreError)
    assert told.down == []
    store.get_batch([key(3), key(4), key(5)])
    assert len(told.down) == 1


def test_a_node_of_a_cluster_that_is_gone_is_an_outage_although_others_answer():
    class Nodes(MemoryStore):
        def stat(self, key):
            if key.digest[0] == 2:
                raise StoreError(errno.ETIMEDOUT, "this node does not answer")
            return super().stat(key)

    store, _, _, told = guarded(Nodes())
    assert store.stat_batch([key(1), key(2)])[0] is None
    assert len(told.down) == 1


def test_a_list_that_breaks_off_counts():
    class Breaks(MemoryStore):
        def list(self, namespace=None):
            yield from super().list(namespace)
            raise StoreError(errno.ETIMEDOUT, "the next page does not come")

    store, _, _, told = guarded(Breaks())
    store.put(key(1), b"frame")
    listed = store.list()
    assert next(listed) == key(1)
    fails(lambda: next(listed))
    assert len(told.down) == 1


def test_a_list_that_fails_at_its_first_page_has_not_worked(caplog):
    """A listing is lazy: that it was begun says nothing."""

    class Slow(MemoryStore):
        def list(self, namespace=None):
            raise StoreError(errno.ETIMEDOUT, "the first page does not come")
            yield

    class Bad(MemoryStore):
        def list(self, namespace=None):
            raise StoreError(errno.EIO, "a bad block")
            yield

    store, _, clock, told = guarded(Slow())
    fails(lambda: list(store.list()))
    for wait in (0.5, 1.0, 2.0):
        clock.now += wait
        fails(lambda: list(store.list()))
        assert (len(told.down), told.up) == (1, [])  # one outage, not one for each attempt
    assert len(lines(caplog)) == 1
    store, _, _, told = guarded(Bad())
    for _ in range(3):
        fails(lambda: list(store.list()))
    assert len(told.down) == 1


# --- how it ends


def test_it_comes_back_by_itself_and_says_so_once(caplog):
    store, inner, clock, told = guarded()
    store.put(key(1), b"frame")
    inner.fail()
    fails(lambda: store.get(key(1)))
    inner.heal()
    clock.now += 0.4
    fails(lambda: store.get(key(1)), StoreUnavailableError)  # too early to try
    clock.now += 0.2
    assert store.get(key(1)) == b"frame"
    assert told.up == [pytest.approx(0.6)]
    assert len(lines(caplog)) == 2
    assert lines(caplog)[1] == "tier remote is back after 0.6 s"
    assert store.outage() is None


def test_the_waits_double_up_to_the_longest():
    probes = Probes()
    store, inner, clock, told = guarded(spawn=probes, retry_seconds=(0.5, 8.0))
    inner.fail()
    fails(lambda: store.get(key(1)))
    waits, since = [], clock.now
    for _ in range(400):
        clock.now += 0.25
        before = probes.count
        fails(lambda: store.get(key(1)), StoreUnavailableError)
        if probes.count > before:
            waits.append(clock.now - since)
            since = clock.now
    assert waits[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert len(told.down) == 1
    inner.heal()
    clock.now += 8
    assert store.get(key(1)) is None
    inner.fail()
    fails(lambda: store.get(key(1)))  # so soon after: the waits go on where they were
    outage = store.outage()
    assert outage.retry_seconds == 8.0
    inner.heal()
    clock.now += 8
    store.get(key(1))
    clock.now += 9
    inner.fail()
    fails(lambda: store.get(key(1)))
    assert store.outage().retry_seconds == 0.5


def test_what_failed_has_to_succeed_before_it_is_back(caplog):
    """A server that answers questions and takes no frames does not come and go with each probe."""
    store, _, clock, told = guarded(FaultStore(MemoryStore(), FaultPlan.parse("put.etimedout=@1+2+3")))
    fails(lambda: store.put(key(1), b"frame"))
    for wait in (0.5, 1.0):
        clock.now += wait
        assert store.get(key(1)) is None  # it answers, and is used
        assert store.outage().refuses is False
        fails(lambda: store.put(key(1), b"frame"))
        assert store.outage().refuses is True
    clock.now += 2.0
    assert store.put(key(1), b"frame") == 5
    assert (len(told.down), len(told.up)) == (1, 1)
    assert len(lines(caplog)) == 2


def test_a_trial_ends_well_after_the_longest_wait():
    store, _, clock, told = guarded(FaultStore(MemoryStore(), FaultPlan.parse("put.etimedout=@1")))
    fails(lambda: store.put(key(1), b"frame"))
    for wait in (1, 15, 14):
        clock.now += wait
        store.get(key(1))
        assert told.up == []
    clock.now += 1
    store.get(key(1))
    assert len(told.up) == 1


def test_a_store_that_answers_with_no_is_back():
    inner = FaultStore(MemoryStore())
    store, _, clock, told = guarded(inner)
    inner.fail(errno.ECONNREFUSED)
    fails(lambda: store.get(key(1)))
    inner.fail(errno.EACCES)  # it was restarted, and wants a password now
    clock.now += 1
    assert fails(lambda: store.get(key(1))).errno == errno.EACCES
    assert len(told.up) == 1


# --- unreachable at start


class Opener:
    """Fails with these errors, one after the other, and then opens."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.stores = []

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        self.stores.append(MemoryStore())
        return self.stores[-1]


@pytest.mark.parametrize("code", [*CERTAIN, *DOUBTFUL, errno.ENOSPC, errno.EDQUOT])
def test_one_that_cannot_be_reached_at_start_is_opened_when_it_can(code, caplog):
    refused = StoreError(code, "cannot open a store: nobody is there")
    opener, clock, told = Opener(refused, refused, refused), Clock(), Told()
    store = GuardedStore(
        opener, "resp://h", clock=clock, on_down=told.down.append, on_up=told.up.append, spawn=Probes()
    )
    assert (store.name, store.inner) == ("resp://h", None)
    assert told.down == ["cannot open a store: nobody is there"]
    for call in calls(store):
        assert fails(call, StoreUnavailableError).errno == code
    assert store.stat_batch([key(1)])[0].errno == code
    for wait in (0.6, 1.1):
        clock.now += wait
        fails(lambda: store.get(key(1)), StoreUnavailableError)
    clock.now += 2.1
    assert store.put(key(1), b"frame") == 5
    assert store.stat(key(1)) == StoreStat(5)
    assert store.name == "memory:"
    assert (len(told.down), len(told.up)) == (1, 1)
    assert len(lines(caplog)) == 2
    store.close()


@pytest.mark.parametrize(
    "error", [ConfigError("no such scheme"), StoreError(errno.EEXIST, "another's"), StoreError(errno.EACCES, "no")]
)
def test_what_waiting_does_not_mend_is_refused_at_once(error):
    with pytest.raises(type(error), match=str(error.args[-1])):
        GuardedStore(Opener(error), "resp://h")


def test_names_have_no_secrets_before_the_store_is_open(tmp_path):
    store = open_guarded("capped:1GiB:resp://user:s3cret@127.0.0.1:1/0?timeout=10ms", retry_seconds=(60, 60))
    assert store.name == "capped:1GiB:resp://127.0.0.1:1/0"
    assert "s3cret" not in str(fails(lambda: store.get(key(1)), StoreUnavailableError))
    store.close()
    with pytest.raises(ConfigError, match="%3F") as caught:
        open_guarded("resp://user:a?s3cret@127.0.0.1:1")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("bad", [(0, 1), (2, 1), (-1, 1), (1, float("inf")), (float("nan"), 1)])
def test_waits_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="retry_seconds"):
        Breaker("memory:", bad)


# --- closing, threads, forks


def test_close_closes_what_a_probe_opens_afterwards():
    opener, clock, probes = Opener(StoreError(errno.ECONNREFUSED, "no")), Clock(), Probes(held=True)
    store = GuardedStore(opener, "resp://h", clock=clock, spawn=probes)
    clock.now += 1
    fails(lambda: store.get(key(1)), StoreUnavailableError)
    (probe,) = probes.waiting
    store.close()
    probe()
    assert "closed" in str(fails(lambda: opener.stores[0].get(key(1))))
    assert "closed" in str(fails(lambda: store.get(key(1))))
    store.close()


def test_a_probe_that_ends_after_close_says_nothing(caplog):
    probes = Probes(held=True)
    store, inner, clock, told = guarded(spawn=probes)
    inner.fail()
    fails(lambda: store.get(key(1)))
    clock.now += 1
    fails(lambda: store.get(key(1)), StoreUnavailableError)
    (probe,) = probes.waiting
    inner.heal()
    store.close()
    probe()  # it asks a store that is closed
    assert told.up == []
    assert len(lines(caplog)) == 1


def test_without_a_thread_for_the_probe_callers_are_answered_and_it_is_tried_again():
    threads = [RuntimeError("can't start new thread")]

    def spawn(probe):
        if threads:
            raise threads.pop()
        probe()

    store, inner, clock, told = guarded(spawn=spawn)
    store.put(key(1), b"frame")
    inner.fail()
    fails(lambda: store.get(key(1)))
    inner.heal()
    clock.now += 0.5
    fails(lambda: store.get(key(1)), StoreUnavailableError)
    clock.now += 1.0
    assert store.get(key(1)) == b"frame"
    assert len(told.up) == 1


def test_what_waiting_will_not_mend_is_said_when_a_probe_meets_it(caplog):
    reasons = [StoreError(errno.ECONNREFUSED, "nobody there"), *[StoreError(errno.EACCES, "wrong password")] * 2]

    def opener():
        if reasons:
            raise reasons.pop(0)
        return MemoryStore()

    clock = Clock()
    store = GuardedStore(opener, "resp://h", clock=clock, spawn=Probes())
    for wait in (0.5, 1.0):
        clock.now += wait
        fails(lambda: store.get(key(1)), StoreUnavailableError)
    said = [record.getMessage() for record in caplog.records if "wrong password" in record.getMessage()]
    assert len(said) == 1
    clock.now += 2.0
    assert store.get(key(1)) is None
    store.close()


def test_nobody_waits_for_a_probe_of_a_server_that_does_not_answer():
    class Hangs(FaultStore):
        hang = False
        go = threading.Event()

        def stat(self, key):
            if self.hang:
                assert self.go.wait(20)
            return super().stat(key)

    inner = Hangs(MemoryStore())
    told = Told()
    store = GuardedStore(
        lambda: inner, "memory:", retry_seconds=(0.01, 0.02), on_down=told.down.append, on_up=told.up.append
    )
    inner.fail(errno.ETIMEDOUT)
    fails(lambda: store.stat(key(1)))
    inner.hang = True
    began = time.perf_counter()
    while time.perf_counter() - began < 0.2:
        one = time.perf_counter()
        fails(lambda: store.stat(key(1)), StoreUnavailableError)
        assert time.perf_counter() - one < 5  # who waited would do so for 20 s; a loaded machine takes its time
    inner.hang = False
    inner.heal()
    inner.go.set()
    until = time.perf_counter() + 10
    while store.outage() is not None and time.perf_counter() < until:
        time.sleep(0.005)
    assert (len(told.down), len(told.up)) == (1, 1)
    store.close()


def test_of_many_threads_one_begins_the_outage_and_one_probes(caplog):
    probes = Probes(held=True)
    store, inner, clock, told = guarded(spawn=probes)
    inner.fail()
    gate = threading.Barrier(8)

    def ask(_):
        gate.wait(10)
        for _ in range(50):
            fails(lambda: store.get(key(1)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
        assert len(told.down) == len(lines(caplog)) == 1
        clock.now += 1
        list(pool.map(ask, range(8)))
    assert probes.count == 1
    inner.heal()
    probes.waiting[0]()
    assert store.get(key(1)) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_during_a_probe_probes_by_itself():
    probes = Probes(held=True)
    store, inner, clock, _ = guarded(spawn=probes)
    store.put(key(1), b"frame")
    inner.fail()
    fails(lambda: store.get(key(1)))
    clock.now += 1
    fails(lambda: store.get(key(1)), StoreUnavailableError)
    assert probes.count == 1  # under way, on a thread that the child does not have
    child = os.fork()
    if not child:
        code = 1
        try:
            probes.held = False
            inner.heal()
            code = 0 if bytes(store.get(key(1))) == b"frame" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- the errors of the stores


@pytest.mark.parametrize("code", sorted(UNAVAILABLE))
def test_an_errno_tells_by_itself_that_the_medium_is_gone(code):
    assert is_unavailable(StoreError(code, "gone"))
    assert not is_unavailable(OSError(code, "not of a store"))


def test_while_it_is_down_what_is_no_frame_is_refused_all_the_same():
    store, inner, *_ = guarded()
    inner.fail()
    fails(lambda: store.get(key(1)))
    with pytest.raises(ConfigError):
        store.put_batch([(key(1), memoryview(b"abcdef")[::2])])


def test_usage_and_stats_are_those_of_the_store_behind():
    store, inner, *_ = guarded()
    store.put(key(1), b"frame")
    assert store.stats() == inner.stats()
    assert (store.usage().objects, store.usage().nbytes) == (1, 5)
    opener = Opener(StoreError(errno.ECONNREFUSED, "no"))
    closed = GuardedStore(opener, "resp://h", spawn=Probes())
    assert closed.usage().objects is None
    assert closed.stats().puts == 0
