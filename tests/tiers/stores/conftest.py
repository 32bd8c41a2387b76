"""Real servers of Redis for the tests of its store: the suite's, with what these tests do to them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore_conformance.stores import servers


class RedisServer(servers.RedisServer):
    """A server that forgets everything when it is killed, unless it is told ``--appendonly yes``."""

    def __init__(self, folder: Path, *options: str, tls: dict[str, str] | None = None) -> None:
        if "--appendonly" not in options:
            options += ("--appendonly", "no")
        super().__init__(folder, *options, tls=tls)
        self._admin: Any = None

    @property
    def uri(self) -> str:
        """Without options, so that each test gives its own."""
        return super().uri.partition("?")[0]

    @property
    def admin(self) -> Any:
        """A client over the socket, which needs no TLS."""
        if self._admin is None:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            self._admin = redis.Redis(unix_socket_path=str(self.socket), protocol=2, retry=Retry(NoBackoff(), 0))
        return self._admin

    def kill(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        super().kill()

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def add_options(self, *options: str) -> None:
        """From the next start on."""
        self._options += options

    def make_cluster(self, *others: RedisServer) -> None:
        """Share the slots out among nodes that know nothing of one another yet, and wait until all agree."""
        nodes = (self, *others)
        for at, node in enumerate(nodes):
            first, last = (16384 * n // len(nodes) for n in (at, at + 1))
            node.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            node.admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        for node in others:
            self.admin.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        deadline = time.monotonic() + 20
        while any(not node.knows_all_slots() for node in nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the nodes of the cluster do not find one another")
            time.sleep(0.02)

    def knows_all_slots(self) -> bool:
        info = self.admin.cluster("INFO")
        return bool(info["cluster_state"] == "ok" and info["cluster_slots_ok"] == "16384")


def _servers() -> Iterator[Callable[..., RedisServer]]:
    with contextlib.ExitStack() as started:

        def start(*options: str, tls: dict[str, str] | None = None) -> RedisServer:
            server: RedisServer = started.enter_context(servers.serving(RedisServer, *options, tls=tls))
            return server

        yield start


start_redis = pytest.fixture(_servers, name="start_redis")
"""Starts a server with more options; it ends with the test."""
_module_servers = pytest.fixture(_servers, name="_module_servers", scope="module")


@pytest.fixture(scope="module")
def redis_server(_module_servers: Callable[..., RedisServer]) -> RedisServer:
    """A server for all tests of a file."""
    return _module_servers()


@pytest.fixture
def redis_uri(redis_server: RedisServer) -> str:
    """The URI of that server, emptied."""
    redis_server.admin.flushall()
    return redis_server.uri
