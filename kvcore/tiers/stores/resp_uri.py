"""Where a Redis or Valkey server is and how to talk to it: the URIs ``resp:``, ``resps:`` (TLS) and ``resp+unix:``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from kvcore import settings
from kvcore.errors import ConfigError
from kvcore.tiers.stores.options import read_count, read_flag, read_time, split_options

__all__ = ["RespAddress", "parse_resp_uri"]

DEFAULT_PORT = 6379

_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_TLS_OPTIONS = ("ca", "cert", "key", "verify")
_OPTIONS = ("prefix", "pool", "timeout", "cluster", "protocol", "ttl", "quarantine", *_TLS_OPTIONS)
_FORM = "resp://[USER:PASSWORD@]HOST[:PORT][/DB][?OPTIONS], resps://... for TLS, or resp+unix:///SOCKET[?OPTIONS]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RespAddress:
    """A server, and how to use it.

    Parameters
    ----------
    host, port : str, int
        Of the server, or of any node of a cluster.
    socket : str
        Path of a Unix socket, instead of host and port.
    db : int
        Number of the database; a cluster has 0 alone.
    user, password : str
        Empty: no authentication, or the server's user ``default``.
    prefix : str
        What the names of all keys begin with: 1 to 64 letters, digits and ``_ . : / -``.
    pool : int
        Most calls at a time, so most connections to a server.
    timeout : float
        Seconds to wait for a connection and for each reply, and for how long a failed call is tried again.
    cluster : bool
        Find the node of each key, as a cluster wants it.
    protocol : int
        2 or 3: which RESP to speak.
    ttl : float
        Seconds after which the server forgets a frame; 0: never.
    quarantine : float
        Seconds for which the server keeps a bad frame.
    tls : bool
    ca, cert, key : str
        Files: certificates of authorities to trust (empty: the system's), and the client's own certificate and its key.
    verify : bool
        Whether the server has to prove who it is.

    Raises
    ------
    ConfigError
        A value means nothing, or does not go with another one.
    """

    host: str = "localhost"
    port: int = DEFAULT_PORT
    socket: str = ""
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    prefix: str = "kvcore:"
    pool: int = 8
    timeout: float = 5.0
    cluster: bool = False
    protocol: int = 2
    ttl: float = 0.0
    quarantine: float = 86400.0
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: bool = True

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(f"prefix={self.prefix!r}: a prefix has 1 to 64 letters, digits and _ . : / -")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"the port {self.port} is not between 1 and 65535")
        if not 1 <= self.pool <= 1024:
            raise ConfigError(f"pool={self.pool}: from 1 to 1024 connections")
        if not 0.01 <= self.timeout <= 3600:
            raise ConfigError(f"timeout={self.timeout:g}: from 10ms to 1h")
        if self.protocol not in {2, 3}:
            raise ConfigError(f"protocol={self.protocol}: RESP has the versions 2 and 3")
        if self.ttl and self.ttl < 0.001:
            raise ConfigError(f"ttl={self.ttl:g}: a millisecond or more, or 0 for frames that stay")
        if self.quarantine < 0.001:
            raise ConfigError(f"quarantine={self.quarantine:g}: bad frames are kept for a millisecond or more")
        if self.cluster and (self.db or self.socket):
            raise ConfigError("a cluster has the database 0 alone and no Unix socket; leave out cluster=1, or those")
        if not self.tls and (self.ca or self.cert or self.key or not self.verify):
            raise ConfigError("ca, cert, key and verify are for TLS: write resps://, or leave them out")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("cert and key go together: the client's certificate, and its private key")

    @property
    def name(self) -> str:
        """The URI without user and password; of the options, the prefix alone."""
        if self.socket:
            return f"resp+unix://{self.socket}?prefix={self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'resps' if self.tls else 'resp'}://{host}:{self.port}/{self.db}?prefix={self.prefix}"


def parse_resp_uri(uri: str) -> RespAddress:
    """Read the URI of a server.

    Parameters
    ----------
    uri : str
        ``resp://[user:password@]host[:port][/db][?options]``, the same with ``resps`` for TLS, or
        ``resp+unix:///path/of/socket[?options]``. User, password and path are percent-decoded. Without a password the
        variable ``KVCORE_RESP_PASSWORD`` counts. A database behind a socket is not written: it is 0.

    Raises
    ------
    ConfigError
        The URI means nothing. No message repeats a password.
    """
    scheme, _, rest = uri.partition(":")
    body, options = split_options(rest, _OPTIONS, scheme=scheme)
    try:
        parts = urlsplit(f"{scheme}:{body}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        # urllib's own message may hold what comes before the host.
        raise ConfigError(f"the host or port of this {scheme}: URI means nothing; write {_FORM}") from None
    if scheme not in {"resp", "resps", "resp+unix"} or not body.startswith("//") or parts.fragment:
        raise ConfigError(f"this is not the URI of a Redis or Valkey server (# is written %23); write {_FORM}")
    unix = scheme == "resp+unix"
    if unix and (parts.hostname or not parts.path.strip("/")):
        raise ConfigError(f"resp+unix: names a socket by its absolute path and no host; write {_FORM}")
    if not unix and not parts.hostname:
        raise ConfigError(f"{scheme}: names a host; write {_FORM}")
    return RespAddress(
        host=parts.hostname or "",
        port=port,
        socket=unquote(parts.path) if unix else "",
        db=0 if unix else read_count(parts.path.strip("/") or "0", "the database"),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or "") or settings.current().resp_password,
        tls=scheme == "resps",
        prefix=options.get("prefix", "kvcore:"),
        pool=read_count(options.get("pool", "8"), "pool"),
        timeout=read_time(options.get("timeout", "5"), "timeout", unit="s"),
        cluster=read_flag(options.get("cluster", "0"), "cluster"),
        protocol=read_count(options.get("protocol", "2"), "protocol"),
        ttl=read_time(options.get("ttl", "0"), "ttl", unit="s"),
        quarantine=read_time(options.get("quarantine", "86400"), "quarantine", unit="s"),
        ca=options.get("ca", ""),
        cert=options.get("cert", ""),
        key=options.get("key", ""),
        verify=read_flag(options.get("verify", "1"), "verify"),
    )
