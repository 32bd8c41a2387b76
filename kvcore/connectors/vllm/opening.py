"""`open_worker` and `open_scheduler`: from vLLM's configuration and its tensors to the two sides of a connector.

Whatever is not known for sure is refused here, while vLLM starts: it must not run with a cache that is half there.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from kvcore.connectors.vllm.identity import model_namespace
from kvcore.connectors.vllm.layouts import BoundPart, CacheGeometry, bind_caches, gives_blocks_back
from kvcore.connectors.vllm.lookup import LookupClient, LookupServer, lookup_address
from kvcore.connectors.vllm.options import ConnectorConfig
from kvcore.connectors.vllm.proof import prove_transposed
from kvcore.connectors.vllm.scheduler import SchedulerSide
from kvcore.connectors.vllm.worker import WorkerSide
from kvcore.engine.keys import Namespace
from kvcore.engine.observer import EngineObserver
from kvcore.engine.opening import open_engine
from kvcore.errors import LayoutError, UnsupportedOpError
from kvcore.ops import open_backend
from kvcore.telemetry import observers

__all__ = ["bind_vllm", "block_tokens", "check_parallel", "open_scheduler", "open_worker"]

logger = logging.getLogger("kvcore")


def check_parallel(vllm_config: Any) -> None:
    """Refuse ways of sharing a sequence out among ranks that leave a rank without whole tokens.

    Raises
    ------
    UnsupportedOpError
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedOpError(
                f"{name} is {getattr(parallel, name)}: each rank has some tokens of a block only, and kvcore stores "
                "whole ones; use tensor or pipeline parallelism"
            )
    nodes = int(getattr(parallel, "nnodes", 1) or 1)
    if nodes != 1:
        raise UnsupportedOpError(
            f"the engine has workers on {nodes} nodes (nnodes), and its scheduler reaches those of its own only, by "
            "sockets of the machine; let each node run an engine, over one store"
        )


def block_tokens(kv_cache_config: Any) -> int:
    """Return what hits must be multiples of: the least common multiple of the groups' block sizes."""
    groups = kv_cache_config.kv_cache_groups
    return math.lcm(*(int(groups[i].kv_cache_spec.block_size) for i in kv_cache_config.prefix_cacheable_group_ids))


def bind_vllm(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], namespace: Namespace
) -> tuple[BoundPart, ...]:
    """Bind the caches of this rank, and prove the layout of those that are proved by trial.

    Parameters
    ----------
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig
    kv_caches : mapping of str to tensor
        As `register_kv_caches` is given them.
    namespace : Namespace

    Raises
    ------
    LayoutError
        Something is not known; see `bind_caches`.
    """
    groups = kv_cache_config.kv_cache_groups
    wanted = kv_cache_config.prefix_cacheable_group_ids
    for index in kv_cache_config.transfer_group_ids:
        if index not in wanted:
            kind = type(groups[index].kv_cache_spec).__name__
            raise LayoutError(f"cache group {index} ({kind}) holds what a prefix cannot bring back; do without kvcore")
    layers = vllm_config.compilation_config.static_forward_context
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    dtype = namespace.kv_dtype
    geometry = CacheGeometry(
        model_layers=int(model.get_total_num_hidden_layers()),
        kv_heads=int(model.get_total_num_kv_heads() or 0),
        rank=parallel.rank % parallel.tensor_parallel_size,
        degree=parallel.tensor_parallel_size,
        kv_dtype=(dtype, dtype) if isinstance(dtype, str) else dtype,
    )
    bound = bind_caches(
        groups,
        kv_caches,
        layers,
        geometry,
        chunk_tokens=namespace.chunk_tokens,
        num_blocks=kv_cache_config.num_blocks,
        group_ids=wanted,
    )
    for one in bound:
        if one.interior == "transposed":
            prove_transposed(one, kv_caches[one.layer_names[0]], layers[one.layer_names[0]])
    return bound


def open_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    config: ConnectorConfig,
    *,
    stats: EngineObserver | None = None,
) -> WorkerSide:
    """Open the engine of a worker, and the server that answers the scheduler's lookups.

    Parameters
    ----------
    vllm_config, kv_cache_config, kv_caches
        As in `bind_vllm`.
    config : ConnectorConfig
    stats : EngineObserver, optional
        Told what the engine does.

    Raises
    ------
    ConfigError, LayoutError, UnsupportedOpError, StoreError
        vLLM must not start with this cache; the message says why.
    """
    check_parallel(vllm_config)
    namespace = model_namespace(vllm_config, kv_cache_config, config.engine)
    bound = bind_vllm(vllm_config, kv_cache_config, kv_caches, namespace)
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    with contextlib.ExitStack() as stack:
        told = observers(
            config.engine,
            model=namespace.model,
            engine=transfer.engine_id,
            # Unique on the machine, for ports are: data-parallel engines have the same ranks.
            rank=parallel.rank + int(getattr(parallel, "data_parallel_rank", 0) or 0) * parallel.world_size,
            registry=_registry(config),
            more=[] if stats is None else [stats],
        )
        stack.callback(told.close)
        engine = open_engine(
            config.engine,
            namespace,
            [one.part for one in bound],
            model_layers=int(vllm_config.model_config.get_total_num_hidden_layers()),
            block_tokens=block_tokens(kv_cache_config),
            backend=open_backend(config.engine.backend or None, device=bound[0].rows.device),
            observer=told,
        )
        stack.callback(engine.close)
        side = WorkerSide(
            engine,
            bound,
            groups=len(kv_cache_config.kv_cache_groups),
            load=config.options.load,
            load_threads=config.options.load_threads,
            saves=config.saves,
            flush_seconds=config.options.flush_seconds,
        )
        stack.callback(side.close)
        address = lookup_address(transfer.engine_id, parallel.rank, config.options.lookup_directory or None)
        server = LookupServer(engine, address, namespace=namespace.digest)
        side.on_close.append(server.close)
        stack.pop_all()
    return side


def open_scheduler(
    vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig
) -> tuple[SchedulerSide, LookupClient]:
    """Open the scheduler side, and what it asks the workers with, which is to be closed after it.

    Parameters
    ----------
    vllm_config, kv_cache_config
        As in `bind_vllm`.
    config : ConnectorConfig

    Raises
    ------
    ConfigError, UnsupportedOpError, StoreError
        vLLM must not start with this cache; the message says why.
    """
    namespace = model_namespace(vllm_config, kv_cache_config, config.engine)
    options, engine_id = config.options, vllm_config.kv_transfer_config.engine_id
    directory = options.lookup_directory or None
    ranks = range(vllm_config.parallel_config.world_size)
    lookups = LookupClient(
        [lookup_address(engine_id, rank, directory) for rank in ranks],
        namespace=namespace.digest,
        wait_ms=options.lookup_wait_ms,
        timeout_s=options.lookup_timeout_s,
    )
    groups = kv_cache_config.kv_cache_groups
    side = SchedulerSide(
        namespace,
        lookups,
        block_tokens=block_tokens(kv_cache_config),
        groups=len(groups),
        windowed=any(gives_blocks_back(group.kv_cache_spec) for group in groups),
        loads=config.loads and not _whole_prompts_only(vllm_config),
        saves=config.saves,
        asynchronous=options.load == "async",
        save_decode=config.engine.save_decode,
        save_partial_chunk=config.engine.save_partial_chunk,
        min_retrieve_tokens=config.engine.min_retrieve_tokens,
        prefetch=config.engine.prefetch.enabled,
        trust_media_ids=options.trust_media_ids,
    )
    return side, lookups


def _whole_prompts_only(vllm_config: Any) -> bool:
    """Whether this vLLM computes wrong tokens behind a prefix that it has not computed in the same step.

    Its MLA for processors does, so it turns its own prefix cache off; what is saved is of use to other engines.
    """
    whole = vllm_config.model_config.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill
    if whole and vllm_config.device_config.device_type == "cpu":
        logger.warning("KV is saved and not loaded: vLLM's MLA on a processor takes whole prompts only")
        return True
    return False


def _registry(config: ConnectorConfig) -> Any:
    """Return a registry of this worker's own: vLLM has the same metrics in the process-wide one, where it has any."""
    if not config.engine.metrics:
        return None
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()
