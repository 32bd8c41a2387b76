"""The arena, L1 and an eviction policy together: what goes when there is no room, and what stays."""

import threading

import pytest

from kvcore.errors import ConfigError, LeaseError, OutOfMemoryError
from kvcore.keys import StoreKey, make_temp_key
from kvcore.memory import align_up
from kvcore.runtime import HostRuntime
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_tier import HostTier

from .objects import PLAN, chain, fill, holds

SIZE = align_up(PLAN.nbytes)


@pytest.fixture
def arena():
    with HostArena(HostRuntime(), 4 * SIZE, pinned=False) as arena:
        yield arena


@pytest.fixture
def host(arena):
    host = HostTier(arena, watermark=1.0)
    yield host
    host.clear()


def write(host, keys, **options):
    for key in keys:
        (lease,) = host.reserve_write({key: PLAN}, **options).values()
        fill(lease.memory, key)
        host.finish_write(lease)


def test_on_demand_the_least_recently_used_object_goes(host):
    keys = [*chain(1, "a"), *chain(1, "b"), *chain(1, "c"), *chain(1, "d")]
    write(host, keys)
    (lease,) = host.reserve_read(keys[:1]).values()  # a is used
    host.finish_read(lease)
    gone = []
    host.on_evict = lambda chunks, nbytes: gone.append((chunks, nbytes))
    (new,) = chain(1, "e")
    write(host, [new])
    assert [key in host for key in (*keys, new)] == [True, False, True, True, True]
    assert gone == [(1, SIZE)]


def test_a_chunk_goes_after_those_that_follow_it_in_its_prefix(host):
    keys = chain(4)
    write(host, keys)
    write(host, chain(2, "other"))
    assert [key in host for key in keys] == [True, True, False, False]


def test_what_is_being_read_stays_and_is_found_again_by_the_policy_afterwards(host):
    keys = chain(4)
    write(host, keys)
    reading = host.reserve_read(keys)
    (new,) = chain(1, "new")
    with pytest.raises(OutOfMemoryError):
        host.reserve_write({new: PLAN})
    assert all(holds(lease.memory, key) for lease, key in zip(reading.values(), keys, strict=True))
    for lease in reading.values():
        host.finish_read(lease)
    write(host, [new])
    assert [key in host for key in keys] == [True, True, True, False]


def test_above_the_watermark_a_share_goes_ahead_of_demand(arena):
    host = HostTier(arena, watermark=0.7, ratio=0.5)
    keys = chain(3)
    write(host, keys[:2])
    assert host.relieve() == 0
    write(host, keys[2:])
    assert host.relieve() == 2 * SIZE
    assert [key in host for key in keys] == [True, False, False]
    host.clear()


def test_a_victim_that_is_locked_is_kept_in_the_books(arena):
    host = HostTier(arena, policy="fifo", watermark=0.7, ratio=0.5)
    keys = [*chain(1, "a"), *chain(1, "b"), *chain(1, "c")]
    write(host, keys)
    leases = host.reserve_read(keys)
    assert host.relieve() == 0
    for lease in leases.values():
        host.finish_read(lease)
    assert host.relieve() == 2 * SIZE
    assert len(host) == 1
    host.clear()


def test_shares_that_make_no_sense_are_refused(arena):
    with pytest.raises(ConfigError, match="watermark"):
        HostTier(arena, watermark=0)
    with pytest.raises(ConfigError, match="no policy 'lruu'; did you mean 'lru'"):
        HostTier(arena, policy="lruu")


def test_temporary_objects_of_one_key_do_not_meet_and_vanish_with_their_reader(host):
    (key,) = chain(1)
    first, second = make_temp_key(key), make_temp_key(key)
    write(host, [first, second, key], temporary=True)
    assert len(host) == 3
    for name in (first, second, key):
        (lease,) = host.reserve_read([name]).values()
        assert holds(lease.memory, key)
        host.finish_read(lease)
        assert name not in host


def test_waiting_for_an_object_that_somebody_writes(host):
    (key,) = chain(1)
    (lease,) = host.reserve_write({key: PLAN}).values()
    threading.Timer(0.05, host.finish_write, [lease]).start()
    host.wait_ready([key], 10)
    assert key in host
    (other,) = chain(1, "other")
    (lease,) = host.reserve_write({other: PLAN}).values()
    host.wait_ready([other], 0.01)  # in vain
    assert other not in host
    host.cancel_write(lease)
    host.cancel_write(lease)  # it is void by now: nothing to give up
    host.wait_ready([other], 10)


def test_names_are_those_of_stores(host):
    (key,) = chain(1)
    write(host, [key])
    assert StoreKey.of(key) in host
    assert host.delete([StoreKey.of(key)]) == {StoreKey.of(key)}
    assert len(host) == 0


def test_victims_that_somebody_has_just_begun_to_read_are_passed_over(host, monkeypatch):
    """The policy names a victim before it learns that it is read: it takes it back as one that is, and names others."""
    keys = [*chain(1, "a"), *chain(1, "b"), *chain(1, "c"), *chain(1, "d")]
    write(host, keys)
    policy, leases = host._policy, {}

    def read_first(nbytes):
        names = host._victims(nbytes)
        if not leases:
            leases.update(host.reserve_read(names))
        return names

    monkeypatch.setattr(host._l1, "_victims", read_first)
    write(host, chain(1, "new"))
    assert [key in host for key in keys] == [True, False, True, True]
    assert policy.unpin(StoreKey.of(keys[0]))  # once for the reader
    assert not policy.unpin(StoreKey.of(keys[0]))
    policy.pin(StoreKey.of(keys[0]))
    for lease in leases.values():
        host.finish_read(lease)
    monkeypatch.undo()
    leases.clear()
    assert not policy.unpin(StoreKey.of(keys[0]))
    write(host, chain(3, "more"))
    assert len(host) == 4


def test_relieve_ends_each_lease_when_its_time_is_over(arena):
    now = [0.0]
    host = HostTier(arena, watermark=1.0, write_ttl=10.0, read_ttl=4.0, clock=lambda: now[0])
    (read,), (slow,), (temporary,), (dead,) = (chain(1, name) for name in ("read", "slow", "temporary", "dead"))
    write(host, [read])
    write(host, [temporary], temporary=True)
    (lease,) = host.reserve_write({dead: PLAN}).values()  # until 10, and its memory is kept until 20
    now[0] = 1.0
    held = [*host.reserve_read([read]).values(), *host.reserve_read([temporary]).values()]  # until 5
    now[0] = 3.0
    held += host.reserve_read([read]).values()  # until 7
    (late,) = host.reserve_write({slow: PLAN}).values()  # until 13
    seen = {}
    for second in range(4, 31):
        now[0] = float(second)
        host.relieve()
        stats = host.stats()
        state = stats.staging, stats.locked, len(host), arena.live_leases
        if state not in seen.values():
            seen[second] = state
    assert seen == {
        4: (2, 2, 2, 4),
        5: (2, 1, 1, 3),  # the temporary object is gone with its reader
        7: (2, 0, 1, 3),
        10: (1, 0, 1, 3),
        13: (0, 0, 1, 3),
        20: (0, 0, 1, 2),
        23: (0, 0, 1, 1),
    }
    for void in held:
        with pytest.raises(LeaseError):
            host.finish_read(void)
    for void in (lease, late):
        with pytest.raises(LeaseError):
            host.finish_write(void)
    host.clear()
