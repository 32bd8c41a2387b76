"""`LookupClient`: the scheduler's end of the lookup channel, which asks all workers and waits for none for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
import zmq

import kvcore
from kvcore.connectors.vllm import lookup_wire as wire
from kvcore.engine.keys import ChunkKey
from kvcore.errors import ConfigError, StoreError

__all__ = ["LookupClient"]

_MAX_BACKOFF = 5  # doublings of the time between two greetings: at most 32 times as long

logger = logging.getLogger("kvcore")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(wire.Reply).decode


@dataclass(slots=True)
class _Rank:
    """One worker, as the client sees it."""

    number: int
    socket: zmq.Socket[bytes]
    up: bool = True
    refused: str = ""
    next_hello: float = 0.0
    waiting: dict[int, tuple[_Question, float]] = field(default_factory=dict)
    """By the id of the message: whose answer, and when it is late."""
    complained: bool = False
    losses: int = 0
    """How often it was taken for dead since it last had a hit to tell of, or to tell that there is none."""


@dataclass(slots=True)
class _Question:
    """What was asked of all ranks, and what they said so far."""

    answers: dict[int, wire.Reply | None] = field(default_factory=dict)
    missing: int = 0
    asked: float = 0.0


class LookupClient:
    """Asks all workers of an engine. For one thread: the scheduler's.

    Parameters
    ----------
    addresses : sequence of str
        One of each worker.
    namespace : bytes
        Digest of the namespace that keys are made with.
    wait_ms : float
        How long all calls of `answer` together wait at most until `next_step`, in milliseconds.
    timeout_s : float
        A worker that has not answered after so many seconds is taken for dead: no hits, and no waiting for it, until
        it answers again. Said once in the log, and so is its return.
    retry_s : float
        After so many seconds a dead worker is greeted again; later each time, if it greets but answers nothing.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        namespace: bytes,
        wait_ms: float = 5.0,
        timeout_s: float = 2.0,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not addresses:
            raise ConfigError("a lookup needs at least one worker to ask")
        self._namespace, self._clock = namespace, clock
        self._wait_s, self._timeout_s, self._retry_s = wait_ms / 1000.0, timeout_s, retry_s
        self._patience = self._wait_s
        self._ids = 0
        self._questions: dict[str, _Question] = {}
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._ranks: list[_Rank] = []
        for number, address in enumerate(addresses):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._ranks.append(_Rank(number, socket))
        for rank in self._ranks:
            self._greet(rank)

    def close(self) -> None:
        """Free the sockets; calling it again does nothing."""
        for rank in self._ranks:
            self._poller.unregister(rank.socket)
            rank.socket.close()
        self._ranks = []
        self._context.term()

    def __enter__(self) -> LookupClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether all workers answer, as far as is known."""
        return all(rank.up and not rank.refused for rank in self._ranks)

    def ask(self, request: str, keys: Sequence[ChunkKey], num_tokens: int, *, computed: int = 0) -> None:
        """Ask what could be loaded for a request; returns at once. An earlier question of the request is forgotten.

        Parameters
        ----------
        request : str
        keys : sequence of ChunkKey
            Of the sequence's chunks from token 0 on; the last one need not be full. None: there is no hit.
        num_tokens : int
            Tokens of the sequence.
        computed : int
            Tokens that the inference engine has already: a hit that gives no more is none.
        """
        self.forget(request)
        self._pump(0.0)
        self._questions[request] = question = _Question(asked=self._clock())
        if keys:
            chunks = wire.pack_chunks(keys)
            self._send_all(question, lambda i: wire.Lookup(i, request, chunks, num_tokens, computed), self._timeout_s)

    def asked(self, request: str) -> float | None:
        """Return how many seconds ago a request's question was asked; None if there is none."""
        question = self._questions.get(request)
        return None if question is None else self._clock() - question.asked

    def answer(self, request: str) -> int | None:
        """Return what was answered, the least of all workers; None: nobody knows yet, ask again later.

        Waits for what is left of `wait_ms` in this step at most. It is 0 where a worker is dead or could not tell. The
        question stays: the same answer is given until it is asked anew or forgotten.
        """
        question = self._questions.get(request)
        if question is None:
            return None
        start = self._clock()
        self._await(question, self._patience)
        self._patience = max(self._patience - (self._clock() - start), 0.0)
        if question.missing:
            return None
        hits = [reply.tokens if isinstance(reply, wire.Hit) else 0 for reply in question.answers.values()]
        return min(hits, default=0)

    def next_step(self) -> None:
        """Say that a step of the scheduler ends: `answer` may wait again.

        All requests that wait are asked about in each step, and all who run wait for it.
        """
        self._patience = self._wait_s

    def forget(self, request: str) -> None:
        """Drop a request's question, if there is one."""
        question = self._questions.pop(request, None)
        if question is not None:
            self._drop_question(question)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Tell all workers which chunks will be asked for; returns at once."""
        self._pump(0.0)
        if keys:
            chunks = wire.pack_chunks(keys)
            self._tell(self._ranks, lambda i: wire.Prefetch(i, chunks))

    def uncacheable(self, reason: str) -> None:
        """Have the first worker's engine count a request that is not cached; returns at once."""
        self._pump(0.0)
        self._tell(self._ranks[:1], lambda i: wire.Uncacheable(i, reason))

    def ping(self, timeout_s: float = 1.0) -> list[bool]:
        """Return which workers answer within so many seconds, by rank."""
        return [isinstance(reply, wire.Done) for reply in self._call(wire.Ping, timeout_s)]

    def health(self, timeout_s: float = 1.0) -> list[Any]:
        """Return the health of each worker's engine, as plain values; None of one that does not answer."""
        replies = self._call(wire.Health, timeout_s)
        return [reply.health if isinstance(reply, wire.Status) else None for reply in replies]

    def clear(self, tier: str = "", timeout_s: float = 30.0) -> None:
        """Delete what is stored, in one tier or in all.

        Raises
        ------
        StoreError
            Not all workers have done it.
        """
        for number, reply in enumerate(self._call(lambda i: wire.Clear(i, tier), timeout_s)):
            if not isinstance(reply, wire.Done):
                why = reply.error if isinstance(reply, wire.Failed) else f"no answer within {timeout_s} s"
                raise StoreError(f"worker {number} has not cleared its cache: {why}; try again when it is up")

    def _call(self, make: Callable[[int], wire.Message], timeout_s: float) -> list[wire.Reply | None]:
        question = _Question()
        self._send_all(question, make, float("inf"))
        self._await(question, timeout_s)
        self._drop_question(question)
        return [question.answers.get(rank.number) for rank in self._ranks]

    def _tell(self, ranks: Sequence[_Rank], make: Callable[[int], wire.Message]) -> None:
        """Send what needs no reply."""
        for rank in ranks:
            if rank.up and not rank.refused:
                self._ids += 1
                self._send(rank, make(self._ids))

    def _drop_question(self, question: _Question) -> None:
        """Wait for no more answers to it."""
        for rank in self._ranks if question.missing else ():
            for number in [n for n, (asked, _) in rank.waiting.items() if asked is question]:
                del rank.waiting[number]

    def _send_all(self, question: _Question, make: Callable[[int], wire.Message], timeout_s: float) -> None:
        question.asked = self._clock()
        for rank in self._ranks:
            question.answers[rank.number] = None
            if rank.up and not rank.refused:
                self._ids += 1
                if self._send(rank, make(self._ids)):
                    rank.waiting[self._ids] = (question, question.asked + timeout_s)
                    question.missing += 1

    def _send(self, rank: _Rank, message: wire.Message) -> bool:
        try:
            rank.socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:  # a thousand messages that nobody takes
            return False
        return True

    def _greet(self, rank: _Rank) -> None:
        self._ids += 1
        rank.next_hello = self._clock() + self._retry_s
        self._send(rank, wire.Hello(self._ids, wire.PROTOCOL, kvcore.__version__, self._namespace))

    def _await(self, question: _Question, seconds: float) -> None:
        """Take what has come, until a question is answered or so many seconds have passed."""
        until = self._clock() + seconds
        self._pump(0.0)
        while question.missing:
            left = until - self._clock()
            if left <= 0.0:
                return
            self._pump(left)

    def _pump(self, seconds: float) -> None:
        """Take what has come, waiting for the first for so many seconds, and see who is late."""
        ready = dict(self._poller.poll(max(int(seconds * 1000.0), 1 if seconds > 0.0 else 0)))
        for rank in self._ranks:
            if rank.socket in ready:
                self._receive(rank)
        now = self._clock()
        for rank in self._ranks:
            if any(now > late for _, late in rank.waiting.values()):
                self._lose(rank)
            if not rank.up and now >= rank.next_hello:
                self._greet(rank)

    def _receive(self, rank: _Rank) -> None:
        while True:
            try:
                data = rank.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = _decode(data)
            except msgspec.DecodeError:
                self._complain(rank, "it sends what is no message of this version of kvcore")
                continue
            if isinstance(reply, wire.Welcome):
                self._welcomed(rank, reply)
                continue
            if isinstance(reply, wire.Failed):
                if reply.strange:  # it was started anew
                    self._greet(rank)
                else:
                    self._complain(rank, reply.error)
            elif isinstance(reply, wire.Hit):
                self._answered(rank)
            self._settle(rank, reply)

    def _welcomed(self, rank: _Rank, welcome: wire.Welcome) -> None:
        if welcome.refusal:
            if welcome.refusal != rank.refused:
                logger.error("KV cache lookups in worker %d are refused: %s", rank.number, welcome.refusal)
            rank.refused = welcome.refusal
            self._drop(rank)
            return
        rank.refused, rank.up = "", True

    def _answered(self, rank: _Rank) -> None:
        rank.complained = False
        if rank.losses:
            rank.losses = 0
            logger.info("KV cache lookups in worker %d work again", rank.number)

    def _settle(self, rank: _Rank, reply: wire.Answer) -> None:
        waiting = rank.waiting.pop(reply.id, None)
        if waiting is not None:  # else it was late, or nobody wants to know any more
            question, _ = waiting
            question.answers[rank.number] = reply
            question.missing -= 1

    def _lose(self, rank: _Rank) -> None:
        """Take a worker for dead: all its open questions have no hits."""
        if rank.up:
            if not rank.losses:
                logger.warning(
                    "KV cache lookups in worker %d have no answer after %.3g s: requests are computed without the "
                    "cache until it answers again",
                    rank.number,
                    self._timeout_s,
                )
            # It may greet at once, for its engine is what hangs: then each new try costs a request the timeout.
            rank.next_hello = self._clock() + self._retry_s * 2 ** min(rank.losses, _MAX_BACKOFF)
            rank.losses += 1
        rank.up = False
        self._drop(rank)

    def _drop(self, rank: _Rank) -> None:
        for question, _ in rank.waiting.values():
            question.missing -= 1
        rank.waiting.clear()

    def _complain(self, rank: _Rank, why: str) -> None:
        """Log a failure, once until it works again."""
        if not rank.complained:
            rank.complained = True
            logger.warning("KV cache lookups in worker %d fail: %s", rank.number, why)
