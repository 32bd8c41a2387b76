"""Tiers from a configuration: what means nothing is refused, and nothing stays open, however it ends."""

import gc
import os
import threading

import pytest

import kvcore
from kvcore.errors import ConfigError, LeaseError, StoreError
from kvcore.tiers import config as tiers_config
from kvcore.tiers.arena import HostArena
from kvcore.tiers.config import StoreTierConfig, TiersConfig, open_tiers
from kvcore.tiers.host_limits import HostLimits
from kvcore.tiers.observer import TierObserver

from .objects import PLAN, chain, fill, holds

SMALL = {"host_bytes": 1 << 16, "pinned": False}


@pytest.fixture(scope="module")
def backend():
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture
def opened(backend):
    caches = []

    def make(**config):
        caches.append(open_tiers({**SMALL, **config}, backend))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def resources():
    """Descriptors, threads and arenas of this process."""
    gc.collect()
    arenas = sum(type(one) is HostArena and not one._closed for one in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), arenas


def save(cache, keys):
    leases = list(cache.reserve(dict.fromkeys(keys, PLAN)).values())
    for lease in leases:
        fill(lease.memory, lease.key)
    return cache.stored(cache.commit(leases))


def load(cache, keys):
    found = cache.load(keys, [PLAN] * len(keys))
    for key, one in zip(keys, found, strict=True):
        assert holds(one.lease.memory, key)
        cache.release(one)
    return [one.tier for one in found]


def test_tiers_by_a_configuration(opened, tmp_path):
    disk = {"store": f"fs:{tmp_path}/a", "serde": {"type": "kvs1", "preset": "lossless"}}
    cache = opened(tiers=[{"store": "memory:", "serde": "raw"}, disk])
    keys = chain(3)
    for outcome in save(cache, keys):
        assert outcome.error is None
        assert set(outcome.tiers) == {"memory", "disk"}
    cache.host.clear()
    assert load(cache, keys) == ["memory"] * 3
    assert set(cache.stats()) == {"host", "memory", "disk"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"host_byte": 1},
            r"tiers: host_byte: no such setting; did you mean 'host_bytes'\? there are tiers, host_bytes",
        ),
        ({"tiers": [{"store": "memory:", "serd": "raw"}]}, r"tiers\.0\.serd: .* mean 'serde'\? there are store, serde"),
        ({"tiers": [{"serde": "raw"}]}, r"tiers\.0\.store: Field required"),
        ({"tiers": "memory:"}, "tiers: "),
        ({"host_bytes": 0}, "host_bytes: .*greater than 0"),
        ({"host_bytes": "much"}, "host_bytes: .*integer"),
        ({"max_in_flight": 0}, "max_in_flight: .*greater than 0"),
        ({"serde_workers": 0}, "serde_workers: .*greater than 0"),
        ({"store_workers": 0}, "store_workers: .*greater than 0"),
        ({"min_host_bytes": 1 << 20}, "the host arena needs 1048576 B, but gets 65536 B: 64 KiB asked for"),
        ({"policy": "lruu"}, "no policy 'lruu'; did you mean 'lru'"),
        ({"store_policy": "write_thru"}, "no store policy 'write_thru'; .*write_through"),
        ({"store_policy": "buffer_only", "tiers": []}, "needs a store"),
        ({"tiers": [{"store": "memory:", "serde": "kvs2"}]}, "no serde 'kvs2'; did you mean 'kvs1'.*there are .*fp8"),
        ({"tiers": [{"store": "memory:", "serde": {"type": "raw", "level": 3}}]}, "not 'level'"),
        ({"tiers": [{"store": "memory:", "serde": '{"type": 1}'}]}, r"tiers\.0\.serde: the type of a serde is a name"),
        ({"tiers": [{"store": "memory:", "serde": {"type": "asym_k16_v8", "slots": True}}]}, "takes groups of 2"),
        ({"tiers": [{"store": "memory:", "serde": {"type": "asym_k16_v8", "mode": "k_elsewhere"}}]}, "leaves parts"),
        ({"tiers": [{"store": "aesgcm"}]}, "not the URI of a store"),
        ({"tiers": [{"store": "memorie:"}]}, "did you mean 'memory'"),
        ({"tiers": [{"store": "memory:"}, {"store": "memory:"}]}, "names of their own, got host, memory, memory; give"),
        ({"tiers": [{"store": "memory:", "name": "host"}]}, "names of their own"),
    ],
)
def test_what_means_nothing_is_a_config_error_and_leaves_nothing_open(backend, tmp_path, change, match):
    good = {"tiers": [{"store": f"fs:{tmp_path}", "name": "first"}]}
    before = resources()
    with pytest.raises(ConfigError, match=match) as refused:
        open_tiers({**SMALL, **good, **change}, backend)
    del refused
    assert resources() == before


def test_a_store_that_cannot_be_opened_leaves_nothing_open(backend, tmp_path):
    (tmp_path / "file").write_text("in the way")
    tiers = [{"store": f"fs:{tmp_path}/good"}, {"store": f"fs:{tmp_path}/file", "name": "second"}]
    before = resources()
    with pytest.raises(StoreError) as refused:
        open_tiers({**SMALL, "tiers": tiers}, backend)
    del refused
    assert resources() == before


def test_a_limit_of_locked_memory_that_is_too_small_says_the_limit_and_what_was_granted(backend, monkeypatch):
    limits = HostLimits(lockable=1 << 20, memlock=2 << 20)
    monkeypatch.setattr(
        tiers_config, "HostArena", lambda *given, **options: HostArena(*given, **options, limits=limits)
    )
    wanted = {"host_bytes": 1 << 30, "min_host_bytes": 4 << 20, "tiers": [{"store": "memory:"}]}
    with pytest.raises(ConfigError, match="needs 4194304 B, but gets 1048576 B: 1 MiB instead of 1 GiB") as refused:
        open_tiers(wanted, backend)
    assert "RLIMIT_MEMLOCK is 2 MiB, of which 1 MiB are left; raise it" in str(refused.value)
    with open_tiers({**wanted, "min_host_bytes": 1 << 19}, backend) as cache:  # less is granted, and said
        assert cache.host.arena.capacity_bytes == 1 << 20
        assert "RLIMIT_MEMLOCK" in cache.host.arena.notes[0]


def test_equal_serdes_are_one_so_that_their_frames_can_be_copied(opened, tmp_path):
    kvs1 = {"type": "kvs1", "preset": "balanced", "nonfinite": "raw"}
    cache = opened(
        tiers=[
            {"store": "memory:", "serde": kvs1},
            {"store": f"fs:{tmp_path}/a", "serde": dict(reversed(kvs1.items()))},
            {"store": f"fs:{tmp_path}/b", "serde": {**kvs1, "preset": "small"}, "name": "other"},
        ]
    )
    first, second, third = (tier.store.serde for tier in cache.tiers)
    assert first is second
    assert first is not third


@pytest.mark.parametrize(
    ("uri", "label"),
    [
        ("memory:", "memory"),
        ("fs:/kv", "disk"),
        ("resp://h", "remote"),
        ("s3://b/p", "remote"),
        ("capped:1GiB:fs:/kv", "disk"),
        ("fault:puts=3:capped:1GiB:memory:", "memory"),
    ],
)
def test_a_tier_is_called_by_what_it_is_unless_it_has_a_name(uri, label):
    assert StoreTierConfig(store=uri).label == label
    assert StoreTierConfig(store=uri, name="mine").label == "mine"


def test_a_configuration_is_taken_as_it_is_or_as_a_mapping():
    config = TiersConfig(tiers=(StoreTierConfig(store="memory:"),))
    assert TiersConfig.of(config) is config
    assert TiersConfig.of({"tiers": [{"store": "memory:"}]}) == config


class Steps(TierObserver):
    def __init__(self):
        self.steps = []

    def serde(self, serde, direction, nbytes, seconds):
        self.steps.append((serde, direction, nbytes))
        assert 0 < seconds < 60


def test_an_observer_is_told_of_the_steps_of_serdes(backend, tmp_path):
    key_file = tmp_path / "keys"
    key_file.write_text("42" * 32)
    key_file.chmod(0o600)
    steps = ["raw", {"type": "aesgcm", "key_file": str(key_file), "tenant": "somebody"}]
    tiers = [
        {"store": "memory:", "serde": {"type": "kvs1", "preset": "lossless"}},
        {"store": f"fs:{tmp_path}/a", "serde": {"type": "chain", "steps": steps}},
    ]
    observer, keys = Steps(), chain(2)
    with open_tiers({**SMALL, "tiers": tiers}, backend, observer=observer) as cache:
        sizes = [outcome.tiers["memory"] for outcome in save(cache, keys)]
        cache.host.clear()
        load(cache, keys)
    assert {step[:2] for step in observer.steps} == {
        ("kvs1:lossless", "serialize"),
        ("kvs1:lossless", "deserialize"),
        ("raw+aesgcm", "serialize"),  # and no word of keys or tenants
    }
    read = [nbytes for serde, direction, nbytes in observer.steps if direction == "deserialize"]
    assert sorted(read) == sorted(sizes)


def test_all_is_closed_with_the_cache_time_and_again(backend, tmp_path):
    keys = chain(3)
    config = {**SMALL, "tiers": [{"store": f"fs:{tmp_path}/a", "serde": "kvs1"}, {"store": "memory:"}]}
    with open_tiers(config, backend) as cache:  # what is done once, such as loading a library, is done now
        save(cache, keys)
    before = resources()
    for _ in range(10):
        with open_tiers(config, backend) as cache:
            save(cache, keys)
            cache.forget_load(cache.begin_load(keys, [PLAN] * 3))
        cache.close()
    assert resources() == before


def test_who_closes_while_somebody_reads_is_told_so_and_can_close_again(backend):
    cache = open_tiers({**SMALL, "tiers": [{"store": "memory:"}]}, backend)
    (key,) = chain(1)
    save(cache, [key])
    (found,) = cache.load([key], [PLAN])
    with pytest.raises(LeaseError, match="1 live lease"):
        cache.close()
    assert holds(found.lease.memory, key)
    cache.release(found)
    del found
    cache.close()
    assert cache.host.arena._closed
