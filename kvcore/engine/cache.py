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
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.contract import Codec
from kvcore.codecs.frame import FrameReader, FrameWriter, GroupInfo, PartInfo, encode_frame, plan_frame
from kvcore.codecs.registry import PRESETS, get_codec
from kvcore.engine.keys import ChunkKey, ExtraKey, Namespace, Tokens, chunk_keys
from kvcore.errors import ConfigError, CorruptFrameError, QuantizationError, StoreError, UnsupportedOpError
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.rows import RowLayout
from kvcore.tiers.stores import Store

__all__ = ["OPS", "LoadedChunk", "PrefixCache", "SaveReport"]

OPS = ("convert_layout", "digest")
"""The ops of a backend that saving and restoring take, whatever the codec."""

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
    """A verified chunk: tokens ``[start, stop)`` of the prefix, and its K and V.

    Of codec raw these are read-only rows of the frame itself.
    """

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
        Its `OPS` move and digest the bytes; those of the codec encode and decode them.
    codec : Codec or str
        How chunks are coded that this cache writes: a preset's name, or a codec with options, such as
        ``get_codec("balanced", nonfinite="raw")`` with a policy for NaN and infinities.
    codecs : sequence of str, optional
        The codecs whose frames it takes from the store: `codec`, ``"raw"`` and ``"lossless"`` if not given. The codec
        is no part of a key: who stored a chunk first decided how, and a frame of a codec that is not accepted is a
        miss. It stays where it is, for those who accept it; nothing that is stored is coded again.

    Attributes
    ----------
    misses : Counter of str
        Chunks that could not be used though they were looked for, by reason: those of `CorruptFrameError`,
        ``"codec"`` where a frame's codec is not accepted or the backend lacks its ops, ``"store"`` where the medium
        failed, ``"absent"`` where a chunk vanished after `lookup`.
    refused : int
        Chunks that `save` left out, because the codec does not take a value of theirs (a NaN or infinity in a lossy
        one, under policy ``"error"``), or of one before them. Said once in the log.

    Raises
    ------
    ConfigError
        There is no such codec, or `codecs` leaves out the one that is written.
    UnsupportedOpError
        The backend lacks one of the ops.
    LayoutError
        The extents do not fit a frame.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        *,
        layers: int,
        heads: int,
        width: int,
        backend: Backend,
        codec: Codec | str = "raw",
        codecs: Sequence[str] | None = None,
    ) -> None:
        k_dtype, v_dtype = (namespace.kv_dtype,) * 2 if isinstance(namespace.kv_dtype, str) else namespace.kv_dtype
        for op in OPS:
            backend.resolve(op)
        self.store = store
        self.namespace = namespace
        self.backend = backend
        self.codec = get_codec(codec) if isinstance(codec, str) else codec
        self.codecs = _accepted(self.codec, codecs)
        self.misses: Counter[str] = Counter()
        self.refused = 0
        self._group = GroupInfo(
            "LKHTD",
            tuple(range(layers)),
            (PartInfo("K", k_dtype, width), PartInfo("V", v_dtype, width)),
            rows=namespace.chunk_tokens,
            head_count=heads,
            rope=namespace.rope,
        )

    def lookup(self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = ()) -> int:
        """Return how many leading tokens are stored, in whole chunks and in whatever codec, without a side effect.

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
        UnsupportedOpError
            The codec does not take the element types, or the backend lacks its ops.
        """
        keys = chunk_keys(self.namespace, tokens, extra_keys=extra_keys)
        written = present = stored_bytes = 0
        for key in keys:
            stat = self.store.stat(key)
            if stat is None:
                frame = self._encode(key, source(key.start, key.stop))
                if frame is None:
                    break
                stored_bytes += self.store.put(key, frame)
                written += 1
            else:
                stored_bytes += stat.nbytes
                present += 1
            if progress is not None:
                progress(key.stop)
        covered = written + present
        self.refused += len(keys) - covered
        return SaveReport(
            keys[covered - 1].stop if covered else 0,
            written,
            present,
            covered * self._group.raw_bytes,
            stored_bytes,
            len(keys) - covered,
        )

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

    def _encode(self, key: ChunkKey, source: RowLayout) -> bytearray | None:
        """Return a chunk's frame, or None where the codec does not take its values."""
        group, tokens = replace(self._group, base_position=key.start), key.stop - key.start
        if self.codec.codec_id == 0:
            plan = plan_frame([group], tokens=tokens, namespace=key.namespace, key=key.digest)
            writer = FrameWriter(plan)
            target = _rows(group, [writer.layer_view(i) for i in range(len(plan.layers))])
            self.backend.convert_layout(source, out=target)
            return writer.finish(self.backend.digest)
        try:
            return encode_frame(
                self.backend,
                [group],
                [source],
                tokens=tokens,
                namespace=key.namespace,
                key=key.digest,
                codec=self.codec,
            )
        except QuantizationError as error:
            if not self.refused:
                logger.warning("not cached, nor are the tokens after it: chunk %d:%d: %s", key.start, key.stop, error)
            return None

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
            if reader.codec.name not in self.codecs:
                accepted = ", ".join(sorted(self.codecs))
                self._miss("codec", f"chunk {key.start}:{key.stop} is stored as {reader.codec.name}, not as {accepted}")
                return None
            if reader.codec.codec_id == 0:
                return _rows(group, [reader.layer(i) for i in range(len(reader.layers))])
            rows = allocate_rows(group)
            reader.decode(self.backend, [rows])
            return rows
        except UnsupportedOpError as error:
            self._miss("codec", error)
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


def _accepted(codec: Codec, codecs: Sequence[str] | None) -> frozenset[str]:
    names = {codec.name, "raw", "lossless"} if codecs is None else set(codecs)
    if unknown := names - PRESETS.keys():
        raise ConfigError(f"there is no codec {min(unknown)!r}; there are {', '.join(PRESETS)}")
    if codec.name not in names:
        raise ConfigError(
            f"chunks are written as {codec.name}, but only {', '.join(sorted(names))} would be accepted: what this "
            f"cache stores it could never use; add {codec.name!r} to codecs"
        )
    return frozenset(names)


def _rows(group: GroupInfo, layers: Sequence[memoryview]) -> RowLayout:
    """Bind the stored layers of a raw frame as one dense chunk, in place."""
    return _LAYER_ARRAYS.bind([list(raw.layer_arrays(group, layer)) for layer in layers])
