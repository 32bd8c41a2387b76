"""What a call of an op costs the host, and how long one is away: small arrays, so that the device has nothing to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Recorder
from bench.device_check.timing import Call
from kvcore import Backend, Layout, Quantized, QuantSpec
from kvcore.codecs.tables import table_set
from kvcore.entropy import EncodedTiles
from kvcore.ops import send

LAUNCHES = "launches"
_SAMPLES, _CALLS = 15, 200


def run(given: Given, recorder: Recorder) -> None:
    """Measure each op of the implementation in question."""
    backend = given.open()
    recorder.check("launches", partial(_launches, given, backend, recorder))


def _launches(given: Given, backend: Backend, recorder: Recorder) -> str:
    calls = 5 if given.small else _CALLS
    count = 0
    for op, checked, planned in _cases(backend):
        if not given.measures(backend, op):
            continue
        if given.left_s <= 0:
            return "stopped: out of time"
        checked()
        backend.runtime.check()
        recorder.figure(
            LAUNCHES,
            op,
            implementation=backend.bindings[op].implementation,
            checked_us=_queued_us(backend, checked, calls),
            planned_us=_queued_us(backend, planned, calls),
            round_trip_us=_round_trip_us(backend, planned, calls),
        )
        count += 1
    return f"{count} ops"


def _queued_us(backend: Backend, call: Call, calls: int) -> float:
    """Return the time of the host in which a call is queued, in microseconds."""
    samples = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls)
        backend.runtime.synchronize()
    return round(statistics.median(samples) * 1e6, 2)


def _round_trip_us(backend: Backend, call: Call, calls: int) -> float:
    """Return the time from a call to the end of the wait for it, in microseconds."""
    samples = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        backend.runtime.synchronize()
        samples.append(time.perf_counter() - start)
    return round(statistics.median(samples) * 1e6, 2)


def _cases(backend: Backend) -> Iterator[tuple[str, Call, Call]]:
    """Yield an op, a checked call and a planned one of the same work."""
    runtime, tables, spec = backend.runtime, table_set("gauss"), QuantSpec.symmetric(16, (2,))
    cache = Layout("L|KBNHD").bind([send(backend, np.zeros((2, 8, 16, 2, 64), np.float16)) for _ in range(2)])
    chunk = Layout("LKTHD").bind(send(backend, np.zeros((2, 2, 16, 2, 64), np.float16)))
    slots = send(backend, np.arange(16, dtype=np.int64))
    shape = (2, 16, 64)
    x, scale = send(backend, np.zeros(shape, np.float32)), send(backend, np.ones((2, 16, 1), np.float32))
    codes, largest = send(backend, np.zeros(shape, np.int16)), runtime.empty((2, 16, 1), np.dtype(np.float32))
    source, target = (send(backend, np.zeros(4096, np.uint8)) for _ in range(2))
    packed, digests = runtime.empty((2048,), np.dtype(np.uint8)), runtime.empty((1,), np.dtype(np.uint64))
    choice = backend.choose_classes(codes, tables, use_offsets=True)
    coded = EncodedTiles(*backend.encode_symbols(codes, choice, tables, use_offsets=True))
    values = runtime.empty(shape, np.dtype(np.int16))
    runtime.check()
    used = runtime.empty((2, 16, 1), np.dtype(np.float32))
    held, tiles = Quantized(codes, scale), {"tables": tables, "use_offsets": True}
    works: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
        ("copy_batch", ([source],), {}, {"out": [target]}),
        ("gather_paged", (cache, slots), {}, {"out": chunk}),
        ("scatter_paged", (chunk, slots), {"check_duplicates": False}, {"out": cache}),
        ("reduce_absmax", (x,), {"axes": (2,)}, {"out": largest}),
        ("quantize", (x,), {"spec": spec}, {"scale": scale, "out": Quantized(codes, used)}),
        ("dequantize", (held,), {"spec": spec}, {"out": x}),
        ("pack_bits", (source,), {"bits": 4}, {"out": packed}),
        ("choose_classes", (codes,), tiles, {"out": choice}),
        ("encode_symbols", (codes, choice), tiles, {"out": coded}),
        ("decode_symbols", (coded,), tiles, {"out": values}),
        ("digest", ([source],), {}, {"out": digests}),
    ]
    for op, arguments, static, launch in works:
        plan = backend.plan(op, **static)
        native = {"out": (chunk,)} if op == "gather_paged" else launch
        given = ((chunk,), slots) if op == "scatter_paged" else arguments
        yield op, partial(getattr(backend, op), *arguments, **static, **launch), partial(plan, *given, **native)
