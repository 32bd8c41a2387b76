"""The dashboard asks for metrics that exist, by labels that they have, and leaves none out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore.telemetry.definitions import COMMON_LABELS, METRICS, by_name

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "kvcore.json"
DASHBOARD = json.loads(FILE.read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
SUFFIX = re.compile(r"_(bucket|sum|count)$")
# Common to kvcore's own metrics and to those that vLLM serves, which calls the model something else.
SHARED = set(COMMON_LABELS) - {"model"}


def metric(name: str):
    """The metric that a series is of; histograms have several kinds of series, the others one."""
    found = by_name(name)
    if found is not None:
        return None if found.kind == "histogram" else found
    found = by_name(SUFFIX.sub("", name))
    return found if found is not None and found.kind == "histogram" else None


def test_there_are_panels_and_they_have_places_of_their_own():
    assert len(PANELS) > 10
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    covered = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & covered, panel["title"]
        covered |= cells


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[f"{t} {q['refId']}" for t, q in QUERIES])
def test_queries_use_metrics_and_labels_of_the_table(title, target):
    expression = target["expr"]
    assert expression.count("(") == expression.count(")")
    names = re.findall(r"\bkvcore_\w+", expression)
    assert names
    metrics = [metric(name) for name in names]
    assert None not in metrics, names
    labels = SHARED.union(*(found.labels for found in metrics)) | {"le"}
    by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    filtered = set(re.findall(r"(\w+)=~", expression))
    shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert by | filtered | shown <= labels
    assert shown <= by
    assert ("le" in by) == expression.startswith("histogram_quantile")
    # A counter means something by its rate alone.
    for name, found in zip(names, metrics, strict=True):
        assert bool(re.search(rf"(rate|increase)\({name}\b", expression)) == (found.kind != "gauge")


def test_variables_take_labels_that_are_there():
    queries = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert metric(name) is not None
        assert label in SHARED
    used = set(re.findall(r"\$(engine|rank|\w+)\b", " ".join(target["expr"] for _, target in QUERIES)))
    assert used - {"__rate_interval"} == {v["name"] for v in DASHBOARD["templating"]["list"]} - {"datasource"}


def test_every_metric_is_on_it():
    shown = {metric(name) for _, target in QUERIES for name in re.findall(r"\bkvcore_\w+", target["expr"])}
    assert {found.name for found in METRICS} - {found.name for found in shown} == set()
