"""Compile every kernel for every GPU and print what each needs; exit status 1 where one does not compile.

With --record what compiled is written into a backend's conformance record, which `kvcore ops` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.errors import KVCoreError
from kvcore.kernels.check import TARGETS, Outcome, compile_for, compiled_ops
from kvcore.kernels.check.twins import TRITON_BACKENDS, compiled_twins
from kvcore.plugins.discover import discover
from kvcore.plugins.record import RECORD_NAME, Hashes, add_compiled, hashes_of
from kvcore.plugins.spec import BackendSpec
from kvcore.settings import current


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(prog="python -m kvcore.kernels.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON: kernel, arch, registers, spills")
    parser.add_argument("--require", action="store_true", help="a compiler that is not installed is a failure")
    parser.add_argument("--arch", action="append", choices=[t.arch for t in TARGETS], help="only this one (repeatable)")
    parser.add_argument(
        "--record",
        metavar="BACKEND",
        choices=sorted({t.backend for t in TARGETS}),
        help=f"only the targets of this backend, and write what compiled into its {RECORD_NAME}",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(arguments)

    if options.arch and options.record:
        parser.error("--record records all targets of a backend; leave --arch out")
    spec = _spec(parser, options.record) if options.record else None
    targets = [
        t for t in TARGETS if t.arch in (options.arch or [t.arch]) and t.backend == (options.record or t.backend)
    ]
    hashes = hashes_of(spec) if spec is not None else None
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(compile_for, targets))
    bad = {"failed", "skipped"} if options.require else {"failed"}
    if options.json:
        sys.stdout.write(json.dumps(_rows(outcomes), indent=1) + "\n")
    else:
        _show(outcomes, time.monotonic() - began)
    if spec is not None and hashes is not None:
        _record(spec, outcomes, hashes)
        if "triton" in spec.implementations and spec.name in TRITON_BACKENDS:
            _record_twins(spec, hashes, options.jobs)
    return int(any(outcome.status in bad for outcome in outcomes))


def _spec(parser: argparse.ArgumentParser, backend: str) -> BackendSpec:
    candidate = next((c for c in discover(current()) if c.name == backend), None)
    if candidate is None or candidate.spec is None:
        parser.error(f"{backend}: {candidate.reason if candidate is not None else 'not installed'}")
    if not candidate.spec.implementations or not candidate.spec.core_kernels:
        parser.error(
            f"{backend}: its package says nothing of being built from these kernels (BackendSpec.core_kernels)"
        )
    return candidate.spec


def _record_twins(spec: BackendSpec, hashes: Hashes, jobs: int) -> None:
    """Do the same for the ops in Triton's language."""
    out = Console(stderr=True, highlight=False, markup=False)
    try:
        ops, targets = compiled_twins(spec.name, jobs)
        add_compiled(spec, "triton", ops, targets, hashes)
    except (ImportError, KVCoreError, OSError) as error:
        out.print(f"nothing recorded of those in Triton's language: {error}")
        raise SystemExit(1) from error
    out.print(f"recorded for {spec.name}, triton: {', '.join(ops)} compiled for {', '.join(targets)}")


def _record(spec: BackendSpec, outcomes: Sequence[Outcome], hashes: Hashes) -> None:
    """Write what compiled into the record; say what is missing in it."""
    targets = {o.target.arch: o.target.compiled_by() for o in outcomes if o.status == "ok"}
    implementation = next(iter(spec.implementations))
    out = Console(stderr=True, highlight=False, markup=False)
    try:
        # The library is one: an architecture counts only where every kernel of every op compiled for it.
        add_compiled(spec, implementation, compiled_ops() if targets else (), targets, hashes)
    except (KVCoreError, OSError) as error:
        out.print(f"nothing recorded: {error}")
        raise SystemExit(1) from error
    left_out = ", ".join(o.target.arch for o in outcomes if o.status != "ok")
    out.print(
        f"recorded for {spec.name}, {implementation}: compiled for {', '.join(targets) or 'nothing'}"
        + (f"; not in the record: {left_out}" if left_out else "")
    )


def _rows(outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, object]]]:
    targets: list[dict[str, object]] = [
        {"arch": o.target.arch, "status": o.status, "reason": o.reason} for o in outcomes
    ]
    kernels: list[dict[str, object]] = [
        {"kernel": k.name, "arch": o.target.arch, "ok": True, "registers": k.registers, "spills": k.spills}
        for o in outcomes
        for k in o.kernels
    ]
    return {"targets": targets, "kernels": kernels}


def _show(outcomes: Sequence[Outcome], seconds: float) -> None:
    told = [o for o in outcomes if any(k.registers is not None or k.spills for k in o.kernels)]
    console = Console()
    console.width = max(console.width, 24 + 11 * len(told))
    if told:
        console.print(_needs(told))
    statuses = Table(title="all kernels of all ops", show_header=False)
    for outcome in outcomes:
        count = f"{len(outcome.kernels)} kernels" if outcome.kernels else ""
        statuses.add_row(outcome.target.arch, outcome.status, Text(outcome.reason or count))
    console.print(statuses)
    console.print(f"{seconds:.0f} s; compiled only, nothing ran", highlight=False)


def _needs(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="registers of a thread, and (in brackets) bytes that are spilled")
    table.add_column("kernel", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.target.arch, justify="right", no_wrap=True)
    found = [{k.name: k for k in outcome.kernels} for outcome in outcomes]
    for name in sorted({name for kernels in found for name in kernels}):
        cells = [kernels.get(name) for kernels in found]
        table.add_row(name, *("" if k is None else _cell(k.registers, k.spills) for k in cells))
    return table


def _cell(registers: int | None, spills: int | None) -> str:
    text = "?" if registers is None else str(registers)
    return f"{text} ({spills})" if spills else text


if __name__ == "__main__":
    sys.exit(main())
