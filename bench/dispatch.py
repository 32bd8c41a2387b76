"""What kvcore adds to a call: plans against a bare call, checked one-off calls minus their implementation.

The implementations do nothing, so whatever is measured is the core's own. Targets: a planned callable costs at most
5 times a bare function call with the same arguments; a checked call at most 5 us more than its implementation.

Run ``python bench/dispatch.py [--json] [--repeats N]``.
"""

from __future__ import annotations

import argparse
import json
import os
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

PLAN_TARGET, CHECKED_TARGET_US = 5.0, 5.0


def idle_backend() -> kvcore.Backend:
    """Return a backend whose ops return at once: the hookspecs themselves, which have no body."""
    module = types.ModuleType("kvcore_bench_idle")
    for op, spec in op_specs().items():
        copy = types.FunctionType(spec.__code__, spec.__globals__, OP_PREFIX + op, spec.__defaults__)
        copy.__kwdefaults__ = dict(spec.__kwdefaults__ or {})
        setattr(module, OP_PREFIX + op, kvcore.hookimpl(copy))
    sys.modules[module.__name__] = module
    spec = BackendSpec("idle", ("cpu",), 0, API_VERSION, lambda: Probe(True, "does nothing"), {"idle": module.__name__})
    return kvcore.open_backend("idle", fallback="error", found=[Candidate("idle", "usable", "does nothing", spec)])


def cases() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], tuple[Any, ...]]]:
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


def nanoseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of one call in ns; each sample is the mean of 1000 calls."""
    loop = range(1000)
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in loop:
            call()
        samples.append((time.perf_counter_ns() - start) / len(loop))
    return statistics.median(samples)


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return one row of figures an op."""
    backend = idle_backend()
    empty = nanoseconds(lambda: None, repeats)  # what the loop and the closure around a call take
    rows = []
    for label, (op, arguments, static, launch, positional) in cases().items():
        function = backend.bindings[op].function
        plan = backend.plan(op, **static)
        checked = getattr(backend, op)
        with_static = {**static, **launch}
        bare = nanoseconds(lambda f=function, a=arguments, k=with_static: f(*a, **k), repeats) - empty
        planned = nanoseconds(lambda f=plan, a=arguments, k=launch: f(*a, **k), repeats) - empty
        one_off = nanoseconds(lambda f=checked, a=(*arguments, *positional), k=launch: f(*a, **k), repeats) - empty
        rows.append(
            {
                "op": label,
                "bare_ns": round(bare, 1),
                "planned_ns": round(planned, 1),
                "planned_ratio": round(planned / bare, 2),
                "checked_us": round((one_off - bare) / 1000, 3),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=51, help="samples of 1000 calls for each figure")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # one core for the whole run: no moves between samples
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = measure(options.repeats)
    ratio, checked = max(r["planned_ratio"] for r in rows), max(r["checked_us"] for r in rows)
    met = ratio <= PLAN_TARGET and checked <= CHECKED_TARGET_US
    if options.json:
        targets = {"planned_ratio": PLAN_TARGET, "checked_us": CHECKED_TARGET_US}
        print(json.dumps({"ops": rows, "planned_ratio": ratio, "checked_us": checked, "targets": targets, "met": met}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="what kvcore adds to a call that does nothing (medians)")
    for heading in (
        "op",
        "bare call, ns",
        "planned, ns",
        f"ratio (<= {PLAN_TARGET:g})",
        f"checks, us (<= {CHECKED_TARGET_US:g})",
    ):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for r in rows:
        table.add_row(
            r["op"], f"{r['bare_ns']}", f"{r['planned_ns']}", f"{r['planned_ratio']:.2f}", f"{r['checked_us']:.2f}"
        )
    Console().print(table)
    print(f"worst: {ratio:.2f}x, {checked:.2f} us; targets {'met' if met else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
