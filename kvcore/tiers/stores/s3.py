"""A store in a bucket of S3, or of any server that speaks its protocol. Any number of processes may share one.

Objects, all below the store's prefix::

    kvcore-store.json                             what this is: format and version
    <namespace, 64 hex>/<2 hex>/<64 hex>.kvf      frames, by digest
    quarantine/<namespace>.<digest>.<reason>.kvf  bad frames, moved aside

The server gives an object its name when it is whole, so a `put` needs no temporary names. A large frame is read in
ranges, several at a time; each has to be of the object that the first was of (If-Match, and its ETag and size are
compared), or the reading begins anew, once.
"""

from __future__ import annotations

import concurrent.futures
import errno
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvcore.errors import StoreError
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Ledger,
    Outcomes,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    check_reason,
    flat_bytes,
    outcome_of,
    result_of,
)
from kvcore.tiers.stores.s3_client import ReplacedError, S3Client
from kvcore.tiers.stores.s3_marker import claim
from kvcore.tiers.stores.s3_uri import S3Address, parse_s3_uri

__all__ = ["S3Address", "S3Store", "open_s3"]

S = TypeVar("S")
T = TypeVar("T")

_FRAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.kvf")


def open_s3(uri: str) -> S3Store:
    """Open a store by the URI of its bucket.

    Parameters
    ----------
    uri : str
        ``s3://bucket[/prefix][?options]``; `parse_s3_uri` and docs/store-s3.md say more.

    Raises
    ------
    ConfigError
        The URI means nothing or holds credentials, or the client library is not installed.
    StoreError
        The bucket cannot be used, or has something else below this prefix.
    """
    return S3Store(parse_s3_uri(uri))


class S3Store(Store):
    """Frames as objects of a bucket.

    Parameters
    ----------
    address : S3Address

    Raises
    ------
    ConfigError
        The client library is not installed, or refuses the settings.
    StoreError
        The bucket cannot be used, or has something else below this prefix.

    Notes
    -----
    A request is tried again as the address says, with exponential back-off, where that cannot do harm. Of one call at
    most `address.concurrency` requests are under way: beside the frames themselves, that many parts are in memory. A
    process that forks opens its stores afterwards.
    """

    def __init__(self, address: S3Address) -> None:
        self._address = address
        self._part = address.part_bytes
        self._ledger = Ledger(address.name)
        self._calls = _Calls(self._ledger)
        self._client = S3Client(address)
        claim(self._client, address.name)
        self._pool = ThreadPoolExecutor(address.concurrency, thread_name_prefix="kvcore-s3")

    @property
    def name(self) -> str:
        """See `Store.name`."""
        return self._ledger.name

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that the store takes: 10,000 parts, and 5 TiB."""
        return self._address.max_frame_bytes

    def put(self, key: Key, frame: Buffer) -> int:
        """Write one object, a large one in parts. See `Store.put`."""
        name, data = _frame_name(StoreKey.of(key)), flat_bytes(frame)
        with self._calls:
            return self._put(name, data, self._address.concurrency)

    def put_batch(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int]:
        """Write several objects at a time. See `Store.put_batch`."""
        pairs = [(_frame_name(StoreKey.of(key)), flat_bytes(frame)) for key, frame in items]
        names = [name for name, _ in pairs]
        width = max(1, self._address.concurrency // max(1, len(set(names))))
        return self._each(names, lambda index: self._put(*pairs[index], width))

    def get(self, key: Key) -> memoryview | None:
        """Read one object, a large one in ranges. See `Store.get`."""
        return result_of(self.get_batch([key])[0])

    def get_batch(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """Read several objects at a time. See `Store.get_batch`."""
        return self._get([(_frame_name(StoreKey.of(key)), None) for key in keys])

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """Read one object into memory of the caller's. See `Store.get_into`."""
        return result_of(self.get_batch_into([(key, out)])[0])

    def get_batch_into(self, items: Sequence[tuple[Key, memoryview]]) -> Outcomes[int | None]:
        """Read several objects at a time into memory of the caller's. See `Store.get_batch_into`."""
        frames = self._get([(_frame_name(StoreKey.of(key)), out) for key, out in items])
        return [len(frame) if isinstance(frame, memoryview) else frame for frame in frames]

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        name = _frame_name(StoreKey.of(key))
        with self._calls:
            return self._stat(name)

    def stat_batch(self, keys: Sequence[Key]) -> Outcomes[StoreStat | None]:
        """Look several objects up at a time. See `Store.stat_batch`."""
        names = [_frame_name(StoreKey.of(key)) for key in keys]
        return self._each(names, lambda index: self._stat(names[index]))

    def delete(self, key: Key) -> bool:
        """Look whether there is one, and delete it: the server itself does not tell. See `Store.delete`.

        Of two that delete one frame at the same moment, both may be told that there was one.
        """
        name = _frame_name(StoreKey.of(key))
        with self._calls:
            return self._delete(name)

    def delete_batch(self, keys: Sequence[Key]) -> Outcomes[bool]:
        """Delete several objects at a time. See `Store.delete_batch`."""
        names = [_frame_name(StoreKey.of(key)) for key in keys]
        return self._each(names, lambda index: self._delete(names[index]))

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. Pages of names are asked for when they are due; what is no frame's is passed over."""
        self._ledger.require_open()
        return self._list(namespace)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Copy the object to ``quarantine/`` at the server, then delete it. See `Store.quarantine`.

        A frame that is stored between the two is deleted with the bad one: a miss, to be stored again.
        """
        check_reason(reason)
        found = StoreKey.of(key)
        name = _frame_name(found)
        with self._calls:
            aside = f"quarantine/{found.namespace.hex()}.{found.digest.hex()}.{reason}.kvf"
            if not self._client.copy(name, aside):
                return False
            self._client.delete(name)
        self._ledger.add(quarantined=1)
        return True

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._ledger.stats()

    def close(self) -> None:
        """See `Store.close`."""
        self._calls.close()
        self._pool.shutdown()
        self._client.close()

    def _put(self, name: str, data: memoryview, width: int) -> int:
        if len(data) > self.max_frame_bytes:
            raise StoreError(
                errno.EFBIG,
                f"a frame of {len(data)} bytes is larger than the {self.max_frame_bytes} bytes that {self.name} takes "
                "in parts of this size; add a larger part_mb= to the URI, or store smaller chunks",
            )
        self._client.put(name, data, width=width)
        self._ledger.add(puts=1, put_bytes=len(data))
        return len(data)

    def _stat(self, name: str) -> StoreStat | None:
        size = self._client.size(name)
        return None if size is None else StoreStat(size)

    def _delete(self, name: str) -> bool:
        if self._client.size(name) is None:
            return False
        self._client.delete(name)
        self._ledger.add(deletes=1)
        return True

    def _list(self, namespace: bytes | None) -> Iterator[StoreKey]:
        pages = self._client.names(None if namespace is None else namespace.hex())
        while True:
            with self._calls:
                page = next(pages, None)
            if page is None:
                return
            for name in page:
                found = _FRAME.fullmatch(name)
                if found:
                    yield StoreKey(bytes.fromhex(found[1]), bytes.fromhex(found[3]))

    def _each(self, names: Sequence[str], call: Callable[[int], T]) -> Outcomes[T]:
        """Call with each index, several at a time; those of one name one after the other.

        Of a store that is closed, each has the error that says so.
        """
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(name, []).append(index)

        def run(group: list[int]) -> list[T | StoreError]:
            return [outcome_of(call, index) for index in group]

        outcomes: dict[int, T | StoreError] = {}
        closed = outcome_of(self._calls.begin)
        if isinstance(closed, StoreError):
            return [closed] * len(names)
        try:
            for group, results in zip(groups.values(), self._all(run, list(groups.values())), strict=True):
                outcomes.update(zip(group, results, strict=True))
        finally:
            self._calls.end()
        return [outcomes[index] for index in range(len(names))]

    def _get(self, wanted: Sequence[tuple[str, memoryview | None]]) -> Outcomes[memoryview | None]:
        """Read objects, each into its memory or into new; one that is replaced meanwhile is read again, once."""
        closed = outcome_of(self._calls.begin)
        if isinstance(closed, StoreError):
            return [closed] * len(wanted)
        try:
            outcomes = self._download(wanted)
            again = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, ReplacedError)]
            for index, outcome in zip(again, self._download([wanted[index] for index in again]), strict=True):
                outcomes[index] = outcome
        finally:
            self._calls.end()
        torn = sum(isinstance(outcome, ReplacedError) for outcome in outcomes)
        frames = [None if isinstance(outcome, ReplacedError) else outcome for outcome in outcomes]
        hits = [len(frame) for frame in frames if isinstance(frame, memoryview)]
        misses = sum(frame is None for frame in frames)
        self._ledger.add(hits=len(hits), hit_bytes=sum(hits), misses=misses, torn=torn)
        return frames

    def _download(self, wanted: Sequence[tuple[str, memoryview | None]]) -> Outcomes[memoryview | None]:
        """Read objects; `ReplacedError` for one that changed under the reading."""
        begun = self._all(lambda item: outcome_of(self._begin, *item), wanted)
        jobs = [(one, start) for one in begun if isinstance(one, _Download) for start in one.rest]
        failed: dict[int, StoreError] = {}
        for (download, _), done in zip(jobs, self._all(lambda job: outcome_of(self._fetch, *job), jobs), strict=True):
            if done is not None:
                failed.setdefault(id(download), done)
        return [failed.get(id(one), one.out.toreadonly()) if isinstance(one, _Download) else one for one in begun]

    def _begin(self, name: str, out: memoryview | None) -> _Download | memoryview | None:
        """Read the first part of an object, which tells how large the rest is; None if there is none."""
        first = self._client.read(name, 0, self._part)
        if first is not None and len(first.data) < first.size and first.etag is None:
            first = self._client.read_whole(name)  # nothing would tell two objects apart
        if first is None:
            return None
        if out is None and len(first.data) == first.size:
            return first.data
        if out is None:
            # NumPy's allocation is not zeroed first, as a bytearray's would be.
            out = np.empty(first.size, np.uint8).data
        elif len(out) < first.size:
            raise ReplacedError
        out[: len(first.data)] = first.data
        return _Download(name, first.etag, out[: first.size], range(len(first.data), first.size, self._part))

    def _fetch(self, download: _Download, start: int) -> None:
        """Read another part of an object to its place."""
        size = len(download.out)
        stop = min(start + self._part, size)
        piece = self._client.read(download.name, start, stop, etag=download.etag)
        if piece is None or (piece.etag, piece.size) != (download.etag, size):
            raise ReplacedError
        download.out[start:stop] = piece.data

    def _all(self, call: Callable[[S], T], items: Sequence[S]) -> Sequence[T]:
        """Call with each item on the pool's threads. None is at work any more when this returns or raises."""
        if len(items) == 1:
            return [call(items[0])]
        futures: list[Future[T]] = []
        try:
            futures.extend(self._pool.submit(call, item) for item in items)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)


@dataclass(frozen=True, slots=True)
class _Download:
    """An object of which the first part is in its place, and where the others begin."""

    name: str
    etag: str | None
    out: memoryview
    rest: range


class _Calls:
    """The calls under way: a context for each of them, and `close`, which waits for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._under_way = 0

    def begin(self) -> None:
        """Let a call begin; raise `StoreError` once the store is closed."""
        with self._changed:
            self._ledger.require_open()
            self._under_way += 1

    def end(self) -> None:
        """Note that a call has ended."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def close(self) -> None:
        """Let no more calls begin; return when none is under way."""
        with self._changed:
            self._ledger.close()
            self._changed.wait_for(lambda: not self._under_way)


def _frame_name(key: StoreKey) -> str:
    digest = key.digest.hex()
    return f"{key.namespace.hex()}/{digest[:2]}/{digest}.kvf"
