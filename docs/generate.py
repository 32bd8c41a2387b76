"""Write the pages of the documentation that are made from the code: python docs/generate.py."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kvcore.plugins.discover import discover
from kvcore.settings import VARIABLES, current

ROOT = Path(__file__).resolve().parents[1]

HEADER = """\
# Environment variables

kvcore reads these variables and no others; all are optional. They are read when a backend is opened, not when kvcore
is imported, so a notebook may change them. A value that means nothing raises `kvcore.ConfigError`, which names the
variable and gives an example. The header of the conformance suite prints their values.

This page is written by `docs/generate.py` from `kvcore.settings.VARIABLES`.
"""

OPS_HEADER = """\
# What was verified

Of each op and backend: what its own record says. A record is written by the [conformance suite](conformance.md) and by
the check that kernels compile, ships with the backend's package, and holds for the very sources that it was made from.

- **executed**: the suite has run it, on the devices that are named below, and all of its tests passed
- compiled: compilers have made code of it for the architectures that are named below, and that is all: it has *never
  run*
- not run: nothing counts as proof. The reason is below
- -: the backend does not have it

This page is written by `docs/generate.py` from `kvcore ops --records --csv`. `kvcore ops` says the same of what is
installed and bound on your machine.
"""

SHOWN = {"executed": "**executed**", "compiled": "compiled", "not-run": "not run", "missing": "-"}


def environment() -> str:
    """Return the text of `environment.md`."""
    sections = [HEADER]
    for variable in VARIABLES:
        default = f"`{variable.default}`" if variable.default else "empty"
        example = f"`{variable.name}={variable.example}`"
        sections.append(f"## {variable.name}\n\n{variable.help}\n\nDefault: {default}. For example {example}.\n")
    return "\n".join(sections)


def ops() -> str:
    """Return the text of `ops.md`: the backends of this repository."""
    folders = {f"kvcore-{folder.parent.name.replace('_', '-')}" for folder in ROOT.glob("backends/*/pyproject.toml")}
    backends = [c.name for c in discover(current({})) if c.distribution.partition(" ")[0] in folders]
    command = [sys.executable, "-m", "kvcore", "ops", "--records", "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return ops_page(done.stdout, backends)


def ops_page(text: str, backends: Collection[str]) -> str:
    """Return the page made of what `kvcore ops --records --csv` printed, of these backends."""
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["backend"] in backends]
    columns: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        columns.setdefault((row["backend"], row["implementation"]), []).append(row)
    lines = [OPS_HEADER, _line("op", *(_title(column) for column in columns)), _line("---", *("---" for _ in columns))]
    cells = {(row["op"], row["backend"], row["implementation"]): SHOWN[row["status"]] for row in rows}
    names = dict.fromkeys(row["op"] for row in rows)
    lines += (_line(f"`{op}`", *(cells.get((op, *c), SHOWN["missing"]) for c in columns)) for op in names)
    sections = [_section(_title(column), found) for column, found in columns.items()]
    return "\n".join([*lines, "", *sections])


def _title(column: tuple[str, str]) -> str:
    return " ".join(filter(None, column))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _section(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return devices, architectures and reasons of one implementation, each with the number of ops it is true of."""
    said: dict[str, int] = {}
    for row in rows:
        facts = [f"executed on {row['executed_on']}"] if row["executed_on"] else []
        facts += [f"compiled for {', '.join(row['compiled_for'].split())}"] if row["compiled_for"] else []
        for fact in facts or [f"{row['status'].replace('-', ' ')}: {row['reason']}"]:
            said[fact] = said.get(fact, 0) + 1
    whole = len(rows)
    lines = [f"- {'all' if number == whole else number} of {whole} ops: {fact}" for fact, number in said.items()]
    return "\n".join([f"## {title}", "", *lines, ""])


PAGES = {"environment.md": environment, "ops.md": ops}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (Path(__file__).parent / name).write_text(text(), encoding="utf-8")
