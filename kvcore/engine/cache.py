"""`PrefixCache`: the KV of token prefixes, whole chunks of them, in tiers.

It knows tokens, keys and tiers; how KV is coded, the tiers' serdes know, and where an engine keeps its KV, the engine's
connector. Bytes go twice: between the engine's memory and host memory, and between that and a frame.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from kvcore.codecs import Codec, get_codec
from kvcore.completion import TaskId
from kvcore.dtypes import to_dtype
from kvcore.engine.keys import ChunkKey, ExtraKey, Namespace, Tokens, chunk_keys
from kvcore.errors import (
    ConfigError,
    CorruptFrameError,
    KVCoreError,
    LayoutError,
    LeaseError,
    OutOfMemoryError,
    QuantizationError,
    StoreError,
    UnsupportedOpError,
)
from kvcore.layout import Layout
from kvcore.memory import BufferPool, KVMeta, LayoutDesc, MemoryPlan
from kvcore.ops import Backend
from kvcore.rows import RowLayout
from kvcore.runtime import HostRuntime
from kvcore.serde.builtin import codec_serde
from kvcore.serde.processor import AsyncSerdeProcessor
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.store_tier import StoreTier
from kvcore.tiers.stores import Store
from kvcore.tiers.tiered import TieredCache

__all__ = ["OPS", "LoadedChunk", "PrefixCache", "SaveReport"]

OPS = ("convert_layout", "digest")
"""The ops of a backend that saving and restoring take, whatever the codec."""

WINDOW = 4
"""Chunks that are loaded at a time; as many more are on their way meanwhile."""
LOADS = 4
"""Loads that find room at a time where host memory is but a staging buffer. What is not used takes no pages."""

logger = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What `PrefixCache.save` did.

    Parameters
    ----------
    tokens : int
        Tokens that the store now covers: whole chunks only.
    chunks_written, chunks_present : int
        Chunks stored by this call, and chunks that were there already.
    raw_bytes, stored_bytes : int
        Bytes of these chunks' K and V, and of the frames that hold them.
    chunks_refused : int
        Chunks that were left out: the first has values that the codec does not take, the others come after it.
    """

    tokens: int
    chunks_written: int
    chunks_present: int
    raw_bytes: int
    stored_bytes: int
    chunks_refused: int = 0


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A verified chunk: tokens ``[start, stop)`` of the prefix, and its K and V, read-only until the next one."""

    start: int
    stop: int
    rows: RowLayout


class PrefixCache:
    """KV of token prefixes in a store, or in several tiers.

    Parameters
    ----------
    store : Store or TieredCache
        A store by itself, without host memory in front that would keep anything; or tiers. It stays the caller's.
    namespace : Namespace
        Whose KV it is; decides the element type, the rotation and the chunk size too.
    layers, heads, width : int
        Layers of the model, its KV heads, and the channels of a head.
    backend : Backend
        Its `OPS` move and digest the bytes; those of the codec encode and decode them.
    codec : Codec or str
        How chunks are coded that this cache writes to a store: a preset's name, or a codec with options, such as
        ``get_codec("balanced", nonfinite="raw")`` with a policy for NaN and infinities; ``"raw"`` if not given. Tiers
        have their serdes instead.
    codecs : sequence of str, optional
        The codecs whose frames it takes from the store: `codec`, ``"raw"`` and ``"lossless"`` if not given. The codec
        is no part of a key: who stored a chunk first decided how, and a frame of a codec that is not accepted is a
        miss. It stays where it is, for those who accept it; nothing that is stored is coded again.

    Attributes
    ----------
    misses : Counter of str
        Chunks that could not be used though they were looked for, by reason: those of `CorruptFrameError`,
        ``"codec"`` where a frame's codec is not accepted or the backend lacks its ops, ``"store"`` where the medium
        failed, ``"memory"`` where there was no room for it, ``"absent"`` where a chunk vanished after `lookup`.
    refused : int
        Chunks that `save` left out, because the codec does not take a value of theirs (a NaN or infinity in a lossy
        one, under policy ``"error"``), or of one before them. Said once in the log.

    Raises
    ------
    ConfigError
        There is no such codec, `codecs` leaves out the one that is written, or codecs were given for tiers; or host
        memory has no room for a chunk.
    UnsupportedOpError
        The backend lacks one of the ops.
    LayoutError
        The extents do not fit a frame.

    Notes
    -----
    `close` frees its threads and buffers; garbage collection does too.
    """

    def __init__(
        self,
        store: Store | TieredCache,
        namespace: Namespace,
        *,
        layers: int,
        heads: int,
        width: int,
        backend: Backend,
        codec: Codec | str | None = None,
        codecs: Sequence[str] | None = None,
    ) -> None:
        for op in OPS:
            backend.resolve(op)
        self.namespace = namespace
        self.backend = backend
        self.misses: Counter[str] = Counter()
        self.refused = 0
        k_dtype, v_dtype = (namespace.kv_dtype,) * 2 if isinstance(namespace.kv_dtype, str) else namespace.kv_dtype
        extents = {"L": layers, "T": namespace.chunk_tokens, "H": heads, "D": width}
        text = "LKHTD" if k_dtype == v_dtype else "L[K:HTD,V:HTD]"
        self._desc = LayoutDesc(Layout(text, **extents), {"K": to_dtype(k_dtype), "V": to_dtype(v_dtype)})
        self._opened = contextlib.ExitStack()
        if isinstance(store, TieredCache):
            if codec is not None or codecs is not None:
                raise ConfigError(
                    "tiers have serdes of their own: say there how KV is coded, and leave out codec, codecs"
                )
            size, room = MemoryPlan.of([self._desc]).size, store.host.arena.capacity_bytes
            if size > room:
                raise ConfigError(
                    f"a chunk of {namespace.chunk_tokens} tokens has {size} B, and the host memory of the tiers {room} "
                    "B: nothing could be cached; give them more, or make chunks smaller"
                )
            self.tiers, self.store = store, None
        else:
            self.store = store
            self.tiers = self._over(store, "raw" if codec is None else codec, codecs)
        weakref.finalize(self, _let_go, self._opened)

    def on_close(self, call: Callable[[], None]) -> None:
        """Call something at the end of `close`: to close a store that was opened for this cache."""
        earlier = self._opened.pop_all()
        self._opened.callback(call)
        self._opened.push(earlier)

    def close(self) -> None:
        """Free threads and buffers. The store stays open, or the tiers."""
        self._opened.close()

    def lookup(self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = ()) -> int:
        """Return how many leading tokens are stored, in whole chunks and in whatever codec, without a side effect.

        At least one token is always left to compute: an engine whose cache covers its whole prompt has nothing to
        run, and so no logits for the next token.
        """
        keys = self._wanted(tokens, extra_keys)
        found = len(self.tiers.lookup(keys))
        return keys[found - 1].stop if found else 0

    def load(self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = ()) -> Iterator[LoadedChunk]:
        """Yield the stored chunks of a prefix, first to last, up to the first that is missing or not right.

        A frame that is short, altered, foreign, of a newer format, or of another namespace or shape is a miss: it is
        counted in `misses` and moved aside in the store, so that the key can be stored again.

        Raises
        ------
        LeaseError
            A chunk was held for longer than a read may take: what was read of it must not be used.
        """
        keys = self._wanted(tokens, extra_keys)
        windows = [keys[at : at + WINDOW] for at in range(0, len(keys), WINDOW)]
        coming = [self._begin(windows[0])] if windows else []
        try:
            for number, window in enumerate(windows):
                found = self.tiers.loaded(coming[-1])
                try:
                    whole = len(found) == len(window) and isinstance(found[-1], Found)
                    if whole and number + 1 < len(windows):
                        coming.append(self._begin(windows[number + 1]))
                    yield from self._yielded(window, found)
                finally:
                    self._give_back(found)
                if not whole:
                    return
        finally:
            for task in coming:
                self.tiers.forget_load(task)

    def save(
        self,
        tokens: Tokens,
        source: Callable[[int, int], RowLayout],
        *,
        extra_keys: Sequence[ExtraKey] = (),
        progress: Callable[[int], None] | None = None,
    ) -> SaveReport:
        """Store the whole chunks of a prefix that are not stored yet, in whatever codec.

        A chunk with a value that the codec does not take ends the prefix: it and those after it are left out and
        counted, because a server goes on serving when a model gives a NaN.

        Parameters
        ----------
        tokens : sequence of int, or integer array ``[num_tokens]``
        source : callable
            From a range ``start, stop`` of tokens to the dense rows of parts K and V that hold it. Called for the
            chunks that are written, in order.
        extra_keys : sequence of ExtraKey
        progress : callable, optional
            Called after each chunk with the tokens covered so far.

        Raises
        ------
        StoreError
            The store failed (disk full, say). The chunks stored before stay, and are of use.
        OutOfMemoryError
            There is no room in host memory for a chunk.
        UnsupportedOpError
            The codec does not take the element types, or the backend lacks its ops.
        """
        keys = chunk_keys(self.namespace, tokens, extra_keys=extra_keys)
        written = present = stored_bytes = 0
        for key, known in zip(keys, self.tiers.stat(keys), strict=True):
            if isinstance(known, Exception):
                raise known
            if known is None:
                nbytes = self._store(key, source)
                if nbytes is None:
                    break
                stored_bytes += nbytes
                written += 1
            else:
                stored_bytes += known[1]
                present += 1
            if progress is not None:
                progress(key.stop)
        covered = written + present
        self.refused += len(keys) - covered
        return SaveReport(
            keys[covered - 1].stop if covered else 0,
            written,
            present,
            covered * self._desc.nbytes,
            stored_bytes,
            len(keys) - covered,
        )

    def _over(self, store: Store, codec: Codec | str, codecs: Sequence[str] | None) -> TieredCache:
        """Put a store behind as much host memory as chunks need on their way."""
        codec = get_codec(codec) if isinstance(codec, str) else codec
        accepted = {codec.name, "raw", "lossless"} if codecs is None else set(codecs)
        for name in sorted(accepted):
            if getattr(get_codec(name), "omits", ()):  # which also says what there is
                raise ConfigError(
                    f"frames of codec {name} do not hold all parts, and a prefix cache gives whole chunks back; use "
                    "kvcore.codecs.composites, which leave such parts as they are, or another codec"
                )
        if codec.name not in accepted:
            raise ConfigError(
                f"chunks are written as {codec.name}, but only {', '.join(sorted(accepted))} would be accepted: what "
                f"this cache stores it could never use; add {codec.name!r} to codecs"
            )
        serde = codec_serde(self.backend, codec, sorted(accepted))
        size = MemoryPlan.of([self._desc]).size
        arena = HostArena(HostRuntime(), 2 * LOADS * WINDOW * size, pinned=False, min_bytes=2 * WINDOW * size)
        self._opened.callback(arena.close)
        processor = AsyncSerdeProcessor(serde.serializer, serde.deserializer)
        self._opened.callback(processor.close)
        wrapped = SerdeStore(store, processor, BufferPool(1 << 40), max_workers=1, window=1)
        self._opened.callback(wrapped.close)
        host = HostTier(arena)
        self._opened.callback(host.clear)
        tier, observer = StoreTier("store", wrapped), _Misses(self.misses)
        tiers = TieredCache(host, [tier], store_policy="buffer_only", max_in_flight=2, observer=observer)
        self._opened.callback(tiers.close)
        return tiers

    def _wanted(self, tokens: Tokens, extra_keys: Sequence[ExtraKey]) -> list[ChunkKey]:
        """Keys of the chunks that may be taken from the store: those that leave a token to compute."""
        keys = chunk_keys(self.namespace, tokens, extra_keys=extra_keys)
        return keys[: max(len(tokens) - 1, 0) // self.namespace.chunk_tokens]

    def _plan(self, key: ChunkKey) -> MemoryPlan:
        meta = KVMeta(base_position=key.start, rope=self.namespace.rope, namespace=key.namespace)
        return MemoryPlan.of([self._desc], meta)

    def _begin(self, keys: Sequence[ChunkKey]) -> TaskId:
        return self.tiers.begin_load(keys, [self._plan(key) for key in keys])

    def _yielded(self, keys: Sequence[ChunkKey], found: list[Found | Exception | None]) -> Iterator[LoadedChunk]:
        """Yield chunks while they are locked, and take them off `found`; count what ended the prefix."""
        for key in keys[: len(found)]:
            one = found.pop(0)
            if not isinstance(one, Found) or one.lease is None:
                self._miss(key, cast("Exception | None", one))
                return
            try:
                yield LoadedChunk(key.start, key.stop, one.lease.memory.rows())
            finally:
                self.tiers.release(one)

    def _give_back(self, found: Sequence[Found | Exception | None]) -> None:
        """End the locks of chunks that nobody has read."""
        for one in found:
            if isinstance(one, Found):
                with contextlib.suppress(LeaseError):
                    self.tiers.release(one)

    def _store(self, key: ChunkKey, source: Callable[[int, int], RowLayout]) -> int | None:
        """Store a chunk; return its bytes in the fastest store, or None where the codec does not take its values."""
        rows = source(key.start, key.stop)
        leases = list(self.tiers.reserve({key: self._plan(key)}).values())
        if not leases:  # somebody else is at it, or was just now
            return self._desc.nbytes
        try:
            self.backend.convert_layout(rows, out=leases[0].memory.rows())
        except BaseException:
            self.tiers.cancel(leases)
            raise
        (outcome,) = self.tiers.stored(self.tiers.commit(leases)) or ()
        error = outcome if isinstance(outcome, Exception) else outcome.error
        if isinstance(error, QuantizationError):
            if not self.refused:
                logger.warning("not cached, nor are the tokens after it: chunk %d:%d: %s", key.start, key.stop, error)
            return None
        if error is not None or isinstance(outcome, Exception):
            raise error or KVCoreError("not stored")
        return next((n for n in outcome.tiers.values() if isinstance(n, int)), self._desc.nbytes)

    def _miss(self, key: ChunkKey, why: Exception | None) -> None:
        reason = "error"
        if why is None:
            reason, said = "absent", f"chunk {key.start}:{key.stop} is gone"
        else:
            said = f"chunk {key.start}:{key.stop}: {why}"
        kinds = {UnsupportedOpError: "codec", StoreError: "store", OutOfMemoryError: "memory", LayoutError: "layout"}
        for kind, name in kinds.items():
            reason = name if isinstance(why, kind) else reason
        reason = why.reason if isinstance(why, CorruptFrameError) else reason
        self.misses[reason] += 1
        logger.warning("cache miss (%s): %s", reason, said)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _let_go(opened: contextlib.ExitStack) -> None:
    """Close what a cache that nobody has any more had opened."""
    with contextlib.suppress(LeaseError):  # somebody still has rows: their memory goes with them
        opened.close()


class _Misses(TierObserver):
    """Counts lookups that failed: a store that cannot be asked is a miss."""

    def __init__(self, misses: Counter[str]) -> None:
        self._misses = misses

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        if operation == "lookup":
            self._misses["store"] += 1
            logger.warning("cache miss (store): %s", error)
