"""What a worker's engine did, as vLLM carries it to its log and to its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcore.telemetry import DeltaMetrics, StatsDelta

__all__ = ["KVCorePromMetrics", "KVCoreStats"]


class KVCoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """A `StatsDelta` in vLLM's clothes: ``data`` is lists and numbers alone."""

    def reset(self) -> None:
        """Forget what happened."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return this one with a later one, or another rank's, added to it."""
        return KVCoreStats(StatsDelta(self.data).aggregate(StatsDelta(other.data)).data)

    def reduce(self) -> dict[str, int | float]:
        """Return a few figures for the log."""
        return StatsDelta(self.data).reduce()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KVCorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # nor here
    """kvcore's metrics in vLLM's Prometheus, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {
            "counter": metric_types[Counter],
            "gauge": metric_types[Gauge],
            "histogram": metric_types[Histogram],
        }
        self._metrics = DeltaMetrics(kinds, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what happened."""
        self._metrics.observe(transfer_stats_data, engine_idx)
