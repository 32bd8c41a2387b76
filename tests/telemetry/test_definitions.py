"""The table of metrics keeps the conventions of Prometheus, and every event of an engine counts for something in it."""

from __future__ import annotations

import inspect
import re

import pytest

from kvcore.engine.observer import EngineObserver, TierSize
from kvcore.telemetry.definitions import COMMON_LABELS, METRICS, by_name
from kvcore.telemetry.events import MetricsObserver

UNITS = {"calls", "requests", "tokens", "bytes", "chunks", "objects", "failures", "outages", "seconds", "0 or 1"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_the_kind_and_the_unit(metric):
    assert re.fullmatch(r"kvcore(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.unit in UNITS
    if metric.unit in {"tokens", "bytes", "chunks", "seconds"}:
        assert re.search(rf"_{metric.unit}(_total)?$", metric.name)
    assert metric.help.endswith(".")
    assert not set(metric.labels) & set(COMMON_LABELS)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert bool(metric.bounds) == (metric.kind == "histogram")


def test_names_are_unique_and_found():
    assert {by_name(metric.name) for metric in METRICS} == set(METRICS)
    assert by_name("kvcore_no_such_thing") is None


class Recording(MetricsObserver):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def add(self, value, metric, *labels):
        self._see("counter", metric, labels)

    def observe(self, value, metric, *labels):
        self._see("histogram", metric, labels)

    def set(self, value, metric, *labels):
        self._see("gauge", metric, labels)

    def _see(self, kind, metric, labels):
        assert metric.kind == kind
        assert len(labels) == len(metric.labels)
        self.seen.setdefault(metric.name, set()).add(labels)


def events():
    """Every method of an observer that tells of something, from its signature."""
    for name, function in inspect.getmembers(EngineObserver, inspect.isfunction):
        if not name.startswith("_") and name not in {"watch", "close"}:
            yield name, list(inspect.signature(function).parameters.values())[1:]


@pytest.mark.parametrize(("name", "parameters"), list(events()))
def test_every_event_counts_for_something(name, parameters):
    some = {"int": 3, "float": 0.5, "str": "some", "Exception": ValueError("no")}
    observer = Recording()
    getattr(observer, name)(*(some[parameter.annotation] for parameter in parameters))
    assert observer.seen


def test_every_metric_but_sizes_comes_of_an_event():
    observer = Recording()
    some = {"int": 3, "float": 0.5, "str": "some", "Exception": ValueError("no")}
    for name, parameters in events():
        getattr(observer, name)(*(some[parameter.annotation] for parameter in parameters))
    observer.request_lookup("r", 5, 3, 0.1)
    sizes = {"kvcore_tier_bytes", "kvcore_tier_objects", "kvcore_tier_capacity_bytes"}
    assert set(observer.seen) == {metric.name for metric in METRICS} - sizes
    assert len(sizes) == len(TierSize.__dataclass_fields__) - 1


def test_reasons_are_few_whatever_is_given():
    observer = Recording()
    for number in range(1000):
        observer.uncacheable(f"request {number}")
    found = observer.seen["kvcore_uncacheable_requests_total"]
    assert len(found) <= 33
    assert ("other",) in found
    observer.uncacheable("request 1")
    assert ("request 1",) in found
