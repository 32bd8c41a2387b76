"""The store over a cluster: every key on its node, batches over all of them, nodes that go and slots that move."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from kvcore.errors import StoreError
from kvcore.tiers.stores import StoreKey, StoreStat, StoreStats
from kvcore.tiers.stores import resp_client as client_module
from kvcore.tiers.stores.resp import RespStore, open_resp


def key(n: int, namespace: int = 0) -> StoreKey:
    return StoreKey(bytes([namespace]) * 32, n.to_bytes(32, "big"))


@pytest.fixture(scope="module")
def nodes(_module_servers: Callable[..., Any]) -> tuple[Any, Any]:
    """Two primaries with half of the slots each."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes")
    options += ("--appendfsync", "always")
    one, two = (_module_servers(*options) for _ in range(2))
    one.make_cluster(two)
    return one, two


@pytest.fixture(params=[2, 3])
def store(request: pytest.FixtureRequest, nodes: tuple[Any, Any]) -> Iterator[RespStore]:
    for node in nodes:
        node.admin.flushall()
    with open_resp(f"{nodes[0].uri}?cluster=1&protocol={request.param}&timeout=10s") as opened:
        yield opened


def test_frames_are_on_all_nodes(store: RespStore, nodes: tuple[Any, Any]) -> None:
    frames = {key(n, space): bytes([n]) * (n * 9000) for n in range(20) for space in (1, 2)}
    assert store.put_batch(list(frames.items())) == [len(frame) for frame in frames.values()]
    counts = [node.admin.dbsize() for node in nodes]
    assert sum(counts) == 41  # and the marker
    assert min(counts) > 5
    assert store.get_batch(list(frames)) == list(frames.values())
    assert store.stat_batch([*frames, key(99)]) == [*(StoreStat(len(frame)) for frame in frames.values()), None]
    assert sorted(store.list()) == sorted(frames)
    assert sorted(store.list(b"\2" * 32)) == sorted(name for name in frames if name.namespace == b"\2" * 32)
    assert store.delete_batch([*frames, key(99)]) == [True] * 40 + [False]
    assert list(store.list()) == []
    assert store.stats() == StoreStats(puts=40, put_bytes=3_420_000, hits=40, hit_bytes=3_420_000, deletes=40)


def test_quarantine_stays_on_the_node_of_its_frame(store: RespStore, nodes: tuple[Any, Any]) -> None:
    for n in range(8):
        store.put(key(n), b"bad")
        assert store.quarantine(key(n), "crc")
        assert not store.quarantine(key(n), "crc")
        assert store.get(key(n)) is None
    asides = [name for node in nodes for name in node.admin.keys("kvcore:quarantine:*")]
    assert len(asides) == 8
    assert all(0 < node.admin.ttl(name) <= 86400 for node in nodes for name in node.admin.keys("*quarantine:*"))


def test_a_slot_that_moved_is_followed(store: RespStore, nodes: tuple[Any, Any]) -> None:
    slot = key_slot(f"kvcore:frame:{{{key(1).namespace.hex()}:{key(1).digest.hex()}}}".encode())
    owners = [node for node in nodes if _owns(node, slot)]
    assert len(owners) == 1
    (other,) = (node for node in nodes if node is not owners[0])
    store.put(key(2), b"x")
    _move(slot, other, nodes)
    try:
        assert store.put_batch([(key(1), b"frame"), (key(2), b"y")]) == [5, 1]
        assert store.get_batch([key(1), key(2)]) == [b"frame", b"y"]
        assert other.admin.dbsize() > 0
        assert store.delete_batch([key(1), key(1)]) == [True, False]
    finally:
        _move(slot, owners[0], nodes)
    assert store.get(key(1)) is None


def _owns(node: Any, slot: int) -> bool:
    mine = node.admin.cluster("MYID").decode()
    for start, end, primary, *_ in node.admin.execute_command("CLUSTER SLOTS"):
        if start <= slot <= end:
            return bool(primary[2].decode() == mine)
    return False


def _move(slot: int, target: Any, nodes: tuple[Any, Any]) -> None:
    name = target.admin.cluster("MYID").decode()
    for node in (target, *(node for node in nodes if node is not target)):
        node.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)


def test_a_node_that_is_restarted_is_found_again(nodes: tuple[Any, Any]) -> None:
    wanted = {key(n): bytes([n]) * 1000 for n in range(30)}
    with open_resp(f"{nodes[0].uri}?cluster=1&timeout=20s") as store:
        store.put_batch(list(wanted.items()))
        for node in nodes:
            node.kill()
        for node in nodes:
            node.start()
        assert store.get_batch(list(wanted)) == list(wanted.values())
        assert set(wanted) <= set(store.list())
        assert store.put_batch(list(wanted.items())) == [1000] * 30
    _settle(nodes)


def test_without_a_node_its_frames_are_errors_and_the_others_are_served(nodes: tuple[Any, Any]) -> None:
    names = [key(n) for n in range(20)]
    with open_resp(f"{nodes[0].uri}?cluster=1&timeout=200ms") as store:
        store.put_batch([(name, b"frame") for name in names])
        nodes[1].kill()
        try:
            outcomes = store.get_batch(names)
            here = [n for n, outcome in enumerate(outcomes) if outcome == b"frame"]
            assert 0 < len(here) < 20
            lost = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
            assert len(lost) == 20 - len(here)
            assert {error.errno for error in lost} <= {errno.ECONNREFUSED, errno.ECONNRESET, errno.EAGAIN}
            large = [(name, bytes(client_module.PIPELINE_BYTES)) for name in names[:4]]  # each has its own pipeline
            assert {n for n, outcome in enumerate(store.put_batch(large)) if isinstance(outcome, int)} == {
                n for n in here if n < 4
            }
            written = store.put_batch([(name, b"other") for name in names])
            assert [n for n, outcome in enumerate(written) if outcome == 5] == here
        finally:
            nodes[1].start()
        _settle(nodes)
        assert store.get_batch(names) == [b"other" if n in here else b"frame" for n in range(20)]


def _settle(nodes: tuple[Any, Any]) -> None:
    deadline = time.monotonic() + 20
    while any(node.admin.cluster("INFO")["cluster_state"] != "ok" for node in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_the_address_says_must_be_true(nodes: tuple[Any, Any], redis_uri: str) -> None:
    with pytest.raises(StoreError, match="leave out cluster=1") as caught:
        open_resp(f"{redis_uri}?cluster=1")
    assert caught.value.errno == errno.EINVAL

    def use_as_one_server() -> None:
        with open_resp(nodes[0].uri) as store:
            for n in range(10):
                store.put(key(n), b"frame")

    with pytest.raises(StoreError, match="add cluster=1") as caught:
        use_as_one_server()
    assert caught.value.errno == errno.EINVAL


def test_a_cluster_without_all_slots_is_not_ready(start_redis: Callable[..., Any]) -> None:
    node = start_redis("--cluster-enabled", "yes")
    node.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8000)
    with pytest.raises(StoreError, match="CLUSTER INFO") as caught:
        open_resp(f"{node.uri}?cluster=1")
    assert caught.value.errno == errno.EAGAIN


def test_a_frame_too_large_for_one_node_is_too_large(nodes: tuple[Any, Any]) -> None:
    nodes[1].admin.config_set("proto-max-bulk-len", 3 << 20)
    try:
        with open_resp(f"{nodes[0].uri}?cluster=1") as store:
            assert store.max_frame_bytes == 3 << 20
    finally:
        nodes[1].admin.config_set("proto-max-bulk-len", 512 << 20)


def test_few_rights_suffice(nodes: tuple[Any, Any]) -> None:
    rules = "on >hunter2 ~prod:* resetchannels -@all +get +set +strlen +exists +unlink +scan +pexpire +rename"
    for node in nodes:
        command = f"ACL SETUSER kvcore {rules} +command +cluster|slots +cluster|info"
        node.admin.execute_command(*command.split(" "))
    try:
        uri = nodes[0].uri.replace("//", "//kvcore:hunter2@")
        with open_resp(f"{uri}?cluster=1&prefix=prod:") as store:
            frames = [(key(n), bytes([n])) for n in range(12)]
            assert store.put_batch(frames) == [1] * 12
            assert store.get_batch([name for name, _ in frames]) == [frame for _, frame in frames]
            assert store.quarantine(key(0), "crc")
            assert sorted(store.list()) == [key(n) for n in range(1, 12)]
            assert store.delete_batch([key(n) for n in range(12)]) == [False] + [True] * 11
    finally:
        for node in nodes:
            node.admin.acl_deluser("kvcore")


def test_batches_are_bounded_in_a_cluster_too(store: RespStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PIPELINE_COMMANDS", 7)
    frames = {key(n): bytes([n]) for n in range(40)}
    assert store.put_batch(list(frames.items())) == [1] * 40
    assert store.get_batch(list(frames)) == list(frames.values())
