"""What the two ends of the lookup channel say to each other: msgpack messages, of one version.

A request and its reply have the same `id`. Chunk keys go as what makes them up: the keys of a request have one
namespace, follow one another, and each one's parent is the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import msgspec

from kvcore.engine.keys import ChunkKey
from kvcore.errors import ConfigError
from kvcore.keys import DIGEST_BYTES

__all__ = [
    "PROTOCOL",
    "Answer",
    "Chunks",
    "Clear",
    "Done",
    "Failed",
    "Health",
    "Hello",
    "Hit",
    "Lookup",
    "Message",
    "Ping",
    "Prefetch",
    "Reply",
    "Status",
    "Uncacheable",
    "Welcome",
    "pack_chunks",
    "unpack_chunks",
]

PROTOCOL = 1
"""Version of these messages: it changes with any of them."""


class Chunks(msgspec.Struct, frozen=True, array_like=True):
    """The chunks of a prefix, first to last, from token 0 on.

    Parameters
    ----------
    namespace : bytes
        32 bytes.
    tenant : str
    chunk_tokens : int
        Tokens of each, but of the last one where `tail_tokens` says so.
    tail_tokens : int
        Tokens of the last chunk, if it is not full; else 0.
    digests : bytes
        32 bytes of each.
    """

    namespace: bytes
    tenant: str
    chunk_tokens: int
    tail_tokens: int
    digests: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The first message of a connection: which protocol is spoken, and which cache is meant."""

    id: int
    protocol: int
    version: str
    namespace: bytes


class Lookup(msgspec.Struct, frozen=True, tag="lookup", array_like=True):
    """Asks how many of `num_tokens` tokens, `computed` of which need no KV, are in the cache."""

    id: int
    request: str
    chunks: Chunks
    num_tokens: int
    computed: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch", array_like=True):
    """Bring these chunks nearer: they will be asked for."""

    id: int
    chunks: Chunks


class Uncacheable(msgspec.Struct, frozen=True, tag="uncacheable", array_like=True):
    """Tells of a request that is not cached, for the engine to count."""

    id: int
    reason: str


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Asks whether somebody is there."""

    id: int


class Health(msgspec.Struct, frozen=True, tag="health", array_like=True):
    """Asks how the engine is."""

    id: int


class Clear(msgspec.Struct, frozen=True, tag="clear", array_like=True):
    """Delete what is stored, in one tier or (empty name) in all."""

    id: int
    tier: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The answer to `Hello`; `refusal` is empty, or says why nothing will be answered."""

    id: int
    protocol: int
    version: str
    refusal: str


class Hit(msgspec.Struct, frozen=True, tag="hit", array_like=True):
    """So many leading tokens."""

    id: int
    tokens: int


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Yes, or done; to what asks for no value."""

    id: int


class Status(msgspec.Struct, frozen=True, tag="status", array_like=True):
    """The health of the engine, as plain values."""

    id: int
    health: Any


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """It could not be done; the text says why. `strange`: say `Hello` first."""

    id: int
    error: str
    strange: bool = False


Message = Union[Hello, Lookup, Prefetch, Uncacheable, Ping, Health, Clear]  # noqa: UP007 - msgspec reads it at run time
Reply = Union[Welcome, Hit, Done, Status, Failed]  # noqa: UP007
Answer = Union[Hit, Done, Status, Failed]  # noqa: UP007


def pack_chunks(keys: Sequence[ChunkKey]) -> Chunks:
    """Put keys of chunks, from the first on, in the form of a message. The last chunk need not be full.

    Raises
    ------
    ConfigError
        There are none, or they do not follow one another.
    """
    if not keys:
        raise ConfigError("there is no chunk to ask for; a prompt that is shorter than one has no hit")
    first, last = keys[0], keys[-1]
    size = first.stop
    if any(key.start != number * size for number, key in enumerate(keys)):
        raise ConfigError("the keys of a prefix follow one another from token 0 on; these do not")
    tail = last.stop - last.start
    digests = b"".join(key.digest for key in keys)
    return Chunks(first.namespace, first.tenant, size, tail if tail != size else 0, digests)


def unpack_chunks(chunks: Chunks) -> list[ChunkKey]:
    """Return the keys.

    Raises
    ------
    ConfigError
        The message is not what `pack_chunks` makes.
    """
    size, count = chunks.chunk_tokens, len(chunks.digests) // DIGEST_BYTES
    if (
        size < 1
        or not count
        or len(chunks.digests) % DIGEST_BYTES
        or len(chunks.namespace) != DIGEST_BYTES
        or not 0 <= chunks.tail_tokens < size
    ):
        raise ConfigError(f"malformed chunks: {len(chunks.digests)} B of digests, {size} tokens each")
    keys = []
    parent: bytes | None = None
    for number in range(count):
        digest = chunks.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        start = number * size
        stop = start + (chunks.tail_tokens if chunks.tail_tokens and number == count - 1 else size)
        keys.append(ChunkKey(chunks.namespace, digest, start, stop, parent, chunks.tenant))
        parent = digest
    return keys
