"""The lookup channel: real sockets, engines that are stand-ins."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which the extra vllm brings")
msgspec = pytest.importorskip("msgspec", reason="needs msgspec, which the extra vllm brings")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvcore.connectors.vllm import lookup_client, lookup_wire  # noqa: E402
from kvcore.connectors.vllm.lookup import LookupClient, LookupServer, lookup_address  # noqa: E402
from kvcore.engine.keys import ChunkKey, Namespace, chunk_keys  # noqa: E402
from kvcore.errors import ConfigError, StoreError  # noqa: E402

SPACE = Namespace("model", "1", chunk_tokens=4, salt="tenant")
DIGEST = SPACE.digest


@dataclass
class Health:
    ok: bool
    tiers: dict[str, int]


class Engine:
    """Has the first `hit` tokens of everything, after `delay` seconds."""

    def __init__(self, hit: int = 8, delay: float = 0.0) -> None:
        self.hit, self.delay = hit, delay
        self.seen: list[tuple[list[ChunkKey], int, int, str]] = []
        self.prefetched: list[ChunkKey] = []
        self.cleared: list[str | None] = []
        self.reasons: list[str] = []
        self.error: Exception | None = None

    def lookup_keys(self, keys: list[ChunkKey], num_tokens: int, *, computed: int = 0, request: str = "") -> int:
        self.seen.append((keys, num_tokens, computed, request))
        time.sleep(self.delay)
        if self.error:
            raise self.error
        return min(self.hit, num_tokens - 1)

    def prefetch_keys(self, keys: list[ChunkKey]) -> None:
        self.prefetched = list(keys)

    def uncacheable(self, reason: str) -> None:
        self.reasons.append(reason)

    def clear(self, tier: str | None = None) -> None:
        if self.error:
            raise self.error
        self.cleared.append(tier)

    def health(self) -> Health:
        return Health(True, {"disk": 3})


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("s")
    path.chmod(0o700)
    return path


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def patient(client: LookupClient, request: str) -> int:
    answers: list[int] = []

    def asked() -> bool:
        answers.extend(a for a in [client.answer(request)] if a is not None)
        return bool(answers)

    until(asked)
    return answers[0]


def test_the_engine_sees_the_keys_as_they_were_made_and_the_answer_comes_back(place: Path) -> None:
    engine, address = Engine(), lookup_address("e", 0, place)
    keys = chunk_keys(SPACE, range(14), partial=True)
    with LookupServer(engine, address, namespace=DIGEST), LookupClient([address], namespace=DIGEST) as client:
        client.ask("r", keys, 14, computed=4)
        assert patient(client, "r") == 8
        client.ask("s", keys[:-1], 12)
        assert patient(client, "s") == 8
    assert engine.seen == [(keys, 14, 4, "r"), (keys[:-1], 12, 0, "s")]
    assert [(k.parent, k.tenant) for k in engine.seen[0][0]] == [
        (k.parent, k.tenant) for k in keys
    ]  # not compared by ==


@given(tokens=st.integers(1, 40), partial=st.booleans(), size=st.integers(1, 9))
def test_keys_survive_the_message(tokens: int, partial: bool, size: int) -> None:
    space = Namespace("m", "r", chunk_tokens=size)
    keys = chunk_keys(space, range(tokens), partial=partial)
    if not keys:
        with pytest.raises(ConfigError, match="no chunk to ask for"):
            lookup_wire.pack_chunks(keys)
        return
    data = msgspec.msgpack.encode(lookup_wire.pack_chunks(keys))
    again = lookup_wire.unpack_chunks(msgspec.msgpack.decode(data, type=lookup_wire.Chunks))
    assert again == keys
    assert [key.parent for key in again] == [key.parent for key in keys]


@pytest.mark.parametrize(
    ("size", "tail", "digests", "namespace"),
    [(0, 0, 32, 32), (4, 4, 32, 32), (4, -1, 32, 32), (4, 0, 33, 32), (4, 0, 0, 32), (4, 0, 32, 31)],
)
def test_malformed_chunks_are_refused(size: int, tail: int, digests: int, namespace: int) -> None:
    with pytest.raises(ConfigError, match="malformed"):
        lookup_wire.unpack_chunks(lookup_wire.Chunks(bytes(namespace), "", size, tail, bytes(digests)))


def test_the_least_of_all_ranks_counts_and_ranks_are_asked_at_the_same_time(place: Path) -> None:
    engines = [Engine(hit, 0.1) for hit in (8, 4, 12)]
    addresses = [lookup_address("e", rank, place) for rank in range(3)]
    servers = [LookupServer(e, a, namespace=DIGEST) for e, a in zip(engines, addresses, strict=True)]
    with LookupClient(addresses, namespace=DIGEST) as client:
        start = time.monotonic()
        client.ask("r", chunk_keys(SPACE, range(16)), 16)
        assert patient(client, "r") == 4
        assert time.monotonic() - start < 0.25, "three ranks of 0.1 s, one after the other"
    for server in servers:
        server.close()


def test_the_scheduler_is_not_blocked_for_longer_than_it_was_told(place: Path) -> None:
    engine, address = Engine(delay=0.3), lookup_address("e", 0, place)
    with (
        LookupServer(engine, address, namespace=DIGEST),
        LookupClient([address], namespace=DIGEST, wait_ms=20) as client,
    ):
        client.ask("r", chunk_keys(SPACE, range(16)), 16)
        start = time.monotonic()
        assert client.answer("r") is None
        assert 0.015 < time.monotonic() - start < 0.15
        assert patient(client, "r") == 8
        assert client.answer("r") == 8, "the same answer until it is asked anew"
        client.forget("r")
        assert client.answer("r") is None
    assert len(engine.seen) == 1


def test_a_slow_lookup_does_not_keep_another_waiting(place: Path) -> None:
    gate, address = threading.Event(), lookup_address("e", 0, place)

    class Gated(Engine):
        def lookup_keys(self, keys: list[ChunkKey], num_tokens: int, **more: object) -> int:
            if num_tokens == 100:
                gate.wait(10)
            return 4

    with LookupServer(Gated(), address, namespace=DIGEST), LookupClient([address], namespace=DIGEST) as client:
        keys = chunk_keys(SPACE, range(16))
        client.ask("slow", keys, 100)
        client.ask("quick", keys, 16)
        assert patient(client, "quick") == 4
        assert client.answer("slow") is None
        gate.set()
        assert patient(client, "slow") == 4


def test_a_prompt_without_a_chunk_has_no_hit_and_asks_nobody(place: Path) -> None:
    address = lookup_address("nobody", 0, place)
    with LookupClient([address], namespace=DIGEST) as client:
        client.ask("r", [], 3)
        assert client.answer("r") == 0
        client.prefetch([])


def test_a_worker_that_dies_is_a_cache_without_hits_said_once_and_comes_back(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcore")
    keys, address = chunk_keys(SPACE, range(16)), lookup_address("e", 0, place)
    server = LookupServer(Engine(), address, namespace=DIGEST)
    with LookupClient([address], namespace=DIGEST, timeout_s=0.2, retry_s=0.05) as client:
        client.ask("a", keys, 16)
        assert patient(client, "a") == 8
        server.close()
        client.ask("b", keys, 16)
        assert patient(client, "b") == 0
        assert not client.alive
        for number in range(20):  # while it is known to be dead, nobody waits
            start = time.monotonic()
            client.ask(f"c{number}", keys, 16)
            assert client.answer(f"c{number}") == 0
            assert time.monotonic() - start < 0.1
        assert sum("no answer after" in record.message for record in caplog.records) == 1
        with LookupServer(Engine(12), address, namespace=DIGEST):

            def back() -> bool:
                client.ask("d", keys, 16)
                client.answer("d")
                return client.alive

            until(back)
            client.ask("e", keys, 16)
            assert patient(client, "e") == 12
    assert sum("work again" in record.message for record in caplog.records) == 1


def test_a_worker_that_was_started_anew_is_greeted_again(place: Path) -> None:
    keys, address = chunk_keys(SPACE, range(16)), lookup_address("e", 0, place)
    server = LookupServer(Engine(), address, namespace=DIGEST)
    with LookupClient([address], namespace=DIGEST) as client:
        client.ask("a", keys, 16)
        assert patient(client, "a") == 8
        server.close()
        with LookupServer(Engine(12), address, namespace=DIGEST):

            def found() -> bool:  # the first question may meet a server that does not know who asks
                client.ask("b", keys, 16)
                return patient(client, "b") == 12

            until(found)


def test_a_failing_engine_has_no_hits_and_says_so_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, address = Engine(), lookup_address("e", 0, place)
    engine.error = StoreError("the disk is gone")
    with LookupServer(engine, address, namespace=DIGEST), LookupClient([address], namespace=DIGEST) as client:
        for number in range(3):
            client.ask(f"{number}", chunk_keys(SPACE, range(16)), 16)
            assert patient(client, f"{number}") == 0
        assert client.alive
        with pytest.raises(StoreError, match="worker 0 has not cleared its cache: StoreError: the disk is gone"):
            client.clear()
    assert sum("the disk is gone" in record.message for record in caplog.records if record.levelno >= 30) == 1


@pytest.mark.parametrize(
    ("protocol", "namespace", "why"),
    [(lookup_wire.PROTOCOL + 1, DIGEST, "speaks protocol"), (lookup_wire.PROTOCOL, bytes(32), "model_revision")],
)
def test_another_version_or_another_model_is_refused(
    place: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    protocol: int,
    namespace: bytes,
    why: str,
) -> None:
    engine, address = Engine(), lookup_address("e", 0, place)
    with LookupServer(engine, address, namespace=DIGEST) as server:
        monkeypatch.setattr(
            lookup_client,
            "_encode",
            lambda message: msgspec.msgpack.encode(
                msgspec.structs.replace(message, protocol=protocol) if hasattr(message, "namespace") else message
            ),
        )
        with LookupClient([address], namespace=namespace, wait_ms=500) as client:
            until(lambda: (client.ask("r", chunk_keys(SPACE, range(16)), 16), client.answer("r"), not client.alive)[2])
            client.ask("r", chunk_keys(SPACE, range(16)), 16)
            assert client.answer("r") == 0
        server.close()
    assert not engine.seen
    assert sum(why in record.message for record in caplog.records if record.levelno >= logging.ERROR) == 1


def test_prefetch_ping_health_and_clear(place: Path) -> None:
    engines = [Engine(), Engine()]
    addresses = [lookup_address("e", rank, place) for rank in range(2)]
    servers = [LookupServer(e, a, namespace=DIGEST) for e, a in zip(engines, addresses, strict=True)]
    keys = chunk_keys(SPACE, range(10), partial=True)
    with LookupClient(addresses, namespace=DIGEST) as client:
        client.prefetch(keys)
        client.uncacheable("media")
        until(lambda: all(engine.prefetched == keys for engine in engines))
        until(lambda: engines[0].reasons == ["media"] and not engines[1].reasons)
        assert client.ping() == [True, True]
        assert client.health() == [{"ok": True, "tiers": {"disk": 3}}] * 2
        client.clear("disk")
        client.clear()
        assert engines[1].cleared == ["disk", None]
        servers[1].close()
        assert client.ping(0.1) == [True, False]
        assert client.health(0.1)[1] is None
        with pytest.raises(StoreError, match=r"worker 1 has not cleared its cache: no answer within 0\.1 s"):
            client.clear(timeout_s=0.1)
    servers[0].close()


def test_noise_does_not_stop_the_server(place: Path) -> None:
    import zmq

    engine, address = Engine(), lookup_address("e", 0, place)
    with LookupServer(engine, address, namespace=DIGEST):
        context = zmq.Context()
        for data in (b"", b"\xc1", b"\x93\xa6lookup\x01", os.urandom(100)):
            socket = context.socket(zmq.DEALER)
            socket.connect(address)
            socket.send(data)
            socket.close()
        context.term()
        with LookupClient([address], namespace=DIGEST) as client:
            client.ask("r", chunk_keys(SPACE, range(16)), 16)
            assert patient(client, "r") == 8


def test_the_directory_is_private(tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert lookup_address("x", 1, made) == lookup_address("x", 1, made)
    assert lookup_address("x", 1, made) != lookup_address("x", 2, made)
    assert lookup_address("x", 1, made) != lookup_address("y", 1, made)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    with pytest.raises(StoreError, match="only this user may enter"):
        lookup_address("x", 1, made)
    (tmp_path / "link").symlink_to(made)
    made.chmod(0o700)
    with pytest.raises(StoreError, match="only this user may enter"):
        lookup_address("x", 1, tmp_path / "link")
    with pytest.raises(ConfigError, match="shorter one as lookup_directory"):
        lookup_address("x", 1, tmp_path / ("long" * 30))


def test_an_address_that_cannot_be_bound_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be bound"):
        LookupServer(Engine(), f"ipc://{tmp_path}/not/there/socket", namespace=DIGEST)


def test_closing_again_does_nothing(place: Path) -> None:
    address = lookup_address("e", 0, place)
    server, client = LookupServer(Engine(), address, namespace=DIGEST), LookupClient([address], namespace=DIGEST)
    for _ in range(2):
        server.close()
        client.close()


def test_a_client_without_workers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        LookupClient([], namespace=DIGEST)


def test_many_requests_that_wait_cost_a_step_no_more_than_one(place: Path) -> None:
    engine, address = Engine(delay=0.5), lookup_address("e", 0, place)
    with (
        LookupServer(engine, address, namespace=DIGEST),
        LookupClient([address], namespace=DIGEST, wait_ms=50) as client,
    ):
        names = [f"r{number}" for number in range(8)]
        for name in names:
            client.ask(name, chunk_keys(SPACE, range(16)), 16)
        for _ in range(2):
            client.next_step()
            start = time.monotonic()
            assert [client.answer(name) for name in names] == [None] * 8
            assert 0.04 < time.monotonic() - start < 0.15


def test_an_error_that_cannot_be_written_does_not_end_the_server(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, address = Engine(), lookup_address("e", 0, place)
    engine.error = StoreError("no file \udcff")  # a name of a file that is no UTF-8
    with LookupServer(engine, address, namespace=DIGEST), LookupClient([address], namespace=DIGEST) as client:
        client.ask("a", chunk_keys(SPACE, range(16)), 16)
        assert patient(client, "a") == 0
        assert client.ping() == [True]
        engine.error = None
        client.ask("b", chunk_keys(SPACE, range(16)), 16)
        assert patient(client, "b") == 8
    assert any(r"no file \udcff" in record.message for record in caplog.records)


def test_a_health_that_cannot_be_written_is_an_error_of_its_own(place: Path) -> None:
    class Odd(Engine):
        def health(self) -> Health:
            return Health(True, {"disk": 2**70})

    address = lookup_address("e", 0, place)
    with LookupServer(Odd(), address, namespace=DIGEST), LookupClient([address], namespace=DIGEST) as client:
        assert client.health() == [None]
        assert client.ping() == [True]


def test_a_worker_that_greets_and_never_answers_is_waited_for_less_and_less(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcore")
    gate, address = threading.Event(), lookup_address("e", 0, place)

    class Stuck(Engine):
        def lookup_keys(self, keys: list[ChunkKey], num_tokens: int, **more: object) -> int:
            gate.wait(10)
            return 8

    keys = chunk_keys(SPACE, range(16))
    with (
        LookupServer(Stuck(), address, namespace=DIGEST, workers=1),
        LookupClient([address], namespace=DIGEST, timeout_s=0.05, retry_s=0.05) as client,
    ):
        end, waited = time.monotonic() + 1.0, 0
        while time.monotonic() < end:
            start = time.monotonic()
            client.ask("r", keys, 16)
            assert patient(client, "r") == 0
            waited += time.monotonic() - start > 0.04
            client.next_step()
        assert 2 <= waited <= 7, "it was taken for alive again and again, for it does say hello"
        said = [record.message for record in caplog.records]
        assert sum("no answer after" in message for message in said) == 1
        assert not any("work again" in message for message in said)
        gate.set()

        def found() -> bool:
            client.ask("s", keys, 16)
            return patient(client, "s") == 8

        until(found)
    assert sum("work again" in record.message for record in caplog.records) == 1


def test_a_server_that_closes_does_not_begin_what_waits(place: Path) -> None:
    gate, address = threading.Event(), lookup_address("e", 0, place)

    class Stuck(Engine):
        def lookup_keys(self, keys: list[ChunkKey], num_tokens: int, **more: object) -> int:
            tried.append(num_tokens)
            gate.wait(10)
            return 8

    tried: list[int] = []
    server = LookupServer(Stuck(), address, namespace=DIGEST, workers=1)
    with LookupClient([address], namespace=DIGEST) as client:
        for number in range(5):
            client.ask(f"{number}", chunk_keys(SPACE, range(16)), 16)
        assert client.ping() == [True], "all of it has come"
        until(lambda: tried)
        threading.Timer(0.1, gate.set).start()
        server.close()
    assert tried == [16]
