"""What a store is held against: the machine's own speed at moving as many bytes to and from the same medium."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcore.bench.cases import copy_roofline
from kvcore.errors import KVCoreError
from kvcore.tiers.stores import FsStore, MemoryStore, Store

__all__ = ["NO_LIMIT", "Limit", "limits_of"]


class Limit(NamedTuple):
    """A call that does no more than it must, and its name; without one where nothing can be said.

    `before` is called before each call, and not timed.
    """

    name: str
    call: Callable[[], Any] | None
    before: Callable[[], Any] | None = None


NO_LIMIT = Limit("", None)


def limits_of(store: Store, nbytes: int, closing: ExitStack) -> tuple[Limit, Limit]:
    """Return what the machine can do at most, to write and to read as many bytes.

    A copy for a store in memory; a plain file in the same file system for one of files, written and put on the medium
    if the store does so, and read, through the page cache. None for others, and for files that go past the cache.

    Parameters
    ----------
    store : Store
    nbytes : int
    closing : ExitStack
        Removes the file.

    Raises
    ------
    KVCoreError
        The file cannot be written beside the store's directory.
    """
    if isinstance(store, MemoryStore):
        copy = Limit("memcpy", copy_roofline(nbytes))
        return copy, copy
    if not isinstance(store, FsStore) or store.direct:
        return NO_LIMIT, NO_LIMIT
    path = Path(store.name.removeprefix("fs:")).parent / f"kvcore-bench-{os.getpid()}.bin"
    data, room = np.ones(nbytes, np.uint8).data, np.ones(nbytes, np.uint8).data

    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
        try:
            _whole(os.write(fd, data), nbytes, path)
            if store.sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _whole(os.readv(fd, [room]), nbytes, path)
        finally:
            os.close(fd)

    remove = partial(path.unlink, missing_ok=True)
    closing.callback(remove)
    try:
        write()
    except OSError as error:
        raise KVCoreError(
            f"cannot write {path}: {error.strerror}; beside the store's directory there must be room for a plain file, "
            "which the store is held against"
        ) from error
    return Limit("write, fsync" if store.sync else "write", write, remove), Limit("read", read)


def _whole(count: int, nbytes: int, path: Path) -> None:
    if count != nbytes:
        raise KVCoreError(f"{path}: the system moved {count} of {nbytes} bytes at once; is the disk full?")
