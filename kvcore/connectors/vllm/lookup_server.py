"""`LookupServer`: the end of the lookup channel in a worker, which answers with the worker's engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import zmq

import kvcore
from kvcore.completion import WakeFd, attempt
from kvcore.connectors.vllm import lookup_wire as wire
from kvcore.engine.keys import ChunkKey
from kvcore.errors import StoreError
from kvcore.workers import Priority, Workers

__all__ = ["MAX_MESSAGE", "LookupEngine", "LookupServer"]

MAX_MESSAGE = 64 << 20
"""Bytes of the largest message that a server takes: 2 million chunks."""
_MAX_PEERS = 1024

logger = logging.getLogger("kvcore")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(wire.Message).decode


class LookupEngine(Protocol):
    """What a server asks: `kvcore.engine.CacheEngine` does all of it."""

    def lookup_keys(self, keys: Sequence[ChunkKey], num_tokens: int, *, computed: int = 0, request: str = "") -> int:
        """Return how many leading tokens could be loaded."""

    def prefetch_keys(self, keys: Sequence[ChunkKey]) -> object:
        """Bring chunks nearer."""

    def uncacheable(self, reason: str) -> None:
        """Count a request that is not cached."""

    def clear(self, tier: str | None = None) -> object:
        """Delete what is stored."""

    def health(self) -> object:
        """Return how it is: a dataclass or plain values."""


class LookupServer:
    """Answers for one engine, on threads of its own.

    Parameters
    ----------
    engine : LookupEngine
        Stays the caller's. What it raises is the answer to who asked.
    address : str
        From `lookup_address`. A socket that is left over from a process that died is replaced.
    namespace : bytes
        Digest of the engine's namespace: who greets with another one is refused.
    workers : int
        Lookups at a time: one that waits for a far store keeps no other one waiting.

    Raises
    ------
    StoreError
        The address cannot be bound.
    """

    def __init__(self, engine: LookupEngine, address: str, *, namespace: bytes, workers: int = 2) -> None:
        self.address = address
        self._engine, self._namespace = engine, namespace
        self._known: dict[bytes, None] = {}
        self._done: deque[tuple[bytes, bytes]] = deque()
        self._wake = WakeFd()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._let_go()
            raise StoreError(f"the lookup socket {address} cannot be bound: {error.strerror}") from error
        self._workers = Workers(workers, name="kvcore-lookup")
        self._thread = threading.Thread(target=self._run, name="kvcore-lookup-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and free the socket and its threads; calling it again does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.signal()
            self._thread.join()
            self._workers.close()
            self._let_go()

    def __enter__(self) -> LookupServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _let_go(self) -> None:
        self._socket.close()
        self._context.term()
        self._wake.close()

    def _run(self) -> None:
        """Take messages, hand them on, and send what comes back, until `close`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._wake.fileno() in ready:
                self._wake.clear()
            while self._done:
                self._send(*self._done.popleft())
            if self._socket in ready:
                failure = attempt(self._receive)
                if isinstance(failure, zmq.ZMQError):
                    time.sleep(0.1)  # a failing socket must not keep a core busy; attempt has logged it

    def _receive(self) -> None:
        """Take all messages that are there."""
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _decode(frames[-1])
            except (msgspec.DecodeError, IndexError):
                logger.warning("lookup channel: a message that is none of protocol %d was dropped", wire.PROTOCOL)
                continue
            self._handle(peer, message)

    def _handle(self, peer: bytes, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            refusal = self._refusal(message)
            if not refusal:
                while len(self._known) >= _MAX_PEERS:  # the longest known goes; it will be asked to greet again
                    del self._known[next(iter(self._known))]
                self._known[peer] = None
            self._reply(peer, wire.Welcome(message.id, wire.PROTOCOL, kvcore.__version__, refusal))
        elif peer not in self._known:
            self._reply(peer, wire.Failed(message.id, "this server does not know you; say hello first", True))
        elif isinstance(message, wire.Ping):
            self._reply(peer, wire.Done(message.id))
        else:
            priority = Priority.LOAD if isinstance(message, wire.Lookup) else Priority.PREFETCH
            taken = attempt(self._workers.submit, priority, lambda: self._work(peer, message))
            if isinstance(taken, Exception):
                self._send(peer, _failed(message, taken))

    def _refusal(self, hello: wire.Hello) -> str:
        if hello.protocol != wire.PROTOCOL:
            return (
                f"this worker speaks protocol {wire.PROTOCOL} (kvcore {kvcore.__version__}), the scheduler "
                f"{hello.protocol} (kvcore {hello.version}); install one version of kvcore in both"
            )
        if hello.namespace != self._namespace:
            return (
                "the scheduler and this worker name the model's KV differently (namespace "
                f"{hello.namespace.hex()[:16]} and {self._namespace.hex()[:16]}); give model_name and model_revision"
            )
        return ""

    def _work(self, peer: bytes, message: wire.Message) -> None:
        """On a thread of the workers: let the engine answer."""
        if self._closing.is_set():  # nobody hears the answer, and a stop must not wait for all that was asked
            return
        data = attempt(lambda: _encode(self._answer(message)))
        if isinstance(data, Exception):
            data = _failed(message, data)
        self._done.append((peer, data))
        self._wake.signal()

    def _answer(self, message: wire.Message) -> wire.Reply:
        if isinstance(message, wire.Lookup):
            hit = self._engine.lookup_keys(
                wire.unpack_chunks(message.chunks),
                message.num_tokens,
                computed=message.computed,
                request=message.request,
            )
            return wire.Hit(message.id, int(hit))
        if isinstance(message, wire.Prefetch):
            self._engine.prefetch_keys(wire.unpack_chunks(message.chunks))
        elif isinstance(message, wire.Uncacheable):
            self._engine.uncacheable(message.reason)
        elif isinstance(message, wire.Clear):
            self._engine.clear(message.tier or None)
        elif isinstance(message, wire.Health):
            return wire.Status(message.id, msgspec.to_builtins(self._engine.health(), enc_hook=str))
        return wire.Done(message.id)

    def _reply(self, peer: bytes, reply: wire.Reply) -> None:
        self._send(peer, _encode(reply))

    def _send(self, peer: bytes, data: bytes) -> None:
        try:
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # who asked has gone, or takes nothing: there is nobody to tell
            logger.debug("lookup channel: a reply could not be sent")


def _failed(message: wire.Message, why: Exception) -> bytes:
    """The answer that there is none; names of files in it need not be UTF-8."""
    text = f"{type(why).__name__}: {why}".encode(errors="backslashreplace").decode()
    return _encode(wire.Failed(message.id, text))
