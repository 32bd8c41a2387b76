"""``kvcore ops``: which implementation of each op is bound, and what was really run or compiled."""

from __future__ import annotations

import csv
import platform
import sys
from dataclasses import asdict, fields
from typing import Annotated

import typer
from rich.measure import Measurement
from rich.padding import Padding

from kvcore.cli.output import console, plain_table, print_json
from kvcore.errors import ConfigError, KVCoreError, NoBackendError
from kvcore.hookspecs import op_names
from kvcore.ops import candidates, explain
from kvcore.plugins.discover import Candidate, discover
from kvcore.plugins.link import link
from kvcore.plugins.verification import OpStatus, every_recorded_status, op_statuses, recorded_statuses
from kvcore.settings import current

__all__ = ["collect", "ops", "recorded"]

_WIDEST = 1000


def ops(
    backend: Annotated[str | None, typer.Option(help="One backend, with the reason of every status.")] = None,
    records: Annotated[
        bool, typer.Option("--records", help="What the packages' records say, whatever this machine is.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print lines of comma-separated values.")] = False,
) -> None:
    """Show what is bound to every op, and what was verified.

    executed: run by the suite, on the device that is named. compiled: built for the architectures that are named, never
    run. not-run: nothing counts as proof, the reason says why. missing: the backend does not have it.
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv are two forms of one answer; give one")
    rows = recorded(backend) if records else collect(backend)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([field.name for field in fields(OpStatus)])
        writer.writerows(list(asdict(row).values()) for row in rows)
    elif backend:
        _print_one(rows)
    else:
        _print_matrix(rows)


def collect(backend: str | None = None) -> list[OpStatus]:
    """Return the status of every op here: of one backend, or of all that are installed or known.

    A backend that is not usable here is not loaded, nor is one for tests that nobody asks for: their records are told
    as they are. ``KVCORE_KERNELS`` applies to the backend that would be opened (or is asked for), as it does when one
    is.

    Raises
    ------
    NoBackendError
        `backend` is neither installed nor known.
    """
    settings = current()
    found = candidates(settings)
    _check_known(backend, found)
    try:
        chosen = backend or next(v.name for v in explain().verdicts if v.taken)
    except NoBackendError:
        chosen = ""
    rows = []
    for candidate in found:
        if backend in (None, candidate.name):
            is_chosen = candidate.name == chosen
            rows += _statuses(candidate, settings.kernels if is_chosen else (), is_chosen)
    return rows


def recorded(backend: str | None = None) -> list[OpStatus]:
    """Return what the records of the installed backends say, on whatever machine they were made.

    Nothing is probed or loaded. An op has a row for each of a backend's implementations that was run or compiled.

    Raises
    ------
    NoBackendError
        `backend` is neither installed nor known.
    """
    found = discover(current())
    _check_known(backend, found)
    rows = []
    for candidate in found:
        if backend in (None, candidate.name):
            spec = candidate.spec
            if spec is not None and spec.implementations:
                rows += every_recorded_status(spec)
            else:
                rows += _missing(candidate, candidate.reason if spec is None else "it has no implementation of any op")
    return rows


def _check_known(backend: str | None, found: list[Candidate]) -> None:
    if backend is not None and backend not in {candidate.name for candidate in found}:
        explain(backend)  # raises, with the nearest name and the table


def _statuses(candidate: Candidate, kernels: tuple[tuple[str, str], ...], is_chosen: bool) -> list[OpStatus]:
    spec, reason = candidate.spec, candidate.reason
    if spec is None:
        return _missing(candidate, reason)
    if candidate.status == "usable" and spec.priority < 0 and spec.implementations and not is_chosen:
        why = f"taken only when named: kvcore ops --backend {spec.name} loads it"  # which may compile for minutes
        return recorded_statuses(spec, machine=platform.machine(), remark=why)
    if candidate.status == "usable":
        try:
            return op_statuses(link(spec, kernels))
        except ConfigError:  # the user's KVCORE_KERNELS, not the backend
            raise
        except KVCoreError as error:
            reason = str(error)
    if not spec.implementations:
        return _missing(candidate, reason)
    return recorded_statuses(spec, machine=platform.machine(), remark=f"not usable here: {reason}")


def _missing(candidate: Candidate, reason: str) -> list[OpStatus]:
    return [OpStatus(op, candidate.name, "", "missing", "", "", reason) for op in op_names()]


def _print_one(rows: list[OpStatus]) -> None:
    out, reasons = console(), {row.reason for row in rows}
    one = len(reasons) == 1 < len(rows)  # what is true of all is said once
    table = plain_table("op", "implementation", "status", *([] if one else ["why"]))
    for row in rows:
        table.add_row(row.op, row.implementation, row.status, *([] if one else [row.reason]))
    out.print(table)
    if one:
        out.print(f"\nAll of them: {reasons.pop()}")


def _print_matrix(rows: list[OpStatus]) -> None:
    cells = {(row.op, row.backend): row for row in reversed(rows)}  # of several implementations the preferred one
    names = list(dict.fromkeys(row.backend for row in rows))
    absent = {name for name in names if all(r.status == "missing" for r in rows if r.backend == name)}
    shown = [name for name in names if name not in absent]
    # A backend's only implementation is said once, above its column: many backends fit side by side then.
    used = {name: {r.implementation for r in cells.values() if r.backend == name} - {""} for name in shown}
    table = plain_table("op", *(f"{n}\n({', '.join(used[n])})" if len(used[n]) == 1 else n for n in shown))
    for op in dict.fromkeys(row.op for row in rows):
        bound = (cells[op, name] for name in shown)
        several = (f" ({r.implementation})" if len(used[r.backend]) > 1 and r.implementation else "" for r in bound)
        table.add_row(op, *(cells[op, name].status + more for name, more in zip(shown, several, strict=True)))
    out = console()
    if shown:
        for column in table.columns:
            column.no_wrap = True
        # A matrix that is folded cannot be read.
        out.width = max(out.width, Measurement.get(out, out.options.update_width(_WIDEST), table).maximum)
        out.print(table)
    for name in names:
        reasons = dict.fromkeys(row.reason for row in rows if row.backend == name and row.status != "executed")
        if reasons:
            out.print(f"\n{name}", style="bold")
            out.print(Padding("\n".join(reasons), (0, 0, 0, 2)))
