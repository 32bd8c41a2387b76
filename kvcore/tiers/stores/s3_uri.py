"""Where a bucket is and how to talk to its server: the URI ``s3://bucket/prefix?options``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvcore.errors import ConfigError
from kvcore.tiers.stores.options import read_count, read_flag, read_time, split_options

__all__ = ["S3Address", "parse_s3_uri"]

MIB = 1 << 20
MOST_PARTS = 10_000
MOST_BYTES = 5 << 40
"""Limits of the protocol: the parts of an object, and its bytes."""

_OPTIONS = ("endpoint", "region", "allow_http", "part_mb", "concurrency", "timeout", "retries", "profile", "ca")
_FORM = "s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME&...]"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# No character that the protocol or the client library would write differently, and no part that means another folder.
_PREFIX = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/(?!$)|$))*")
_PREFIX_CHARS = 512
_WORD = re.compile(r"[A-Za-z0-9_.@+-]{0,128}")
_SECRET = re.compile(r"key|secret|token|passw|credential", re.IGNORECASE)
_NO_SECRETS = (
    "the URI of an S3 store holds no credentials, as URIs end up in logs; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or name a profile of the AWS files by ?profile=NAME"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    """A bucket, a place in it, and how to use it.

    Parameters
    ----------
    bucket : str
    prefix : str
        What the names of all objects begin with, without the slash that follows; empty: the bucket is the store's
        alone. At most 512 letters, digits and ``_ - . /``.
    endpoint : str
        URL of the server; empty: what ``AWS_ENDPOINT_URL`` says, else AWS.
    region : str
        Empty: what ``AWS_REGION`` says, else us-east-1.
    allow_http : bool
        Whether an endpoint may do without TLS. Frames can be turned back into prompts: for trusted networks alone.
    part_bytes : int
        Frames that are larger are written and read in parts of this size, several at a time; 5 MiB to 512 MiB.
    concurrency : int
        Most requests at a time of one call, a batch or not; 1 to 64.
    timeout : float
        Seconds for one request; and for how long a failed one is tried again.
    retries : int
        How often a failed request is tried again; 0 to 20.
    profile : str
        Whose credentials to take from the AWS files; empty: those of the environment.
    ca : str
        File of certificates of authorities to trust beside the system's; empty: none.

    Raises
    ------
    ConfigError
        A value means nothing.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    allow_http: bool = False
    part_bytes: int = 8 * MIB
    concurrency: int = 4
    timeout: float = 30.0
    retries: int = 5
    profile: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(
                f"{self.bucket!r} is not the name of a bucket: 3 to 63 lower-case letters, digits, dots and hyphens; "
                f"write {_FORM}"
            )
        if len(self.prefix) > _PREFIX_CHARS or not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"the prefix {self.prefix!r} is not one of an S3 store: at most {_PREFIX_CHARS} letters, digits and "
                "_ - . with single slashes between, no part of which begins with a dot"
            )
        if self.endpoint:
            _check_endpoint(self.endpoint, self.allow_http)
        for option, value in (("region", self.region), ("profile", self.profile)):
            if not _WORD.fullmatch(value):
                raise ConfigError(f"{option}={value!r} is not a name of letters, digits and _ . @ + -")
        if not 5 * MIB <= self.part_bytes <= 512 * MIB:
            raise ConfigError(f"part_mb={self.part_bytes / MIB:g}: parts have 5 to 512 MiB")
        if not 1 <= self.concurrency <= 64:
            raise ConfigError(f"concurrency={self.concurrency}: from 1 to 64 requests")
        if not 0.1 <= self.timeout <= 3600:
            raise ConfigError(f"timeout={self.timeout:g}: from 100ms to 1h")
        if not 0 <= self.retries <= 20:
            raise ConfigError(f"retries={self.retries}: from 0 to 20")

    @property
    def name(self) -> str:
        """The URI, of its options the endpoint alone."""
        place = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        return f"{place}?endpoint={self.endpoint}" if self.endpoint else place

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that can be stored with parts of this size."""
        return min(MOST_BYTES, self.part_bytes * MOST_PARTS)


def parse_s3_uri(uri: str) -> S3Address:
    """Read the URI of a bucket.

    Parameters
    ----------
    uri : str
        ``s3://bucket[/prefix][?options]``, the options being the fields of `S3Address`, with ``part_mb`` (MiB) for
        `part_bytes`. A time without a unit is in seconds.

    Raises
    ------
    ConfigError
        The URI means nothing, or holds credentials. No message repeats those.
    """
    scheme, _, rest = uri.partition(":")
    body, _, query = rest.partition("?")
    if "@" in body or any(_SECRET.search(pair.partition("=")[0]) for pair in query.split("&")):
        raise ConfigError(_NO_SECRETS)
    if scheme != "s3" or not body.startswith("//"):
        raise ConfigError(f"{scheme}:{body} is not the URI of a bucket; write {_FORM}")
    _, options = split_options(rest, _OPTIONS, scheme=scheme)
    bucket, _, prefix = body[2:].partition("/")
    return S3Address(
        bucket=bucket,
        prefix=prefix.removesuffix("/"),
        endpoint=options.get("endpoint", "").removesuffix("/"),
        region=options.get("region", ""),
        allow_http=read_flag(options.get("allow_http", "0"), "allow_http"),
        part_bytes=read_count(options.get("part_mb", "8"), "part_mb") * MIB,
        concurrency=read_count(options.get("concurrency", "4"), "concurrency"),
        timeout=read_time(options.get("timeout", "30"), "timeout", unit="s"),
        retries=read_count(options.get("retries", "5"), "retries"),
        profile=options.get("profile", ""),
        ca=options.get("ca", ""),
    )


def _check_endpoint(endpoint: str, allow_http: bool) -> None:
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # urllib's own message may hold what comes before the host.
        raise ConfigError("the endpoint has no host or port that means anything; write http://HOST:PORT") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(_NO_SECRETS)
    if not whole or parts.path or parts.query or parts.fragment:
        raise ConfigError(f"endpoint={endpoint!r} is not the URL of a server; write https://HOST or http://HOST:PORT")
    if parts.scheme == "http" and not allow_http:
        raise ConfigError(
            f"endpoint={endpoint!r} does without TLS, so that anybody on the way reads the frames; write https://, or "
            "add allow_http=1 where the network is trusted"
        )
