"""Connections of the client library that move frames without needless copies.

The library collects a reply in a growing buffer and copies it out twice; its optional C parser is faster there, and
copies twice what it sends. Here a large value is received straight into memory of its length, and sent from where it
is. The rest of the protocol stays the library's. The parsers are not public API, so whoever imports this module
catches `ImportError`, and takes the library's own connections instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import redis
from redis._parsers import Encoder, _RESP2Parser, _RESP3Parser
from redis._parsers.socket import SocketBuffer
from redis.connection import PythonRespSerializer

__all__ = ["FrameConnection", "FrameTlsConnection", "FrameUnixConnection"]

_LARGE = 64 << 10
"""From this length a value is received directly. What was read ahead with its length is at most this much."""


class _FrameBuffer(SocketBuffer):
    def read(self, length: int, *args: Any, **kwargs: Any) -> Any:
        if length < _LARGE:
            return super().read(length, *args, **kwargs)
        value = np.empty(length, np.uint8).data  # not zeroed first, as a bytearray would be
        ahead = self._buffer.read(length)
        value[: len(ahead)] = ahead
        rest = value[len(ahead) :]
        while rest:
            try:
                count = self._sock.recv_into(rest)
            except TimeoutError as error:
                raise redis.TimeoutError("Timeout reading from socket") from error
            if not count:
                raise redis.ConnectionError("Connection closed by server.")
            rest = rest[count:]
        super().read(0)  # the end of the line after it
        return value.toreadonly()


class _Parser2(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _buffer(self, connection)


class _Parser3(_RESP3Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _buffer(self, connection)


def _buffer(parser: Any, connection: Any) -> _FrameBuffer:
    return _FrameBuffer(connection._sock, parser.socket_read_size, connection.socket_timeout)


def _with_frames(options: dict[str, Any]) -> dict[str, Any]:
    """Add the parser above, and the packer that takes views as they are."""
    encoder: Any = Encoder
    return {
        **options,
        "parser_class": _Parser3 if options.get("protocol") == 3 else _Parser2,
        "command_packer": PythonRespSerializer(6000, encoder("utf-8", "strict", False).encode),
    }


class FrameConnection(redis.Connection):
    """A connection over TCP."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**_with_frames(options))  # type: ignore[no-untyped-call]


class FrameTlsConnection(redis.SSLConnection):
    """A connection over TLS."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**_with_frames(options))


class FrameUnixConnection(redis.UnixDomainSocketConnection):
    """A connection over a Unix socket."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**_with_frames(options))  # type: ignore[no-untyped-call]
