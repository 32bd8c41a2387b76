"""Spans say what lookups, stores and retrieves did; while tracing is off, there is nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvcore.telemetry.tracing import TracingObserver, disable_tracing, enable_tracing, span


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield enable_tracing(provider)
    disable_tracing()
    provider.shutdown()


def test_each_call_of_the_engine_is_a_span(tracer, exporter):
    observer = TracingObserver(tracer, {"kvcore.engine": "e"})
    observer.request_lookup("r", 1391, 1280, 0.25, 128)
    observer.request_retrieve("r", 1280, 1024, 5000, 0.5)
    observer.request_store("", 256, 1391, 1000, 0.0)
    lookup, retrieve, store = exporter.get_finished_spans()
    assert lookup.name == "kvcore.lookup"
    assert lookup.attributes == {
        "kvcore.engine": "e",
        "kvcore.request": "r",
        "kvcore.tokens": 1391,
        "kvcore.hit_tokens": 1280,
        "kvcore.computed_tokens": 128,
    }
    assert lookup.end_time - lookup.start_time == 250_000_000
    assert abs(lookup.end_time - time.time_ns()) < 60e9
    assert retrieve.name == "kvcore.retrieve"
    assert retrieve.attributes["kvcore.retrieved_tokens"] == 1024
    assert store.name == "kvcore.store"
    assert store.attributes == {
        "kvcore.engine": "e",
        "kvcore.tokens": 1391,
        "kvcore.stored_tokens": 256,
        "kvcore.bytes": 1000,
    }


def test_they_belong_to_the_span_that_is_running(tracer, exporter):
    with span("kvcore.step", {"kvcore.step": 7}):
        TracingObserver(tracer).request_lookup("r", 1, 0, 0.0)
    lookup, step = exporter.get_finished_spans()
    assert (step.name, step.attributes) == ("kvcore.step", {"kvcore.step": 7})
    assert lookup.parent.span_id == step.context.span_id


def test_an_error_is_recorded_and_passes(tracer, exporter):
    with pytest.raises(ValueError, match="no"), span("kvcore.step"):
        raise ValueError("no")
    assert not exporter.get_finished_spans()[0].status.is_ok


def test_off_again_there_are_no_more(tracer, exporter):
    disable_tracing()
    with span("kvcore.step"):
        pass
    assert exporter.get_finished_spans() == ()


def test_off_an_error_passes():
    with pytest.raises(ValueError, match="no"), span("kvcore.step"):
        raise ValueError("no")


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**clean, **environ}, check=False)


def test_off_nothing_of_opentelemetry_is_imported():
    done = run(
        "import sys\n"
        "from kvcore.telemetry import span\n"
        "with span('x'): pass\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert done.stdout == "[]\n"


TRACED = """
from kvcore.telemetry.tracing import TracingObserver, disable_tracing, enable_tracing
TracingObserver(enable_tracing()).request_lookup("r", 10, 5, 0.1)
disable_tracing()
from opentelemetry import trace
assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), "the global one is the application's"
"""


def test_the_standard_variables_say_where_spans_go():
    done = run(TRACED, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="my-service")
    assert '"name": "kvcore.lookup"' in done.stdout, done.stderr
    assert "my-service" in done.stdout


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_without_them_spans_go_nowhere(variables):
    done = run(TRACED, **variables)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("variables", "exporter"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin_of_old"}, "zipkin_of_old"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"}, "pigeon"),
    ],
)
def test_an_exporter_that_is_not_there_is_refused(variables, exporter):
    done = run(TRACED, **variables)
    assert "ConfigError" in done.stderr
    assert f"exporter {exporter}, which is not installed" in done.stderr


def test_the_application_may_set_the_global_provider_later():
    done = run(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor\n"
        "from kvcore.telemetry.tracing import TracingObserver, enable_tracing\n"
        "observer = TracingObserver(enable_tracing())\n"
        "observer.request_store('early', 1, 1, 1, 0.0)\n"
        "provider = TracerProvider()\n"
        "provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))\n"
        "trace.set_tracer_provider(provider)\n"
        "observer.request_lookup('late', 1, 1, 0.0)\n"
    )
    assert '"name": "kvcore.lookup"' in done.stdout, done.stderr
    assert "early" not in done.stdout


def test_without_the_library_the_message_says_what_to_install():
    done = run("import sys\nsys.modules['opentelemetry'] = None\n" + TRACED)
    assert "pip install 'kvcore[tracing]'" in done.stderr
