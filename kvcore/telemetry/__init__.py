"""What happens in an engine, told to people: metrics, log lines, traces. The engine knows nothing of it.

`observers` puts together what a configuration asks for. Libraries are imported by the part that needs them:
`kvcore.telemetry.prometheus` the Prometheus client library, `kvcore.telemetry.tracing` OpenTelemetry once it is on.
"""

from __future__ import annotations

from kvcore.telemetry.assemble import TelemetryConfig, observers
from kvcore.telemetry.deltas import DeltaMetrics, DeltaObserver, StatsDelta
from kvcore.telemetry.logs import LogObserver, configure_logging, log_lookup, log_store
from kvcore.telemetry.tracing import span

__all__ = [
    "DeltaMetrics",
    "DeltaObserver",
    "LogObserver",
    "StatsDelta",
    "TelemetryConfig",
    "configure_logging",
    "log_lookup",
    "log_store",
    "observers",
    "span",
]
