"""Tiers whose stores go away: nobody waits for them, the log has a line, and they come back by themselves."""

from __future__ import annotations

import socket
import statistics
import threading
import time

import pytest

import kvcore
from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.config import TiersConfig, open_tiers
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.stores import StoreUnavailableError
from kvcore_conformance.stores import servers

from .objects import PLAN, chain, fill, holds
from .stores.outages import lines

SMALL = {"host_bytes": 1 << 16, "pinned": False, "retry_seconds": [0.02, 0.1]}


class Notes(TierObserver):
    """Notes what is told of outages, and how many objects are coded."""

    def __init__(self):
        self.told, self.coded, self.failures = [], 0, []

    def degraded(self, tier, reason):
        self.told.append(("down", tier))

    def recovered(self, tier, seconds):
        self.told.append(("back", tier))

    def failure(self, tier, operation, error):
        self.failures.append((tier, operation, type(error)))

    def serde(self, serde, direction, nbytes, seconds):
        self.coded += direction == "serialize"


@pytest.fixture(scope="module")
def backend():
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture
def opened(backend):
    caches = []

    def make(*tiers, **config):
        notes = Notes()
        caches.append(open_tiers({**SMALL, "tiers": list(tiers), **config}, backend, observer=notes))
        return caches[-1], notes

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture
def redis():
    """A server, not started yet, which keeps what it acknowledged; skipped aloud where there is none."""
    with servers.serving(servers.RedisServer) as server:
        yield server


def save(cache, keys):
    leases = list(cache.reserve(dict.fromkeys(keys, PLAN)).values())
    for lease in leases:
        fill(lease.memory, lease.key)
    outcomes = cache.stored(cache.commit(leases))
    assert cache.flush(20)
    return outcomes


def load(cache, keys):
    """Load a prefix, check every byte; return where each object was, or what ended it."""
    places = []
    for key, one in zip(keys, cache.load(keys, [PLAN] * len(keys)), strict=False):
        if isinstance(one, Found):
            assert holds(one.lease.memory, key)
            cache.release(one)
        places.append(one.tier if isinstance(one, Found) else one)
    return places


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def fault(cache, number=0):
    return cache.tiers[number].store.store.inner


def test_while_a_tier_is_down_host_memory_and_the_others_serve(opened, caplog):
    cache, notes = opened({"store": "fault::memory:", "name": "near"}, {"store": "memory:", "name": "far"})
    keys, more = chain(3), chain(2, "more")
    save(cache, keys)
    fault(cache).fail()
    assert load(cache, keys) == ["host"] * 3
    cache.host.clear()
    assert cache.lookup(keys) == ["far"] * 3
    assert load(cache, keys) == ["far"] * 3
    for outcome in save(cache, more):
        assert isinstance(outcome.tiers["near"], StoreUnavailableError)
        assert outcome.error is None
    assert not cache.health()["near"].ok
    assert cache.health()["near"].reason.startswith("Connection refused")
    assert cache.health()["host"].ok
    assert cache.health()["far"].ok
    fault(cache).heal()
    until(lambda: cache.health()["near"].ok and len(notes.told) == 2)
    assert notes.told == [("down", "near"), ("back", "near")]
    assert len(lines(caplog)) == 2
    assert cache.stats()["near"].outages == 1
    assert cache.stats()["near"].down_seconds > 0
    cache.host.clear()
    assert load(cache, keys) == ["near"] * 3  # nothing was lost


def test_nothing_is_coded_for_a_tier_that_is_down_and_lookups_of_it_are_misses_only(opened):
    cache, notes = opened({"store": "fault::memory:", "serde": "kvs1"}, retry_seconds=60)
    keys = chain(2)
    fault(cache).fail()
    assert cache.lookup(keys) == []
    assert notes.failures == [("memory", "lookup", StoreError)]
    for outcome in save(cache, keys):
        assert isinstance(outcome.error, StoreUnavailableError)
    assert notes.coded == 0
    cache.host.clear()
    assert cache.lookup(keys) == []
    assert isinstance(load(cache, keys)[0], StoreUnavailableError)
    assert {operation for _, operation, _ in notes.failures[1:]} == {"store"}
    assert isinstance(cache.delete(keys)["memory"], StoreUnavailableError)
    assert notes.told == [("down", "memory")]


def test_a_server_that_never_answers_costs_one_request_its_timeout_and_no_other_one(opened, caplog):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(16)
        uri = f"resp://127.0.0.1:{deaf.getsockname()[1]}?timeout=200ms"
        pytest.importorskip("redis")
        cache, notes = opened({"store": uri}, retry_seconds=[0.05, 0.1])  # tried again all the while
        keys = chain(8)
        times = []
        for _ in range(100):
            began = time.perf_counter()
            assert cache.lookup(keys) == []
            times.append(time.perf_counter() - began)
            time.sleep(0.005)
        assert statistics.median(times) < 0.01
        assert max(times) < 0.15  # of a busy machine; the timeout alone is longer
        assert notes.told == [("down", "remote")]
        assert len(lines(caplog)) == 1
        assert uri.partition("?")[0] in cache.describe()["remote"].store


def test_a_disk_that_becomes_full_takes_nothing_more_and_gives_what_it_has(opened, tmp_path, caplog):
    full = {"store": f"fault:put.enospc=@3+4:fs:{tmp_path}/kv", "serde": "lossless"}
    cache, notes = opened(full)
    keys, more = chain(2), chain(2, "more")
    save(cache, keys)
    for outcome in save(cache, more):
        assert isinstance(outcome.error, StoreError)
    cache.host.clear()
    assert load(cache, keys) == ["disk"] * 2
    assert cache.lookup(more) == []
    assert cache.health()["disk"].ok
    assert notes.told == []
    assert all(outcome.error is None for outcome in save(cache, more))  # somebody made room
    assert lines(caplog) == []


def test_a_server_that_is_not_there_at_start_is_used_when_it_comes(opened, redis, caplog):
    redis.kill()
    cache, notes = opened({"store": redis.uri, "serde": "kvs1"}, {"store": "memory:"})
    keys = chain(3)
    assert notes.told == [("down", "remote")]
    assert cache.describe()["remote"].health.state == "down"
    for outcome in save(cache, keys):
        assert outcome.error is None  # the other tier has it
    redis.start()
    until(lambda: cache.health()["remote"].ok and len(notes.told) == 2)
    assert notes.told == [("down", "remote"), ("back", "remote")]
    assert len(lines(caplog)) == 2
    more = chain(2, "more")
    assert all(isinstance(outcome.tiers["remote"], int) for outcome in save(cache, more))
    cache.host.clear()
    assert cache.lookup(more) == ["remote"] * 2


def test_a_server_that_is_killed_and_started_again_loses_nothing_it_acknowledged(opened, redis, caplog):
    cache, notes = opened({"store": redis.uri, "serde": "lossless"}, retry_seconds=[0.05, 0.2])
    keys = chain(6)
    save(cache, keys)
    stop = threading.Event()
    wrong, asked = [], []

    def requests():
        number = 0
        while not stop.is_set():
            cache.host.clear()
            places = load(cache, keys)
            asked.append(places)
            if not all(isinstance(place, (str, StoreError)) for place in places):
                wrong.append(places)
            save(cache, chain(1, f"other {number}"))
            number += 1

    thread = threading.Thread(target=requests)
    thread.start()
    try:
        until(lambda: len(asked) > 3)
        redis.kill()
        until(lambda: ("down", "remote") in notes.told)
        redis.start()
        until(lambda: ("back", "remote") in notes.told)
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert wrong == []
    cache.host.clear()
    assert load(cache, keys) == ["remote"] * 6
    assert notes.told == [("down", "remote"), ("back", "remote")]
    assert len(lines(caplog)) == 2


def test_promotions_wait_for_no_tier_that_is_down(opened):
    cache, notes = opened({"store": "fault::memory:", "name": "near"}, {"store": "memory:", "name": "far"})
    keys = chain(2)
    save(cache, keys)
    fault(cache).fail()
    cache.host.clear()
    assert load(cache, keys) == ["far"] * 2
    assert cache.flush(5)
    assert ("near", "store", StoreUnavailableError) not in notes.failures


@pytest.mark.parametrize(("given", "pair"), [(2, (2.0, 2.0)), ([1, 8], (1.0, 8.0)), ((0.5, 30.0), (0.5, 30.0))])
def test_waits_are_two_numbers_or_one(given, pair):
    config = TiersConfig.of({"retry_seconds": given, "tiers": [{"store": "memory:", "retry_seconds": given}]})
    assert config.retry_seconds == config.tiers[0].retry_seconds == pair


@pytest.mark.parametrize("given", [0, [2, 1], "soon", [1], [1, 2, 3], True])
def test_waits_that_mean_nothing_are_config_errors(given):
    with pytest.raises(ConfigError, match="retry_seconds"):
        TiersConfig.of({"retry_seconds": given})
