"""A thing to time, and the samples taken of it."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcore.arrays import aligned_empty
from kvcore.bench.peer import Peer
from kvcore.errors import KVCoreError

__all__ = ["Case", "Row", "copy_roofline", "measure", "neighbours", "pinned", "rate", "spread"]

_SAMPLE_SECONDS = 0.02  # a sample repeats a call until it has taken about this long: clocks and interrupts average out


@dataclass(frozen=True, slots=True)
class Case:
    """One path of the benchmark.

    Parameters
    ----------
    path : str
        What it is called in tables.
    nbytes : int
        Bytes (or, as `unit` says, symbols) that one call handles: GB/s are of these.
    call : callable
        One call of kvcore.
    roofline : callable, optional
        The memory's own speed on as many bytes.
    peer : dict, optional
        The peer's request for the same work, see `kvcore.bench.peer`.
    unit : str
        ``"GB/s"`` or ``"Gsym/s"``.
    """

    path: str
    nbytes: int
    call: Callable[[], Any]
    roofline: Callable[[], Any] | None = None
    peer: dict[str, Any] | None = None
    unit: str = "GB/s"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one path, in 10**9 of its unit a second; None where something was not measured.

    ``spread`` is the distance of kvcore's quartiles, relative to its median. ``ratio_peer`` and ``ratio_roofline`` are
    medians of ratios of neighbouring samples, which a machine that slows down for a while hardly moves.
    """

    path: str
    unit: str
    kvcore_gbps: float
    spread: float
    peer_gbps: float | None
    roofline_gbps: float | None
    ratio_peer: float | None
    ratio_roofline: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row for ``--json``."""
        return asdict(self)


def copy_roofline(nbytes: int) -> Callable[[], Any]:
    """Return a call that copies `nbytes` from one place to another as the C library does."""
    source, target = (aligned_empty((nbytes,), np.dtype(np.uint8)) for _ in range(2))
    source[:], target[:] = 1, 0  # touched: pages that are there
    return lambda: np.copyto(target, source)


def pinned() -> int | None:
    """Pin this process, and those it starts, to one core; return it, or None where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def measure(cases: Iterable[Case], peer: Peer | None, repeats: int) -> Iterator[Row]:
    """Time cases one by one: samples of kvcore, of the peer and of the roofline alternate.

    Raises
    ------
    KVCoreError
        The peer has died.
    """
    for case in cases:
        yield _measure(case, peer, repeats)


def _measure(case: Case, peer: Peer | None, repeats: int) -> Row:
    loops = _loops(case.call)
    roof_loops = 0 if case.roofline is None else _loops(case.roofline)
    note, peer_loops = "", 0
    if peer is not None and case.peer is not None:
        try:
            peer_loops = max(1, int(_SAMPLE_SECONDS / peer.seconds(case.peer, 1)))
        except KVCoreError as error:
            note = str(error)
    ours, theirs, roof = [], [], []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            ours.append(_sample(case.call, loops))
            if peer is not None and case.peer is not None and peer_loops:
                theirs.append(peer.seconds(case.peer, peer_loops))
            if case.roofline is not None:
                roof.append(_sample(case.roofline, roof_loops))
    finally:
        if enabled:
            gc.enable()
    return Row(
        case.path,
        case.unit,
        rate(case.nbytes, ours) or 0.0,
        spread(ours),
        rate(case.nbytes, theirs),
        rate(case.nbytes, roof),
        neighbours(theirs, ours),
        neighbours(roof, ours),
        note,
    )


def rate(nbytes: int, samples: Sequence[float]) -> float | None:
    """Return GB/s of the median of samples in seconds; None where there are none."""
    return float(f"{nbytes / statistics.median(samples) / 1e9:.4g}") if samples else None


def spread(samples: Sequence[float]) -> float:
    """Return the distance of the quartiles, relative to the median."""
    median = statistics.median(samples)
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [median] * 3
    return round((quartiles[2] - quartiles[0]) / median, 3)


def neighbours(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """Return how many times faster we were than they: the median over neighbouring samples; None where there are none.

    Parameters
    ----------
    theirs, ours : sequence of float
        Seconds, as many of both, taken in turns.
    """
    if not theirs:
        return None
    return float(f"{statistics.median(t / o for t, o in zip(theirs, ours, strict=True)):.3g}")


def _loops(call: Callable[[], Any]) -> int:
    call()  # warm: allocations, caches, page tables
    return max(1, int(_SAMPLE_SECONDS / max(_sample(call, 1), 1e-7)))


def _sample(call: Callable[[], Any], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops
