"""What went wrong between a store and its S3 server: an errno, what happened, and what to do about it.

The client library tells by its types only some of it; the rest it has as text: the server's answer (its status and its
code), or what kept a request from getting there.
"""

from __future__ import annotations

import errno
import os
import re

from kvcore.errors import StoreError

__all__ = ["explain", "server_code"]

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_OS = re.compile(r"Os \{\s*code: (\d+)")

_PERMISSION = "grant these credentials what docs/store-s3.md lists (GetObject, PutObject, DeleteObject, ListBucket)"
_CREDENTIALS = (
    "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or name a profile of the AWS files by "
    "?profile=NAME"
)
_LATER = "try again later, or ask it for less at a time (concurrency=)"
_LOG = "look at the server's log"
_REACH = "is it running, and is the endpoint right?"

_BY_CODE: dict[str, tuple[int, str]] = {
    "AccessDenied": (errno.EACCES, _PERMISSION),
    "AllAccessDisabled": (errno.EACCES, _PERMISSION),
    "ExpiredToken": (errno.EACCES, "get new temporary credentials"),
    "InvalidAccessKeyId": (errno.EACCES, _CREDENTIALS),
    "InvalidToken": (errno.EACCES, _CREDENTIALS),
    "SignatureDoesNotMatch": (errno.EACCES, _CREDENTIALS),
    "RequestTimeTooSkewed": (errno.EACCES, "set the clock of this machine"),
    "NoSuchBucket": (errno.ENOENT, "create the bucket, or check its name, the endpoint and the region"),
    "InvalidBucketName": (errno.EINVAL, "choose a name that the server takes"),
    "AuthorizationHeaderMalformed": (errno.EINVAL, "the bucket is in another region: add region=NAME to the URI"),
    "PermanentRedirect": (errno.EINVAL, "the bucket is in another region: add region=NAME to the URI"),
    "EntityTooLarge": (errno.EFBIG, "store smaller chunks"),
    "QuotaExceeded": (errno.ENOSPC, "delete objects, or raise the quota"),
    "XMinioStorageFull": (errno.ENOSPC, "delete objects, or give the server more disk"),
    "RequestLimitExceeded": (errno.EAGAIN, _LATER),
    "SlowDown": (errno.EAGAIN, _LATER),
    "ServiceUnavailable": (errno.EAGAIN, _LATER),
    "ThrottlingException": (errno.EAGAIN, _LATER),
    "TooManyRequests": (errno.EAGAIN, _LATER),
}
_BY_STATUS: dict[int, tuple[int, str]] = {
    401: (errno.EACCES, _CREDENTIALS),
    403: (errno.EACCES, f"{_PERMISSION}; {_CREDENTIALS}"),
    413: (errno.EFBIG, "store smaller chunks"),
    429: (errno.EAGAIN, _LATER),
    503: (errno.EAGAIN, _LATER),
    507: (errno.ENOSPC, "delete objects, or give the server more disk"),
}
# Text of the library -> errno, what happened, what to do; the first that is found counts.
_BY_TEXT: tuple[tuple[str, int, str, str], ...] = (
    (
        "169.254.169.254",
        errno.EACCES,
        "there are no credentials in the environment, and the instance gives none",
        _CREDENTIALS,
    ),
    ("credential provider", errno.EACCES, "the profile gives no credentials", "check the AWS files and the profile"),
    ("BadScheme", errno.EINVAL, "the endpoint does without TLS", "use https://, or add allow_http=1 to the URI"),
    (
        "incorrectly configured region",
        errno.EINVAL,
        "the server sends elsewhere",
        "the bucket is in another region: add region=NAME to the URI",
    ),
    ("dns error", errno.EHOSTUNREACH, "the name of the server is not known", "check the endpoint and the network"),
    (
        "InvalidMessage",
        errno.EPROTO,
        "the server does not speak TLS",
        "write http:// and add allow_http=1, if the network is trusted",
    ),
    (
        "InvalidCertificate",
        errno.EPROTO,
        "the server's certificate is not trusted",
        "name a file of authorities by ca= in the URI",
    ),
    ("TimedOut", errno.ETIMEDOUT, "the server gave no answer in time", f"{_REACH} A longer timeout= may help"),
    ("kind: Timeout", errno.ETIMEDOUT, "the server gave no answer in time", f"{_REACH} A longer timeout= may help"),
    ("IncompleteMessage", errno.ECONNRESET, "the server closed the connection", _LOG),
    ("IncompleteBody", errno.ECONNRESET, "the server closed the connection", _LOG),
    ("kind: Interrupted", errno.ECONNRESET, "the server closed the connection", _LOG),
)
_BY_ERRNO = {
    errno.ECONNREFUSED: _REACH,
    errno.ECONNRESET: _LOG,
    errno.EPIPE: _LOG,
    errno.EHOSTUNREACH: "check the endpoint and the network",
    errno.ENETUNREACH: "check the endpoint and the network",
    errno.EMFILE: "allow this process more open files (ulimit -n), or lower concurrency=",
}


def server_code(error: BaseException) -> str:
    """Return the code that the server gave as the reason, such as ``"NoSuchKey"``; empty where it gave none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def explain(error: BaseException, doing: str, name: str) -> StoreError:
    """Turn what the client library raised into a `StoreError`.

    Parameters
    ----------
    error : exception
        Of the client library, or the `FileNotFoundError` by which it says that something is not there.
    doing : str
        What was tried: ``"store a frame"``.
    name : str
        Of the store; objects are not named.

    Returns
    -------
    StoreError
        With EACCES (credentials, permissions), EAGAIN (throttled, after all retries), ECONNREFUSED, ECONNRESET, EFBIG,
        EHOSTUNREACH, EINVAL (the URI is not right for the server), EIO (anything else that the server says), ENOENT
        (no such bucket), ENOSPC, EPROTO (TLS) or ETIMEDOUT.
    """
    code, what, advice = _read(error)
    return StoreError(code, f"cannot {doing} in {name}: {what}; {advice}")


def _read(error: BaseException) -> tuple[int, str, str]:
    """Return errno, what happened, and what to do."""
    text = str(error)
    said, status = server_code(error), _STATUS.search(text)
    if said in _BY_CODE:
        return _BY_CODE[said][0], f"the server says {said}", _BY_CODE[said][1]
    for word, code, what, advice in _BY_TEXT[:2]:
        if word in text:  # about credentials: the status is that of who gives them, not of the server
            return code, what, advice
    if status:
        code, advice = _BY_STATUS.get(int(status[1]), (errno.EIO, _LOG))
        return code, f"the server answers with status {status[1]}{said and f' ({said})'}", advice
    system = _OS.search(text)
    if system:
        code = int(system[1])
        return code, os.strerror(code), _BY_ERRNO.get(code, _REACH)
    for word, code, what, advice in _BY_TEXT[2:]:
        if word in text:
            return code, what, advice
    return errno.EIO, f"the client library gave up ({type(error).__name__})", f"its message has more; {_LOG}"
