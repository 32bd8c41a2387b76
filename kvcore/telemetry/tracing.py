"""OpenTelemetry spans of lookups, stores and retrieves. Off unless `enable_tracing` is called, and free while off."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

from kvcore.engine.observer import EngineObserver
from kvcore.errors import ConfigError

__all__ = ["TracingObserver", "disable_tracing", "enable_tracing", "span"]

_NAME = "kvcore"
# Whoever sets one of these wants spans to go somewhere.
_WANTED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


class _Nothing(AbstractContextManager[None]):
    """A span while tracing is off: `contextlib.nullcontext`, in half the time."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


_NOTHING = _Nothing()
_tracer: Any = None
_own: Any = None
_lock = threading.Lock()


def span(name: str, attributes: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Return a context in which a span runs: ``with span("kvcore.flush"): ...``. While tracing is off, it does nothing.

    Parameters
    ----------
    name : str
    attributes : mapping, optional
        Text, numbers and booleans.
    """
    tracer = _tracer
    if tracer is None:
        return _NOTHING
    found: AbstractContextManager[Any] = tracer.start_as_current_span(name, attributes=attributes)
    return found


def enable_tracing(provider: Any = None) -> Any:
    """Turn spans on, for this process; return the tracer.

    Parameters
    ----------
    provider : opentelemetry.trace.TracerProvider, optional
        Where spans go. By default to the global tracer provider, which is the application's to set, before or
        afterwards. Where none is set and the standard variables ask for it (``OTEL_TRACES_EXPORTER``,
        ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so on), to a provider of kvcore's own that they describe; the global one
        is not set.

    Raises
    ------
    ConfigError
        OpenTelemetry, or an exporter that the variables name, is not installed.
    """
    global _tracer, _own
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ConfigError(
            f"tracing needs OpenTelemetry, which cannot be imported ({error}): pip install 'kvcore[tracing]'"
        ) from error
    with _lock:
        if provider is None:
            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider) and any(os.environ.get(name) for name in _WANTED):
                _own = _own or _provider(os.environ)
                provider = _own
        _tracer = provider.get_tracer(_NAME)
        return _tracer


def disable_tracing() -> None:
    """Turn spans off, and send what is left, where the provider is kvcore's own."""
    global _tracer, _own
    with _lock:
        _tracer, own, _own = None, _own, None
    if own is not None:
        own.shutdown()


def _provider(environ: Mapping[str, str]) -> Any:
    """Make a provider with the exporters that the standard variables name, as the SDK's own start-up would."""
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"the OTEL_ variables ask for spans, and OpenTelemetry's SDK cannot be imported ({error}): "
            "pip install 'kvcore[tracing]'"
        ) from error
    provider = TracerProvider()
    for asked in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        name = asked.strip()
        if name in {"", "none"}:
            continue
        if name == "otlp":
            # By HTTP unless said otherwise, as the specification has it.
            protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            name = _PROTOCOLS.get(protocol or "http/protobuf", protocol or "")
        found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not found:
            raise ConfigError(
                f"the OTEL_ variables ask for the exporter {name}, which is not installed: pip install "
                "opentelemetry-exporter-otlp, or set OTEL_TRACES_EXPORTER=none"
            )
        provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    return provider


class TracingObserver(EngineObserver):
    """Makes a span of each lookup, store and retrieve of an engine, with what it did as attributes.

    Parameters
    ----------
    tracer : opentelemetry.trace.Tracer
        What `enable_tracing` returns.
    attributes : mapping, optional
        Attributes of all spans.

    Notes
    -----
    Spans are made when the call is over, which is when the engine tells of it; they begin when it began. Their parent
    is the span that is current in the caller's thread.
    """

    def __init__(self, tracer: Any, attributes: Mapping[str, Any] | None = None) -> None:
        self._tracer = tracer
        self._attributes = dict(attributes or {})

    def request_lookup(self, request: str, tokens: int, hit_tokens: int, seconds: float, computed: int = 0) -> None:
        """See `EngineObserver.request_lookup`."""
        self._span("kvcore.lookup", seconds, request, tokens=tokens, hit_tokens=hit_tokens, computed_tokens=computed)

    def request_store(self, request: str, stored_tokens: int, total_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_store`."""
        self._span("kvcore.store", seconds, request, tokens=total_tokens, stored_tokens=stored_tokens, bytes=nbytes)

    def request_retrieve(self, request: str, wanted_tokens: int, got_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_retrieve`."""
        self._span("kvcore.retrieve", seconds, request, tokens=wanted_tokens, retrieved_tokens=got_tokens, bytes=nbytes)

    def _span(self, name: str, seconds: float, request: str, **what: int) -> None:
        end = time.time_ns()
        attributes = self._attributes | {f"kvcore.{key}": value for key, value in what.items()}
        if request:
            attributes["kvcore.request"] = request
        made = self._tracer.start_span(name, attributes=attributes, start_time=end - round(seconds * 1e9))
        made.end(end)
