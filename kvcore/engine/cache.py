"""`PrefixCache`: the KV of token prefixes, whole chunks of them, as frames in a store.

It knows tokens, keys, frames and stores; where an engine keeps its KV, the engine's connector knows. Bytes go once:
from the engine's memory into the frame, and from the frame into the engine's memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcore.codecs import raw
from kvcore.codecs.frame import FrameReader, FrameWriter, GroupInfo, PartInfo, plan_frame
from kvcore.engine.keys import ChunkKey, ExtraKey, Namespace, Tokens, chunk_keys
from kvcore.errors import CorruptFrameError, StoreError
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.rows import RowLayout
from kvcore.tiers.stores import Store

__all__ = ["OPS", "LoadedChunk", "PrefixCache", "SaveReport"]

OPS = ("convert_layout", "digest")
"""The ops of a backend that saving and restoring take."""

logger = logging.getLogger("kvcore")

_LAYER_ARRAYS = Layout("LK|HTD")


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
    """

    tokens: int
    chunks_written: int
    chunks_present: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A verified chunk: tokens ``[start, stop)`` of the prefix, and its K and V as read-only rows of the frame."""

    start: int
    stop: int
    rows: RowLayout


class PrefixCache:
    """KV of token prefixes in a store.

    Parameters
    ----------
    store : Store
    namespace : Namespace
        Whose KV it is; decides the element type, the rotation and the chunk size too.
    layers, heads, width : int
        Layers of the model, its KV heads, and the channels of a head.
    backend : Backend
        Its `OPS` move and digest the bytes.

    Attributes
    ----------
    misses : Counter of str
        Chunks that could not be used though they were looked for, by reason: those of `CorruptFrameError`,
        ``"store"`` where the medium failed, ``"absent"`` where a chunk vanished after `lookup`.

    Raises
    ------
    UnsupportedOpError
        The backend lacks one of the ops.
    LayoutError
        The extents do not fit a frame.
    """

    def __init__(
        self, store: Store, namespace: Namespace, *, layers: int, heads: int, width: int, backend: Backend
    ) -> None:
        k_dtype, v_dtype = (namespace.kv_dtype,) * 2 if isinstance(namespace.kv_dtype, str) else namespace.kv_dtype
        for op in OPS:
            backend.resolve(op)
        self.store = store
        self.namespace = namespace
        self.backend = backend
        self.misses: Counter[str] = Counter()
        self._group = GroupInfo(
            "LKHTD",
            tuple(range(layers)),
            (PartInfo("K", k_dtype, width), PartInfo("V", v_dtype, width)),
            rows=namespace.chunk_tokens,
            head_count=heads,
            rope=namespace.rope,
        )

    def lookup(self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = ()) -> int:
        """Return how many leading tokens are stored, in whole chunks, without a side effect.

        At least one token is always left to compute: an engine whose cache covers its whole prompt has nothing to
        run, and so no logits for the next token.
        """
        hit = 0
        for key in self._wanted(tokens, extra_keys):
            if not self._exists(key):
                break
            hit = key.stop
        return hit

    def load(self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = ()) -> Iterator[LoadedChunk]:
        """Yield the stored chunks of a prefix, first to last, up to the first that is missing or not right.

        A frame that is short, altered, foreign, of a newer format, or of another namespace or shape is a miss: it is
        counted in `misses` and moved aside in the store, so that the key can be stored again.
        """
        for key in self._wanted(tokens, extra_keys):
            rows = self._read(key)
            if rows is None:
                return
            yield LoadedChunk(key.start, key.stop, rows)

    def save(
        self, tokens: Tokens, source: Callable[[int, int], RowLayout], *, extra_keys: Sequence[ExtraKey] = ()
    ) -> SaveReport:
        """Store the whole chunks of a prefix that are not stored yet.

        Parameters
        ----------
        tokens : sequence of int, or integer array ``[num_tokens]``
        source : callable
            From a range ``start, stop`` of tokens to the dense rows of parts K and V that hold it. Called for the
            chunks that are written, in order.
        extra_keys : sequence of ExtraKey

        Raises
        ------
        StoreError
            The store failed (disk full, say). The chunks stored before stay, and are of use.
        """
        keys = chunk_keys(self.namespace, tokens, extra_keys=extra_keys)
        written = stored_bytes = 0
        for key in keys:
            stat = self.store.stat(key)
            if stat is None:
                stored_bytes += self._write(key, source(key.start, key.stop))
                written += 1
            else:
                stored_bytes += stat.nbytes
        covered = keys[-1].stop if keys else 0
        return SaveReport(covered, written, len(keys) - written, len(keys) * self._group.raw_bytes, stored_bytes)

    def _wanted(self, tokens: Tokens, extra_keys: Sequence[ExtraKey]) -> list[ChunkKey]:
        """Keys of the chunks that may be taken from the store: those that leave a token to compute."""
        keys = chunk_keys(self.namespace, tokens, extra_keys=extra_keys)
        return keys[: max(len(tokens) - 1, 0) // self.namespace.chunk_tokens]

    def _exists(self, key: ChunkKey) -> bool:
        try:
            return self.store.exists(key)
        except StoreError as error:
            self._miss("store", error)
            return False

    def _write(self, key: ChunkKey, source: RowLayout) -> int:
        group = replace(self._group, base_position=key.start)
        plan = plan_frame([group], tokens=key.stop - key.start, namespace=key.namespace, key=key.digest)
        writer = FrameWriter(plan)
        target = _rows(group, [writer.layer_view(i) for i in range(len(plan.layers))])
        self.backend.convert_layout(source, out=target)
        return self.store.put(key, writer.finish(self.backend.digest))

    def _read(self, key: ChunkKey) -> RowLayout | None:
        group = replace(self._group, base_position=key.start)
        try:
            frame = self.store.get(key)
            if frame is None:
                self._miss("absent", f"chunk {key.start}:{key.stop} is gone")
                return None
            reader = FrameReader(
                frame,
                expect_namespace=key.namespace,
                expect_key=key.digest,
                expect_groups=[group],
                digest=self.backend.digest,
            )
            if reader.header.tokens != key.stop - key.start:
                raise CorruptFrameError(
                    f"the frame holds {reader.header.tokens} tokens, its key stands for {key.stop - key.start}",
                    reason="layout",
                )
            return _rows(group, [reader.layer(i) for i in range(len(reader.layers))])
        except StoreError as error:
            self._miss("store", error)
        except CorruptFrameError as error:
            self._miss(error.reason, error)
            self._quarantine(key, error.reason)
        return None

    def _quarantine(self, key: ChunkKey, reason: str) -> None:
        try:
            self.store.quarantine(key, reason)
        except StoreError as error:  # a store that is mounted read-only, say: the miss stands all the same
            logger.warning("a bad frame stays where it is: %s", error)

    def _miss(self, reason: str, why: object) -> None:
        self.misses[reason] += 1
        logger.warning("cache miss (%s): %s", reason, why)


def _rows(group: GroupInfo, layers: Sequence[memoryview]) -> RowLayout:
    """Bind the stored layers of a raw frame as one dense chunk, in place."""
    return _LAYER_ARRAYS.bind([list(raw.layer_arrays(group, layer)) for layer in layers])
