"""What went wrong between a store and its Redis or Valkey server: an errno, what happened, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator

from redis import exceptions as lib

from kvcore.errors import StoreError

__all__ = ["FAILURES", "TRANSIENT", "explain"]

FAILURES = (lib.RedisError, lib.RedisClusterException, OSError)
"""All that the client library raises for trouble with the server."""

TRANSIENT = frozenset({errno.EAGAIN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT})
"""What may be gone at the next attempt."""

_LOST = frozenset({errno.EPIPE, errno.ECONNABORTED, errno.ENOTCONN, errno.EBADF})

_BY_TYPE: tuple[tuple[type[Exception], int, str], ...] = (
    (lib.OutOfMemoryError, errno.ENOSPC, "raise its maxmemory, let it evict (maxmemory-policy), or give frames a ttl"),
    (lib.ReadOnlyError, errno.EROFS, "it is a replica: give the address of the primary"),
    (
        lib.NoPermissionError,
        errno.EACCES,
        "grant this user the commands, and the keys below the prefix (ACL SETUSER)",
    ),
    (lib.AuthenticationError, errno.EACCES, "check user and password, in the URI or KVCORE_RESP_PASSWORD"),
    (lib.AuthorizationError, errno.EACCES, "check user and password, in the URI or KVCORE_RESP_PASSWORD"),
    (lib.AuthenticationWrongNumberOfArgsError, errno.EACCES, "it knows no users: give a password alone"),
    (lib.BusyLoadingError, errno.EAGAIN, "it reads its data from disk: try again later"),
    (lib.MovedError, errno.EINVAL, "it is a node of a cluster: add cluster=1 to the URI"),
    (lib.TryAgainError, errno.EAGAIN, "slots of the cluster are moving: try again later"),
    (lib.ClusterError, errno.EAGAIN, "the cluster is not whole: see CLUSTER INFO, and try again later"),
)
_BY_WORD: dict[str, tuple[int, str]] = {
    "BUSY": (errno.EAGAIN, "a script runs there: try again later, or SCRIPT KILL"),
    "MISCONF": (errno.EIO, "it cannot save its data: look at its log and at its disk"),
    "NOREPLICAS": (errno.EAGAIN, "too few replicas are up (min-replicas-to-write)"),
    "WRONGTYPE": (errno.EEXIST, "somebody else's data is under this key: choose another prefix"),
}
_BY_ERRNO = {
    errno.ECONNREFUSED: "is it running, and is the address right?",
    errno.ECONNRESET: "look at its log; where it speaks TLS it wants resps://, and perhaps cert= and key=",
    errno.ETIMEDOUT: "it is busy, unreachable, or speaks no TLS but was asked to; a longer timeout= may help",
    errno.EACCES: "give this process access to the socket",
    errno.EHOSTUNREACH: "check the name of the host and the network",
    errno.ENETUNREACH: "check the name of the host and the network",
    errno.EPROTO: "check ca=, cert= and key=",
}


def explain(error: BaseException, doing: str, name: str) -> StoreError:
    """Turn what the client library raised into a `StoreError`.

    Parameters
    ----------
    error : exception
        One of `FAILURES`; a `StoreError` is returned as it is.
    doing : str
        What was tried: ``"store a frame"``.
    name : str
        Of the store, without secrets.

    Returns
    -------
    StoreError
        With EACCES (password, ACL), EAGAIN (loading, busy, cluster not whole), ECONNREFUSED, ECONNRESET, EEXIST (a key
        of another type), EHOSTUNREACH, EINVAL (the server is not what the URI says), EIO (anything else the server
        says), ENOENT (a key that was to be renamed is gone), ENOSPC (out of memory), EPROTO (TLS), EROFS (a replica)
        or ETIMEDOUT.
    """
    if isinstance(error, StoreError):
        return error
    code, what, advice = _read(error)
    return StoreError(code, f"cannot {doing} in {name}: {what}; {advice}")


def _read(error: BaseException) -> tuple[int, str, str]:
    """Return errno, what happened, and what to do."""
    if isinstance(error, lib.RedisClusterException):
        if isinstance(error.__cause__, FAILURES):
            return _read(error.__cause__)
        return errno.EAGAIN, _said(error), "see CLUSTER INFO, and try again later"
    for kind, code, advice in _BY_TYPE:
        if isinstance(error, kind):
            return code, f"the server says {_said(error)!r}", advice
    if isinstance(error, lib.ResponseError) and str(error) == "no such key":
        return errno.ENOENT, "it is not there any more", "another one has moved or deleted it meanwhile"
    if isinstance(error, lib.ResponseError) and "cluster support disabled" in str(error):
        return errno.EINVAL, "the server is no node of a cluster", "leave out cluster=1"
    if isinstance(error, lib.ResponseError):
        code, advice = _BY_WORD.get(str(error).partition(" ")[0], (errno.EIO, "look at its log and its version"))
        return code, f"the server says {_said(error)!r}", advice
    if isinstance(error, lib.ConnectionError) and "max number of clients" in str(error):
        return errno.EAGAIN, f"the server says {_said(error)!r}", "raise its maxclients, or use a smaller pool="
    code = _errno(error)
    what = "the server closed the connection" if code == errno.ECONNRESET else os.strerror(code)
    return code, f"{what} ({_said(error)})", _BY_ERRNO.get(code, "look at the server's log")


def _errno(error: BaseException) -> int:
    """Return the errno of a connection's failure; the library keeps it only in what led to its own exception."""
    if isinstance(error, (lib.TimeoutError, TimeoutError)):
        return errno.ETIMEDOUT
    for cause in _chain(error):
        if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return errno.ECONNRESET
        if isinstance(cause, ssl.SSLError):
            return errno.EPROTO
        if isinstance(cause, socket.gaierror):
            return errno.EHOSTUNREACH
        if isinstance(cause, FileNotFoundError):
            return errno.ECONNREFUSED  # a Unix socket: nobody listens
        if isinstance(cause, OSError) and cause.errno:
            return errno.ECONNRESET if cause.errno in _LOST else cause.errno
    return errno.ECONNRESET if isinstance(error, lib.ConnectionError) else errno.EIO


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _said(error: BaseException) -> str:
    """Return the first line of a message, without what the server quotes of a command: it may be anything."""
    lines = str(error).partition(", with args")[0].splitlines() or [type(error).__name__]
    return lines[0][:200]
