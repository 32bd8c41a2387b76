"""Metrics for Prometheus, kept by its client library: `PrometheusObserver`, `metrics_text`, `serve_metrics`."""

from __future__ import annotations

import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from kvcore.engine.observer import TierSize
from kvcore.errors import ConfigError
from kvcore.telemetry import definitions as d
from kvcore.telemetry.events import MetricsObserver

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.exposition import start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        f"metrics need Prometheus' client library, which cannot be imported ({error}): pip install 'kvcore[metrics]'"
    ) from error

__all__ = ["REGISTRY", "MetricsServer", "PrometheusObserver", "metrics_text", "serve_metrics"]

_log = logging.getLogger("kvcore")

REGISTRY: Final = CollectorRegistry()
"""Where the metrics of this process go unless another registry is given. It holds nothing but kvcore's."""

_MULTIPROCESS = values.ValueClass is not values.MutexValue
"""Whether the client library keeps values in files that several processes write, as PROMETHEUS_MULTIPROC_DIR says."""

_KINDS: dict[str, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class PrometheusObserver(MetricsObserver):
    """Counts the events of one engine in a registry.

    Parameters
    ----------
    model, engine : str
        The model's name, and an id of the engine: values of these labels. Observers of one registry with the same
        labels count together.
    rank : int or str
        Tensor-parallel rank.
    registry : CollectorRegistry, optional
        `REGISTRY`, unless given. Where the client library is in its multi-process mode, values are in files that all
        registries share, and a registry that is given is not used.

    Raises
    ------
    ConfigError
        Somebody else has registered a metric of one of these names.
    """

    def __init__(
        self,
        *,
        model: str = "",
        engine: str = "",
        rank: int | str = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        super().__init__()
        self._common = (model, engine, str(rank))
        self._families = _families(registry)
        self._series: dict[tuple[object, ...], Any] = {}

    def add(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.add`."""
        self._of(metric, labels).inc(value)

    def observe(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.observe`."""
        self._of(metric, labels).observe(value)

    def set(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.set`."""
        self._of(metric, labels).set(value)

    def watch(self, sizes: Callable[[], Iterable[TierSize]]) -> None:
        """See `EngineObserver.watch`; asked at each scrape."""
        self._families.sizes.asked[self] = (self._common, sizes)

    def close(self) -> None:
        """Ask no more for sizes, and end outages; what was counted stays, as it does in Prometheus."""
        self._families.sizes.asked.pop(self, None)
        super().close()

    def _of(self, metric: d.Metric, labels: tuple[str, ...]) -> Any:
        key = (metric, *labels)
        series = self._series.get(key)
        if series is None:  # looking a series up by its labels takes longer than counting does
            series = self._families.of[metric].labels(*self._common, *labels)
            self._series[key] = series
        return series


class _Sizes(Collector):
    """What tiers hold, asked for when somebody scrapes."""

    _METRICS = (d.TIER_BYTES, d.TIER_OBJECTS, d.TIER_CAPACITY)

    def __init__(self) -> None:
        self.asked: dict[object, tuple[tuple[str, ...], Callable[[], Iterable[TierSize]]]] = {}

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the families without samples, by which the registry knows the names."""
        return [GaugeMetricFamily(m.name, m.help, labels=(*d.COMMON_LABELS, *m.labels)) for m in self._METRICS]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask every open engine. One that fails is logged and left out: the others' metrics are still wanted."""
        families = self.describe()
        for common, sizes in list(self.asked.values()):
            try:
                for size in sizes():
                    values_ = (size.nbytes, size.objects, size.capacity)
                    for family, value in zip(families, values_, strict=True):
                        if value is not None:
                            family.add_metric((*common, size.tier), value)
            except Exception:  # noqa: BLE001 - theirs, whatever it is
                _log.error("the sizes of tiers could not be had\n%s", traceback.format_exc())
        yield from families


@dataclass
class _Families:
    of: dict[d.Metric, Any] = field(default_factory=dict)
    sizes: _Sizes = field(default_factory=_Sizes)


_made: weakref.WeakKeyDictionary[CollectorRegistry, _Families] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _families(given: CollectorRegistry | None) -> _Families:
    """Return the metrics of a registry, made once: several engines count in the same ones."""
    # In multi-process mode there is one set of values per process: two objects for one would overwrite each other.
    registry = REGISTRY if given is None or _MULTIPROCESS else given
    with _lock:
        found = _made.get(registry)
        if found is not None:
            return found
        made = _Families()
        registered: list[Any] = []
        try:
            for metric in d.METRICS:
                if metric in _Sizes._METRICS:
                    continue
                more: dict[str, Any] = {"buckets": metric.bounds} if metric.bounds else {}
                more |= {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
                labels = (*d.COMMON_LABELS, *metric.labels)
                made.of[metric] = _KINDS[metric.kind](metric.name, metric.help, labels, registry=registry, **more)
                registered.append(made.of[metric])
            registry.register(made.sizes)
        except ValueError as error:
            for collector in registered:
                registry.unregister(collector)
            raise ConfigError(
                f"this registry has metrics of kvcore that somebody else registered: {error}; give the observer a "
                "registry of its own"
            ) from error
        _made[registry] = made
        return made


def _scraped(registry: CollectorRegistry | None) -> CollectorRegistry:
    """Return what shows all values: the registry itself, or the files of all processes and the sizes of this one."""
    if not _MULTIPROCESS:
        return REGISTRY if registry is None else registry
    everything = CollectorRegistry()
    collect_files: Callable[[CollectorRegistry], object] = MultiProcessCollector
    collect_files(everything)
    everything.register(_families(registry).sizes)
    return everything


def metrics_text(registry: CollectorRegistry | None = None) -> str:
    """Return all metrics of a registry, `REGISTRY` unless given, in Prometheus' text format."""
    return generate_latest(_scraped(registry)).decode()


class MetricsServer:
    """Metrics over HTTP, until `close`. Made by `serve_metrics`.

    Parameters
    ----------
    host : str
    port : int
        Where it listens; 0 takes a free port, which `port` then tells.
    registry : CollectorRegistry

    Raises
    ------
    ConfigError
        The port cannot be had.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, _scraped(registry))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot be served on {host}:{port}: {error}; choose another metrics_port or metrics_host"
            ) from error
        self.host, self.port, self.registry = host, int(self._server.server_port), registry
        self._process = os.getpid()
        self._users = 1

    def close(self) -> None:
        """Give it back. The last one who does ends it; calling it again does nothing."""
        with _serving:
            self._users -= 1
            if self._users or self._process != os.getpid():  # a forked process has the socket, but not the thread
                return
            _servers.pop((self.host, self.port), None)
            self._server.shutdown()
            self._server.server_close()
        self._thread.join()

    def shared(self, registry: CollectorRegistry) -> MetricsServer | None:
        """Return this server for one more user; None if it is that of the process that this one was forked from.

        Raises
        ------
        ConfigError
            It serves another registry.
        """
        if self._process != os.getpid():
            return None
        if self.registry is not registry:
            raise ConfigError(
                f"{self.host}:{self.port} serves another registry of this process; choose another metrics_port"
            )
        self._users += 1
        return self


_servers: dict[tuple[str, int], MetricsServer] = {}
_serving = threading.Lock()


def serve_metrics(port: int, *, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> MetricsServer:
    """Serve a registry, `REGISTRY` unless given, at ``http://host:port/metrics``.

    Parameters
    ----------
    port : int
        0 for any that is free. One that this process serves already is served on, until all have closed it.
    host : str
        Address to listen on. Anybody who reaches it reads names of models and sizes of caches: the default is for
        this machine alone, ``"0.0.0.0"`` is for all networks.

    Raises
    ------
    ConfigError
        The port is in use, or serves another registry.
    """
    registry = REGISTRY if registry is None else registry
    with _serving:
        running = _servers.get((host, port))
        server = running.shared(registry) if running else None
        if server is None:
            server = MetricsServer(host, port, registry)
            _servers[host, server.port] = server
        return server
