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
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvcore.errors import ConfigError, CorruptFrameError, StoreError
from kvcore.tiers.stores.contract import (
    Buffer,
    Key,
    Ledger,
    Store,
    StoreKey,
    StoreStat,
    StoreStats,
    check_reason,
    flat_bytes,
)
from kvcore.tiers.stores.fs_io import (
    as_store_error,
    make_directory,
    probe_direct,
    read_file,
    read_file_into,
    store_error,
    sync_directory,
    temp_name,
    write_file,
)
from kvcore.tiers.stores.fs_scan import HeadCheck, Scanned, check_frame_head, look_at
from kvcore.tiers.stores.marker import check_marker, marker_bytes
from kvcore.tiers.stores.options import read_flag, split_options

__all__ = ["FsStore", "open_fs"]

MARKER = "kvcore-store.json"
FORMAT, VERSION = "kvcore-fs-store", 1
STALE_SECONDS = 3600.0

_INCOMING, _QUARANTINE = "incoming", "quarantine"
_TEMP = re.compile(r"[0-9]+-[0-9a-f]{16}\.tmp")
_NAMESPACE, _SHARD, _FRAME = (re.compile(p) for p in ("[0-9a-f]{64}", "[0-9a-f]{2}", r"[0-9a-f]{64}\.kvf"))

T = TypeVar("T", memoryview, int)

_log = logging.getLogger("kvcore")


class FsStore(Store):
    """Frames as files. Many processes may share the directory.

    Parameters
    ----------
    root : str or Path
        Created if missing. A directory that holds anything else than a store of this format is refused,
        untouched.
    direct : bool
        Read and write past the page cache (O_DIRECT). Where the file system refuses, the store goes through the cache
        and says so: once in the log, and in `notes`.
    sync : bool
        Whether a frame is on the medium when `put` returns. Without it a power failure, not the death of a process,
        may leave short or empty files under the names of frames: readers that check frames take them for misses.

    Attributes
    ----------
    notes : tuple of str
        What differs from what was asked for, for people; empty where nothing does.

    Raises
    ------
    StoreError
        The directory is not a store of this version, or cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str], *, direct: bool = False, sync: bool = True) -> None:
        self._root = Path(root).absolute()
        self._base = str(self._root)  # paths of frames are made of strings: a Path costs more than a small read
        self._folders: set[str] = set()  # that were there when last looked at
        self._ledger = Ledger(f"fs:{self._root}")
        self._sync = sync
        self._direct = False
        self.notes: tuple[str, ...] = ()
        with as_store_error("open a store in", self._root):
            self._claim()
            make_directory(self._root / _INCOMING, sync=sync)
            self._sweep()
        self._direct = direct and self._can_direct()

    @property
    def name(self) -> str:
        """See `Store.name`."""
        return self._ledger.name

    @property
    def direct(self) -> bool:
        """Whether it reads and writes past the page cache."""
        return self._direct

    @property
    def sync(self) -> bool:
        """Whether a `put` waits for the medium."""
        return self._sync

    def put(self, key: Key, frame: Buffer) -> int:
        """Write, fsync, rename, fsync the directory. See `Store.put`."""
        path, data = self._path(key), flat_bytes(frame)
        with as_store_error("write", path):
            self._make_folder(path)
            try:
                self._publish(path, data)
            except FileNotFoundError:  # somebody has removed a folder since it was last looked at
                self._folders.clear()
                self._make_folder(path)
                self._publish(path, data)
        self._ledger.add(puts=1, put_bytes=len(data))
        return len(data)

    def get(self, key: Key) -> memoryview | None:
        """Read a file of known length. One that vanishes or shrinks meanwhile is a miss. See `Store.get`."""
        return self._load(key, lambda path: read_file(path, direct=self._direct))

    def get_into(self, key: Key, out: memoryview) -> int | None:
        """Read straight into the caller's memory; with O_DIRECT only where its address is a multiple of 4096.

        See `Store.get_into`.
        """
        return self._load(key, lambda path: read_file_into(path, out, direct=self._direct))

    def stat(self, key: Key) -> StoreStat | None:
        """See `Store.stat`."""
        path = self._path(key)
        with as_store_error("look up", path):
            try:
                return StoreStat(os.stat(path).st_size)
            except FileNotFoundError:
                return None

    def delete(self, key: Key) -> bool:
        """See `Store.delete`."""
        path = self._path(key)
        with as_store_error("delete", path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return False
        self._ledger.add(deletes=1)
        return True

    def list(self, namespace: bytes | None = None) -> Iterator[StoreKey]:
        """See `Store.list`. Files whose names are not exactly those of frames are passed over."""
        self._ledger.require_open()
        return self._list(namespace)

    def scan(
        self, check: HeadCheck | None = check_frame_head, *, progress: Callable[[int], None] | None = None
    ) -> Iterator[Scanned]:
        """Iterate over all frames with their sizes and times; set those aside that are not what their names say.

        Parameters
        ----------
        check : callable, optional
            What looks at a head, so that no name is trusted without it; None for a store of other bytes than frames.
        progress : callable, optional
            Called after each file with the number of files so far.

        Yields
        ------
        Scanned
            In no order. Frames of a newer format are left alone and yielded, with the reason; frames that `check` finds
            to be damaged are in quarantine and not yielded. Both are summed up in the log at the end.

        Raises
        ------
        StoreError
            A directory cannot be read, or a bad frame not be set aside. One file that cannot be read is no error.
        """
        self._ledger.require_open()
        return self._scan(check, progress or (lambda count: None))

    def quarantine(self, key: Key, reason: str) -> bool:
        """Move the file to ``quarantine/``, the latest of each key and reason. See `Store.quarantine`."""
        check_reason(reason)
        path = Path(self._path(key))
        aside = self._root / _QUARANTINE / f"{path.parent.parent.name}.{path.stem}.{reason}.kvf"
        with as_store_error("quarantine", path):
            make_directory(aside.parent, sync=self._sync)
            try:
                os.replace(path, aside)
            except FileNotFoundError:
                return False
        self._ledger.add(quarantined=1)
        return True

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._ledger.stats()

    def close(self) -> None:
        """See `Store.close`. Nothing is held between calls: those under way end as if the store were open."""
        self._ledger.close()

    def _path(self, key: Key) -> str:
        self._ledger.require_open()
        name = StoreKey.of(key)
        digest = name.digest.hex()
        return f"{self._base}/{name.namespace.hex()}/{digest[:2]}/{digest}.kvf"

    def _load(self, key: Key, read: Callable[[str], T | None]) -> T | None:
        """Read a frame's file; None, counted as a miss, where it is not there, or torn where `read` gives None."""
        path = self._path(key)
        found, torn = None, False
        try:
            found = read(path)
            torn = found is None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise store_error("read", path, error) from error
            torn = True  # a network file system dropped the file under our feet
        if found is None:
            self._ledger.add(misses=1, torn=torn)
            return None
        self._ledger.add(hits=1, hit_bytes=found if isinstance(found, int) else len(found))
        return found

    def _claim(self) -> None:
        """Make sure that the root is a store of this version; make it one if it is empty."""
        make_directory(self._root, sync=self._sync)
        # Listed before the marker is read: a store made by another process meanwhile has its marker first.
        foreign = sorted(entry.name for entry in self._root.iterdir() if not _TEMP.fullmatch(entry.name))
        marker = self._root / MARKER
        try:
            found = marker.read_bytes()
        except FileNotFoundError:
            if foreign:
                raise StoreError(
                    errno.EEXIST,
                    f"{self._root} is not a kvcore store: it has {foreign[0]!r} and no {MARKER}; choose an "
                    "empty or new directory",
                ) from None
            self._publish(str(marker), memoryview(marker_bytes(FORMAT, VERSION)), through=self._base)
            return
        check_marker(found, FORMAT, VERSION, where=str(marker), other="directory")

    def _can_direct(self) -> bool:
        """Whether the file system takes O_DIRECT; if not, say so."""
        why = probe_direct(self._root / _INCOMING)
        if why is None:
            return True
        self.notes += (f"{self.name} goes through the page cache, although direct=1 was asked for: {why}",)
        _log.warning("%s", self.notes[-1])
        return False

    def _make_folder(self, path: str) -> None:
        """Make sure that the folder of a file and that of files being written are there."""
        folder = os.path.dirname(path)
        if folder not in self._folders:
            if not os.path.exists(f"{self._base}/{MARKER}"):
                self._claim()  # somebody has removed all of it
            make_directory(Path(folder), sync=self._sync)
            make_directory(self._root / _INCOMING, sync=self._sync)
            self._folders.add(folder)

    def _publish(self, path: str, data: memoryview, *, through: str | None = None) -> None:
        """Write to a name of our own; give the file its real name when every byte is on the medium."""
        temp = f"{through or self._base + '/' + _INCOMING}/{temp_name()}"
        try:
            write_file(temp, data, direct=self._direct, sync=self._sync)
            os.replace(temp, path)
        except FileExistsError:
            raise  # another writer's
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        if self._sync:
            sync_directory(os.path.dirname(path))

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
        with as_store_error("list", self._root):
            for space in _entries(self._root, only):
                for shard in _entries(space, _SHARD):
                    for entry in _entries(shard, _FRAME):
                        if entry.name.startswith(shard.name):
                            yield StoreKey(bytes.fromhex(space.name), bytes.fromhex(entry.name[:64]))

    def _scan(self, check: HeadCheck | None, progress: Callable[[int], None]) -> Iterator[Scanned]:
        good, aside, left = 0, Counter[str](), Counter[str]()
        for count, key in enumerate(self._list(None), 1):
            try:
                found = look_at(self._path(key), key, check)
            except CorruptFrameError as error:
                found = None
                if self.quarantine(key, error.reason):
                    aside[error.reason] += 1
                    _log.debug("%s: set aside %s: %s", self.name, key.digest.hex(), error)
            if found is not None:
                left[found.unusable] += bool(found.unusable)
                good += not found.unusable
                yield found
            progress(count)
        if aside or +left:
            _log.warning(
                "%s: %d frames; set aside: %s; left alone, of no use to this build: %s",
                self.name, good, _counts(aside), _counts(+left),
            )  # fmt: skip


def open_fs(rest: str) -> FsStore:
    """Open what stands behind ``fs:`` in the URI of a store: ``PATH?direct=1&sync=0&scan=1``.

    Parameters
    ----------
    rest : str
        The directory, absolute or relative to the working directory, and options: ``direct`` and ``sync`` as `FsStore`
        has them, and ``scan=1`` to check the head of every frame before anything is served.

    Raises
    ------
    ConfigError
        No directory, or an option that means nothing.
    StoreError
        The store cannot be opened.
    """
    path, options = split_options(rest, ("direct", "sync", "scan"), scheme="fs")
    if not path:
        raise ConfigError("a file system store needs a directory, for example fs:/var/cache/kvcore")
    flags = {name: read_flag(value, name) for name, value in options.items()}
    scan = flags.pop("scan", False)
    store = FsStore(path, **flags)
    if scan:
        for _ in store.scan():
            pass
    return store


def _counts(by_reason: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.most_common()) or "none"


def _entries(folder: Path | os.DirEntry[str], name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """Entries whose whole names match; none if the folder is gone or is no folder."""
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if name.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
