"""Metrics as differences, for an inference engine that carries them between processes and has a Prometheus of its own.

`DeltaObserver` counts; `DeltaObserver.take` gives what happened since it was last asked, as a `StatsDelta` of plain
lists and numbers; that goes to wherever the metrics are served, where `DeltaMetrics` adds it to metrics that are made
of the engine's own classes. Nothing here imports an engine, or Prometheus' client library.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvcore.engine.observer import TierSize
from kvcore.telemetry import definitions as d
from kvcore.telemetry.events import MetricsObserver

__all__ = ["Data", "DeltaMetrics", "DeltaObserver", "StatsDelta"]

_log = logging.getLogger("kvcore")

Data: TypeAlias = dict[str, Any]
"""Metric name -> ``[[labels, value], ...]``; `labels` are the rank and the metric's own. A value is a number, or for a
histogram ``[[bucket, count, sum], ...]``: lists and numbers alone, for any encoding."""

_Key: TypeAlias = "tuple[d.Metric, tuple[str, ...]]"
_Buckets: TypeAlias = "dict[int, list[float]]"

SIZES_EVERY = 10.0
"""Seconds between two questions for the sizes of tiers."""


@dataclass(frozen=True, slots=True)
class StatsDelta:
    """What happened in some time.

    Parameters
    ----------
    data : dict
        See `Data`.
    """

    data: Data = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: StatsDelta) -> StatsDelta:
        """Return the sum of this and a later one, or one of another rank; states are the later one's. Both stay."""
        data: Data = {}
        for name in dict.fromkeys((*self.data, *other.data)):
            metric = d.by_name(name)
            if metric is None:
                _unknown(name)
                continue
            merged: dict[tuple[str, ...], Any] = {}
            for labels, value in (*self.data.get(name, ()), *other.data.get(name, ())):
                key = tuple(labels)
                merged[key] = _sum(metric, merged[key], value) if key in merged else value
            data[name] = [[list(labels), value] for labels, value in merged.items()]
        return StatsDelta(data)

    def reduce(self) -> dict[str, int | float]:
        """Return a few figures for a line of a log: tokens, hit rate, megabytes, mean times. Nothing, if empty."""
        said: dict[str, int | float] = {}
        lookups, hits = self._total(d.LOOKUP_TOKENS), self._total(d.HIT_TOKENS)
        if lookups:
            said |= {
                "Lookup tokens": int(lookups),
                "Hit tokens": int(hits),
                "Hit rate (%)": round(100 * hits / lookups, 1),
            }
        for title, tokens, nbytes in (
            ("Stored", d.STORED_TOKENS, d.STORED_BYTES),
            ("Retrieved", d.RETRIEVED_TOKENS, d.RETRIEVED_BYTES),
        ):
            if self._total(tokens):
                said[f"{title} tokens"] = int(self._total(tokens))
                said[f"{title} MB"] = round(self._total(nbytes) / 1e6, 1)
        for operation in ("lookup", "store", "retrieve"):
            count, seconds = self._mean(d.REQUEST_SECONDS, operation)
            if count:
                said[f"Avg {operation} time (ms)"] = round(1000 * seconds / count, 3)
        for title, metric in (
            ("Not loaded tokens", d.MISSED_TOKENS),
            ("Failures", d.TIER_FAILURES),
            ("Uncacheable requests", d.UNCACHEABLE),
        ):
            total = self._total(metric, *(["not_loaded"] if metric is d.MISSED_TOKENS else []))
            if total:
                said[title] = int(total)
        return said

    def _total(self, metric: d.Metric, *labels: str) -> float:
        rows = self.data.get(metric.name, ())
        return float(sum(value for found, value in rows if list(labels) == list(found[1 : 1 + len(labels)])))

    def _mean(self, metric: d.Metric, operation: str) -> tuple[float, float]:
        rows = [buckets for labels, buckets in self.data.get(metric.name, ()) if labels[-1] == operation]
        flat = [bucket for buckets in rows for bucket in buckets]
        return sum(count for _, count, _ in flat), sum(seconds for _, _, seconds in flat)


class DeltaObserver(MetricsObserver):
    """Counts the events of one engine until somebody takes the counts.

    Parameters
    ----------
    rank : int or str
        Tensor-parallel rank, or another name of the process: the first label of all series.
    clock : callable, optional
        Seconds; for tests.

    Notes
    -----
    What is kept has a bound, whether or not anybody takes it: times are kept as a count and a sum for each bucket.
    """

    def __init__(self, rank: int | str = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._rank = str(rank)
        self._clock = clock
        self._changed = threading.Lock()
        self._numbers: dict[_Key, float] = {}
        self._times: dict[_Key, _Buckets] = {}
        self._sizes: Callable[[], Iterable[TierSize]] | None = None
        self._next_sizes = 0.0

    def add(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.add`."""
        if value:
            key = (metric, labels)
            with self._changed:
                self._numbers[key] = self._numbers.get(key, 0) + value

    def observe(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.observe`."""
        index = bisect.bisect_left(metric.bounds, value)
        key = (metric, labels)
        with self._changed:
            bucket = self._times.setdefault(key, {}).setdefault(index, [0, 0.0])
            bucket[0] += 1
            bucket[1] += value

    def set(self, value: float, metric: d.Metric, *labels: str) -> None:
        """See `MetricsObserver.set`."""
        with self._changed:
            self._numbers[metric, labels] = value

    def watch(self, sizes: Callable[[], Iterable[TierSize]]) -> None:
        """See `EngineObserver.watch`; asked by `take`, every ten seconds at most."""
        self._sizes = sizes

    def close(self) -> None:
        """Ask no more for sizes, and end outages; what was counted can still be taken."""
        self._sizes = None
        super().close()

    def take(self) -> StatsDelta:
        """Return what happened since it was last taken."""
        self._ask_sizes()
        with self._changed:
            numbers, self._numbers = self._numbers, {}
            times, self._times = self._times, {}
        data: Data = {}
        for (metric, labels), value in numbers.items():
            data.setdefault(metric.name, []).append([[self._rank, *labels], value])
        for (metric, labels), buckets in times.items():
            value_of = [[index, int(count), total] for index, (count, total) in sorted(buckets.items())]
            data.setdefault(metric.name, []).append([[self._rank, *labels], value_of])
        return StatsDelta(data)

    def _ask_sizes(self) -> None:
        sizes, now = self._sizes, self._clock()
        if sizes is None or now < self._next_sizes:
            return
        self._next_sizes = now + SIZES_EVERY
        try:
            found = list(sizes())
        except Exception:  # noqa: BLE001 - theirs, whatever it is; and the counts are still wanted
            _log.error("the sizes of tiers could not be had\n%s", traceback.format_exc())
            return
        for size in found:
            for metric, value in (
                (d.TIER_BYTES, size.nbytes),
                (d.TIER_OBJECTS, size.objects),
                (d.TIER_CAPACITY, size.capacity),
            ):
                if value is not None:
                    self.set(value, metric, size.tier)


class DeltaMetrics:
    """The same metrics in the inference engine's own Prometheus, to which differences are added.

    Parameters
    ----------
    kinds : mapping of str to callable
        How to make a ``"counter"``, ``"gauge"`` and ``"histogram"``: the classes of Prometheus' client library, or
        others that take the same arguments.
    labelnames : sequence of str
        The engine's own labels, which come first; kvcore's ``rank`` and those of the metric follow.
    labelvalues : mapping of int to sequence
        Values of the engine's labels, by the number of the engine.

    Notes
    -----
    The metrics are made once for each set of classes and labels in a process: a second engine uses the same ones.
    """

    def __init__(
        self,
        kinds: Mapping[str, Callable[..., Any]],
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._values = {engine: tuple(values) for engine, values in labelvalues.items()}
        self._families = _families(kinds, tuple(labelnames))
        self._series: dict[tuple[object, ...], Any] = {}

    def observe(self, data: Mapping[str, Any], engine: int = 0) -> None:
        """Add a difference.

        Parameters
        ----------
        data : mapping
            `StatsDelta.data`, or what an encoding made of it.
        engine : int
            Whose it is.
        """
        for name, rows in data.items():
            metric = d.by_name(name)
            if metric is None:
                _unknown(name)
                continue
            for labels, value in rows:
                series = self._of(metric, engine, labels)
                if metric.kind == "counter":
                    series.inc(value)
                elif metric.kind == "gauge":
                    series.set(value)
                else:
                    _replay(series, metric.bounds, value)

    def _of(self, metric: d.Metric, engine: int, labels: Sequence[str]) -> Any:
        key = (metric, engine, *labels)
        series = self._series.get(key)
        if series is None:
            series = self._families[metric].labels(*self._values[engine], *labels)
            self._series[key] = series
        return series


_made: dict[tuple[object, ...], dict[d.Metric, Any]] = {}
_lock = threading.Lock()
_told: set[str] = set()


def _families(kinds: Mapping[str, Callable[..., Any]], labelnames: tuple[str, ...]) -> dict[d.Metric, Any]:
    key = (*(kinds[kind] for kind in ("counter", "gauge", "histogram")), labelnames)
    with _lock:
        if key not in _made:
            families = {}
            for metric in d.METRICS:
                more: dict[str, Any] = {"buckets": metric.bounds} if metric.bounds else {}
                more |= {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
                families[metric] = kinds[metric.kind](
                    name=metric.name,
                    documentation=metric.help,
                    labelnames=[*labelnames, "rank", *metric.labels],
                    **more,
                )
            _made[key] = families
        return _made[key]


def _replay(series: Any, bounds: Sequence[float], buckets: Iterable[Sequence[float]]) -> None:
    """Observe the mean of each bucket as often as there was something in it: the same counts, and the same sum."""
    for index, count, total in buckets:
        place = int(index)
        mean = total / count
        # A mean lies in its bucket, but for the rounding.
        mean = min(mean, bounds[place]) if place < len(bounds) else mean
        if place and mean <= bounds[place - 1]:
            mean = bounds[place - 1] * (1 + 1e-12)
        for _ in range(int(count)):
            series.observe(mean)


def _sum(metric: d.Metric, old: Any, new: Any) -> Any:
    if metric.kind == "gauge":
        return new
    if metric.kind == "counter":
        return old + new
    summed: dict[int, list[float]] = {}
    for index, count, total in (*old, *new):
        bucket = summed.setdefault(int(index), [0, 0.0])
        bucket[0] += count
        bucket[1] += total
    return [[index, int(count), total] for index, (count, total) in sorted(summed.items())]


def _unknown(name: str) -> None:
    """Say once that a metric is of another version: losing it is better than stopping the engine's log."""
    if name not in _told:
        _told.add(name)
        _log.warning("metric %s comes from another version of kvcore, and is left out", name)
