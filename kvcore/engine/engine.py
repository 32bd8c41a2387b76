"""`CacheEngine`: store, look up and retrieve the KV of token prefixes.

It knows tokens, keys, parts and tiers; how KV is coded, the tiers' serdes know, and where an inference engine keeps its
KV, a `KVMemory`. Nothing here is global: a process may have several engines.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvcore.engine.keys import ChunkKey, ExtraKey, KeyChain, Namespace, Tokens
from kvcore.engine.kv import KVMemory, as_memory
from kvcore.engine.layerwise import LayerwiseRetrieve, LayerwiseStore
from kvcore.engine.observer import EngineObserver, EngineObservers
from kvcore.engine.parts import CachePart, check_parts
from kvcore.engine.presence import Presence, StoredPart, longest
from kvcore.engine.stats import EngineStats, Health
from kvcore.engine.transfer import Misses, Retriever, Storer, StoreReport
from kvcore.errors import ConfigError, KVCoreError, LeaseError
from kvcore.ops import Backend
from kvcore.rows import RowLayout
from kvcore.tiers.tiered import TieredCache

__all__ = ["OPS", "CacheEngine", "EngineStats", "Health", "LookupStrategy", "StoreReport"]

OPS = ("convert_layout", "digest")
"""The ops of a backend that storing and retrieving take, whatever the codec and the engine's memory."""

LookupStrategy = Literal["chunked", "exact"]


class CacheEngine:
    """The KV of token prefixes in tiers.

    Parameters
    ----------
    namespace : Namespace
        Whose KV it is; decides the rotation and the chunk size too.
    parts : sequence of CachePart
        What is stored by itself of each chunk; the order is that of the parts of every `KVMemory`.
    tiers : TieredCache
        Stays the caller's, unless `own` says otherwise.
    backend : Backend
        Its `OPS` move the bytes; what is in an engine's memory is moved by its `gather_paged` and `scatter_paged`.
    model_layers : int, optional
        Layers of the whole model: a part that has all of them has the chunk's own key. Those of the parts if not given.
    block_tokens : int
        Hits are multiples of these.
    save_partial_chunk : bool
        Also store and find the last chunk of a sequence, which is not full.
    min_retrieve_tokens : int
        A hit of fewer tokens beyond those that the engine has itself is none.
    lookup_strategy : {"chunked", "exact"}
        ``"exact"``: a sequence of which not all chunks are there is a miss.
    reshard : bool
        Also find what other tensor-parallel degrees have stored.
    prefetch_chunks : int, optional
        Most chunks that a prefetch brings.
    prefetch_watermark : float
        Share of host memory in use from which on nothing is prefetched.
    observer : EngineObserver, optional
    misses : Misses, optional
        Where chunks are counted that were looked for in vain; for who counts there, too.
    own : bool
        Close the tiers with the engine.

    Raises
    ------
    ConfigError
        No part, a layout without place in host memory, or an option that means nothing.
    UnsupportedOpError
        The backend lacks one of the ops.

    Notes
    -----
    Thread-safe. A process that was forked from one with an engine opens an engine of its own: it lacks the threads of
    this one, and says so. `close` frees what was opened; garbage collection does too.

    Failures of stores never leave `lookup`, `retrieve` and `store`, unless `store` is to wait: they are counted, said
    once in the log, and are misses.
    """

    def __init__(
        self,
        namespace: Namespace,
        parts: Sequence[CachePart],
        tiers: TieredCache,
        *,
        backend: Backend,
        model_layers: int | None = None,
        block_tokens: int = 1,
        save_partial_chunk: bool = False,
        min_retrieve_tokens: int = 0,
        lookup_strategy: str = "chunked",
        reshard: bool = True,
        prefetch_chunks: int | None = None,
        prefetch_watermark: float = 1.0,
        observer: EngineObserver | None = None,
        misses: Misses | None = None,
        own: bool = False,
    ) -> None:
        check_parts(namespace, parts, tiers.host.arena.capacity_bytes)
        if block_tokens < 1 or min_retrieve_tokens < 0:
            raise ConfigError(
                f"block_tokens is 1 or more, min_retrieve_tokens 0 or more; got {block_tokens}, {min_retrieve_tokens}"
            )
        if lookup_strategy not in get_args(LookupStrategy):
            known = ", ".join(get_args(LookupStrategy))
            raise ConfigError(f"there is no lookup strategy {lookup_strategy!r}; there are {known}")
        for op in OPS:
            backend.resolve(op)
        self.namespace, self.parts, self.tiers, self.backend = namespace, tuple(parts), tiers, backend
        self.block_tokens, self.save_partial_chunk = block_tokens, save_partial_chunk
        self.min_retrieve_tokens, self.lookup_strategy = min_retrieve_tokens, lookup_strategy
        self._prefetch_chunks, self._prefetch_watermark = prefetch_chunks, prefetch_watermark
        layers = model_layers or max(part.layers[-1] + 1 for part in parts)
        self._stored = [
            StoredPart(part, parts, model_layers=layers, hash=namespace.hash, reshard=reshard) for part in parts
        ]
        self._misses = Misses() if misses is None else misses
        self._uncacheable = Misses()
        self._storer = Storer(tiers, self._stored, namespace)
        self._retriever = Retriever(tiers, self._stored, namespace, self._misses)
        self._observer = EngineObservers([] if observer is None else [observer])
        self._counts = Counter[str]()
        self._lock = threading.Lock()  # of the counters
        self._pid, self._own, self._closed = os.getpid(), own, False
        self._opened = contextlib.ExitStack()
        if own:
            self._opened.callback(tiers.close)
        self._opened.callback(self._observer.close)
        weakref.finalize(self, _let_go, self._opened, self._pid)

    def chain(self, *, extra_keys: Sequence[ExtraKey] = (), adapter: str = "", salt: str = "") -> KeyChain:
        """Return an empty chain of keys for a request."""
        return KeyChain(self.namespace.for_request(adapter=adapter, salt=salt), extra_keys=extra_keys)

    def keys(
        self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = (), adapter: str = "", salt: str = ""
    ) -> list[ChunkKey]:
        """Return the keys of a sequence's chunks, with that of the last one where partial chunks are kept."""
        chain = self.chain(extra_keys=extra_keys, adapter=adapter, salt=salt)
        keys = list(chain.extend(tokens))
        tail = chain.tail() if self.save_partial_chunk else None
        return keys if tail is None else [*keys, tail]

    # --- lookup

    def lookup(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        adapter: str = "",
        salt: str = "",
        computed: int = 0,
        request: str = "",
    ) -> int:
        """Return how many leading tokens `retrieve` would find, without a side effect.

        At least one token is always left to compute: an engine whose cache covers its whole prompt has nothing to run,
        and so no logits for the next token.

        Parameters
        ----------
        tokens : sequence of int, or integer array ``[num_tokens]``
        extra_keys : sequence of ExtraKey
            Inputs that token ids do not identify: images, prompt embeddings.
        adapter, salt : str
            Of the request: its LoRA, and what keeps its tenant apart.
        computed : int
            Tokens that the engine has itself.
        request : str
            Its id, for the log.
        """
        keys = self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt)
        return self.lookup_keys(keys, len(tokens), computed=computed, request=request)

    def lookup_keys(self, keys: Sequence[ChunkKey], num_tokens: int, *, computed: int = 0, request: str = "") -> int:
        """Do what `lookup` does, for a sequence whose keys are known; the last chunk need not be full."""
        began = time.perf_counter()
        found = self._longest(keys, num_tokens)
        self._count(lookups=1, lookup_tokens=num_tokens, hit_tokens=found)
        self._observer.request_lookup(request, num_tokens, found, time.perf_counter() - began, computed)
        return self._worth(found, computed)

    def uncacheable(self, reason: str) -> None:
        """Count a request that is not cached, because its inputs cannot be identified, say."""
        self._uncacheable.count(reason, "a request is not cached")
        self._observer.uncacheable(reason)

    # --- store

    def store(
        self,
        tokens: Tokens,
        kv: KVMemory | RowLayout | Sequence[RowLayout],
        slot_mapping: Any = None,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        adapter: str = "",
        salt: str = "",
        request: str = "",
        wait: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> StoreReport:
        """Store the chunks of a sequence that are nowhere yet.

        Parameters
        ----------
        tokens, extra_keys, adapter, salt, request
            As in `lookup`. All tokens must have their KV in `kv`.
        kv : KVMemory, RowLayout or sequence of RowLayout
            Where the KV is: bound paged caches, one for each part, with `slot_mapping`; or dense rows of all tokens; or
            anything that can read and write it.
        slot_mapping : int64 array ``[num_tokens]``, or a sequence of them
            For each part; one for all if they have the same.
        wait : bool
            Return when the stores have it; without, coding and writing go on in the background.
        progress : callable, optional
            With `wait`: called after each chunk with the tokens covered so far.

        Raises
        ------
        StoreError
            With `wait`: no store takes it. The chunks stored before stay, and are of use.
        OutOfMemoryError
            With `wait`: there is no room in host memory for a chunk.
        UnsupportedOpError
            With `wait`: the codec does not take the element types, or the backend lacks its ops.
        LayoutError, SlotError
            `kv` is not what the parts say, or has not these tokens.
        """
        keys = self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt)
        memory = self._memory(kv, slot_mapping)
        return self.store_keys(keys, memory, total=len(tokens), request=request, wait=wait, progress=progress)

    def store_keys(
        self,
        keys: Sequence[ChunkKey],
        kv: KVMemory,
        *,
        total: int = 0,
        request: str = "",
        wait: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> StoreReport:
        """Do what `store` does, for some chunks of a sequence of `total` tokens whose keys are known."""
        self._alive()
        began = time.perf_counter()
        report = self._storer.run_and_wait(keys, kv, progress) if wait else self._storer.run(keys, kv)
        self._told_store(report, total, request, began)
        return report

    def begin_store(
        self, keys: Sequence[ChunkKey], kv: KVMemory, *, total: int = 0, request: str = ""
    ) -> LayerwiseStore:
        """Begin to store chunks layer by layer, as they are computed."""
        self._alive()
        began = time.perf_counter()

        def told(report: StoreReport) -> None:
            self._told_store(report, total, request, began)

        layers = [len(part.layers) for part in self.parts]
        return LayerwiseStore(self.tiers, self._storer, keys, kv, layers, told)

    def store_layer(
        self, tokens: Tokens, kv: KVMemory | RowLayout | Sequence[RowLayout], slot_mapping: Any = None, **request: Any
    ) -> Iterator[int]:
        """Store a sequence layer by layer: a generator that stores one more each time it is advanced.

        It yields the number of the model's layer that it is about to store; at its end all goes to the tiers. Arguments
        are those of `store`, without `wait`.
        """
        name = request.pop("request", "")
        keys, memory = self.keys(tokens, **request), self._memory(kv, slot_mapping)
        with self.begin_store(keys, memory, total=len(tokens), request=name) as store:
            for layer, part, index in self._layers():
                yield layer
                store.layer(part, index)
            store.finish()

    # --- retrieve

    def retrieve(
        self,
        tokens: Tokens,
        kv: KVMemory | RowLayout | Sequence[RowLayout],
        slot_mapping: Any = None,
        *,
        skip_tokens: int = 0,
        extra_keys: Sequence[ExtraKey] = (),
        adapter: str = "",
        salt: str = "",
        request: str = "",
    ) -> npt.NDArray[np.bool_]:
        """Bring the longest stored prefix of a sequence into the engine's memory.

        Parameters
        ----------
        tokens, kv, slot_mapping, extra_keys, adapter, salt, request
            As in `store`.
        skip_tokens : int
            Leading tokens that the engine has itself: they are neither loaded nor written.

        Returns
        -------
        bool array ``[num_tokens]``
            Which tokens were written: those from `skip_tokens` up to the end of the prefix.

        Raises
        ------
        LayoutError, SlotError
            As in `store`.
        """
        keys = self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt)
        memory = self._memory(kv, slot_mapping)
        stop = self._worth(self._longest(keys, len(tokens)), skip_tokens)
        mask = np.zeros(len(tokens), np.bool_)
        if stop > skip_tokens:
            upto = self.retrieve_keys(keys, memory, start=skip_tokens, stop=stop, request=request)
            mask[skip_tokens:upto] = True
        return mask

    def retrieve_keys(self, keys: Sequence[ChunkKey], kv: KVMemory, *, start: int, stop: int, request: str = "") -> int:
        """Bring tokens ``[start, stop)`` of a sequence into the engine's memory.

        A frame that is short, altered, foreign, of a newer format, or of another namespace or shape is a miss: it is
        counted and moved aside in the store, so that the key can be stored again.

        Parameters
        ----------
        keys : sequence of ChunkKey
            Of the chunks from token 0 on, as far as `stop`.
        kv : KVMemory
        start, stop : int
            `stop` is what `lookup` gave.

        Returns
        -------
        int
            Up to which token the KV is right: `stop` if all went well, `start` if nothing did. What was written behind
            it must not be used.
        """
        self._alive()
        began = time.perf_counter()
        upto, nbytes = self._retriever.run(keys, kv, start, stop)
        self._told_retrieve(request, start, stop, began)(upto, nbytes)
        return upto

    def begin_retrieve(
        self, keys: Sequence[ChunkKey], kv: KVMemory, *, start: int, stop: int, request: str = ""
    ) -> LayerwiseRetrieve:
        """Begin to bring tokens into the engine's memory, layer by layer. Arguments are those of `retrieve_keys`."""
        self._alive()
        told = self._told_retrieve(request, start, stop, time.perf_counter())
        return LayerwiseRetrieve(self._retriever, keys, kv, start, stop, told)

    def retrieve_layer(
        self,
        tokens: Tokens,
        kv: KVMemory | RowLayout | Sequence[RowLayout],
        slot_mapping: Any = None,
        *,
        skip_tokens: int = 0,
        **request: Any,
    ) -> Iterator[int | npt.NDArray[np.bool_]]:
        """Bring a prefix into the engine's memory layer by layer: a generator.

        Each time it is advanced one more of the model's layers is there, whose number it yields; last of all it yields
        what `retrieve` returns. Arguments are those of `retrieve`.
        """
        name = request.pop("request", "")
        keys, memory = self.keys(tokens, **request), self._memory(kv, slot_mapping)
        mask = np.zeros(len(tokens), np.bool_)
        stop = self._worth(self._longest(keys, len(tokens)), skip_tokens)
        if stop > skip_tokens:
            with self.begin_retrieve(keys, memory, start=skip_tokens, stop=stop, request=name) as load:
                for layer, part, index in self._layers():
                    load.layer(part, index)
                    yield layer
                mask[skip_tokens : load.finish()] = True
        yield mask

    # --- the rest

    def prefetch(
        self, tokens: Tokens, *, extra_keys: Sequence[ExtraKey] = (), adapter: str = "", salt: str = ""
    ) -> int:
        """Begin to bring stored chunks of a sequence into host memory; return how many objects are on their way."""
        return self.prefetch_keys(self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt))

    def prefetch_keys(self, keys: Sequence[ChunkKey]) -> int:
        """Do what `prefetch` does, for known keys."""
        self._alive()
        arena = self.tiers.host.arena
        if not keys or arena.live_bytes >= self._prefetch_watermark * arena.capacity_bytes:
            return 0
        hit = self._longest(keys, keys[-1].stop + 1)
        return self._retriever.prefetch(keys, hit, self._prefetch_chunks)

    def move(
        self,
        tokens: Tokens,
        source: str,
        target: str,
        *,
        keep: bool = False,
        extra_keys: Sequence[ExtraKey] = (),
        adapter: str = "",
        salt: str = "",
    ) -> int:
        """Move the chunks of a sequence from one tier to another; return how many objects are in `target` now.

        Raises
        ------
        ConfigError
            There is no such tier, it is read-only, or it does not take the other's frames as they are.
        StoreError
            One of them failed. What was moved before is there; nothing is lost.
        """
        self._alive()
        keys = self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt)
        objects = self._storer.objects(keys)
        plans = [self._storer.plan(part, key) for part, key, _ in objects]
        outcomes = self.tiers.move([name for _, _, name in objects], source, target, plans=plans, keep=keep)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return sum(map(bool, outcomes))

    def clear(
        self,
        tier: str | None = None,
        tokens: Tokens | None = None,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        adapter: str = "",
        salt: str = "",
    ) -> int:
        """Remove objects: of one sequence from all tiers, or all that there are from one tier or from all.

        Returns
        -------
        int
            Objects that were there and are gone; where stores were not listed for it, those that were asked for.

        Raises
        ------
        ConfigError
            There is no such tier, it is read-only, or both a tier and tokens were given.
        StoreError
            A store failed.
        """
        self.flush()  # what is on its way would arrive afterwards
        if tokens is None:
            return sum(self.tiers.clear(None if tier is None else [tier]).values())
        if tier is not None:
            raise ConfigError("clear takes a tier or tokens: a sequence goes from all tiers; move() takes it from one")
        keys = self.keys(tokens, extra_keys=extra_keys, adapter=adapter, salt=salt)
        names = [name for *_, name in self._storer.objects(keys)]
        there = len(names) - len(self.tiers.missing(names))
        for error in self.tiers.delete(names).values():
            raise error
        return there

    def health(self) -> Health:
        """Return whether all tiers answer."""
        return Health(self.tiers.health())

    def stats(self) -> EngineStats:
        """Return the counters."""
        with self._lock:
            counts = dict(self._counts)
        return EngineStats(
            **counts,
            uncacheable=self._uncacheable.counts,
            misses=self.misses,
            tiers=self.tiers.stats(),
        )

    @property
    def misses(self) -> Counter[str]:
        """Chunks that were looked for in vain, by reason, as it is now."""
        return self._misses.counts

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was stored is in the stores; return whether it is."""
        self._alive()
        return self.tiers.flush(timeout)

    def on_close(self, call: Callable[[], None]) -> None:
        """Call something at the end of `close`: to close what was opened for this engine."""
        earlier = self._opened.pop_all()
        self._opened.callback(call)
        self._opened.push(earlier)

    def close(self) -> None:
        """Free what was opened for this engine; tiers that were given stay open.

        Raises
        ------
        LeaseError
            As `TieredCache.close`: somebody still reads there. Call this again when they have finished.
        """
        if os.getpid() == self._pid:
            self._closed = True
            self._opened.close()
            if self._own:
                self.tiers.close()  # where somebody was still reading the first time

    def __enter__(self) -> CacheEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _memory(self, kv: KVMemory | RowLayout | Sequence[RowLayout], slot_mapping: Any) -> KVMemory:
        return as_memory(self.backend, kv, slot_mapping, parts=len(self.parts))

    def _longest(self, keys: Sequence[ChunkKey], num_tokens: int) -> int:
        self._alive()
        size = self.namespace.chunk_tokens
        full = next((i for i, key in enumerate(keys) if key.stop - key.start < size), len(keys))
        presence = Presence(self._stored, keys, self._locate)
        hit = longest(
            self.parts,
            presence,
            chunks=full,
            chunk_tokens=size,
            tail=sum(key.stop - key.start for key in keys[full:]),
            num_tokens=num_tokens,
            block_tokens=self.block_tokens,
        )
        if self.lookup_strategy == "exact" and keys:
            most = min(keys[-1].stop, num_tokens - 1)
            return hit if hit == most - most % self.block_tokens else 0
        return hit

    def _worth(self, hit: int, computed: int) -> int:
        """Return a hit, or 0 where it saves too little beyond what the engine has itself."""
        return hit if hit - computed >= max(self.min_retrieve_tokens, 1) else 0

    def _locate(self, names: Sequence[ChunkKey]) -> list[bool | None]:
        found: list[bool | None] = [True] * len(names)
        for i in self.tiers.missing(names):
            found[i] = None
        return found

    def _layers(self) -> list[tuple[int, int, int]]:
        """Return the model's layers in order, each with its part and its number within the part."""
        return sorted((layer, n, i) for n, part in enumerate(self.parts) for i, layer in enumerate(part.layers))

    def _told_store(self, report: StoreReport, total: int, request: str, began: float) -> None:
        tokens, nbytes = report.tokens_written, report.raw_bytes
        self._count(stores=1, stored_tokens=tokens, stored_bytes=nbytes, dropped=report.chunks_dropped)
        self._observer.request_store(request, tokens, total, nbytes, time.perf_counter() - began)

    def _told_retrieve(self, request: str, start: int, stop: int, began: float) -> Callable[[int, int], None]:
        def told(upto: int, nbytes: int) -> None:
            wanted, got = stop - start, max(upto - start, 0)
            self._count(retrieves=1, wanted_tokens=wanted, retrieved_tokens=got, retrieved_bytes=nbytes)
            self._observer.request_retrieve(request, wanted, got, nbytes, time.perf_counter() - began)

        return told

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _alive(self) -> None:
        if self._closed:
            raise KVCoreError("this engine is closed; open another one")
        if os.getpid() != self._pid:
            raise KVCoreError(
                f"this engine was opened by process {self._pid}, of which this one was forked: its threads are not "
                "here; open an engine in this process, or start processes with spawn"
            )


def _let_go(opened: contextlib.ExitStack, pid: int) -> None:
    """Close what an engine that nobody has any more had opened; not what is a fork's copy of it."""
    if os.getpid() == pid:
        with contextlib.suppress(LeaseError):  # somebody still has rows: their memory goes with them
            opened.close()
