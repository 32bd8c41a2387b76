"""How the client library is told where the server is, and which connections to make."""

from __future__ import annotations

import errno
import ssl
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.resp_uri import RespAddress

__all__ = ["connect"]

_SLOTS = 16384


def connect(address: RespAddress, name: str) -> Any:
    """Return the library's client for a server or a cluster.

    It makes no attempts of its own, as not everything may be sent again. One server is reached at the first command, a
    cluster here.

    Parameters
    ----------
    address : RespAddress
    name : str
        Of the store, for messages.

    Raises
    ------
    ConfigError
        The files for TLS cannot be used.
    StoreError
        Slots of the cluster have no node. For anything else the library's own exceptions.
    """
    options: dict[str, Any] = {
        "connection_class": _connection_class(address),
        "username": address.user or None,
        "password": address.password or None,
        "protocol": address.protocol,
        "socket_timeout": address.timeout,
        "socket_connect_timeout": address.timeout,
    }
    if address.tls:
        _check_files(address)
        options |= {
            "ssl_ca_certs": address.ca or None,
            "ssl_certfile": address.cert or None,
            "ssl_keyfile": address.key or None,
            "ssl_cert_reqs": "required" if address.verify else "none",
            "ssl_check_hostname": address.verify,
        }
    if address.socket:
        place: dict[str, Any] = {"path": address.socket}
    else:
        options["socket_keepalive"] = True
        place = {"host": address.host, "port": address.port}
    none = Retry(NoBackoff(), 0)
    one = redis.Redis(connection_pool=redis.ConnectionPool(**place, db=address.db, retry=none, **options))
    if not address.cluster:
        return one
    try:
        # What is wrong with the server shows here; a client of a cluster that cannot be made leaves open sockets.
        slots = int(one.cluster("INFO")["cluster_slots_assigned"])
    finally:
        one.connection_pool.disconnect()
    if slots < _SLOTS:
        what = f"only {slots} of the {_SLOTS} slots of the cluster have a node"
        raise StoreError(errno.EAGAIN, f"cannot open a store in {name}: {what}; see CLUSTER INFO, and try again later")
    # Only by a URL does the library take another class of connections.
    host = f"[{address.host}]" if ":" in address.host else address.host
    return redis.RedisCluster(url=f"redis://{host}:{address.port}", retry=none, **options)


def _check_files(address: RespAddress) -> None:
    """Refuse files that cannot be used: at each connection they would look like trouble with the server."""
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.cert:
            context.load_cert_chain(address.cert, address.key, password="")  # so that nobody is asked for one
    except OSError as error:
        raise ConfigError(
            f"cannot use the files ca={address.ca!r}, cert={address.cert!r}, key={address.key!r}: {error}; they are "
            "PEM files that this process can read, a key without a passphrase"
        ) from error


def _connection_class(address: RespAddress) -> type:
    try:
        from kvcore.tiers.stores import resp_wire as wire
    except ImportError:  # a version of the library with other insides
        if address.socket:
            return redis.UnixDomainSocketConnection
        return redis.SSLConnection if address.tls else redis.Connection
    if address.socket:
        return wire.FrameUnixConnection
    return wire.FrameTlsConnection if address.tls else wire.FrameConnection
