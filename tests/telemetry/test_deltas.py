"""Differences, carried as plain data and added up again, give the same metrics as counting on the spot."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcore.engine.observer import TierSize
from kvcore.telemetry import DeltaMetrics, DeltaObserver, StatsDelta
from kvcore.telemetry.prometheus import PrometheusObserver

from .events import EVENTS, tell


def kinds(registry):
    made = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    return {kind: functools.partial(cls, registry=registry) for kind, cls in made.items()}


def values(registry):
    """Series that are not zero -> value, without labels that are the engine's business."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"model", "model_name", "engine"}}
            # A gauge that is 0 has been set.
            if not sample.name.endswith("_created") and (sample.value or family.type == "gauge"):
                found[(sample.name, *sorted(labels.items()))] = sample.value
    return found


@given(
    events=st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=60),
    cuts=st.sets(st.integers(0, 59), max_size=8),
    merge=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_differences_sum_to_what_is_counted_directly(events, cuts, merge):
    direct, there = CollectorRegistry(), CollectorRegistry()
    ranks = [(PrometheusObserver(model="m", engine="0", rank=r, registry=direct), DeltaObserver(r)) for r in (0, 1)]
    metrics = DeltaMetrics(kinds(there), ["model_name", "engine"], {0: ["m", "0"]})
    waiting = StatsDelta()

    def carry(now):
        nonlocal waiting
        for _, delta in ranks:
            waiting = waiting.aggregate(delta.take())
        if now:
            metrics.observe(json.loads(json.dumps(waiting.data)), 0)
            waiting = StatsDelta()

    merge = iter(merge)
    for number, (rank, event) in enumerate(events):
        for observer in ranks[rank]:
            tell(observer, event)
        if number in cuts:
            carry(next(merge))
    carry(True)
    assert values(there) == pytest.approx(values(direct))


def test_aggregating_changes_neither_side():
    observer = DeltaObserver()
    deltas = []
    for tokens in (1, 2):
        observer.request_lookup("r", tokens, 0, 0.5)
        deltas.append(observer.take())
    before = [json.dumps(delta.data) for delta in deltas]
    total = deltas[0].aggregate(deltas[1])
    assert [json.dumps(delta.data) for delta in deltas] == before
    assert total.data["kvcore_lookup_tokens_total"] == [[["0"], 3]]
    assert total.data["kvcore_request_seconds"] == [[["0", "lookup"], [[10, 2, 1.0]]]]


def test_nothing_happened_is_empty():
    observer = DeltaObserver()
    assert observer.take().empty
    observer.miss("host", 1)
    assert not observer.take().empty
    assert observer.take().empty
    assert StatsDelta().aggregate(StatsDelta()).empty
    assert StatsDelta().reduce() == {}


def test_what_nobody_takes_is_bounded():
    observer = DeltaObserver()
    for number in range(5000):
        observer.lookup("host", 1, 1, number / 100)
        observer.request_lookup(f"request {number}", 10, 5, number / 100)
    assert len(json.dumps(observer.take().data)) < 3000


def test_the_figures_for_a_line_of_the_log():
    first, second = DeltaObserver(0), DeltaObserver(1)
    first.request_lookup("a", 1000, 500, 0.002)
    first.request_lookup("b", 1000, 0, 0.004)
    for observer in (first, second):
        observer.request_retrieve("a", 500, 400, 5_000_000, 0.01)
        observer.request_store("b", 300, 1000, 3_000_000, 0.1)
    second.failure("disk", "store", OSError("no"))
    second.uncacheable("prompt embeddings")
    assert first.take().aggregate(second.take()).reduce() == {
        "Lookup tokens": 2000,
        "Hit tokens": 500,
        "Hit rate (%)": 25.0,
        "Stored tokens": 600,
        "Stored MB": 6.0,
        "Retrieved tokens": 800,
        "Retrieved MB": 10.0,
        "Avg lookup time (ms)": 3.0,
        "Avg store time (ms)": 100.0,
        "Avg retrieve time (ms)": 10.0,
        "Not loaded tokens": 200,
        "Failures": 1,
        "Uncacheable requests": 1,
    }


def test_sizes_are_asked_every_ten_seconds():
    now, asked = [0.0], []

    def sizes():
        asked.append(now[0])
        return [TierSize("host", 10, 1, 100), TierSize("remote")]

    observer = DeltaObserver(clock=lambda: now[0])
    observer.watch(sizes)
    assert observer.take().data["kvcore_tier_bytes"] == [[["0", "host"], 10]]
    now[0] = 9.0
    assert observer.take().empty
    now[0] = 10.0
    assert observer.take().data["kvcore_tier_capacity_bytes"] == [[["0", "host"], 100]]
    assert asked == [0.0, 10.0]
    observer.close()
    now[0] = 30.0
    assert observer.take().empty


def test_sizes_that_cannot_be_had_cost_no_counts(caplog):
    observer = DeltaObserver()
    observer.watch(lambda: [1 / 0])
    observer.miss("host", 2)
    assert observer.take().data == {"kvcore_tier_missed_chunks_total": [[["0", "host"], 2]]}
    assert "ZeroDivisionError" in caplog.text


def test_a_metric_of_another_version_is_left_out_and_said_once(caplog):
    registry = CollectorRegistry()
    metrics = DeltaMetrics(kinds(registry), [], {0: []})
    data = {"kvcore_from_the_future": [[["0"], 1]], "kvcore_hit_tokens_total": [[["0"], 5]]}
    for _ in range(2):
        metrics.observe(data)
        data = StatsDelta(data).aggregate(StatsDelta({"kvcore_from_the_future": [[["0"], 1]]})).data | data
    assert registry.get_sample_value("kvcore_hit_tokens_total", {"rank": "0"}) == 10
    assert caplog.text.count("another version") == 1


def test_a_second_engine_in_the_process_uses_the_same_metrics():
    registry = CollectorRegistry()
    same = kinds(registry)
    data = {"kvcore_hit_tokens_total": [[["0"], 5]]}
    for _ in range(2):
        DeltaMetrics(same, ["engine"], {0: ["a"], 1: ["b"]}).observe(data, 1)
    value = registry.get_sample_value
    assert value("kvcore_hit_tokens_total", {"engine": "b", "rank": "0"}) == 10
    assert value("kvcore_hit_tokens_total", {"engine": "a", "rank": "0"}) is None


def test_times_on_the_bounds_stay_in_their_buckets():
    direct, there = CollectorRegistry(), CollectorRegistry()
    counted, delta = PrometheusObserver(rank=0, registry=direct), DeltaObserver(0)
    for seconds in (0.0, 1e-5, 3e-5, 0.1, 0.1, 0.1, 0.3, 30.0, 31.0, 100.0):
        for observer in (counted, delta):
            observer.serde("raw", "serialize", 1, seconds)
    DeltaMetrics(kinds(there), [], {0: []}).observe(delta.take().data)
    assert values(there) == pytest.approx(values(direct))
