"""A Redis or Valkey server through its client library: pipelines, attempts, and errors by name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import redis
from redis.backoff import EqualJitterBackoff
from redis.retry import Retry

from kvcore.completion import drop_traceback
from kvcore.errors import StoreError
from kvcore.tiers.stores.contract import Ledger
from kvcore.tiers.stores.resp_connect import connect
from kvcore.tiers.stores.resp_errors import FAILURES, TRANSIENT, explain
from kvcore.tiers.stores.resp_permits import Permits
from kvcore.tiers.stores.resp_uri import RespAddress

__all__ = ["PIPELINE_BYTES", "PIPELINE_COMMANDS", "Command", "RespClient"]

PIPELINE_BYTES = 16 << 20
"""Bytes of frames in one pipeline: a server keeps the replies to one in its memory until they are read."""
PIPELINE_COMMANDS = 1024

Command: TypeAlias = tuple[Any, ...]
T = TypeVar("T")

_DEFAULT_LIMITS = {"proto-max-bulk-len": 512 << 20, "client-query-buffer-limit": 1 << 30}
_OVERHEAD = {"proto-max-bulk-len": 0, "client-query-buffer-limit": 2}  # the end of the line counts there
_SCAN_COUNT = 1000


class RespClient:
    """Connections to one server or cluster. All methods may be called from any thread.

    Parameters
    ----------
    address : RespAddress
    ledger : Ledger
        Of the store; once it is closed, calls raise `StoreError`.

    Raises
    ------
    ConfigError
        The files for TLS cannot be used.
    StoreError
        A cluster cannot be reached. One server is reached at the first call.
    """

    def __init__(self, address: RespAddress, ledger: Ledger) -> None:
        self._address = address
        self._ledger = ledger
        # Not the library's pool bounds the calls: that of a cluster raises instead of waiting.
        self._permits = Permits(address.pool)
        self._closing = threading.Lock()
        self._closed = False
        try:
            self._client = connect(address, ledger.name)
        except StoreError:
            raise
        except FAILURES as error:
            raise explain(error, "open a store", ledger.name) from error

    def run(self, doing: str, call: Callable[[Any], T], *, again: bool) -> T:
        """Let `call` use the library's client.

        Parameters
        ----------
        doing : str
            What is tried, for messages.
        call : callable
            Called with the client; its exceptions are explained.
        again : bool
            Whether it may be called again, for `timeout` seconds after the first failure that may be gone then.
        """
        with self._permit():
            return self._run(doing, call, _Patience(self._address.timeout), again=again)

    def pipeline(self, doing: str, commands: Sequence[Command], sizes: Sequence[int], *, again: bool) -> list[Any]:
        """Send commands, one key each, with one round trip for as many as fit into a pipeline.

        Parameters
        ----------
        doing : str
        commands : sequence of tuple
            Name and arguments.
        sizes : sequence of int
            About how many bytes go with each, there or back.
        again : bool
            Whether a command may be sent again when it is not known whether it was executed. If not, none is.

        Returns
        -------
        list
            For each command its reply, or a `StoreError`. Where the only server is gone, the rest has that error; of a
            store that is closed, all have the one that says so.
        """
        try:
            with self._permit():
                return self._pipeline(doing, commands, sizes, again=again)
        except StoreError as error:  # closed: what went wrong with commands is in the replies
            return [drop_traceback(error)] * len(commands)

    def keys(self, pattern: str) -> set[bytes]:
        """Return the keys that match a pattern; those that are there all the time are among them."""
        found: set[bytes] = set()
        attempts = 0

        def scan(client: Any) -> None:
            nonlocal attempts
            attempts += 1
            if self._address.cluster and attempts > 1:
                client.nodes_manager.initialize()
            for node in self._nodes():
                # A cursor means nothing to a server that was restarted meanwhile. One connection for the whole scan
                # breaks then, and the scan begins anew.
                with node.client() as connected:
                    cursor = None
                    while cursor != 0:
                        cursor, page = connected.scan(cursor or 0, match=pattern, count=_SCAN_COUNT)
                        found.update(page)

        self.run("list the frames", scan, again=True)
        return found

    def largest(self) -> int:
        """Return how many bytes the server takes in one value, or what servers usually take if it does not tell."""

        def ask(client: Any) -> int:
            return min(_limit(node, option) - over for node in self._nodes() for option, over in _OVERHEAD.items())

        return self.run("read the limits", ask, again=False)

    def close(self) -> None:
        """Close the connections, after the calls that are under way."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._ledger.close()
            for _ in range(self._permits.count):
                self._permits.acquire()
            try:
                self.disconnect()
            finally:
                for _ in range(self._permits.count):
                    self._permits.release()

    def disconnect(self) -> None:
        """Close the connections now."""
        clients = [self._client]
        if self._address.cluster:
            clients = [node.redis_connection for node in self._client.get_nodes() if node.redis_connection]
        for client in clients:
            client.connection_pool.disconnect()

    @contextlib.contextmanager
    def _permit(self) -> Iterator[None]:
        """Wait for one of `pool` permits; fail if the store was closed meanwhile."""
        self._ledger.require_open()
        with self._permits:
            self._ledger.require_open()
            yield

    def _run(self, doing: str, call: Callable[[Any], T], patience: _Patience, *, again: bool) -> T:
        def attempt() -> T:
            try:
                return call(self._client)
            except StoreError:
                raise
            except FAILURES as error:
                raise explain(error, doing, self._ledger.name) from error

        def failed(error: Exception) -> None:
            if not again or not _may_be_gone(error) or patience.is_over():
                raise error

        reply = Retry(EqualJitterBackoff(cap=0.5, base=0.02), -1, (StoreError,)).call_with_retry(attempt, failed)
        patience.renew()
        return reply

    def _pipeline(self, doing: str, commands: Sequence[Command], sizes: Sequence[int], *, again: bool) -> list[Any]:
        replies: list[Any] = []
        patience = _Patience(self._address.timeout)
        for piece in _pieces(sizes):
            answers = self._send(doing, commands[piece], patience, again=again)
            replies += answers
            if not self._address.cluster and all(_may_be_gone(answer) for answer in answers):
                # Each further attempt would be as vain as the last one. Of a cluster another node may do.
                replies += [answers[-1]] * (len(commands) - len(replies))
                break
        return replies

    def _send(self, doing: str, commands: Sequence[Command], patience: _Patience, *, again: bool) -> list[Any]:
        """Send one pipeline; where that is allowed, what failed for a while is sent again."""
        replies: list[Any] = [None] * len(commands)
        pending = list(range(len(commands)))

        def send(client: Any) -> None:
            nonlocal pending
            try:
                answers = self._answers(client, [commands[at] for at in pending], again=again)
            except FAILURES as error:
                # At once, not only of what is returned: a later attempt may go well, and this frame and the error would
                # then hold each other, and the buffers of all callers, until somebody collects garbage.
                answers = [drop_traceback(error)] * len(pending)
            for at, answer in zip(pending, answers, strict=True):
                failed = isinstance(answer, BaseException)
                replies[at] = explain(answer, doing, self._ledger.name) if failed else answer
            pending = [at for at in pending if _may_be_gone(replies[at])]
            if pending:
                raise replies[pending[0]]

        with contextlib.suppress(StoreError):  # it is in the replies
            self._run(doing, send, patience, again=again)
        return [drop_traceback(reply) for reply in replies]  # it holds this call's frames

    def _answers(self, client: Any, commands: Sequence[Command], *, again: bool) -> list[Any]:
        """Return the server's answer to each command, exceptions among them."""
        if self._address.cluster and not again:
            # A pipeline of the cluster's client sends by itself again what may have been executed.
            return [_answers_or_error(client.execute_command, *command) for command in commands]
        try:
            return _pipelined(client, commands)
        except FAILURES:
            if not self._address.cluster:
                raise
        # One node that is gone fails the pipeline for all of them, so each has its own now.
        groups: dict[str, list[int]] = {}
        for at, command in enumerate(commands):
            groups.setdefault(client.get_node_from_key(command[1]).name, []).append(at)
        answers: list[Any] = [None] * len(commands)
        for group in groups.values():
            found = _answers_or_error(_pipelined, client, [commands[at] for at in group])
            for n, at in enumerate(group):
                answers[at] = found if isinstance(found, BaseException) else found[n]
        return answers

    def _nodes(self) -> list[Any]:
        """Return a client of each server that holds keys."""
        if not self._address.cluster:
            return [self._client]
        return [self._client.get_redis_connection(node) for node in self._client.get_primaries()]


class _Patience:
    """For how long what fails is tried again: some seconds from the first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    def is_over(self) -> bool:
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return now >= self._end

    def renew(self) -> None:
        self._end = None


def _may_be_gone(reply: object) -> bool:
    return isinstance(reply, StoreError) and reply.errno in TRANSIENT


def _answers_or_error(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except FAILURES as error:
        return drop_traceback(error)


def _pipelined(client: Any, commands: Sequence[Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def _limit(node: Any, option: str) -> int:
    """Ask a server for a limit. Many a hosted one forbids that, or has no such command."""
    with contextlib.suppress(redis.ResponseError):
        for value in node.config_get(option).values():
            return int(value)
    return _DEFAULT_LIMITS[option]


def _pieces(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut a batch into pipelines of bounded bytes; a larger frame has one of its own."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (total + size > PIPELINE_BYTES or at - start >= PIPELINE_COMMANDS):
            yield slice(start, at)
            start, total = at, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
