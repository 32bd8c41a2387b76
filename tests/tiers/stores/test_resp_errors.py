"""The store over Redis and Valkey when things go wrong: each failure has its errno, and nothing is lost in silence."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from kvcore.errors import StoreError
from kvcore.tiers.stores import StoreKey, StoreStats
from kvcore.tiers.stores import resp_client as client_module
from kvcore.tiers.stores.resp import RespStore, open_resp

Start = Callable[..., Any]


def key(n: int) -> StoreKey:
    return StoreKey(bytes(32), n.to_bytes(32, "big"))


def refused(call: Callable[[], object], code: int, words: str) -> StoreError:
    """Check that a call fails with an errno, and with a message that says these words."""
    with pytest.raises(StoreError) as caught:
        call()
    assert caught.value.errno == code, caught.value
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)
    return caught.value


class Proxy:
    """Passes bytes on between clients and a server, and cuts connections after so many bytes of replies."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_after: list[int | None] = []
        """For each connection to come, in order; None or nothing: never. The library's greeting does not count."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            link = _Link(client, self._target, self.cut_after.pop(0) if self.cut_after else None)
            for direction in (link.requests, link.replies):
                self._threads.append(threading.Thread(target=direction))
                self._threads[-1].start()

    def drop(self) -> None:
        """Let the server close all connections, and wait until the clients can see it."""
        with redis.Redis(port=self._target, protocol=2) as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for thread in self._threads[1:]:
            thread.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


class _Link:
    """One connection through a proxy."""

    def __init__(self, client: socket.socket, target: int, most: int | None) -> None:
        self._client = client
        self._server = socket.create_connection(("127.0.0.1", target))
        self._most = most
        self._greeted = False

    def requests(self) -> None:
        with contextlib.suppress(OSError), self._client:
            while data := self._client.recv(1 << 16):
                self._greeted = self._greeted or b"\r\nCLIENT\r\n" not in data
                self._server.sendall(data)
        _shut(self._server)

    def replies(self) -> None:
        with contextlib.suppress(OSError), self._server:
            while self._most != 0 and (data := self._server.recv(1 << 16)):
                if self._greeted and self._most is not None:
                    data = data[: self._most]
                    self._most -= len(data)
                self._client.sendall(data)
        _shut(self._client)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server: Any, redis_uri: str) -> Iterator[Proxy]:
    opened = Proxy(redis_server.port)
    yield opened
    opened.close()


def test_a_connection_cut_in_mid_batch_is_made_again(proxy: Proxy, redis_uri: str) -> None:
    with open_resp(f"resp://127.0.0.1:{proxy.port}") as store, open_resp(redis_uri) as direct:
        frames = [(key(n), bytes([n]) * 100_000) for n in range(8)]
        names = [name for name, _ in frames]
        # The next connections are cut: within the replies to a put, then to a get, and within a frame.
        proxy.cut_after = [7, 5, 250_003]
        proxy.drop()
        assert store.put_batch(frames) == [100_000] * 8
        assert direct.get_batch(names) == [frame for _, frame in frames]
        assert store.get_batch(names) == [frame for _, frame in frames]
        assert proxy.cut_after == [250_003] or proxy.cut_after == []
        assert store.stats() == StoreStats(puts=8, put_bytes=800_000, hits=8, hit_bytes=800_000)


def test_a_frame_cut_in_the_middle_is_never_served(proxy: Proxy, redis_uri: str) -> None:
    with open_resp(redis_uri) as direct:
        direct.put(key(1), bytes(1_000_000))
    with open_resp(f"resp://127.0.0.1:{proxy.port}?timeout=200ms") as store:
        proxy.cut_after = [500_000] * 100
        proxy.drop()
        outcomes = store.get_batch([key(1), key(2)])
        assert [getattr(outcome, "errno", None) for outcome in outcomes] == [errno.ECONNRESET] * 2
        proxy.cut_after = []
        assert store.get(key(1)) == bytes(1_000_000)


def test_a_batch_over_a_dead_connection_names_what_is_not_stored(
    proxy: Proxy, redis_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PIPELINE_COMMANDS", 4)
    with open_resp(f"resp://127.0.0.1:{proxy.port}?timeout=200ms") as store, open_resp(redis_uri) as direct:
        # Two pipelines of four get through (a reply to SET has 5 bytes), of the third three replies.
        proxy.cut_after = [5 * 11] + [1] * 100
        proxy.drop()
        outcomes = store.put_batch([(key(n), b"frame") for n in range(20)])
        assert outcomes[:8] == [5] * 8
        assert {getattr(outcome, "errno", None) for outcome in outcomes[8:]} == {errno.ECONNRESET}
        assert store.stats().puts == 8
        assert direct.get_batch([key(n) for n in range(8)]) == [b"frame"] * 8
        assert direct.get_batch([key(n) for n in range(12, 20)]) == [None] * 8  # not tried any more
        proxy.cut_after = []
        assert store.put_batch([(key(n), b"frame") for n in range(20)]) == [5] * 20


def test_what_tells_whether_there_was_a_frame_is_not_done_twice(proxy: Proxy, redis_uri: str) -> None:
    with open_resp(f"resp://127.0.0.1:{proxy.port}") as store, open_resp(redis_uri) as direct:
        direct.put_batch([(key(n), b"frame") for n in range(3)])
        proxy.cut_after = [1]
        proxy.drop()
        # It was done, and the answer lost: saying False would be a lie.
        refused(lambda: store.delete(key(0)), errno.ECONNRESET, "cannot delete a frame")
        assert not direct.exists(key(0))
        assert store.stats().deletes == 0
        # A connection that is known to be broken is replaced before anything is sent.
        proxy.drop()
        assert store.delete_batch([key(0), key(1)]) == [False, True]


def test_a_server_killed_between_calls_is_found_again(start_redis: Start) -> None:
    server = start_redis("--appendonly", "yes", "--appendfsync", "always")
    with open_resp(f"{server.uri}?timeout=10s") as store:
        store.put(key(1), b"frame")
        server.kill()
        threading.Timer(0.3, server.start).start()
        assert store.get(key(1)) == b"frame"  # waits for the server
        server.kill()
        server.start()
        assert store.delete(key(1))  # is not tried again, and need not be
        server.kill()
        started = time.monotonic()
        with open_resp(f"{_running(server)}?timeout=100ms") as hasty:
            server.kill()
            refused(lambda: hasty.get(key(1)), errno.ECONNREFUSED, "is it running")
            refused(lambda: list(hasty.list()), errno.ECONNREFUSED, "cannot list the frames")
            outcomes = hasty.put_batch([(key(n), b"x") for n in range(3000)])
            assert {getattr(outcome, "errno", None) for outcome in outcomes} == {errno.ECONNREFUSED}
        assert time.monotonic() - started < 5
        refused(lambda: open_resp(server.uri), errno.ECONNREFUSED, "cannot open a store in")


def _running(server: Any) -> str:
    server.start()
    return str(server.uri)


def test_a_server_killed_while_it_is_written_keeps_what_was_reported(start_redis: Start) -> None:
    """Each frame that was reported stored is there afterwards, whole; what was not is an error, or there too."""
    server = start_redis("--appendonly", "yes", "--appendfsync", "always")
    with open_resp(f"{server.uri}?timeout=20s") as patient, open_resp(f"{server.uri}?timeout=10ms") as hasty:
        outcomes: dict[StoreKey, Any] = {}
        wanted: dict[StoreKey, bytes] = {}
        for round_ in range(3):
            batch = [(key(100 * round_ + n), bytes([n]) * 200_000) for n in range(60)]
            wanted |= dict(batch)
            killer = threading.Timer(0.02 + 0.02 * round_, lambda: (server.kill(), server.start()))
            killer.start()
            for store, part in ((patient, batch[:30]), (hasty, batch[30:])):
                outcomes |= dict(zip([name for name, _ in part], store.put_batch(part), strict=True))
            killer.join()
        assert {type(outcome) for outcome in outcomes.values()} <= {int, StoreError}
        assert all(isinstance(outcome, int) for n, outcome in enumerate(outcomes.values()) if n % 60 < 30)
        for name, outcome in outcomes.items():
            got = patient.get(name)
            assert got is None or got == wanted[name]
            assert got is not None or isinstance(outcome, StoreError)
            assert patient.put(name, b"again") == 5


def test_a_listing_begins_anew_when_the_server_was_restarted(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor of a scan means nothing to the new process: its table has another order."""
    server = start_redis("--appendonly", "yes", "--appendfsync", "always")
    monkeypatch.setattr(client_module, "_SCAN_COUNT", 10)
    pages = 0
    scan = redis.Redis.scan

    def restart(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == 20:
            server.kill()
            server.start()
        return scan(self, *args, **kwargs)

    with open_resp(f"{server.uri}?timeout=20s") as store:
        wanted = [key(n) for n in range(500)]
        store.put_batch([(name, b"x") for name in wanted])
        monkeypatch.setattr(redis.Redis, "scan", restart)
        assert sorted(store.list()) == wanted
        assert pages > 60


def test_a_server_without_memory_refuses(start_redis: Start) -> None:
    server = start_redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with open_resp(server.uri) as store:
        outcomes = store.put_batch([(key(n), bytes(500_000)) for n in range(12)])
        stored = [n for n, outcome in enumerate(outcomes) if outcome == 500_000]
        assert 0 < len(stored) < 12
        assert store.stats().puts == len(stored)
        refused(lambda: store.put(key(20), bytes(500_000)), errno.ENOSPC, "raise its maxmemory")
        for n in range(12):
            assert store.get(key(n)) == (bytes(500_000) if n in stored else None)
        store.delete_batch([key(n) for n in stored])
        assert store.put(key(20), bytes(500_000)) == 500_000


def test_a_server_that_evicts_is_a_cache(start_redis: Start) -> None:
    server = start_redis("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with open_resp(server.uri) as store:
        for n in range(20):
            store.put(key(n), bytes(500_000))
        found = [n for n in range(20) if store.get(key(n)) is not None]
        assert 0 < len(found) < 20
        assert 19 in found
        assert store.stats().misses == 20 - len(found)


@pytest.fixture
def guarded(start_redis: Start) -> Any:
    """A server with users: one for all, one below a prefix without CONFIG, one who may only read."""
    server = start_redis()
    for user, *rules in (
        ("writer", ">hunter2", "~kvcore:*", "&*", "+@all", "-@admin", "-@dangerous"),
        ("reader", ">hunter2", "~*", "+@read", "+@connection"),
        ("default", "resetpass", ">hunter2:/", "~*", "+@all"),
    ):
        server.admin.execute_command("ACL", "SETUSER", user, "reset" if user != "default" else "on", "on", *rules)
    return server


def _user(server: Any, login: str) -> str:
    return f"resp://{login}@127.0.0.1:{server.port}"


def test_a_user_with_few_rights_suffices(guarded: Any) -> None:
    with open_resp(_user(guarded, "writer:hunter2")) as store:
        assert store.max_frame_bytes == 512 << 20  # CONFIG is forbidden: what servers usually take
        store.put(key(1), b"frame")
        store.put(key(2), b"bad")
        assert store.quarantine(key(2), "crc")
        assert list(store.list()) == [key(1)]
        assert "hunter2" not in store.name
        assert "writer" not in store.name
        with open_resp(_user(guarded, "reader:hunter2")) as reader:
            assert reader.get(key(1)) == b"frame"
            refused(lambda: reader.put(key(1), b"other"), errno.EACCES, "ACL SETUSER")
            assert reader.get(key(1)) == b"frame"
    refused(lambda: open_resp(_user(guarded, "writer:hunter2") + "?prefix=x:"), errno.EACCES, "ACL SETUSER")


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_rights_that_the_page_names_suffice(redis_server: Any, redis_uri: str, protocol: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "store-resp.md").read_text("utf-8")
    (command,) = (line for line in page.splitlines() if line.startswith("ACL SETUSER"))
    redis_server.admin.execute_command(*command.replace("PASSWORD", "hunter2").split(" "))
    try:
        uri = redis_uri.replace("//", "//kvcore:hunter2@")
        with open_resp(f"{uri}?prefix=prod:&ttl=1h&protocol={protocol}") as store:
            assert store.put_batch([(key(1), b"frame"), (key(2), b"bad")]) == [5, 3]
            assert store.get_batch([key(1), key(2)]) == [b"frame", b"bad"]
            assert store.exists(key(1))
            assert store.quarantine(key(2), "crc")
            assert list(store.list()) == [key(1)]
            assert store.delete(key(1))
    finally:
        redis_server.admin.acl_deluser("kvcore")


def test_wrong_passwords(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: open_resp(guarded.uri), errno.EACCES, "KVCORE_RESP_PASSWORD")
    refused(lambda: open_resp(_user(guarded, ":hunter2")), errno.EACCES, "KVCORE_RESP_PASSWORD")
    refused(lambda: open_resp(_user(guarded, "nobody:hunter2")), errno.EACCES, "KVCORE_RESP_PASSWORD")
    refused(lambda: open_resp(_user(guarded, ":hunter2") + "?protocol=3"), errno.EACCES, "KVCORE_RESP_PASSWORD")
    monkeypatch.setenv("KVCORE_RESP_PASSWORD", "hunter2:/")
    open_resp(guarded.uri).close()
    open_resp(f"{guarded.uri}?protocol=3").close()
    monkeypatch.delenv("KVCORE_RESP_PASSWORD")
    open_resp(_user(guarded, ":hunter2%3A%2F")).close()


def test_a_replica_is_read_and_not_written(start_redis: Start) -> None:
    server = start_redis()
    with open_resp(server.uri) as store:
        store.put(key(1), b"frame")
        server.admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # whose primary is gone
        assert store.get(key(1)) == b"frame"
        refused(lambda: store.put(key(1), b"other"), errno.EROFS, "address of the primary")
        refused(lambda: store.delete(key(1)), errno.EROFS, "address of the primary")
        refused(lambda: store.quarantine(key(1), "crc"), errno.EROFS, "address of the primary")
        with open_resp(server.uri) as another:
            assert another.get(key(1)) == b"frame"
        refused(lambda: open_resp(f"{server.uri}?prefix=other:"), errno.EROFS, "cannot open a store")


def test_a_server_that_loads_its_data_is_waited_for(start_redis: Start) -> None:
    server = start_redis()
    with open_resp(f"{server.uri}?timeout=20s") as store, open_resp(f"{server.uri}?timeout=300ms") as hasty:
        store.put_batch([(key(n), b"frame") for n in range(300)])
        server.admin.save()
        server.kill()
        server.add_options("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024")
        starter = threading.Thread(target=server.start)
        starter.start()
        _wait_for(lambda: socket.create_connection(("127.0.0.1", server.port)).close())
        refused(lambda: hasty.get(key(1)), errno.EAGAIN, "try again later")
        assert store.get(key(1)) == b"frame"
        starter.join()


def _wait_for(call: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            call()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def test_a_server_busy_with_a_script(redis_server: Any, redis_uri: str) -> None:
    redis_server.admin.config_set("lua-time-limit", 1)
    with open_resp(f"{redis_uri}?timeout=100ms") as store:
        runner = redis_server.admin
        script = threading.Thread(target=lambda: _killed(lambda: runner.eval("while true do end", 0)))
        script.start()
        _wait_until_busy(redis_server.admin)
        refused(lambda: store.get(key(1)), errno.EAGAIN, "SCRIPT KILL")
        redis_server.admin.script_kill()
        script.join()
        assert store.get(key(1)) is None


def _wait_until_busy(admin: Any) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            admin.ping()
        except redis.ResponseError:
            return
    raise TimeoutError("the script does not run")


def _killed(call: Callable[[], object]) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        call()


def test_a_server_that_hangs(start_redis: Start) -> None:
    server = start_redis()
    with open_resp(f"{server.uri}?timeout=100ms") as store:
        store.put(key(1), b"frame")
        server.signal(signal.SIGSTOP)
        started = time.monotonic()
        refused(lambda: store.get(key(1)), errno.ETIMEDOUT, "timeout=")
        refused(lambda: store.put(key(1), bytes(100_000)), errno.ETIMEDOUT, "timeout=")
        assert time.monotonic() - started < 3
        server.signal(signal.SIGCONT)
        assert store.get(key(1)) == b"frame"


def test_somebody_elses_key_is_not_a_frame(redis_server: Any, redis_uri: str) -> None:
    with open_resp(redis_uri) as store:
        store.put(key(1), b"frame")
        (name,) = redis_server.admin.keys("kvcore:frame:*")
        redis_server.admin.delete(name)
        redis_server.admin.rpush(name, "a", "b")
        refused(lambda: store.get(key(1)), errno.EEXIST, "choose another prefix")
        refused(lambda: store.stat(key(1)), errno.EEXIST, "choose another prefix")


def test_no_more_clients(start_redis: Start) -> None:
    server = start_redis("--maxclients", "2")
    with open_resp(f"{server.uri}?timeout=50ms") as store:
        store.get(key(1))
        server.admin.ping()
        refused(lambda: open_resp(f"{server.uri}"), errno.EAGAIN, "maxclients")
        assert store.get(key(1)) is None


def test_what_is_not_there() -> None:
    refused(lambda: open_resp("resp://127.0.0.1:1"), errno.ECONNREFUSED, "is it running")
    refused(lambda: open_resp("resp+unix:///nowhere/at/all.sock"), errno.ECONNREFUSED, "is it running")
    refused(lambda: open_resp("resp://nowhere.invalid"), errno.EHOSTUNREACH, "name of the host")
    refused(lambda: open_resp("resp://127.0.0.1:1?cluster=1"), errno.ECONNREFUSED, "is it running")


def test_what_is_no_server_of_this_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        refused(lambda: open_resp(f"resp://127.0.0.1:{listener.getsockname()[1]}"), errno.EIO, "Protocol Error")
        thread.join()


def test_after_closing_all_calls_fail(redis_uri: str) -> None:
    store = open_resp(redis_uri)
    store.put(key(1), b"frame")
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put(key(1), b"x"),
        lambda: store.get(key(1)),
        lambda: store.get_into(key(1), memoryview(bytearray(8))),
        lambda: store.stat(key(1)),
        lambda: store.exists(key(1)),
        lambda: store.delete(key(1)),
        lambda: store.list(),
        lambda: store.quarantine(key(1), "crc"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="is closed"):
            call()
    for outcomes in (
        store.put_batch([(key(1), b"x")] * 2),
        store.get_batch([key(1)] * 2),
        store.stat_batch([key(1)] * 2),
    ):
        assert len(outcomes) == 2
        assert all("is closed" in str(outcome) for outcome in outcomes)
    assert store.stats() == StoreStats(puts=1, put_bytes=5)


def test_closing_waits_for_calls_and_turns_waiting_ones_away(redis_server: Any, redis_uri: str) -> None:
    store = open_resp(f"{redis_uri}?pool=1")
    store.put(key(1), b"frame")
    redis_server.admin.client_pause(700, all=True)
    results: list[Any] = []

    def read() -> None:
        try:
            results.append(store.get(key(1)))
        except StoreError as error:
            results.append(error)

    first, second = threading.Thread(target=read), threading.Thread(target=read)
    first.start()
    time.sleep(0.05)
    second.start()
    time.sleep(0.05)
    started = time.monotonic()
    store.close()
    first.join()
    second.join()
    assert time.monotonic() - started > 0.05
    assert results[0] == b"frame"
    assert results[1] == b"frame" or "is closed" in str(results[1])


def test_nothing_is_left_open(redis_uri: str) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def use() -> None:
        with open_resp(redis_uri) as store:
            for n in range(50):
                store.put(key(n), b"frame")
                store.get(key(n))
            list(store.list())
            next(store.list())

    use()
    before = open_files(), threading.active_count()
    for _ in range(5):
        use()
        with pytest.raises(StoreError):
            open_resp("resp://127.0.0.1:1")
    assert (open_files(), threading.active_count()) == before


def test_an_outcome_keeps_no_frame_alive(start_redis: Start) -> None:
    server = start_redis()
    with open_resp(f"{server.uri}?timeout=50ms") as store:
        server.kill()
        for outcomes in (store.put_batch([(key(1), b"a"), (key(2), b"b")]), store.get_batch([key(1), key(2)])):
            assert [type(outcome) for outcome in outcomes] == [StoreError, StoreError]
            assert [outcome.__traceback__ for outcome in outcomes] == [None, None]


def test_a_store_that_is_refused_leaves_no_connection(redis_server: Any, redis_uri: str) -> None:
    redis_server.admin.set("kvcore:format", b"other")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError):
        RespStore(client_module.RespAddress(host="127.0.0.1", port=redis_server.port))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_attempt_that_failed_before_another_one_went_well_keeps_no_buffers(
    redis_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_resp(redis_uri)
    store.put(key(1), b"frame")
    failures = [redis.ConnectionError("gone for a moment"), redis.ConnectionError("and again")]
    pipelined = client_module._pipelined

    def flaky(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return pipelined(*args)

    monkeypatch.setattr(client_module, "_pipelined", flaky)

    def read() -> weakref.ref[Any]:
        room = np.zeros(8, np.uint8)
        assert store.get_batch_into([(key(1), room.data)]) == [5]
        return weakref.ref(room)

    gc.collect()
    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()
    assert failures == []
    store.close()
