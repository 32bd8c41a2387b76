"""What a scan of stored frames tells, and the check of a frame's head that it makes.

A store does not look into frames, so the check is a function that its owner gives: `check_frame_head` for frames,
another one for other bytes, or none.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvcore.errors import CorruptFrameError
from kvcore.keys import StoreKey

__all__ = ["DAMAGE", "HeadCheck", "Scanned", "check_frame_head", "look_at"]

HeadCheck: TypeAlias = Callable[[StoreKey, int, Callable[[int], bytes]], int]
"""From a key, the stored bytes, and a function that reads the first so many of them: what `check_frame_head` does."""

DAMAGE = frozenset({"truncated", "foreign", "crc", "length", "identity"})
"""Reasons of `CorruptFrameError` for which a scan sets a frame aside. The others are of whole frames that this build
cannot use, of a newer format or codec: another build may, so they stay."""

_FIRST_READ = 4096  # of a file whose head is checked: most heads are shorter, so that one read is enough

_log = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class Scanned:
    """A stored frame that a scan came across.

    Parameters
    ----------
    key : StoreKey
    nbytes : int
        Its size.
    mtime : float
        When it was written, in seconds since 1970.
    position : int
        Of its first token in its sequence; 0 where nothing was checked.
    unusable : str
        Why this build cannot use it, though it stays where it is: a reason of `CorruptFrameError`, or ``"unreadable"``
        where the medium failed; empty for a good one.
    """

    key: StoreKey
    nbytes: int
    mtime: float
    position: int = 0
    unusable: str = ""


def check_frame_head(key: StoreKey, nbytes: int, read: Callable[[int], bytes]) -> int:
    """Check that stored bytes begin with the head of the frame that its name promises, in its length.

    Nothing behind the head is read, and no key is needed for an encrypted frame: its head is in the clear.

    Parameters
    ----------
    key : StoreKey
        The name it is stored under.
    nbytes : int
        Stored bytes.
    read : callable
        Returns so many of the first bytes, or all if there are fewer.

    Returns
    -------
    int
        Position of the frame's first token in its sequence.

    Raises
    ------
    CorruptFrameError
        With one of the reasons of `DAMAGE` where it is not that frame; with another one where it is a whole frame that
        this build cannot read.
    """
    # Loaded by the first scan, not by whoever opens a store.
    from kvcore.codecs.frame_checks import check_crc, check_identity, check_lengths
    from kvcore.codecs.frame_format import HEADER_BYTES, FrameHeader, parse_varlen

    header = FrameHeader.parse(read(HEADER_BYTES))
    check_lengths(header, nbytes, partial=False)
    head = read(header.head_bytes)
    if len(head) < header.head_bytes:
        raise CorruptFrameError(f"the frame ends after {len(head)} bytes, in its head", reason="truncated")
    check_crc(head)
    varlen = parse_varlen(memoryview(head)[HEADER_BYTES : HEADER_BYTES + header.varlen_bytes], header)
    check_identity(varlen, key.namespace, key.digest, None)
    return varlen.groups[0].base_position


def look_at(path: str, key: StoreKey, check: HeadCheck | None) -> Scanned | None:
    """Return what a scan tells of a file; None if it is gone, `CorruptFrameError` if it has to go."""
    try:
        if check is None:
            found = os.stat(path)
            return Scanned(key, found.st_size, found.st_mtime)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            position, unusable = _checked(fd, key, found.st_size, check)
        finally:
            os.close(fd)
        return Scanned(key, found.st_size, found.st_mtime, position, unusable)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot look at %s: %s", path, error.strerror or error)
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            return Scanned(key, found.st_size, found.st_mtime, unusable="unreadable")
        return None


def _checked(fd: int, key: StoreKey, nbytes: int, check: HeadCheck) -> tuple[int, str]:
    """Return the position of a frame, and why it is of no use although it is whole."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # heads alone: nothing to read ahead
    first = os.pread(fd, _FIRST_READ, 0)
    try:
        return check(key, nbytes, lambda count: first[:count] if count <= len(first) else os.pread(fd, count, 0)), ""
    except CorruptFrameError as error:
        if error.reason in DAMAGE:
            raise
        return 0, error.reason
