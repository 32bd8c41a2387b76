"""Compile every kernel for every GPU and print what each needs; exit status 1 where one does not compile."""

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

from kvcore.kernels.check import TARGETS, Outcome, compile_for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(prog="python -m kvcore.kernels.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON: kernel, arch, registers, spills")
    parser.add_argument("--require", action="store_true", help="a compiler that is not installed is a failure")
    parser.add_argument("--arch", action="append", choices=[t.arch for t in TARGETS], help="only this one (repeatable)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(arguments)

    targets = [t for t in TARGETS if not options.arch or t.arch in options.arch]
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(compile_for, targets))
    bad = {"failed", "skipped"} if options.require else {"failed"}
    if options.json:
        sys.stdout.write(json.dumps(_rows(outcomes), indent=1) + "\n")
    else:
        _show(outcomes, time.monotonic() - began)
    return int(any(outcome.status in bad for outcome in outcomes))


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
    console = Console()
    console.width = max(console.width, 100)
    table = Table(title="registers of a thread, and (in brackets) what is spilled")
    table.add_column("kernel", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.target.arch, justify="right")
    found = [{k.name: k for k in outcome.kernels} for outcome in outcomes]
    for name in sorted({name for kernels in found for name in kernels}):
        cells = [kernels.get(name) for kernels in found]
        table.add_row(name, *("" if k is None else _cell(k.registers, k.spills) for k in cells))
    table.add_section()
    table.add_row("all", *(outcome.status for outcome in outcomes))
    console.print(table)
    for outcome in outcomes:
        if outcome.reason:
            console.print(f"{outcome.target.arch} {outcome.status}: {outcome.reason}", markup=False, highlight=False)
    console.print(f"{seconds:.0f} s; compiled only, nothing ran", highlight=False)


def _cell(registers: int | None, spills: int | None) -> str:
    if registers is None:
        return "compiled"
    return f"{registers} ({spills})" if spills else str(registers)


if __name__ == "__main__":
    sys.exit(main())
