"""A store in a directory. A file has its name only when it is whole and on the medium.

Layout, below the root::

    kvcore-store.json                             what this directory is: format and version
    incoming/<pid>-<random>.tmp                   frames being written
    <namespace, 64 hex>/<2 hex>/<64 hex>.kvf      frames, by digest
    quarantine/<namespace>.<digest>.<reason>.kvf  bad frames, moved aside
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvcore.errors import StoreError
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Ledger,
    StoreKey,
    StoreStat,
    StoreStats,
    check_reason,
    flat_bytes,
)

__all__ = ["FsStore"]

MARKER = "kvcore-store.json"
FORMAT, VERSION = "kvcore-fs-store", 1
STALE_SECONDS = 3600.0

_INCOMING, _QUARANTINE = "incoming", "quarantine"
_TEMP = re.compile(r"[0-9]+-[0-9a-f]{16}\.tmp")
_NAMESPACE, _SHARD, _FRAME = (re.compile(p) for p in ("[0-9a-f]{64}", "[0-9a-f]{2}", r"[0-9a-f]{64}\.kvf"))
_ADVICE = {
    errno.ENOSPC: "free some space, or put the store on another disk",
    errno.EDQUOT: "free some space, or put the store on another disk",
    errno.EACCES: "give this process write access, or choose another directory",
    errno.EPERM: "give this process write access, or choose another directory",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.ENOTDIR: "a part of the path is a file; choose another directory",
}


class FsStore:
    """Frames as files. Many processes may share the directory.

    Parameters
    ----------
    root : str or Path
        Created if missing. A directory that holds anything else than a store of this format is refused,
        untouched.

    Raises
    ------
    StoreError
        The directory is not a store of this version, or cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self._ledger = Ledger(f"fs:{self._root}")
        with _as_store_error("open a store in", self._root):
            self._claim()
            _make_directory(self._root / _INCOMING)
            self._sweep()

    def put(self, key: Key, frame: Buffer) -> int:
        """Write, fsync, rename, fsync the directory. See `Store.put`."""
        path, data = self._path(key), flat_bytes(frame)
        with _as_store_error("write", path):
            _make_directory(path.parent)
            self._publish(path, data)
        self._ledger.add(puts=1, put_bytes=len(data))
        return len(data)

    def get(self, key: Key) -> memoryview | None:
        """Read a file of known length. One that vanishes or shrinks meanwhile is a miss. See `Store.get`."""
        path = self._path(key)
        torn = False
        with _as_store_error("read", path):
            try:
                data = _read_whole(path)
                torn = data is None
            except FileNotFoundError:
                data = None
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                data, torn = None, True  # a network file system dropped the file under our feet
        if data is None:
            self._ledger.add(misses=1, torn=torn)
            return None
        self._ledger.add(hits=1, hit_bytes=len(data))
        return data

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        path = self._path(key)
        with _as_store_error("look up", path):
            try:
                return StoreStat(path.stat().st_size)
            except FileNotFoundError:
                return None

    def exists(self, key: Key) -> bool:
        """See `Store.exists`."""
        return self.stat(key) is not None

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        path = self._path(key)
        with _as_store_error("delete", path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        self._ledger.add(deletes=1)
        return True

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. Files whose names are not exactly those of frames are passed over."""
        self._ledger.require_open()
        return self._list(namespace)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Move the file to ``quarantine/``, the latest of each key and reason. See `Store.quarantine`."""
        check_reason(reason)
        path = self._path(key)
        aside = self._root / _QUARANTINE / f"{path.parent.parent.name}.{path.stem}.{reason}.kvf"
        with _as_store_error("quarantine", path):
            _make_directory(aside.parent)
            try:
                path.replace(aside)
            except FileNotFoundError:
                return False
        self._ledger.add(quarantined=1)
        return True

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._ledger.stats()

    def close(self) -> None:
        """See `Store.close`."""
        self._ledger.close()

    def _path(self, key: Key) -> Path:
        self._ledger.require_open()
        name = StoreKey.of(key)
        digest = name.digest.hex()
        return self._root / name.namespace.hex() / digest[:2] / f"{digest}.kvf"

    def _claim(self) -> None:
        """Make sure that the root is a store of this version; make it one if it is empty."""
        _make_directory(self._root)
        # Listed before the marker is read: a store made by another process meanwhile has its marker first.
        foreign = sorted(entry.name for entry in self._root.iterdir() if not _TEMP.fullmatch(entry.name))
        marker = self._root / MARKER
        try:
            found = marker.read_bytes()
        except FileNotFoundError:
            if foreign:
                raise StoreError(
                    f"{self._root} is not a kvcore store: it has {foreign[0]!r} and no {MARKER}; choose an "
                    "empty or new directory"
                ) from None
            data = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
            self._publish(marker, memoryview(data), through=self._root)
            return
        try:
            fields = json.loads(found)
        except ValueError as error:
            raise StoreError(f"{marker} is not JSON ({error}): not a kvcore store, or a damaged one") from error
        if fields != {"format": FORMAT, "version": VERSION}:
            raise StoreError(
                f"{marker} says {fields}, this build uses format {FORMAT!r} version {VERSION}; choose "
                "another directory, or the kvcore that wrote this one"
            )

    def _publish(self, path: Path, data: memoryview, *, through: Path | None = None) -> None:
        """Write to a name of our own; give the file its real name when every byte is on the medium."""
        temp = (through or self._root / _INCOMING) / f"{os.getpid()}-{secrets.token_hex(8)}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            temp.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise
        _sync_directory(path.parent)

    def _sweep(self) -> None:
        """Remove what writers that died long ago have left."""
        before = time.time() - STALE_SECONDS
        for folder in (self._root, self._root / _INCOMING):
            for entry in _entries(folder, _TEMP):
                # One that cannot be removed (a store mounted read-only) costs its space, nothing else.
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        Path(entry).unlink()

    def _list(self, namespace: bytes | None) -> Iterator[StoreKey]:
        only = _NAMESPACE if namespace is None else re.compile(namespace.hex())
        with _as_store_error("list", self._root):
            for space in _entries(self._root, only):
                for shard in _entries(space, _SHARD):
                    for entry in _entries(shard, _FRAME):
                        if entry.name.startswith(shard.name):
                            yield StoreKey(bytes.fromhex(space.name), bytes.fromhex(entry.name[:64]))


def _entries(folder: Path | os.DirEntry[str], name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """Entries whose whole names match; none if the folder is gone or is no folder."""
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if name.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each one's name on the medium before it is used."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    else:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        written = os.write(fd, data)
        if written <= 0:
            raise OSError(errno.EIO, f"the system wrote {written} of {len(data)} bytes")
        data = data[written:]


def _read_whole(path: Path) -> memoryview | None:
    """Read a file into one allocation of its length; None if it turns out shorter."""
    with path.open("rb", buffering=0) as file:
        # NumPy's allocation is not zeroed first, as a bytearray's would be.
        view = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        at = 0
        while at < len(view):
            count = file.readinto(view[at:])
            if not count:
                return None
            at += count
    return view.toreadonly()


@contextlib.contextmanager
def _as_store_error(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` with the same errno that says what was being done."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "the store is as it was before")
        message = f"cannot {doing} {path}: {error.strerror or error}; {advice}"
        raise StoreError(error.errno or errno.EIO, message) from error
