"""How the store `fs` moves bytes between files and memory: through the page cache, or past it with O_DIRECT.

O_DIRECT takes memory, offsets and lengths that are multiples of the device's block; `ALIGN` is one that all known
devices accept. Frames have any length, so the last block is written padded and the file cut to its length, and read
into memory with room for all of the block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvcore.errors import StoreError

__all__ = [
    "ALIGN",
    "O_DIRECT",
    "aligned_bytes",
    "as_store_error",
    "make_directory",
    "probe_direct",
    "read_file",
    "read_file_into",
    "store_error",
    "sync_directory",
    "temp_name",
    "write_file",
]

ALIGN = 4096
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag, or 0 on a system that has none."""

_STAGING_BYTES = 1 << 20
_ADVICE = {
    errno.ENOSPC: "free some space, or put the store on another disk",
    errno.EDQUOT: "free some space, or put the store on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or store smaller chunks",
    errno.EACCES: "give this process write access, or choose another directory",
    errno.EPERM: "give this process write access, or choose another directory",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.ENOTDIR: "a part of the path is a file; choose another directory",
    errno.ENAMETOOLONG: "choose a directory with a shorter path",
}


@contextlib.contextmanager
def as_store_error(doing: str, path: str | Path) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` with the same errno that says what was being done."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise store_error(doing, path, error) from error


def store_error(doing: str, path: str | Path, error: OSError) -> StoreError:
    """Return the `StoreError`, of the same errno, that says what was being done, and what to do."""
    advice = _ADVICE.get(error.errno or 0, "the store is as it was before")
    message = f"cannot {doing} {path}: {error.strerror or error}; {advice}"
    return StoreError(error.errno or errno.EIO, message)


def make_directory(path: Path, *, sync: bool = True) -> None:
    """Create a directory and its missing parents, each one's name on the medium before it is used."""
    if path.is_dir():
        return
    make_directory(path.parent, sync=sync)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    else:
        if sync:
            sync_directory(path.parent)


def sync_directory(path: str | Path) -> None:
    """Put the names in a directory on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temp_name() -> str:
    """Return a name for a file that is being written, which no other writer has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}.tmp"


def write_file(path: str | Path, data: memoryview, *, direct: bool = False, sync: bool = True) -> None:
    """Create a file with these bytes, on the medium when the call returns unless ``sync=False``.

    Raises
    ------
    OSError
        The file is there already, or what the system says; a part of the file may be left then.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o666)
    try:
        if direct:
            _write_direct(fd, data)
        else:
            _write_all(fd, data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: str | Path, *, direct: bool = False) -> memoryview | None:
    """Read a file of known length into one allocation, read-only; None if it turns out shorter."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (O_DIRECT if direct else 0))
    try:
        size = os.fstat(fd).st_size
        if not direct:
            # One call reads all but the largest files, into memory that is not zeroed first.
            data = os.read(fd, size)
            if len(data) == size:
                return memoryview(data)
        room = aligned_bytes(_round_up(size))
        done = _read_direct(fd, room, size) if direct else _read_all(fd, room, size)
        return room[:size].toreadonly() if done else None
    finally:
        os.close(fd)


def read_file_into(path: str | Path, out: memoryview, *, direct: bool = False) -> int | None:
    """Read a file into memory of the caller's; return its bytes, or None if it is longer, or turns out shorter.

    With `direct` the memory is read into straight where its address is a multiple of `ALIGN`, else through a buffer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (O_DIRECT if direct else 0))
    try:
        size = os.fstat(fd).st_size
        if size > len(out):
            return None
        if not direct:
            return size if _read_all(fd, out, size) else None
        if _address(out) % ALIGN == 0:
            return size if _read_direct(fd, out, size) else None
        room = aligned_bytes(_round_up(size))
        if not _read_direct(fd, room, size):
            return None
        out[:size] = room[:size]
        return size
    finally:
        os.close(fd)


def aligned_bytes(nbytes: int) -> memoryview:
    """Allocate bytes, not zeroed, at an address that is a multiple of `ALIGN`."""
    room = np.empty(nbytes + ALIGN, np.uint8)
    shift = -_address(room.data) % ALIGN
    return room[shift : shift + nbytes].data


def probe_direct(folder: Path) -> str | None:
    """Try O_DIRECT in a directory, with a file of its own; return what speaks against it, or None."""
    if not O_DIRECT:
        return "this system has no O_DIRECT"
    path = folder / temp_name()
    try:
        write_file(path, memoryview(bytes(ALIGN + 1)), direct=True, sync=False)
        found = read_file(path, direct=True)
        if found is None or bytes(found) != bytes(ALIGN + 1):
            return "what is written with O_DIRECT does not come back"
    except OSError as error:
        return f"O_DIRECT is refused ({error.strerror or error})"
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0] if view.nbytes else 0
    return address


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            written = os.write(fd, data)
        except OSError as error:
            if error.errno == errno.EINVAL and _leave_direct(fd):
                continue
            raise
        if written <= 0:
            raise OSError(errno.EIO, f"the system wrote {written} of {len(data)} bytes")
        data = data[written:]


def _leave_direct(fd: int) -> bool:
    """Go on through the page cache; False if the file was written so already.

    After a write that ended within a block (at the limit of file sizes, say) no other one is aligned, and the system
    says EINVAL in place of what is the matter.
    """
    if not O_DIRECT:
        return False
    import fcntl  # of Unix alone, as the flag is

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
    return True


def _write_direct(fd: int, data: memoryview) -> None:
    """Write whole blocks: straight from aligned memory, else through a buffer. The last one is padded, and cut off."""
    at = len(data) // ALIGN * ALIGN if _address(data) % ALIGN == 0 else 0
    _write_all(fd, data[:at])
    room = aligned_bytes(min(_STAGING_BYTES, _round_up(len(data) - at)))
    while at < len(data):
        piece = data[at : at + len(room)]
        padded = _round_up(len(piece))
        room[: len(piece)] = piece
        room[len(piece) : padded] = bytes(padded - len(piece))
        _write_all(fd, room[:padded])
        at += len(piece)
    if len(data) % ALIGN:
        os.ftruncate(fd, len(data))


def _read_all(fd: int, out: memoryview, size: int) -> bool:
    """Fill ``out[:size]`` from the file's beginning; False if the file ends before."""
    at = 0
    while at < size:
        count = os.preadv(fd, [out[at:size]], at)
        if not count:
            return False
        at += count
    return True


def _read_direct(fd: int, out: memoryview, size: int) -> bool:
    """Fill ``out[:size]``, whose address is aligned, in whole blocks; one that does not fit goes through a buffer."""
    whole = _round_up(size) if len(out) >= _round_up(size) else size // ALIGN * ALIGN
    at = 0
    while at < min(whole, size):
        count = os.preadv(fd, [out[at:whole]], at)
        if not count or (at + count < size and count % ALIGN):
            return False  # the end of a file that has shrunk
        at += count
    if whole < size:
        tail = aligned_bytes(ALIGN)
        if os.preadv(fd, [tail], whole) < size - whole:
            return False
        out[whole:size] = tail[: size - whole]
    return True
