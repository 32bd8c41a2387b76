"""How long queued work takes: medians of batches of calls with one wait each, subject and yardstick in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench.device_check.child import Given
from kvcore import Backend

__all__ = ["Call", "Clock", "Timing", "rate"]

Call: TypeAlias = Callable[[], Any]

_BATCH_S = 0.01  # a batch takes about this long: the one wait in it then counts for little
_SAMPLES, _FEW_SAMPLES = 15, 3
_MOST_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median, the distance of the quartiles relative to it, and the yardstick's share.

    ``ratio`` is the median of the yardstick's time over the subject's, of neighbouring samples; None without one.
    """

    seconds: float
    spread: float
    ratio: float | None = None


class Clock:
    """Times calls that queue work on the default stream.

    Parameters
    ----------
    backend : Backend
    given : Given
        Its deadline shortens what is measured.
    share : int
        How many timings are to come: each may take its share of the time that is left.
    """

    def __init__(self, backend: Backend, given: Given, share: int) -> None:
        self._wait = backend.runtime.synchronize
        self._given = given
        self._left = share

    @property
    def out_of_time(self) -> bool:
        """Whether nothing more should be started."""
        return self._given.left_s <= 0

    def time(self, call: Call, yardstick: Call | None = None) -> Timing:
        """Time a call, and what it is measured against."""
        until = time.monotonic() + max(self._given.left_s, 0.0) / max(self._left, 1)
        self._left -= 1
        calls = [call] if yardstick is None else [call, yardstick]
        loops = [self._loops(each) for each in calls]
        samples: list[list[float]] = [[] for _ in calls]
        for number in range(_FEW_SAMPLES if self._given.small else _SAMPLES):
            for each, count, found in zip(calls, loops, samples, strict=True):
                found.append(self._batch(each, count))
            if number >= 2 and time.monotonic() > until:
                break
        ours = samples[0]
        median = statistics.median(ours)
        quartiles = statistics.quantiles(ours, n=4)
        ratio = None
        if yardstick is not None:
            ratio = statistics.median(theirs / mine for mine, theirs in zip(*samples, strict=True))
        return Timing(median, (quartiles[2] - quartiles[0]) / median, ratio)

    def _batch(self, call: Call, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return (time.perf_counter() - start) / count

    def _loops(self, call: Call) -> int:
        self._batch(call, 1)  # warm: allocations, kernels that are loaded on first use
        return max(1, min(_MOST_CALLS, round(_BATCH_S / max(self._batch(call, 2), 1e-6))))


def rate(count: int, timing: Timing, unit: str = "GB/s") -> dict[str, Any]:
    """Return a timing as columns of a table: 10**9 of something a second, microseconds of a call, the ratio."""
    columns: dict[str, Any] = {
        "value": float(f"{count / timing.seconds / 1e9:.4g}"),
        "unit": unit,
        "us": float(f"{timing.seconds * 1e6:.4g}"),
        "spread": round(timing.spread, 3),
    }
    return columns if timing.ratio is None else {**columns, "ratio": float(f"{timing.ratio:.3g}")}
