"""A real engine with a real configuration: what it does can be read in Prometheus' text, in the log and in spans."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import kvcore
from kvcore.engine import Namespace
from kvcore.engine.config import load_config
from kvcore.engine.kv import DenseKV
from kvcore.engine.opening import open_engine
from kvcore.engine.parts import CachePart
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc
from kvcore.telemetry import DeltaObserver, observers
from kvcore.telemetry.prometheus import metrics_text
from kvcore.telemetry.tracing import TracingObserver

CHUNK, TOKENS = 8, list(range(29))
SHAPE = {"L": 2, "H": 1, "D": 4}
FLOAT = {"K": np.dtype(np.float32), "V": np.dtype(np.float32)}
PART = CachePart(LayoutDesc(Layout("LKTHD", T=CHUNK, **SHAPE), FLOAT), (0, 1), (0, 1), 1)


def memory(count: int):
    """Dense KV of so many tokens."""
    kv = np.random.default_rng(0).standard_normal((2, 2, count, 1, 4), np.float32)
    return Layout("L|KTHD").bind(list(kv))


def opened(observer, **settings):
    config = load_config({"chunk_tokens": CHUNK, "max_local_cpu_size": "1 MB", "pinned": False, **settings}, environ={})
    backend = kvcore.open_backend("cpu_ref", fallback="error")
    names = Namespace("m", "1", chunk_tokens=CHUNK, kv_dtype="float32")
    return open_engine(config, names, [PART], backend=backend, observer=observer)


def values(registry):
    """Series -> value; of labels, the values of those that are not of every series."""
    found = {}
    for family in text_string_to_metric_families(metrics_text(registry)):
        for sample in family.samples:
            labels = sorted((k, v) for k, v in sample.labels.items() if k not in {"model", "engine", "rank"})
            found[(sample.name, *(value for _, value in labels))] = sample.value
    return found


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_a_store_and_a_hit(tmp_path, registry, caplog):
    caplog.set_level("INFO", "kvcore")
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    more = [TracingObserver(provider.get_tracer("test")), DeltaObserver()]
    config = load_config({"metrics": True}, environ={})
    told = observers(config, model="m", engine="e", registry=registry, more=more)
    tiers = [{"store": f"fs:{tmp_path / 'store'}", "serde": "raw"}]
    with opened(told, tiers=tiers) as engine:
        assert engine.lookup(TOKENS, request="cold") == 0
        engine.store(TOKENS, memory(len(TOKENS)), request="cold", wait=True)
        assert engine.lookup(TOKENS, request="warm") == 24
        kv = DenseKV(engine.backend, memory(len(TOKENS)))
        assert engine.retrieve_keys(engine.keys(TOKENS), kv, start=0, stop=24, request="warm") == 24
        engine.uncacheable("no content hash")
        got = values(registry)
    nbytes = 24 * 2 * 2 * 4 * 4
    assert got["kvcore_lookup_tokens_total",] == 58
    assert got["kvcore_hit_tokens_total",] == 24
    assert got["kvcore_stored_tokens_total",] == 24
    assert got["kvcore_stored_bytes_total",] == nbytes
    assert got["kvcore_retrieved_tokens_total",] == 24
    assert got["kvcore_retrieved_bytes_total",] == nbytes
    assert got["kvcore_requests_total", "lookup"] == 2
    assert got["kvcore_uncacheable_requests_total", "no content hash"] == 1
    assert got["kvcore_tier_hit_chunks_total", "host"] == 3
    assert got["kvcore_tier_stored_chunks_total", "disk"] == 3
    assert got["kvcore_tier_stored_bytes_total", "disk"] > nbytes
    assert got["kvcore_tier_seconds_count", "store", "disk"] >= 1
    assert got["kvcore_serde_seconds_count", "serialize", "raw"] == 3
    assert got["kvcore_tier_bytes", "host"] >= nbytes
    assert got["kvcore_tier_objects", "host"] == 3
    assert "Reqid: cold, Total tokens 29, hit tokens: 0, need to load: 0" in caplog.messages
    assert "Storing KV cache for 24 out of 29 tokens for request cold" in caplog.messages
    assert "Reqid: warm, Total tokens 29, hit tokens: 24, need to load: 24" in caplog.messages
    names = [span.name for span in spans.get_finished_spans()]
    assert names == ["kvcore.lookup", "kvcore.store", "kvcore.lookup", "kvcore.retrieve"]
    assert more[1].take().reduce()["Hit tokens"] == 24
    # Closed: nobody asks it for its sizes any more.
    assert ("kvcore_tier_bytes", "host") not in values(registry)
    provider.shutdown()


def test_a_store_that_cannot_be_reached_shows_as_degraded_and_as_misses(registry):
    told = observers(load_config({"metrics": True}, environ={}), registry=registry)
    tiers = [{"store": "resp://127.0.0.1:1", "serde": "raw"}]
    with opened(told, tiers=tiers) as engine:
        assert engine.lookup(TOKENS) == 0
        got = values(registry)
    assert got["kvcore_tier_degraded", "remote"] == 1
    assert got["kvcore_tier_outages_total", "remote"] == 1
    assert got["kvcore_missed_tokens_total", "not_found"] == len(TOKENS)
