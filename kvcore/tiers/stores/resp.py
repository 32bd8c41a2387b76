"""A store in a Redis or Valkey server, or a cluster of them. Any number of processes may share one.

Keys in the server, all below the store's prefix::

    <prefix>format                                                what this is: format and version
    <prefix>frame:{<namespace, 64 hex>:<digest, 64 hex>}          a frame
    <prefix>quarantine:{<namespace>:<digest>}:<reason>            a bad frame, for a day

What stands in braces decides the slot of a cluster: a frame and its quarantine are on one node, the frames of a
namespace on all.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.errors import ConfigError, StoreError
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
    result_of,
)
from kvcore.tiers.stores.marker import check_marker, marker_bytes
from kvcore.tiers.stores.resp_uri import RespAddress, parse_resp_uri

__all__ = ["RespAddress", "RespStore", "open_resp"]

FORMAT, VERSION = "kvcore-resp-store", 1

_FRAME = re.compile(rb"frame:\{([0-9a-f]{64}):([0-9a-f]{64})\}")
_SMALL = 64
"""About the bytes of a command or a reply without a frame."""
_FIRST_GUESS = 1 << 20
_JOINED = 4096
"""Up to this length a copy of a frame is cheaper than a packet of its own, which the library gives to every view."""


def open_resp(uri: str) -> RespStore:
    """Open a store by the URI of its server.

    Parameters
    ----------
    uri : str
        ``resp://[user:password@]host[:port][/db][?options]``, ``resps://...`` for TLS, or
        ``resp+unix:///path.sock[?options]``; `parse_resp_uri` and docs/store-resp.md say more.

    Raises
    ------
    ConfigError
        The URI means nothing, or the client library is not installed.
    StoreError
        The server cannot be used, or has a store of another version below this prefix.
    """
    return RespStore(parse_resp_uri(uri))


class RespStore(Store):
    """Frames as values of a server.

    Parameters
    ----------
    address : RespAddress

    Raises
    ------
    ConfigError
        The client library is not installed.
    StoreError
        The server cannot be used, or has a store of another version below this prefix.

    Notes
    -----
    Connections are made when they are needed, at most `address.pool` to a server, and again after they broke. What
    has the same result when it is done twice is tried again for `address.timeout` seconds; `delete` and `quarantine`
    are not, as they tell whether there was a frame. A process that forks opens its stores afterwards.
    """

    def __init__(self, address: RespAddress) -> None:
        try:
            from kvcore.tiers.stores.resp_client import RespClient
        except ModuleNotFoundError as error:
            if error.name != "redis":
                raise
            raise ConfigError(
                'a store resp: needs the package redis, which is not installed; pip install "kvcore[redis]"'
            ) from error
        self._address = address
        self._ledger = Ledger(address.name)
        self._client = RespClient(address, self._ledger)
        try:
            self._claim()
            self._most = self._client.largest()
        except BaseException:
            self._client.disconnect()
            raise
        self._large = _FIRST_GUESS

    @property
    def name(self) -> str:
        """See `Store.name`."""
        return self._ledger.name

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that the server takes, as it said when the store was opened."""
        return self._most

    def put(self, key: Key, frame: Buffer) -> int:
        """Store a frame by one SET. See `Store.put`."""
        return result_of(self.put_batch([(key, frame)])[0])

    def put_batch(self, items: Sequence[tuple[Key, Buffer]]) -> Outcomes[int]:
        """Store frames, with one round trip for many. See `Store.put_batch`."""
        pairs = [(StoreKey.of(key), flat_bytes(frame)) for key, frame in items]
        # Of frames for one key only the last is sent: after a broken connection the order would be lost.
        last = {name: data for name, data in pairs if len(data) <= self._most}
        expiry = ("PX", round(self._address.ttl * 1000)) if self._address.ttl else ()
        replies = self._client.pipeline(
            "store a frame",
            [
                ("SET", self._frame(name), data if len(data) > _JOINED else bytes(data), *expiry)
                for name, data in last.items()
            ],
            [len(data) for data in last.values()],
            again=True,
        )
        failed = {name: reply for name, reply in zip(last, replies, strict=True) if isinstance(reply, StoreError)}
        outcomes: Outcomes[int] = [
            failed.get(name, len(data)) if len(data) <= self._most else self._too_large(len(data))
            for name, data in pairs
        ]
        stored = [outcome for outcome in outcomes if not isinstance(outcome, StoreError)]
        self._large = max(self._large, *stored, 0)
        self._ledger.add(puts=len(stored), put_bytes=sum(stored))
        return outcomes

    def get(self, key: Key) -> memoryview | None:
        """See `Store.get`."""
        return result_of(self.get_batch([key])[0])

    def get_batch(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """Read frames, with one round trip for many. See `Store.get_batch`."""
        outcomes = self._read(keys)
        self._count(outcomes)
        return outcomes

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """See `Store.get_into`."""
        return result_of(self.get_batch_into([(key, out)])[0])

    def get_batch_into(self, items: Sequence[tuple[Key, memoryview]]) -> Outcomes[int | None]:
        """Read frames, and copy them to their places. See `Store.get_batch_into`."""
        outcomes: Outcomes[int | None] = []
        taken: Outcomes[memoryview | None] = []
        torn = 0
        for found, (_, out) in zip(self._read([key for key, _ in items]), items, strict=True):
            frame = found
            if isinstance(frame, memoryview) and len(frame) > len(out):
                frame, torn = None, torn + 1
            if isinstance(frame, memoryview):
                out[: len(frame)] = frame
            taken.append(frame)
            outcomes.append(len(frame) if isinstance(frame, memoryview) else frame)
        self._count(taken, torn=torn)
        return outcomes

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        return result_of(self.stat_batch([key])[0])

    def stat_batch(self, keys: Sequence[Key]) -> Outcomes[StoreStat | None]:
        """Look frames up, with one round trip for many. See `Store.stat_batch`."""
        names = [self._frame(StoreKey.of(key)) for key in keys]
        # The length of what is not there is 0, so both are asked.
        commands = [command for name in names for command in (("STRLEN", name), ("EXISTS", name))]
        replies = self._client.pipeline("look up a frame", commands, [_SMALL] * len(commands), again=True)
        return [
            self._stat(name, length, there)
            for name, length, there in zip(names, replies[::2], replies[1::2], strict=True)
        ]

    def delete(self, key: Key) -> bool:
        """See `Store.delete`. After a connection broke, the frame may be gone although the call failed."""
        return result_of(self.delete_batch([key])[0])

    def delete_batch(self, keys: Sequence[Key]) -> Outcomes[bool]:
        """Remove frames, with one round trip for many; in a cluster one by one. See `Store.delete_batch`."""
        commands = [("UNLINK", self._frame(StoreKey.of(key))) for key in keys]
        replies = self._client.pipeline("delete a frame", commands, [_SMALL] * len(commands), again=False)
        outcomes: Outcomes[bool] = [reply if isinstance(reply, StoreError) else bool(reply) for reply in replies]
        self._ledger.add(deletes=sum(outcome is True for outcome in outcomes))
        return outcomes

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. All names are read before the first is given: a server may name one twice."""
        self._ledger.require_open()
        return self._list(namespace)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Rename the frame, for `address.quarantine` seconds. See `Store.quarantine`."""
        check_reason(reason)
        name = StoreKey.of(key)
        frame, aside = self._frame(name), f"{self._address.prefix}quarantine:{_tag(name)}:{reason}"
        expiry = round(self._address.quarantine * 1000)

        # The expiry comes first and moves along: what was renamed and then lost the connection would stay for ever.
        # It comes again afterwards: a frame that was stored in between is moved in its stead, and has none.
        doing = "quarantine a frame"
        if not self._client.run(doing, lambda client: client.execute_command("PEXPIRE", frame, expiry), again=True):
            return False
        commands = [("RENAME", frame, aside), ("PEXPIRE", aside, expiry)]
        reply, _ = self._client.pipeline(doing, commands, [_SMALL] * 2, again=False)
        if isinstance(reply, StoreError):
            if reply.errno == errno.ENOENT:
                return False  # another one, who found it bad as well, was faster
            raise reply
        self._ledger.add(quarantined=1)
        return True

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._ledger.stats()

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _frame(self, name: StoreKey) -> str:
        return f"{self._address.prefix}frame:{_tag(name)}"

    def _claim(self) -> None:
        """Make sure that what is below the prefix is a store of this version; make it one if nothing is."""
        marker = f"{self._address.prefix}format"
        data = marker_bytes(FORMAT, VERSION)

        def read_or_write(client: Any) -> bytes:
            found = client.get(marker)
            if found is None and not client.set(marker, data, nx=True):
                found = client.get(marker)  # another process was faster
            return data if found is None else bytes(found)

        found = self._client.run("open a store", read_or_write, again=False)
        check_marker(found, FORMAT, VERSION, where=f"the key {marker} of {self.name}", other="prefix")

    def _too_large(self, nbytes: int) -> StoreError:
        return StoreError(
            errno.EFBIG,
            f"a frame of {nbytes} bytes is larger than the {self._most} bytes that {self.name} takes in one value; "
            "raise the server's proto-max-bulk-len and client-query-buffer-limit, or store smaller chunks",
        )

    def _read(self, keys: Sequence[Key]) -> Outcomes[memoryview | None]:
        """Read frames; count nothing."""
        commands = [("GET", self._frame(StoreKey.of(key))) for key in keys]
        # How large they are is known only afterwards; the largest so far bounds what one pipeline asks for.
        replies = self._client.pipeline("read a frame", commands, [self._large] * len(commands), again=True)
        frames: Outcomes[memoryview | None] = [
            reply if reply is None or isinstance(reply, StoreError) else memoryview(reply).toreadonly()
            for reply in replies
        ]
        self._large = max(self._large, *(len(frame) for frame in frames if isinstance(frame, memoryview)), 0)
        return frames

    def _count(self, frames: Outcomes[memoryview | None], torn: int = 0) -> None:
        hits = [len(frame) for frame in frames if isinstance(frame, memoryview)]
        self._ledger.add(hits=len(hits), hit_bytes=sum(hits), misses=sum(f is None for f in frames), torn=torn)

    def _stat(self, name: str, length: Any, there: Any) -> StoreStat | StoreError | None:
        for reply in (length, there):
            if isinstance(reply, StoreError):
                return reply
        if length:
            return StoreStat(length)
        if not there:
            return None
        # An empty frame, or one that came between the two questions.
        (frame,) = self._client.pipeline("look up a frame", [("GET", name)], [self._large], again=True)
        if isinstance(frame, StoreError):
            return frame
        return None if frame is None else StoreStat(len(frame))

    def _list(self, namespace: bytes | None) -> Iterator[StoreKey]:
        prefix = f"{self._address.prefix}frame:"
        for key in self._client.keys(f"{prefix}{{{'' if namespace is None else namespace.hex() + ':'}*"):
            found = _FRAME.fullmatch(key, len(self._address.prefix))
            if found:
                yield StoreKey(bytes.fromhex(found[1].decode()), bytes.fromhex(found[2].decode()))


def _tag(name: StoreKey) -> str:
    return f"{{{name.namespace.hex()}:{name.digest.hex()}}}"
