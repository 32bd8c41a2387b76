"""The store that fails on purpose: each fault, when it was told to, and no other."""

from __future__ import annotations

import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import FsStore, MemoryStore, StoreKey, open_store
from kvcore.tiers.stores.capped import CappedStore
from kvcore.tiers.stores.fault import KINDS, OPS, Fault, FaultPlan, FaultStore

ERRNOS = [kind for kind in KINDS if kind.startswith("e")]


def key(n):
    return StoreKey(bytes(32), n.to_bytes(32, "little"))


def made(text):
    """Return a fault store over memory."""
    return FaultStore(MemoryStore(), FaultPlan.parse(text))


def call(store, op, n=1):
    return {
        "put": lambda: store.put(key(n), b"frame"),
        "get": lambda: store.get(key(n)),
        "stat": lambda: store.stat(key(n)),
        "delete": lambda: store.delete(key(n)),
        "list": lambda: list(store.list()),
        "quarantine": lambda: store.quarantine(key(n), "crc"),
    }[op]()


@pytest.mark.parametrize("kind", ERRNOS)
@pytest.mark.parametrize("op", OPS)
def test_an_errno_fails_the_call_before_it_does_anything(op, kind):
    store = made(f"{op}.{kind}=1")
    store.inner.put(key(1), b"before")
    counted = store.inner.stats()
    with pytest.raises(StoreError, match=f"'{kind.upper()}'.*told to inject") as caught:
        call(store, op)
    assert caught.value.errno == getattr(errno, kind.upper())
    assert store.inner.stats() == counted
    assert store.inner.get(key(1)) == b"before"
    assert store.injected() == {f"{op}.{kind}": 1}
    for other in set(OPS) - {op}:
        call(store, other)


@pytest.mark.parametrize("op", OPS)
def test_lost_fails_the_call_after_it_was_done(op):
    store = made(f"{op}.lost=@2")
    store.inner.put(key(1), b"before")
    call(store, op, n=2)
    with pytest.raises(StoreError) as caught:
        call(store, op)
    assert caught.value.errno == errno.ECONNRESET
    expected = {"put": b"frame", "delete": None, "quarantine": None}.get(op, b"before")
    assert store.inner.get(key(1)) == expected


def test_a_short_write_is_a_store_that_lies():
    store = made("put.short=1")
    assert store.put(key(1), bytes(range(100))) == 100
    found = bytes(store.get(key(1)))
    assert len(found) < 100
    assert found == bytes(range(100))[: len(found)]
    assert store.put(key(2), b"") == 0
    assert store.injected() == {"put.short": 1}


def test_a_write_that_fails_half_way_leaves_half():
    store = made("put.half=@1")
    with pytest.raises(StoreError) as caught:
        store.put(key(1), bytes(range(100)))
    assert caught.value.errno == errno.EIO
    assert store.get(key(1)) == bytes(range(50))
    assert store.put(key(1), b"again") == 5
    assert store.get(key(1)) == b"again"


@pytest.mark.parametrize("op", ["put", "get"])
def test_one_bit_is_another(op):
    store = made(f"{op}.flip=1")
    frame = bytes(100)
    store.put(key(1), frame)
    found = store.get(key(1))
    assert found.readonly
    assert sum(byte.bit_count() for byte in found) == 1
    assert (sum(store.inner.get(key(1))) == 0) == (op == "get")


def test_a_short_read_leaves_the_frame_alone():
    store = made("get.short=@1")
    store.put(key(1), bytes(100))
    first, second = store.get_batch([key(1), key(1)])
    assert len(first) < 100
    assert first.readonly
    assert second == bytes(100)
    assert store.get(key(2)) is None


def test_latency_is_of_the_calls_that_it_names(monkeypatch):
    waited = []
    monkeypatch.setattr("kvcore.tiers.stores.fault.time.sleep", waited.append)
    store = made("get.latency=30ms")
    store.put(key(1), b"frame")
    assert waited == []
    store.get_batch([key(1), key(2)])
    assert waited == pytest.approx([0.03, 0.03])
    assert made("latency=1ms").plan.faults == (Fault("*", "latency", 1.0, seconds=0.001),)


def test_an_outage_lasts_until_it_is_healed():
    store = made("")
    store.put(key(1), b"frame")
    store.fail(errno.ETIMEDOUT)
    for op in OPS:
        with pytest.raises(StoreError) as caught:
            call(store, op)
        assert caught.value.errno == errno.ETIMEDOUT
    assert [outcome.errno for outcome in store.get_batch([key(1), key(2)])] == [errno.ETIMEDOUT] * 2
    store.heal()
    assert store.get(key(1)) == b"frame"
    assert store.injected() == {f"{op}.outage": 3 if op == "get" else 1 for op in OPS}


def happened(store, calls):
    failed = []
    for n in range(calls):
        try:
            store.put(key(n), b"frame")
        except StoreError:
            failed.append(n)
    return failed


def test_the_seed_chooses_the_calls():
    first, again, other = (happened(made(f"put.enospc=0.2,seed={seed}"), 500) for seed in (1, 1, 2))
    assert first == again != other
    assert 60 < len(first) < 140  # 100 expected, standard deviation 9
    assert happened(made("put.enospc=0"), 100) == []
    assert happened(made("put.enospc=1"), 5) == [0, 1, 2, 3, 4]


def test_calls_by_their_number():
    assert happened(made("put.enospc=@3+5"), 8) == [2, 4]
    assert happened(made("enospc=@2"), 4) == [1]


def test_other_ops_and_threads_do_not_change_which_calls_fail():
    store = made("put.enospc=0.2,get.eio=0.3,seed=1")

    def put_and_get(n):
        for op in ("put", "get"):
            with contextlib.suppress(StoreError):
                call(store, op, n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put_and_get, range(500)))
    assert store.injected()["put.enospc"] == len(happened(made("put.enospc=0.2,seed=1"), 500))


def test_one_bad_item_does_not_spoil_its_batch():
    store = made("put.enospc=@2")
    outcomes = store.put_batch([(key(n), b"frame") for n in range(3)])
    assert (outcomes[0], outcomes[2]) == (5, 5)
    assert outcomes[1].errno == errno.ENOSPC
    assert store.get_batch([key(n) for n in range(3)]) == [b"frame", None, b"frame"]


def test_an_outcome_keeps_no_frame_alive():
    alone, behind = made("eio=1"), CappedStore(made("put.eio=1,get.eio=1"), 100)
    for store in (alone, behind):
        for outcomes in (store.put_batch([(key(n), b"frame") for n in range(2)]), store.get_batch([key(1)])):
            assert {outcome.errno for outcome in outcomes} == {errno.EIO}
            assert {outcome.__traceback__ for outcome in outcomes} == {None}


def test_its_uri(tmp_path):
    text = "put.enospc=0.1,get.short=@2,latency=5ms,seed=7"
    with open_store(f"fault:{text}:fs:{tmp_path}/store") as store:
        assert store.plan == FaultPlan.parse(text)
        assert store.plan.seed == 7
        assert type(store.inner) is FsStore
        assert store.name == f"fault:fs:{tmp_path}/store"
    with pytest.raises(StoreError, match="closed"):
        store.inner.get(key(1))
    with open_store("fault:get.eio=1:fault:put.eio=1:memory:") as store:
        for op in ("get", "put"):
            with pytest.raises(StoreError):
                call(store, op)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("put.enospc", "write put.enospc=0.1"),
        ("put.nothing=1", "no fault 'nothing'; there are enospc"),
        ("read.eio=1", "'read': there are put, get"),
        ("put.eio=1.5", "0 to 1"),
        ("put.eio=nan", "0 to 1"),
        ("put.eio=often", "'often' is no number"),
        ("put.eio=@", "'' is no number"),
        ("put.eio=@0", "counted from 1"),
        ("stat.short=1", "put and get, not of stat"),
        ("short=1", r"not of \*"),
        ("get.half=1", "one of put"),
        ("latency=5", "not a time"),
        ("seed=one", "'one' is no number"),
    ],
)
def test_a_plan_that_means_nothing_opens_nothing(text, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        open_store(f"fault:{text}:fs:{tmp_path}/store")
    assert not (tmp_path / "store").exists()


def test_a_delay_is_not_negative():
    with pytest.raises(ConfigError, match="negative"):
        Fault("put", "latency", 1.0, seconds=-1.0)
