"""L1: who sees what when, and what becomes of reservations that outlive their time."""

from __future__ import annotations

import contextlib
import logging
import random
import threading

import numpy as np
import pytest

from kvcore import Layout, LayoutDesc
from kvcore.errors import ConfigError, LeaseError, OutOfMemoryError
from kvcore.memory import ALIGNMENT, MemoryPlan
from kvcore.runtime import HostRuntime
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_limits import HostLimits
from kvcore.tiers.l1 import READ_TTL, WRITE_TTL, L1Cache

F16 = np.dtype(np.float16)
CHUNK = LayoutDesc(Layout("LKTHD", L=2, T=3, H=1, D=5), {"K": F16, "V": F16})
SMALL = MemoryPlan.of_bytes(100)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def arena():
    return HostArena(HostRuntime(), 16 * ALIGNMENT, pinned=False, limits=HostLimits())


@pytest.fixture
def l1(arena, clock):
    return L1Cache(arena, clock=clock)


def write(l1, key, text=b"abc", *, temporary=False, plan=SMALL):
    lease = l1.reserve_write({key: plan}, temporary=temporary)[key]
    lease.memory.bytes()[: len(text)] = np.frombuffer(text, np.uint8)
    l1.finish_write(lease)


def read(l1, key):
    return l1.reserve_read([key]).get(key)


def text_of(lease):
    return bytes(lease.memory.bytes()[:3])


# --- the states


def test_what_is_being_written_is_seen_by_nobody_and_then_by_all(l1):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    assert read(l1, "a") is None
    assert "a" not in l1
    assert (list(l1), len(l1)) == ([], 0)
    assert l1.delete(["a"]) == set()
    lease.memory.bytes()[:3] = (1, 2, 3)
    l1.finish_write(lease)
    assert "a" in l1
    first, second = read(l1, "a"), read(l1, "a")
    assert text_of(first) == text_of(second) == b"\1\2\3"
    assert first.number != second.number
    assert l1.delete(["a"]) == set()  # evict while reading
    l1.finish_read(first)
    assert l1.delete(["a"]) == set()
    l1.finish_read(second)
    assert l1.delete(["a", "a", "unknown"]) == {"a"}
    assert l1.arena.live_leases == 0


def test_typed_chunks_and_bytes_of_any_size_lie_side_by_side(l1):
    leases = l1.reserve_write({"chunk": MemoryPlan.of([CHUNK, CHUNK]), "frame": MemoryPlan.of_bytes(1000)})
    assert leases["chunk"].memory.rows(1).nbytes == 120
    leases["frame"].memory.set_used_size(900)
    for lease in leases.values():
        l1.finish_write(lease)
    assert len(read(l1, "frame").memory.view()) == 900
    assert l1.stats().nbytes == 512 + 1024


def test_two_writers_of_one_key(l1):
    (mine,) = l1.reserve_write({"a": SMALL}).values()
    assert set(l1.reserve_write({"a": SMALL, "b": SMALL})) == {"b"}
    l1.finish_write(mine)
    assert l1.reserve_write({"a": SMALL}) == {}  # it is there: nothing to write
    assert l1.arena.live_leases == 2


def test_written_and_locked_in_one_step(l1):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    reading = l1.finish_write_and_reserve_read(lease)
    assert reading.memory is lease.memory
    assert l1.delete(["a"]) == set()
    l1.finish_read(reading)
    assert l1.delete(["a"]) == {"a"}


def test_temporary_objects_vanish_at_the_end_of_their_last_read(l1):
    write(l1, "a", temporary=True)
    first, second = read(l1, "a"), read(l1, "a")
    l1.finish_read(first)
    third = read(l1, "a")
    l1.finish_read(second)
    assert text_of(third) == b"abc"
    l1.finish_read(third)
    assert "a" not in l1
    assert l1.arena.live_leases == 0
    with pytest.raises(LeaseError, match="void"):
        l1.finish_read(third)


def test_a_lease_is_finished_once(l1):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    l1.finish_write(lease)
    for finish in (l1.finish_write, l1.finish_write_and_reserve_read, l1.cancel_write):
        with pytest.raises(LeaseError, match="write reservation 1 of 'a' is void"):
            finish(lease)
    first, second = read(l1, "a"), read(l1, "a")
    l1.finish_read(first)
    with pytest.raises(LeaseError, match="void"):
        l1.finish_read(first)
    assert l1.delete(["a"]) == set()  # the second still reads
    l1.finish_read(second)


def test_a_cancelled_write_leaves_nothing_and_frees_the_key(l1):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    l1.cancel_write(lease)
    assert l1.arena.live_leases == 0
    write(l1, "a", b"new")
    assert text_of(read(l1, "a")) == b"new"
    with pytest.raises(LeaseError):
        l1.finish_write(lease)


def test_clear_lets_readers_end_and_writers_write_in_vain(l1):
    write(l1, "idle")
    write(l1, "read")
    (writing,) = l1.reserve_write({"written": SMALL}).values()
    reading = read(l1, "read")
    assert l1.clear() == 3
    assert (len(l1), l1.arena.live_leases, l1.stats().detached_bytes) == (0, 2, 512)
    write(l1, "read", b"new")
    assert text_of(reading) == b"abc"
    l1.finish_read(reading)
    with pytest.raises(LeaseError, match="void"):
        l1.finish_write(writing)
    assert text_of(read(l1, "read")) == b"new"
    assert (l1.arena.live_leases, l1.stats().detached_bytes) == (1, 0)


def test_a_rival_that_is_faster_while_room_is_made(l1, arena):
    write(l1, "old", plan=MemoryPlan.of_bytes(15 * ALIGNMENT))
    rival = {}

    def reclaim(nbytes):
        if rival:
            return 0
        l1.delete(["old"])
        rival.update(l1.reserve_write({"a": SMALL}))
        return 15 * ALIGNMENT

    arena.reclaim = reclaim
    assert set(l1.reserve_write({"a": SMALL, "b": MemoryPlan.of_bytes(4 * ALIGNMENT)})) == {"b"}
    l1.finish_write(rival["a"])
    assert "a" in l1
    assert arena.live_bytes == 5 * ALIGNMENT  # what was taken for the slower one was given back


# --- time


def test_the_defaults_are_ten_and_five_minutes():
    assert (WRITE_TTL, READ_TTL) == (600, 300)


@pytest.mark.parametrize("ttl", [{"write_ttl": 0}, {"read_ttl": -1}, {"read_ttl": float("nan")}])
def test_a_time_to_live_is_above_zero(arena, ttl):
    with pytest.raises(ConfigError, match="above 0 s"):
        L1Cache(arena, **ttl)


def test_an_expired_write_reservation_that_was_handed_over_is_void(l1, clock):
    (first,) = l1.reserve_write({"a": SMALL}).values()
    clock.now += 599
    assert l1.reserve_write({"a": SMALL}) == {}
    clock.now += 1
    (second,) = l1.reserve_write({"a": SMALL}).values()
    second.memory.bytes()[:3] = (1, 2, 3)
    first.memory.bytes()[:] = 9  # late, but into bytes that are nobody else's yet
    with pytest.raises(LeaseError, match="expired after 600 s and was given to somebody else"):
        l1.finish_write(first)
    with pytest.raises(LeaseError, match="freed"):
        first.memory.bytes()  # its owner is back: now the memory is gone
    assert "a" not in l1  # the second is not done
    l1.finish_write(second)
    assert text_of(read(l1, "a")) == b"\1\2\3"
    assert l1.stats().expired == 1


def test_an_expired_write_reservation_that_nobody_wanted_is_finished_in_peace(l1, clock):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    clock.now += 10_000
    l1.finish_write(lease)
    assert "a" in l1


def test_the_memory_of_a_writer_that_never_comes_back_is_freed_after_a_second_time_to_live(l1, clock):
    (lease,) = l1.reserve_write({"a": SMALL}).values()
    clock.now += 600
    assert l1.expire() == 0
    assert l1.stats().detached_bytes == 256
    write(l1, "a", b"new")
    clock.now += 599
    assert l1.expire() == 0
    clock.now += 1
    assert l1.expire() == 256
    assert (l1.stats().detached_bytes, l1.arena.live_leases) == (0, 1)
    for finish in (l1.finish_write, l1.cancel_write):
        with pytest.raises(LeaseError, match="void"):
            finish(lease)
    assert text_of(read(l1, "a")) == b"new"


def test_an_expired_read_locks_nothing_and_its_owner_is_told(l1, clock):
    write(l1, "a")
    slow = read(l1, "a")
    clock.now += 299
    assert l1.delete(["a"]) == set()
    clock.now += 1
    assert l1.delete(["a"]) == {"a"}
    write(l1, "a", b"new")
    with pytest.raises(LeaseError, match="held for more than 300 s and given up; what was read under it must not"):
        l1.finish_read(slow)
    assert l1.stats().expired == 1


def test_an_expired_read_of_an_object_that_is_still_there_is_good(l1, clock):
    write(l1, "a")
    slow = read(l1, "a")
    clock.now += 10_000
    l1.finish_read(slow)


def test_temporary_objects_do_not_wait_for_readers_that_never_finish(l1, clock):
    write(l1, "a", temporary=True)
    write(l1, "unread", temporary=True)
    dead = read(l1, "a")
    clock.now += 200
    live = read(l1, "a")
    clock.now += 100
    assert l1.expire() == 0
    l1.finish_read(live)
    assert set(l1) == {"unread"}
    with pytest.raises(LeaseError):
        l1.finish_read(dead)


def test_expiring_unlocks_for_good(l1, clock):
    write(l1, "a")
    slow = read(l1, "a")
    clock.now += 300
    assert l1.expire() == 0
    assert l1.stats().locked == 0
    with pytest.raises(LeaseError, match="void"):
        l1.finish_read(slow)
    assert "a" in l1


def test_a_read_that_outlives_a_clear_ends_at_its_deadline(l1, clock):
    write(l1, "a")
    read(l1, "a")
    l1.clear()
    assert l1.expire() == 0
    clock.now += 300
    assert l1.expire() == 256
    assert l1.arena.live_leases == 0


# --- room


def test_no_room_is_a_typed_error_and_reserves_nothing(l1):
    with pytest.raises(OutOfMemoryError, match="4096 B"):
        l1.reserve_write({n: MemoryPlan.of_bytes(2048) for n in range(3)})
    assert (l1.stats().staging, l1.arena.live_leases) == (0, 0)
    leases = l1.reserve_write({n: MemoryPlan.of_bytes(2048) for n in range(2)})
    assert len(leases) == 2


def test_room_is_made_of_victims_that_nobody_reads(l1, arena):
    order, events = [], []
    l1 = L1Cache(arena, victims=lambda nbytes: list(order))
    l1.add_listener(lambda event: events.append((event.kind, set(event.objects))))
    arena.reclaim = l1.reclaim
    for key in "abcd":
        write(l1, key, plan=MemoryPlan.of_bytes(1024))
        order.append(key)
    reading = read(l1, "a")
    l1.delete(["d"])
    (writing,) = l1.reserve_write({"d": MemoryPlan.of_bytes(1024)}).values()
    order.insert(0, "d")  # named although it is not there yet
    events.clear()
    write(l1, "e", plan=MemoryPlan.of_bytes(1024))
    assert set(l1) == set("ace")
    assert events[:2] == [("kept", {"a"}), ("removed", {"b"})]
    l1.finish_read(reading)
    l1.finish_write(writing)


def test_what_is_locked_is_waited_for(l1, arena, clock):
    l1 = L1Cache(arena, victims=lambda nbytes: ["a"], clock=clock)
    arena.reclaim = l1.reclaim
    write(l1, "a", plan=MemoryPlan.of_bytes(4096))
    reading = read(l1, "a")
    with pytest.raises(OutOfMemoryError):
        l1.reserve_write({"b": SMALL}, timeout=0.05)
    threading.Timer(0.05, l1.finish_read, [reading]).start()
    assert set(l1.reserve_write({"b": SMALL}, timeout=60)) == {"b"}


def test_expired_leases_are_reclaimed_before_victims(l1, arena, clock):
    l1 = L1Cache(arena, victims=lambda nbytes: pytest.fail("nobody had to go"), clock=clock)
    arena.reclaim = l1.reclaim
    l1.reserve_write({"dead": MemoryPlan.of_bytes(4096)})
    clock.now += 1200
    write(l1, "a")
    assert set(l1) == {"a"}


# --- listeners and counters


def test_listeners_hear_of_each_change_in_order(l1, clock):
    events = []
    l1.add_listener(lambda event: events.append((event.kind, dict(event.objects))))
    write(l1, "a")
    reading = read(l1, "a")
    l1.touch(["a", "unknown"])
    l1.finish_read(reading)
    (lease,) = l1.reserve_write({"b": MemoryPlan.of_bytes(300)}).values()
    l1.touch(["b"])  # not there yet
    l1.finish_read(l1.finish_write_and_reserve_read(lease))
    l1.delete(["a"])
    read(l1, "b")
    clock.now += 300
    l1.expire()
    l1.clear()
    read(l1, "b")
    a, b = {"a": 256}, {"b": 512}
    assert events == [
        *(("reserved", a), ("ready", a), ("read", a), ("touched", a), ("finished", a)),
        *(("reserved", b), ("ready", b), ("read", b), ("finished", b)),
        *(("removed", a), ("read", b), ("finished", b), ("removed", b)),
    ]


def test_listeners_are_called_outside_of_the_lock_and_may_use_the_cache(l1):
    seen = []

    def listener(event):
        other = threading.Thread(target=lambda: seen.append((event.kind, sorted(l1))))
        other.start()
        other.join(60)
        if event.kind == "ready" and "a" in event.objects:
            l1.delete(["a"])

    l1.add_listener(listener)
    write(l1, "a")
    assert seen == [("reserved", []), ("ready", ["a"]), ("removed", [])]


def test_a_listener_that_fails_is_logged_and_costs_nothing(l1, caplog):
    heard = []

    def failing(event):
        raise ZeroDivisionError("a bad listener")

    l1.add_listener(failing)
    l1.add_listener(lambda event: heard.append(event.kind))
    with caplog.at_level(logging.ERROR):
        write(l1, "a")
    assert heard == ["reserved", "ready"]
    assert "a bad listener" in caplog.text
    assert "a" in l1


def test_the_counters(l1):
    write(l1, "a")
    write(l1, "b")
    (lease,) = l1.reserve_write({"c": SMALL}).values()
    reading = l1.reserve_read(["a", "a", "c", "x"])
    stats = l1.stats()
    assert (stats.staging, stats.ready, stats.locked, stats.nbytes) == (1, 2, 1, 768)
    assert (stats.hits, stats.misses) == (1, 2)
    assert "a" in l1
    assert l1.stats() == stats  # looking has no side effect
    l1.finish_read(reading["a"])
    l1.cancel_write(lease)


def test_memory_that_somebody_else_freed_is_logged_and_the_state_is_kept(l1, caplog):
    write(l1, "a")
    reading = read(l1, "a")
    reading.memory.free()  # it was not theirs
    l1.finish_read(reading)
    with caplog.at_level(logging.ERROR):
        assert l1.delete(["a"]) == {"a"}
    assert "freed by somebody else" in caplog.text
    write(l1, "a", b"new")
    assert text_of(read(l1, "a")) == b"new"


# --- many at once, and for long


def test_threads_read_what_was_written_whole(arena):
    order = []
    lock = threading.Lock()

    def victims(nbytes):
        with lock:
            order[:] = order[-64:]
            return list(dict.fromkeys([*order, *range(30)]))  # those that were cut off may still be there

    l1 = L1Cache(arena, victims=victims)
    arena.reclaim = l1.reclaim
    failures = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(300):
            key = rng.randrange(30)
            try:
                leases = l1.reserve_write({key: MemoryPlan.of_bytes(rng.randrange(1, 1000))}, timeout=10)
            except OutOfMemoryError:
                failures.append("no room")
                return
            for lease in leases.values():
                lease.memory.bytes()[:] = key
                l1.finish_write(lease)
                with lock:
                    order.append(key)
            for lease in l1.reserve_read([rng.randrange(30) for _ in range(2)]).values():
                if not (lease.memory.bytes() == lease.key).all():
                    failures.append(lease)
                l1.finish_read(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert arena.memcheck().ok
    l1.clear()
    assert (arena.live_leases, arena.largest_free) == (0, arena.capacity_bytes)


def test_ten_thousand_operations_leave_nothing_behind(l1, arena, clock):
    rng = random.Random(3)
    writing, reading = [], []
    for _ in range(10_000):
        clock.now += rng.choice([0, 0, 0, 1, 50, 400])
        key = rng.randrange(12)
        match rng.randrange(6):
            case 0:
                try:
                    writing += l1.reserve_write({key: SMALL}, temporary=rng.random() < 0.3).values()
                except OutOfMemoryError:
                    l1.clear()
            case 1 if writing:
                finish = rng.choice([l1.finish_write, l1.cancel_write])
                with contextlib.suppress(LeaseError):
                    finish(writing.pop(rng.randrange(len(writing))))
            case 2:
                reading += l1.reserve_read([key]).values()
            case 3 if reading:
                with contextlib.suppress(LeaseError):
                    l1.finish_read(reading.pop(rng.randrange(len(reading))))
            case 4:
                l1.delete([key])
            case 5:
                l1.expire()
    clock.now += 2000
    l1.expire()
    l1.clear()
    l1.expire()
    stats = l1.stats()
    assert (stats.nbytes, stats.detached_bytes, arena.live_leases) == (0, 0, 0)
    assert arena.largest_free == arena.capacity_bytes
