"""`observers`: what a configuration asks for, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.engine.observer import EngineObserver, EngineObservers
from kvcore.telemetry.logs import LogObserver, configure_logging

__all__ = ["TelemetryConfig", "observers"]


class TelemetryConfig(Protocol):
    """The fields of an engine's configuration that are read here."""

    @property
    def log_level(self) -> str:
        """Level of the logger ``kvcore``; empty to leave logging as it is."""

    @property
    def log_file(self) -> str:
        """Path of a log file; empty for none."""

    @property
    def log_file_bytes(self) -> int:
        """How long it gets."""

    @property
    def log_file_count(self) -> int:
        """How many older ones are kept."""

    @property
    def metrics(self) -> bool:
        """Whether to count for Prometheus."""

    @property
    def metrics_port(self) -> int:
        """Where to serve that; 0 for nowhere."""

    @property
    def metrics_host(self) -> str:
        """Address to serve it on."""

    @property
    def tracing(self) -> bool:
        """Whether to make spans."""


def observers(
    config: TelemetryConfig,
    *,
    model: str = "",
    engine: str = "",
    rank: int = 0,
    registry: Any = None,
    more: Sequence[EngineObserver] = (),
) -> EngineObservers:
    """Return the observer of one engine, and set logging, the metrics' port and tracing up as its configuration says.

    Parameters
    ----------
    config : TelemetryConfig
        An `EngineConfig`, say.
    model, engine : str
    rank : int
        Labels of the metrics, and attributes of the spans. Rank r serves its metrics on port ``metrics_port + r``,
        as each rank is a process.
    registry : prometheus_client.CollectorRegistry, optional
        See `PrometheusObserver`.
    more : sequence of EngineObserver
        Others to tell.

    Raises
    ------
    ConfigError
        A library is missing, a port is in use, a file cannot be opened, or a level means nothing.
    """
    if config.log_level or config.log_file:
        configure_logging(config.log_level or "INFO", config.log_file, config.log_file_bytes, config.log_file_count)
    chosen: list[EngineObserver] = [LogObserver(), *more]
    if config.tracing:
        from kvcore.telemetry.tracing import TracingObserver, enable_tracing

        attributes = {"kvcore.model": model, "kvcore.engine": engine, "kvcore.rank": rank}
        chosen.append(TracingObserver(enable_tracing(), attributes))
    if config.metrics:
        from kvcore.telemetry.prometheus import PrometheusObserver, serve_metrics

        chosen.append(PrometheusObserver(model=model, engine=engine, rank=rank, registry=registry))
        if config.metrics_port:
            port = config.metrics_port + rank
            chosen.append(_Closing(serve_metrics(port, host=config.metrics_host, registry=registry)))
    return EngineObservers(chosen)


class _Closing(EngineObserver):
    """Closes something together with the engine."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def close(self) -> None:
        """See `EngineObserver.close`. Once: others may use it too, and it counts who is done."""
        what, self._what = self._what, None
        if what is not None:
            what.close()
