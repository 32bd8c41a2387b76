"""Who a chunk of KV belongs to: namespaces and prefix-chained chunk keys.

A namespace names everything that changes the bytes of a cache or their meaning; a chunk key names a namespace
and every token, image and prompt embedding up to the end of the chunk. Two caches share a key only if one may
serve for the other. Digests are of length-prefixed bytes, so they are the same in every process and on every
platform.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.codecs.frame_format import pack_rope
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import ConfigError
from kvcore.rope import RopeParams

__all__ = ["HASHES", "ChunkKey", "ExtraKey", "KeyChain", "Namespace", "Tokens", "chunk_keys"]

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"

_NAMESPACE_TAG = b"kvcore namespace 1\n"
_CHUNK_TAG = b"kvcore chunk 1\n"
_U32 = struct.Struct("<I")
_EXTRA = struct.Struct("<qQI")


def _blake3(data: bytes) -> bytes:
    from blake3 import blake3  # a native library: loaded by the first digest, not by `import kvcore`

    return blake3(data).digest()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASHES: dict[str, Callable[[bytes], bytes]] = {"blake3": _blake3, "sha256": _sha256}
"""The hashes a namespace may name; each gives 32 bytes."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but the tokens that decides what a chunk's bytes are.

    Parameters
    ----------
    model, revision : str
        Model id, and the revision of its weights.
    adapter : str
        LoRA or other adapter of the request; empty for none.
    kv_dtype : str or (str, str)
        Element type of K and V; a pair where they differ. Canonical names replace aliases, and a pair of
        equal names becomes the one name.
    scales : bytes
        Digest of the scales of a quantised cache.
    cache_class : str
        ``"mha"``, ``"mla"``, ``"recurrent"``, ...; never an engine's memory layout, or engines could not
        share.
    rope : RopeParams, optional
        How keys are rotated; None where they are not, or not known.
    chunk_tokens : int
        Tokens of a full chunk.
    salt : str
        Separates tenants who must not see each other's cache hits.
    hash : str
        ``"blake3"`` or ``"sha256"``.

    Raises
    ------
    ConfigError
        An empty model id, an unknown element type or hash, or `chunk_tokens` out of range.
    """

    model: str
    revision: str
    adapter: str = ""
    kv_dtype: str | tuple[str, str] = "bfloat16"
    scales: bytes = b""
    cache_class: str = "mha"
    rope: RopeParams | None = None
    chunk_tokens: int = 256
    salt: str = ""
    hash: str = "blake3"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a namespace needs a model id: without one, caches of different models would mix")
        if self.hash not in HASHES:
            raise ConfigError(f"unknown hash {self.hash!r}; known are {', '.join(HASHES)}")
        if not 1 <= self.chunk_tokens < 2**32:
            raise ConfigError(f"chunk_tokens must be in 1..2**32 - 1, got {self.chunk_tokens}")
        given = (self.kv_dtype,) if isinstance(self.kv_dtype, str) else tuple(self.kv_dtype)
        names = tuple(dtype_name(to_dtype(name)) for name in given)
        if len(names) not in (1, 2):
            raise ConfigError(f"kv_dtype is one name or a (K, V) pair, got {self.kv_dtype!r}")
        object.__setattr__(self, "kv_dtype", names[0] if names[0] == names[-1] else names)

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for all fields."""
        k_dtype, v_dtype = (self.kv_dtype,) * 2 if isinstance(self.kv_dtype, str) else self.kv_dtype
        fields = (
            self.hash.encode(),
            self.model.encode(),
            self.revision.encode(),
            self.adapter.encode(),
            k_dtype.encode(),
            v_dtype.encode(),
            self.scales,
            self.cache_class.encode(),
            pack_rope(self.rope),
            _U32.pack(self.chunk_tokens),
            self.salt.encode(),
        )
        return HASHES[self.hash](_NAMESPACE_TAG + b"".join(_U32.pack(len(field)) + field for field in fields))

    def for_request(self, *, adapter: str = "", salt: str = "") -> Namespace:
        """Return the namespace of a request that brings an adapter or a salt of its own.

        A salt of the request is joined with the one that there is already, whose length stands before it: tenants of
        one server stay apart, so do the servers of two owners, and no tenant can name a salt that makes it another's.
        """
        if not adapter and not salt:
            return self
        joined = f"{len(self.salt)}:{self.salt}{salt}" if salt else self.salt
        return replace(self, adapter=adapter or self.adapter, salt=joined)


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """An input that token ids do not identify: an image, a sound, a prompt embedding.

    Parameters
    ----------
    start, stop : int
        The tokens ``[start, stop)`` it stands for.
    content : bytes
        Hash of the full content, all of its bits.

    Raises
    ------
    ConfigError
        An empty span, or no content hash: such a request cannot be identified, so it must not be cached.
    """

    start: int
    stop: int
    content: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(f"an extra key spans at least one token, got [{self.start}, {self.stop})")
        if not self.content:
            raise ConfigError(
                f"the extra key of tokens [{self.start}, {self.stop}) has no content hash; do not cache a "
                "request whose inputs cannot be identified"
            )


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of one chunk of a sequence.

    Parameters
    ----------
    namespace, digest : bytes
        32 bytes each; `digest` depends on every token of the sequence up to `stop`.
    start, stop : int
        The chunk's tokens ``[start, stop)``.
    parent : bytes, optional
        `digest` of the chunk before it; None for the first. The same for all keys of one digest.
    tenant : str
        Salt of the namespace: whose quota the chunk counts on.
    """

    namespace: bytes
    digest: bytes
    start: int
    stop: int
    parent: bytes | None = field(default=None, compare=False)
    tenant: str = field(default="", compare=False)


class KeyChain:
    """The keys of a sequence that grows: nothing is digested twice.

    Parameters
    ----------
    namespace : Namespace
    extra_keys : sequence of ExtraKey, optional
        In any order. Each enters the key of every chunk that its span touches; what lies past the last token
        is left for later chunks.

    Attributes
    ----------
    namespace : Namespace
    keys : list of ChunkKey
        Of the full chunks, first to last.
    num_tokens : int
        Tokens so far, those of a chunk that is not full yet among them.
    """

    def __init__(self, namespace: Namespace, *, extra_keys: Sequence[ExtraKey] | None = None) -> None:
        self.namespace = namespace
        self.keys: list[ChunkKey] = []
        self.num_tokens = 0
        self._extras = sorted(extra_keys or (), key=lambda e: (e.start, e.stop, e.content))
        self._origin = namespace.digest
        self._rest = b""

    def extend(self, tokens: Tokens) -> list[ChunkKey]:
        """Append tokens; return `keys`.

        Raises
        ------
        ConfigError
            The tokens are not a flat sequence of integers in range; nothing was appended.
        """
        ids = self._rest + _token_bytes(tokens)
        whole = len(ids) // (4 * self.namespace.chunk_tokens)
        for number in range(whole):
            self.keys.append(self._key(ids, number * self.namespace.chunk_tokens, self.namespace.chunk_tokens))
        self._rest = ids[4 * whole * self.namespace.chunk_tokens :]
        self.num_tokens = len(self.keys) * self.namespace.chunk_tokens + len(self._rest) // 4
        return self.keys

    def tail(self) -> ChunkKey | None:
        """Return the key of the last chunk where it is not full; it changes with every token."""
        return self._key(self._rest, 0, len(self._rest) // 4) if self._rest else None

    def _key(self, ids: bytes, at: int, count: int) -> ChunkKey:
        """The key of the chunk that comes after `keys`, whose token ids begin at token `at` of some."""
        parent = self.keys[-1].digest if self.keys else None
        start = len(self.keys) * self.namespace.chunk_tokens
        body = _U32.pack(count) + ids[4 * at : 4 * (at + count)] + _extras(self._extras, start, start + count)
        link = HASHES[self.namespace.hash](_CHUNK_TAG + (self._origin if parent is None else parent) + body)
        return ChunkKey(self._origin, link, start, start + count, parent, self.namespace.salt)


def chunk_keys(
    namespace: Namespace,
    tokens: Tokens,
    *,
    extra_keys: Sequence[ExtraKey] | None = None,
    partial: bool = False,
) -> list[ChunkKey]:
    """Return the keys of a sequence's chunks, first to last.

    Parameters
    ----------
    namespace : Namespace
    tokens : sequence of int, or integer array ``[num_tokens]``
        Token ids, 0 to 2**32 - 1.
    extra_keys : sequence of ExtraKey, optional
        See `KeyChain`.
    partial : bool
        Also give a key to the last chunk where it is not full.

    Raises
    ------
    ConfigError
        The tokens are not a flat sequence of integers in range.
    """
    chain = KeyChain(namespace, extra_keys=extra_keys)
    keys = list(chain.extend(tokens))
    tail = chain.tail() if partial else None
    return keys if tail is None else [*keys, tail]


def _extras(extras: Sequence[ExtraKey], start: int, stop: int) -> bytes:
    """The extra keys of a chunk: offset relative to its start (it may be negative), length, content."""
    touching = [extra for extra in extras if extra.start < stop and extra.stop > start]
    encoded = (
        _EXTRA.pack(extra.start - start, extra.stop - extra.start, len(extra.content)) + extra.content
        for extra in touching
    )
    return _U32.pack(len(touching)) + b"".join(encoded)


def _token_bytes(tokens: Tokens) -> bytes:
    """The token ids as little-endian u32."""
    try:
        array = np.asarray(tokens)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"tokens must be a flat sequence of integers: {error}") from error
    if array.ndim != 1:
        raise ConfigError(f"tokens must be a flat sequence of integers, got shape {array.shape}")
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        raise ConfigError(f"token ids must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**32:
        raise ConfigError(f"token ids must be in 0..2**32 - 1, got {low if low < 0 else high}")
    return array.astype("<u4").tobytes()
