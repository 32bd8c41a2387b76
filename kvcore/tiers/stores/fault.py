"""A store that fails on purpose: errors, torn frames, flipped bits, delays and outages, in front of another store.

What fails is decided by the seed, the op and the number of the call of that op, not by the order in which threads come:
the same calls fail in every run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.contract import Buffer, Key, Store, StoreKey, StoreStat, StoreStats, StoreUsage, flat_bytes
from kvcore.tiers.stores.options import read_time
from kvcore.tiers.stores.registry import open_store

__all__ = ["KINDS", "OPS", "Fault", "FaultPlan", "FaultStore", "open_fault"]

T = TypeVar("T")

OPS = ("put", "get", "stat", "delete", "list", "quarantine")
"""What can fail. `exists` counts as a stat, `get_into` as a get, and a batch as one call for each of its keys."""

_ERRNOS = (
    "ENOSPC",
    "EDQUOT",
    "EFBIG",
    "EIO",
    "EACCES",
    "EROFS",
    "ESTALE",
    "EAGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
)
_OF_FRAMES = ("short", "half", "flip")
KINDS: tuple[str, ...] = (*(name.lower() for name in _ERRNOS), "lost", *_OF_FRAMES, "latency")
"""An errno: the call fails before it does anything. ``lost``: it is done, and then the connection drops (ECONNRESET):
the caller does not know. ``short``: a frame is stored, or returned, without its end, and nobody is told. ``half``: of a
put, the first half of the frame is stored and the call fails (EIO). ``flip``: one bit of the frame is another.
``latency``: the call takes longer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong with some calls.

    Parameters
    ----------
    op : str
        Of `OPS`, or ``"*"`` for all of them.
    kind : str
        Of `KINDS`.
    probability : float
        0 to 1, of each call.
    calls : tuple of int
        Calls that fail whatever the probability, counted from 1 for each op.
    seconds : float
        Of ``latency``: how much longer.

    Raises
    ------
    ConfigError
        A value means nothing, or the op has no frame that the kind could damage.
    """

    op: str
    kind: str
    probability: float = 0.0
    calls: tuple[int, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.op not in (*OPS, "*"):
            raise ConfigError(f"a fault of {self.op!r}: there are {', '.join(OPS)}, and * for all of them")
        if self.kind not in KINDS:
            raise ConfigError(f"there is no fault {self.kind!r}; there are {', '.join(KINDS)}")
        fits = {"short": ("put", "get"), "flip": ("put", "get"), "half": ("put",)}.get(self.kind, (self.op,))
        if self.op not in fits:
            raise ConfigError(f"the fault {self.kind} is one of {' and '.join(fits)}, not of {self.op}")
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"{self.op}.{self.kind}: a probability is 0 to 1, got {self.probability}")
        if any(call < 1 for call in self.calls):
            raise ConfigError(f"{self.op}.{self.kind}: calls are counted from 1, got {min(self.calls)}")
        if self.seconds < 0:
            raise ConfigError(f"{self.op}.{self.kind}: a delay is not negative, got {self.seconds}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, and the seed that chooses the calls."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Return the plan that a text says.

        Parameters
        ----------
        text : str
            Items with commas between them: ``op.kind=0.1`` (a probability), ``op.kind=@3+5`` (the third and the fifth
            call), ``op.latency=5ms``, each with ``kind`` alone for all ops; ``seed=1``.

        Raises
        ------
        ConfigError
            An item means nothing.
        """
        faults: list[Fault] = []
        seed = 0
        for item in filter(None, text.split(",")):
            name, equals, value = item.partition("=")
            op, dot, kind = name.partition(".")
            if not equals:
                raise ConfigError(f"{item!r} is no fault: write put.enospc=0.1, get.short=@3, latency=5ms or seed=1")
            if name == "seed":
                seed = _number(int, value, item)
                continue
            if not dot:
                op, kind = "*", name
            if kind == "latency":
                faults.append(Fault(op, kind, 1.0, seconds=read_time(value, name)))
            elif value.startswith("@"):
                calls = tuple(_number(int, call, item) for call in value[1:].split("+"))
                faults.append(Fault(op, kind, calls=calls))
            else:
                faults.append(Fault(op, kind, _number(float, value, item)))
        return cls(tuple(faults), seed)


def _number(kind: Callable[[str], T], text: str, item: str) -> T:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{item!r}: {text!r} is no number") from error


class FaultStore(Store):
    """A store with faults; without a plan it does what the inner store does.

    Parameters
    ----------
    inner : Store
        Closed with this one.
    plan : FaultPlan
    """

    def __init__(self, inner: Store, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = plan or FaultPlan()
        self._calls = dict.fromkeys(OPS, 0)
        self._injected: Counter[str] = Counter()
        self._outage = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """See `Store.name`: that of the inner store, marked."""
        return f"fault:{self.inner.name}"

    def fail(self, code: int = errno.ECONNREFUSED) -> None:
        """Begin an outage: every call fails with this errno, before it does anything, until `heal`."""
        self._outage = code

    def heal(self) -> None:
        """End an outage."""
        self._outage = 0

    def injected(self) -> dict[str, int]:
        """Return how often each fault happened, by ``op.kind``; calls in an outage as ``op.outage``."""
        with self._lock:
            return dict(self._injected)

    def put(self, key: Key, frame: Buffer) -> int:
        """See `Store.put`."""
        data = flat_bytes(frame)
        call = self._begin("put")
        if self._happens("half", call):
            self.inner.put(key, data[: len(data) // 2])
            raise self._error("half", errno.EIO)
        self.inner.put(key, self._damaged(data, call))
        self._end(call)
        return len(data)

    def get(self, key: Key) -> memoryview | None:
        """See `Store.get`."""
        call = self._begin("get")
        frame = self.inner.get(key)
        self._end(call)
        return None if frame is None else self._damaged(frame, call).toreadonly()

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        return self._pass("stat", lambda: self.inner.stat(key))

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        return self._pass("delete", lambda: self.inner.delete(key))

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. It fails when it is called, not on the way."""
        return self._pass("list", lambda: self.inner.list(namespace))

    def quarantine(self, key: Key, reason: str) -> bool:
        """See `Store.quarantine`."""
        return self._pass("quarantine", lambda: self.inner.quarantine(key, reason))

    def stats(self) -> StoreStats:
        """Return the counters of the inner store: what it was asked, not what callers were told."""
        return self.inner.stats()

    def usage(self) -> StoreUsage:
        """Return that of the inner store, in an outage too."""
        return self.inner.usage()

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _pass(self, op: str, do: Callable[[], T]) -> T:
        call = self._begin(op)
        answer = do()
        self._end(call)
        return answer

    def _begin(self, op: str) -> _Call:
        """Count the call, delay it, and fail it where it is to fail before it does anything."""
        with self._lock:
            self._calls[op] += 1
            call = _Call(op, self._calls[op])
        if self._outage:
            self._count(f"{op}.outage")
            raise self._error("outage", self._outage)
        for fault in self.plan.faults:
            if fault.kind == "latency" and self._chosen(fault, call):
                time.sleep(fault.seconds)
        for name in _ERRNOS:
            if self._happens(name.lower(), call):
                raise self._error(name, getattr(errno, name))
        return call

    def _end(self, call: _Call) -> None:
        """Fail a call that was done."""
        if self._happens("lost", call):
            raise self._error("lost", errno.ECONNRESET)

    def _damaged(self, frame: memoryview, call: _Call) -> memoryview:
        if not frame:
            return frame
        if self._happens("short", call):
            frame = frame[: self._draw("at", call) % len(frame)]
        if frame and self._happens("flip", call):
            bit = self._draw("bit", call) % (8 * len(frame))
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            frame = memoryview(changed)
        return frame

    def _happens(self, kind: str, call: _Call) -> bool:
        happens = any(fault.kind == kind and self._chosen(fault, call) for fault in self.plan.faults)
        if happens:
            self._count(f"{call.op}.{kind}")
        return happens

    def _chosen(self, fault: Fault, call: _Call) -> bool:
        if fault.op not in (call.op, "*"):
            return False
        return call.number in fault.calls or self._draw(fault.kind, call) < fault.probability * 2.0**64

    def _draw(self, what: str, call: _Call) -> int:
        """Return 64 bits that depend on the seed, the op and the number of the call alone."""
        text = f"{self.plan.seed} {what} {call.op} {call.number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def _count(self, what: str) -> None:
        with self._lock:
            self._injected[what] += 1

    def _error(self, what: str, code: int) -> StoreError:
        return StoreError(code, f"{os.strerror(code)}: the fault {what!r} that {self.name} was told to inject")


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    number: int


def open_fault(rest: str) -> FaultStore:
    """Open a store by what follows ``fault:`` in its URI: ``PLAN:INNER``.

    Parameters
    ----------
    rest : str
        A plan as `FaultPlan.parse` reads it, which may be empty, a colon, and the URI of the inner store:
        ``put.enospc=0.1,latency=5ms,seed=1:fs:/path``.

    Raises
    ------
    ConfigError
        The plan means nothing (the inner store was not opened then), or there is no such inner store.
    StoreError
        The inner store cannot be opened.
    """
    text, colon, inner = rest.partition(":")
    if not colon or not inner:
        raise ConfigError(
            f"a fault store is written fault:PLAN:INNER, such as fault:put.enospc=0.1:memory:, got fault:{text}"
        )
    plan = FaultPlan.parse(text)
    return FaultStore(open_store(inner), plan)
