"""The store over Redis and Valkey, against a real server: what is stored, and how."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import StoreKey, StoreStat, StoreStats
from kvcore.tiers.stores import resp_client as client_module
from kvcore.tiers.stores.resp import RespStore, open_resp


def key(n: int, namespace: int = 0) -> StoreKey:
    return StoreKey(bytes([namespace]) * 32, n.to_bytes(32, "big"))


def frame_of(nbytes: int, seed: int = 0) -> bytes:
    return bytes((i * 31 + seed) % 251 for i in range(min(nbytes, 251))) * (nbytes // 251 + 1)


@pytest.fixture(params=["tcp", "unix", "resp3", "library"])
def store(
    request: pytest.FixtureRequest, redis_server: Any, redis_uri: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RespStore]:
    """The store over each transport; and over the library's own connections, should its insides change."""
    uri = {"tcp": redis_uri, "unix": f"resp+unix://{redis_server.socket}", "resp3": f"{redis_uri}?protocol=3"}
    if request.param == "library":
        monkeypatch.setitem(sys.modules, "kvcore.tiers.stores.resp_wire", None)
    with open_resp(uri.get(request.param, redis_uri)) as opened:
        yield opened


def test_put_get_stat_delete(store: RespStore) -> None:
    assert store.get(key(1)) is None
    assert store.put(key(1), b"frame") == 5
    assert store.get(key(1)) == b"frame"
    assert store.stat(key(1)) == StoreStat(5)
    assert store.exists(key(1))
    assert store.put(key(1), bytearray(b"other")) == 5
    assert store.get(key(1)) == b"other"
    assert store.delete(key(1))
    assert not store.delete(key(1))
    assert store.stat(key(1)) is None
    assert store.get(key(1)) is None
    assert store.stats() == StoreStats(puts=2, hits=2, misses=2, deletes=1, put_bytes=10, hit_bytes=10)


def test_frames_of_all_sizes_come_back_in_one_batch(store: RespStore) -> None:
    """Around the length from which a value is received directly, and around what is read ahead."""
    sizes = [0, 1, 65535, 65536, 65537, 3, 131071, 131072, 131073, 0, 262144, 1 << 20, 65536, (9 << 20) + 1, 2]
    frames = {key(n): frame_of(size, n)[:size] for n, size in enumerate(sizes)}
    assert store.put_batch(list(frames.items())) == sizes
    assert store.get_batch(list(frames)) == list(frames.values())
    assert store.stat_batch(list(frames)) == [StoreStat(size) for size in sizes]
    for name, frame in frames.items():
        assert store.get(name) == frame


def test_a_frame_that_was_read_stays_as_it_is(store: RespStore) -> None:
    for size in (10, 100_000):
        old = frame_of(size)
        store.put(key(1), old)
        got = store.get(key(1))
        assert got is not None
        assert got.readonly
        store.put(key(1), bytes(size))
        assert got == old
        store.delete(key(1))
        assert got == old


def test_a_buffer_is_the_callers_again(store: RespStore) -> None:
    buffer = bytearray(frame_of(100_000))
    before = bytes(buffer)
    store.put(key(1), memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert store.get(key(1)) == before


def test_reading_into_memory_of_the_callers(store: RespStore) -> None:
    store.put(key(1), b"frame")
    out = bytearray(8)
    assert store.get_into(key(1), memoryview(out)) == 5
    assert out[:5] == b"frame"
    assert store.get_into(key(2), memoryview(out)) is None
    assert store.get_into(key(1), memoryview(out)[:4]) is None  # it is longer than the caller was told
    assert store.get_batch_into([(key(1), memoryview(out)), (key(2), memoryview(out)[5:])]) == [5, None]
    assert store.stats() == StoreStats(puts=1, put_bytes=5, hits=2, hit_bytes=10, misses=3, torn=1)


def test_one_bad_frame_keeps_no_other_out(redis_server: Any, redis_uri: str) -> None:
    redis_server.admin.config_set("proto-max-bulk-len", 2 << 20)
    try:
        with open_resp(redis_uri) as store:
            assert store.max_frame_bytes == 2 << 20
            redis_server.admin.config_resetstat()
            large = bytes((2 << 20) + 1)
            with pytest.raises(StoreError, match=r"2097153 bytes is larger than the 2097152 bytes") as caught:
                store.put(key(1), large)
            assert caught.value.strerror
            assert caught.value.errno == 27  # EFBIG
            assert "cmdstat_set" not in redis_server.admin.info("commandstats")
            outcomes = store.put_batch([(key(1), b"old"), (key(1), large), (key(2), b"b"), (key(3), large[:-1])])
            assert [outcomes[0], *outcomes[2:]] == [3, 1, 2 << 20]
            assert isinstance(outcomes[1], StoreError)
            assert store.get_batch([key(1), key(2)]) == [b"old", b"b"]
            with pytest.raises(ConfigError, match="contiguous"):
                store.put_batch([(key(4), b"d"), (key(5), memoryview(b"abcdef")[::2])])
            assert not store.exists(key(4))
    finally:
        redis_server.admin.config_set("proto-max-bulk-len", 512 << 20)


def test_the_largest_frame_that_the_buffer_of_queries_has_room_for(redis_server: Any, redis_uri: str) -> None:
    redis_server.admin.config_set("client-query-buffer-limit", 2 << 20)
    try:
        with open_resp(f"{redis_uri}?timeout=200ms") as store:
            frame = bytes(store.max_frame_bytes)
            assert store.put(key(1), frame) == len(frame)
            assert store.get(key(1)) == frame
            with pytest.raises(StoreError) as caught:
                store.put(key(2), frame + b"+")
            assert caught.value.errno == 27  # EFBIG
    finally:
        redis_server.admin.config_set("client-query-buffer-limit", 1 << 30)


def test_of_two_frames_for_one_key_the_later_one_stays(store: RespStore) -> None:
    assert store.put_batch([(key(1), b"first"), (key(2), b"x"), (key(1), b"later one")]) == [5, 1, 9]
    assert store.get_batch([key(1), key(2), key(1)]) == [b"later one", b"x", b"later one"]
    assert store.delete_batch([key(1), key(1), key(3), key(2)]) == [True, False, False, True]
    assert store.put_batch([]) == store.get_batch([]) == store.delete_batch([]) == store.stat_batch([]) == []


def test_a_batch_is_one_round_trip(redis_server: Any, redis_uri: str) -> None:
    keys = [key(n) for n in range(40)]
    with open_resp(redis_uri) as store:

        def reads(call: Callable[[], object]) -> int:
            before = redis_server.admin.info("stats")["total_reads_processed"]
            call()
            return int(redis_server.admin.info("stats")["total_reads_processed"] - before)

        assert reads(lambda: store.put_batch([(name, b"frame") for name in keys])) < 10
        assert reads(lambda: store.stat_batch(keys)) < 10
        assert reads(lambda: [store.get(name) for name in keys]) >= 40
        # How large the frames of others are is not known beforehand: 16 at a time.
        assert reads(lambda: store.get_batch(keys)) < 12
        assert reads(lambda: store.delete_batch(keys)) < 10


def test_a_large_batch_is_cut_into_pipelines(store: RespStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    whole = client_module.RespClient._answers

    def count(self: Any, client: Any, commands: Any, *, again: bool) -> list[Any]:
        sent.append(sum(len(part) for command in commands for part in command[2:3]))
        return whole(self, client, commands, again=again)

    monkeypatch.setattr(client_module.RespClient, "_answers", count)
    monkeypatch.setattr(client_module, "PIPELINE_BYTES", 1000)
    monkeypatch.setattr(client_module, "PIPELINE_COMMANDS", 5)
    frames = [(key(n), frame_of(size, n)[:size]) for n, size in enumerate([400, 600, 1, 5000, 1000, *[2] * 12])]
    assert store.put_batch(frames) == [len(frame) for _, frame in frames]
    assert sent == [1000, 1, 5000, 1000, 10, 10, 4]
    assert store.get_batch([name for name, _ in frames]) == [frame for _, frame in frames]


def test_what_is_in_the_server_is_what_the_page_says(redis_server: Any, redis_uri: str) -> None:
    with open_resp(f"{redis_uri}?prefix=site/a:&quarantine=2h") as store:
        store.put(key(1, 7), b"good")
        store.put(key(2, 7), b"bad")
        assert store.quarantine(key(2, 7), "crc")
        digest, other, space = (1).to_bytes(32, "big").hex(), (2).to_bytes(32, "big").hex(), "07" * 32
        aside = f"site/a:quarantine:{{{space}:{other}}}:crc"
        admin = redis_server.admin
        assert {name.decode() for name in admin.keys("*")} == {
            "site/a:format",
            f"site/a:frame:{{{space}:{digest}}}",
            aside,
        }
        assert admin.get(aside) == b"bad"
        assert 7000 < admin.ttl(aside) <= 7200
        assert admin.ttl("site/a:format") == -1
        assert json.loads(admin.get("site/a:format")) == {"format": "kvcore-resp-store", "version": 1}
        assert admin.ttl(f"site/a:frame:{{{space}:{digest}}}") == -1


def test_quarantine_makes_room_for_a_good_frame(store: RespStore) -> None:
    store.put(key(1), b"bad")
    assert store.quarantine(key(1), "crc")
    assert not store.quarantine(key(1), "crc")
    assert store.get(key(1)) is None
    assert list(store.list()) == []
    store.put(key(1), b"good")
    assert store.get(key(1)) == b"good"
    assert store.stats().quarantined == 1
    with pytest.raises(ConfigError, match="reason"):
        store.quarantine(key(1), "A*")


def test_of_two_that_quarantine_a_frame_one_did(
    redis_server: Any, redis_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_resp(redis_uri) as store, open_resp(redis_uri) as other:
        store.put(key(1), b"bad")
        found_there = store._client.run

        def then_the_other(*args: Any, **options: Any) -> Any:
            found = found_there(*args, **options)
            assert other.quarantine(key(1), "crc")
            return found

        monkeypatch.setattr(store._client, "run", then_the_other)
        assert store.quarantine(key(1), "crc") is False
        assert store.stats().quarantined == 0


def test_a_frame_that_is_stored_while_the_bad_one_is_moved_does_not_stay_for_ever(
    redis_server: Any, redis_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_resp(redis_uri) as store, open_resp(redis_uri) as other:
        store.put(key(1), b"bad")
        found_there = store._client.run

        def then_a_put(*args: Any, **options: Any) -> Any:
            found = found_there(*args, **options)
            other.put(key(1), b"good")
            return found

        monkeypatch.setattr(store._client, "run", then_a_put)
        assert store.quarantine(key(1), "crc")
        assert store.get(key(1)) is None
        (aside,) = redis_server.admin.keys("kvcore:quarantine:*")
        assert 0 < redis_server.admin.ttl(aside) <= 86400


def test_listing_names_each_frame_of_a_namespace_once(store: RespStore, redis_server: Any) -> None:
    wanted = {key(n, space) for n in range(40) for space in (1, 2)}
    store.put_batch([(name, b"x") for name in wanted])
    prefix = "kvcore:frame:"
    for foreign in (
        prefix,
        f"{prefix}{{x:y}}",
        f"{prefix}{{{'0' * 64}:{'0' * 64}}}x",
        f"{prefix}{{{'A' * 64}:{'0' * 64}}}",
    ):
        redis_server.admin.set(foreign, b"x")
    assert sorted(store.list()) == sorted(wanted)
    assert sorted(store.list(b"\2" * 32)) == sorted(name for name in wanted if name.namespace == b"\2" * 32)
    assert list(store.list(b"\3" * 32)) == []


def test_what_is_there_all_the_time_is_listed_while_others_write(redis_uri: str) -> None:
    """Writing so much that the server's table grows and shrinks under the scan, which then names keys twice."""
    with open_resp(redis_uri) as store, open_resp(redis_uri) as other:
        wanted = [key(n, 1) for n in range(3000)]
        store.put_batch([(name, b"x") for name in wanted])
        stop = threading.Event()

        def write() -> None:
            crowd = [key(n, 2) for n in range(20_000)]
            while not stop.is_set():
                other.put_batch([(name, b"x") for name in crowd])
                other.delete_batch(crowd)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(5):
                assert sorted(name for name in store.list() if name.namespace == b"\1" * 32) == wanted
        finally:
            stop.set()
            writer.join()


def test_stores_with_other_prefixes_and_databases_are_others(redis_uri: str) -> None:
    uris = [f"{redis_uri}?prefix=a:", f"{redis_uri}?prefix=a:b:", f"{redis_uri}?prefix=b:", f"{redis_uri}/1?prefix=a:"]
    stores = [open_resp(uri) for uri in uris]
    for n, store in enumerate(stores):
        store.put(key(n), b"x")
    for n, store in enumerate(stores):
        assert list(store.list()) == [key(n)]
        store.close()


def test_frames_may_be_forgotten_after_a_time(redis_server: Any, redis_uri: str) -> None:
    with open_resp(f"{redis_uri}?ttl=90s") as store:
        store.put(key(1), b"frame")
        (name,) = redis_server.admin.keys("kvcore:frame:*")
        assert 80_000 < redis_server.admin.pttl(name) <= 90_000
        redis_server.admin.pexpire(name, 1000)
        store.put(key(1), b"frame")
        assert redis_server.admin.pttl(name) > 80_000
    with open_resp(f"{redis_uri}?ttl=1ms") as store:
        store.put(key(1), b"frame")
        threading.Event().wait(0.01)
        assert store.get(key(1)) is None
        assert store.stat(key(1)) is None


def test_an_empty_frame_is_not_a_missing_one(store: RespStore) -> None:
    store.put(key(1), b"")
    assert store.stat_batch([key(1), key(2)]) == [StoreStat(0), None]
    assert store.get(key(1)) == b""


@pytest.mark.parametrize(
    "found", [b'{"format": "kvcore-resp-store", "version": 2}', b'{"format": "other"}', b"[]", b"not JSON", b"\xff"]
)
def test_a_store_of_another_version_is_left_alone(redis_server: Any, redis_uri: str, found: bytes) -> None:
    redis_server.admin.set("kvcore:format", found)
    with pytest.raises(StoreError, match="choose another prefix"):
        open_resp(redis_uri)
    assert redis_server.admin.keys("*") == [b"kvcore:format"]
    assert redis_server.admin.get("kvcore:format") == found


def test_many_threads_share_few_connections(redis_server: Any, redis_uri: str) -> None:
    with open_resp(f"{redis_uri}?pool=3") as store:
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for n in range(20):
                    name, frame = key(n, worker), frame_of(70_000, worker + n)
                    store.put(name, frame)
                    assert store.get(name) == frame
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        clients = redis_server.admin.client_list()
        assert sum(client["addr"].startswith("127.0.0.1") and client["laddr"] != "" for client in clients) <= 3


def test_a_thread_that_takes_turn_after_turn_keeps_no_other_waiting(redis_uri: str) -> None:
    with open_resp(f"{redis_uri}?pool=1") as store:
        stop = threading.Event()
        taken = 0

        def greedy() -> None:
            nonlocal taken
            while not stop.is_set():
                store.get(key(1))
                taken += 1

        thread = threading.Thread(target=greedy)
        thread.start()
        while not taken:
            pass
        before = taken
        for _ in range(50):
            store.get(key(2))
        assert taken - before <= 60
        stop.set()
        thread.join()


def test_two_writers_of_one_key_leave_a_whole_frame(redis_uri: str) -> None:
    with open_resp(redis_uri) as one, open_resp(redis_uri) as other:
        frames = [bytes([n]) * 300_000 for n in (1, 2)]
        one.put(key(1), frames[0])

        def write(store: RespStore, frame: bytes) -> None:
            for _ in range(20):
                store.put(key(1), frame)

        threads = [threading.Thread(target=write, args=pair) for pair in zip((one, other), frames, strict=True)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            got = one.get(key(1))
            assert got is not None
            assert bytes(got) in frames
        for thread in threads:
            thread.join()


def test_frames_of_another_process_are_found(redis_uri: str) -> None:
    program = (
        "import sys\n"
        "from kvcore.tiers.stores import StoreKey\n"
        "from kvcore.tiers.stores.resp import open_resp\n"
        "with open_resp(sys.argv[1]) as store:\n"
        "    store.put(StoreKey(b'n' * 32, b'd' * 32), b'from afar')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program, redis_uri], check=True)
    with open_resp(redis_uri) as store:
        assert store.get(StoreKey(b"n" * 32, b"d" * 32)) == b"from afar"
