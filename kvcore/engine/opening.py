"""`open_engine`: an engine as its configuration has it, with tiers and observers of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.engine.config import EngineConfig
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import Namespace
from kvcore.engine.observer import EngineObserver, EngineObservers, TierSize
from kvcore.engine.parts import CachePart
from kvcore.memory import MemoryPlan
from kvcore.ops import Backend, open_backend
from kvcore.tiers.config import open_tiers
from kvcore.tiers.tiered import TieredCache

__all__ = ["open_engine"]


def open_engine(
    config: EngineConfig,
    namespace: Namespace,
    parts: Sequence[CachePart],
    *,
    model_layers: int | None = None,
    block_tokens: int = 1,
    backend: Backend | None = None,
    observer: EngineObserver | None = None,
) -> CacheEngine:
    """Open tiers and an engine over them; closing the engine closes them.

    Parameters
    ----------
    config : EngineConfig
    namespace : Namespace
        Of `config.chunk_tokens` tokens a chunk.
    parts, model_layers, block_tokens
        As `CacheEngine` takes them.
    backend : Backend, optional
        Of the memory that the inference engine keeps its KV in; without it the one that the configuration names, or
        else the best for host memory.
    observer : EngineObserver, optional
        Told what engine and tiers do.

    Raises
    ------
    ConfigError
        Something in the configuration means nothing, or the machine has too little host memory for a chunk.
    NoBackendError, BackendLoadError
    """
    told = EngineObservers([] if observer is None else [observer])
    backend = open_backend(config.backend or None) if backend is None else backend
    size = sum(MemoryPlan.of([part.desc]).size for part in parts)
    tiers = open_tiers(config.to_tiers().model_copy(update={"min_host_bytes": max(size, 1)}), backend, observer=told)
    try:
        engine = CacheEngine(
            namespace,
            parts,
            tiers,
            backend=backend,
            model_layers=model_layers,
            block_tokens=block_tokens,
            save_partial_chunk=config.save_partial_chunk,
            min_retrieve_tokens=config.min_retrieve_tokens,
            lookup_strategy=config.lookup_strategy,
            prefetch_chunks=config.prefetch.max_chunks,
            prefetch_watermark=config.prefetch.watermark,
            observer=told,
            own=True,
        )
    except BaseException:
        tiers.close()
        raise
    told.watch(lambda: _sizes(tiers))
    return engine


def _sizes(tiers: TieredCache) -> list[TierSize]:
    return [TierSize(one.name, one.nbytes, one.objects, one.capacity_bytes) for one in tiers.describe().values()]
