"""What a piece of stored KV is filed under: two digests, in whatever type carries them.

How digests are made from tokens is the engine's business (`kvcore.engine.keys`); stores and serdes need no more.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol

from kvcore.errors import ConfigError

__all__ = ["DIGEST_BYTES", "Key", "StoreKey", "TempKey", "make_temp_key"]

DIGEST_BYTES = 32


class Key(Protocol):
    """Anything with the two digests of a chunk: a `StoreKey`, or the engine's `ChunkKey`."""

    @property
    def namespace(self) -> bytes:
        """32 bytes."""

    @property
    def digest(self) -> bytes:
        """32 bytes."""


@dataclass(frozen=True, slots=True, order=True)
class StoreKey:
    """What a store files a frame under.

    Parameters
    ----------
    namespace, digest : bytes
        32 bytes each.

    Raises
    ------
    ConfigError
        A digest has another length.
    """

    namespace: bytes
    digest: bytes

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("digest", self.digest)):
            if len(value) != DIGEST_BYTES:
                raise ConfigError(f"the {name} of a store key has {DIGEST_BYTES} bytes, got {len(value)}")

    @classmethod
    def of(cls, key: Key) -> StoreKey:
        """Take the two digests of any key."""
        return key if isinstance(key, cls) else cls(bytes(key.namespace), bytes(key.digest))


@dataclass(frozen=True, slots=True)
class TempKey:
    """The key of a temporary object: a key, and 16 random bytes that tell it from all others of that key.

    Parameters
    ----------
    namespace, digest : bytes
        Those of the key.
    tenant : str
        Whose quota the object counts on: that of the key.
    nonce : bytes
        16 random bytes.
    """

    namespace: bytes
    digest: bytes
    tenant: str = ""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))


def make_temp_key(key: Key) -> TempKey:
    """Return a key for a temporary object that belongs to `key`, different at each call."""
    return TempKey(bytes(key.namespace), bytes(key.digest), str(getattr(key, "tenant", "")))
