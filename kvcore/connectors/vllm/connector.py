"""`KVCoreConnector`: vLLM's connector interface, in front of the two sides that do the work."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvcore.connectors.vllm.lookup import LookupClient
from kvcore.connectors.vllm.metadata import StepMetadata
from kvcore.connectors.vllm.opening import check_parallel, open_scheduler, open_worker
from kvcore.connectors.vllm.options import read_options
from kvcore.connectors.vllm.scheduler import SchedulerSide
from kvcore.connectors.vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore.connectors.vllm.worker import WorkerSide
from kvcore.errors import ConfigError, UnsupportedOpError
from kvcore.telemetry import DeltaObserver

__all__ = ["KVCoreConnector", "KVCoreMetadata"]

OLDEST = (0, 32)
"""The first vLLM whose caches are views [B, H, N, C], which the layouts read."""

logger = logging.getLogger("kvcore")


@dataclass
class KVCoreMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What a step asks of the workers, in vLLM's clothes."""

    step: StepMetadata = field(default_factory=StepMetadata)


class KVCoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # nor here
    """Prefix KV in kvcore's tiers. vLLM makes one in its scheduler, and one in each worker.

    Parameters
    ----------
    vllm_config : VllmConfig
    role : KVConnectorRole
    kv_cache_config : KVCacheConfig

    Raises
    ------
    ConfigError, UnsupportedOpError, LayoutError
        vLLM must not start with this cache; the message says why, and what to do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_version()
        check_parallel(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._config = read_options(transfer.kv_connector_extra_config, role=transfer.kv_role)
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._stats: DeltaObserver | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._lookups: LookupClient | None = None
        self._handled: int | None = None
        if self._groups > 1 and self._config.options.load != "async":
            raise ConfigError(
                f"load={self._config.options.load!r} is for models with one cache group, and this has {self._groups}: "
                "vLLM could not be told of a load that fails; use load='async'"
            )
        if (
            self._config.loads
            and self._config.options.load != "async"
            and vllm_config.cache_config.enable_prefix_caching
        ):
            raise ConfigError(
                f"load={self._config.options.load!r} with vLLM's own prefix cache on: where a load fails in the step "
                "that needs it, vLLM keeps the blocks that were computed from it for a moment, and may give them to "
                "others; use load='async', or turn it off (--no-enable-prefix-caching)"
            )
        if role == KVConnectorRole.SCHEDULER:
            if self._config.loads and transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kv_load_failure_policy is %r: a request whose KV cannot be loaded fails, though it could be "
                    "computed; set it to 'recompute'",
                    transfer.kv_load_failure_policy,
                )
            self._scheduler, self._lookups = open_scheduler(vllm_config, kv_cache_config, self._config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache that misses is a cache: nothing has to be delivered."""
        return False

    # --- worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Bind vLLM's caches, and open the engine over them."""
        self._stats = DeltaObserver(self._vllm_config.parallel_config.rank)
        self._worker = open_worker(self._vllm_config, self._kv_cache_config, kv_caches, self._config, stats=self._stats)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        self._handled = _handled_error()
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        worker, step = self._working(), self._step()
        if worker.watches:
            worker.written(_slots(forward_context))
        worker.start_loads(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the KV of a layer is there, where loads go layer by layer."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: what a step has completed is saved at its end."""

    def wait_for_save(self) -> None:
        """Copy what this step has completed to host memory; nothing if the model was cut off, by a signal say.

        vLLM calls this also on the way out of a forward pass that raised, with KV of the first layers in the blocks.
        """
        if _handled_error() not in (None, self._handled):
            logger.warning("not cached: what was computed in the step that failed")
            return
        self._working().save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose asynchronous loads have ended; nothing is ever sent so that blocks must wait."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose asynchronous loads have ended, and those that failed as a whole."""
        received = self._working().received()
        return KVConnectorTransferResults(finished_recving=set(received.requests), failed_recving=set(received.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads have left without KV."""
        return self._working().failed_blocks()

    def get_kv_connector_stats(self) -> KVCoreStats | None:
        """Return what happened since it was last asked."""
        if self._stats is None:
            return None
        delta = self._stats.take()
        return None if delta.empty else KVCoreStats(delta.data)

    # --- scheduler side

    def on_new_request(self, request: Any) -> None:
        """Begin to look a request up."""
        self._scheduling().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond those that vLLM has could be loaded, and whether aside of the batch."""
        return self._scheduling().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that a request was given."""
        self._scheduling().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Say what a step asks of the workers."""
        return KVCoreMetadata(self._scheduling().build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what the workers reported."""
        self._scheduling().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        self._scheduling().request_finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """Use nothing any more that was stored before: the weights may have been replaced."""
        return self._scheduling().reset_cache()

    # --- both

    def shutdown(self) -> None:
        """Wait for what is on its way to the stores, and let go of everything."""
        if self._worker is not None:
            self._worker.close()
        if self._lookups is not None:
            self._lookups.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any will do: strides are read from the tensors."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads that go layer by layer need Python between the layers."""
        return extra_config.get("load") == "layerwise"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVCoreStats | None:
        """Return stats with some data."""
        return KVCoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVCorePromMetrics:
        """Register kvcore's metrics with vLLM's Prometheus."""
        return KVCorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- inside

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, KVCoreMetadata):
            raise ConfigError(f"the scheduler's connector sent {type(metadata).__name__}; both must be kvcore's")
        return metadata.step

    def _working(self) -> WorkerSide:
        if self._worker is None:
            raise ConfigError("register_kv_caches was not called on this connector, so it has no caches to work on")
        return self._worker

    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError("this is a worker's connector, and the scheduler's work was asked of it")
        return self._scheduler


def _check_version() -> None:
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = tuple(map(int, found.groups())) if found else None  # built from sources, say: no number at all
    if version is not None and version < OLDEST:
        raise UnsupportedOpError(
            f"vLLM {vllm.__version__} keeps its KV in a form that is not read here; kvcore needs "
            f"{'.'.join(map(str, OLDEST))} or newer"
        )
    if version != OLDEST:
        logger.warning("kvcore was tested with vLLM %d.%d, this is %s", *OLDEST, vllm.__version__)


def _handled_error() -> int | None:
    """Return which exception this thread is handling, by identity: keeping it would keep all that its frames hold."""
    error = sys.exc_info()[1]
    return None if error is None else id(error)


def _slots(forward_context: Any) -> Iterator[Any]:
    """Yield the slots that a step's forward pass writes, int64 ``[n]`` each."""
    mappings = getattr(forward_context, "slot_mapping", None) or {}
    seen: set[int] = set()
    for by_layer in mappings if isinstance(mappings, list) else [mappings]:
        for slots in by_layer.values():
            if id(slots) not in seen:
                seen.add(id(slots))
                yield slots.cpu().numpy()
