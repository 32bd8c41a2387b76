"""``kvcore ops``: which implementation of each op is bound, and what the conformance suite has really run."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, fields
from typing import Annotated

import typer
from rich.padding import Padding

from kvcore.cli.output import console, plain_table, print_json
from kvcore.errors import ConfigError, KVCoreError, NoBackendError
from kvcore.hookspecs import op_names
from kvcore.ops import candidates, explain
from kvcore.plugins.discover import Candidate
from kvcore.plugins.link import link
from kvcore.plugins.verification import OpStatus, op_statuses
from kvcore.settings import current

__all__ = ["collect", "ops"]


def ops(
    backend: Annotated[str | None, typer.Option(help="One backend, with the reason of every status.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print lines of comma-separated values.")] = False,
) -> None:
    """Show what is bound to every op, and what was verified.

    executed: run by the suite on this kind of machine. compiled: built, never run here. not-run: nothing counts as
    proof, the reason says why. missing: the backend does not have it.
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv are two forms of one answer; give one")
    rows = collect(backend)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([field.name for field in fields(OpStatus)])
        writer.writerows(list(asdict(row).values()) for row in rows)
    elif backend:
        table = plain_table("op", "implementation", "status", "why")
        for row in rows:
            table.add_row(row.op, row.implementation, row.status, row.reason)
        console().print(table)
    else:
        _print_matrix(rows)


def collect(backend: str | None = None) -> list[OpStatus]:
    """Return the status of every op: of one backend, or of all that are installed or known.

    ``KVCORE_KERNELS`` applies to the backend that would be opened (or is asked for), as it does when one is.

    Raises
    ------
    NoBackendError
        `backend` is neither installed nor known.
    """
    settings = current()
    found = candidates(settings)
    if backend is not None and backend not in {candidate.name for candidate in found}:
        explain(backend)  # raises, with the nearest name and the table
    try:
        chosen = backend or next(v.name for v in explain().verdicts if v.taken)
    except NoBackendError:
        chosen = ""
    rows = []
    for candidate in found:
        if backend in (None, candidate.name):
            rows += _statuses(candidate, settings.kernels if candidate.name == chosen else ())
    return rows


def _statuses(candidate: Candidate, kernels: tuple[tuple[str, str], ...]) -> list[OpStatus]:
    reason = candidate.reason
    if candidate.status == "usable" and candidate.spec is not None:
        try:
            return op_statuses(link(candidate.spec, kernels))
        except ConfigError:  # the user's KVCORE_KERNELS, not the backend
            raise
        except KVCoreError as error:
            reason = str(error)
    return [OpStatus(op, candidate.name, "", "missing", reason) for op in op_names()]


def _print_matrix(rows: list[OpStatus]) -> None:
    cells = {(row.op, row.backend): row for row in rows}
    names = list(dict.fromkeys(row.backend for row in rows))
    absent = {name for name in names if all(r.status == "missing" for r in rows if r.backend == name)}
    shown = [name for name in names if name not in absent]
    # A backend's only implementation is said once, above its column: many backends fit side by side then.
    used = {name: {r.implementation for r in rows if r.backend == name} - {""} for name in shown}
    table = plain_table("op", *(f"{n}\n({', '.join(used[n])})" if len(used[n]) == 1 else n for n in shown))
    for op in dict.fromkeys(row.op for row in rows):
        bound = (cells[op, name] for name in shown)
        several = (f" ({r.implementation})" if len(used[r.backend]) > 1 and r.implementation else "" for r in bound)
        table.add_row(op, *(cells[op, name].status + more for name, more in zip(shown, several, strict=True)))
    out = console()
    if shown:
        out.print(table)
    for name in names:
        reasons = dict.fromkeys(row.reason for row in rows if row.backend == name and row.status != "executed")
        if reasons:
            out.print(f"\n{name}", style="bold")
            out.print(Padding("\n".join(reasons), (0, 0, 0, 2)))
