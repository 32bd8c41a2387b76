"""What kvcore adds to a call: plans against a bare call, checked one-off calls minus their implementation.

The implementations do nothing, so whatever is measured is the core's own. Targets: a planned callable costs at most
5 times a bare function call with the same arguments; a checked call at most 5 us more than its implementation.
"""

from __future__ import annotations

import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcore
from kvcore import BackendSpec, Layout, Probe, Quantized, QuantSpec
from kvcore.hookspecs import OP_PREFIX, op_specs
from kvcore.plugins import API_VERSION
from kvcore.plugins.discover import Candidate

__all__ = ["CHECKED_TARGET_US", "PLAN_TARGET", "measure_calls"]

PLAN_TARGET, CHECKED_TARGET_US = 5.0, 5.0


def _idle_backend() -> kvcore.Backend:
    """Return a backend whose ops return at once: the hookspecs themselves, which have no body."""
    module = types.ModuleType("kvcore_bench_idle")
    for op, hook in op_specs().items():
        copy = types.FunctionType(hook.__code__, hook.__globals__, OP_PREFIX + op, hook.__defaults__)
        copy.__kwdefaults__ = dict(hook.__kwdefaults__ or {})
        setattr(module, OP_PREFIX + op, kvcore.hookimpl(copy))
    sys.modules[module.__name__] = module
    spec = BackendSpec("idle", ("cpu",), 0, API_VERSION, lambda: Probe(True, "does nothing"), {"idle": module.__name__})
    return kvcore.open_backend("idle", fallback="error", found=[Candidate("idle", "usable", "does nothing", spec)])


def _cases() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], tuple[Any, ...]]]:
    """Return label -> (op, arguments, static keywords, launch keywords, positional form of the static ones)."""
    cache = Layout("L|KBNHD").bind([np.zeros((2, 64, 16, 3, 64), np.float16) for _ in range(30)])
    chunk = Layout("LKTHD").bind(np.zeros((30, 2, 256, 3, 64), np.float16))
    slots, x = np.arange(256, dtype=np.int64), np.zeros((256, 64), np.float32)
    spec = QuantSpec.symmetric(8, (1,))
    codes = Quantized(np.zeros((256, 64), np.int8), np.zeros((256, 1), np.float32))
    largest, source, target = np.zeros((256, 1), np.float32), np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    return {
        "gather_paged": ("gather_paged", (cache, slots), {}, {"out": (chunk,)}, ()),
        "scatter_paged": ("scatter_paged", ((chunk,), slots), {}, {"out": cache}, ()),
        "reduce_absmax": ("reduce_absmax", (x,), {"axes": (1,)}, {"out": largest}, ((1,),)),
        "quantize": ("quantize", (x,), {"spec": spec}, {"out": codes}, (spec,)),
        "copy_batch": ("copy_batch", ([source],), {}, {"out": [target]}, ()),
        "digest": ("digest", ([source],), {}, {"out": np.zeros(1, np.uint64)}, ()),
        "pack_bits": ("pack_bits", (source,), {"bits": 4}, {"out": np.zeros(2048, np.uint8)}, (4,)),
    }


def _nanoseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of one call in ns; each sample is the mean of 1000 calls."""
    loop = range(1000)
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in loop:
            call()
        samples.append((time.perf_counter_ns() - start) / len(loop))
    return statistics.median(samples)


def _calls(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], repeats: int) -> float:
    return _nanoseconds(lambda: function(*arguments, **keywords), repeats)


def measure_calls(repeats: int) -> list[dict[str, Any]]:
    """Return one row of figures an op: ``{path, bare_ns, planned_ns, planned_ratio, checked_us}``, medians."""
    backend = _idle_backend()
    empty = _nanoseconds(lambda: None, repeats)  # what the loop and the closure around a call take
    rows = []
    for label, (op, arguments, static, launch, positional) in _cases().items():
        function = backend.bindings[op].function
        plan = backend.plan(op, **static)
        checked = getattr(backend, op)
        with_static = {**static, **launch}
        bare = _calls(function, arguments, with_static, repeats) - empty
        planned = _calls(plan, arguments, launch, repeats) - empty
        one_off = _calls(checked, (*arguments, *positional), launch, repeats) - empty
        rows.append(
            {
                "path": label,
                "bare_ns": round(bare, 1),
                "planned_ns": round(planned, 1),
                "planned_ratio": round(planned / bare, 2),
                "checked_us": round((one_off - bare) / 1000, 3),
            }
        )
    return rows
