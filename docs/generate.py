"""Write the pages of the documentation that are made from the code: python docs/generate.py."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kvcore.engine.config_model import GROUPS, field_of, form_of
from kvcore.engine.config_sources import ALIASES
from kvcore.plugins.discover import discover
from kvcore.settings import VARIABLES, current
from kvcore.telemetry.definitions import COMMON_LABELS, METRICS, SECONDS, Metric

ROOT = Path(__file__).resolve().parents[1]

HEADER = """\
# Environment variables

kvcore reads these variables, those of the [engine's settings](configuration.md), and no others; all are optional. They
are read when a backend is opened, not when kvcore is imported, so a notebook may change them. A value that means
nothing raises `kvcore.ConfigError`, which names the variable and gives an example. The header of the conformance suite
prints their values.

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

METRICS_HEADER = """\
# Metrics

What kvcore counts for Prometheus; [Metrics, logs and traces](observability.md) says how to turn it on. Every series
has the labels {common}; those of the tables come on top. Where vLLM serves the metrics, its own
labels (`model_name`, `engine`) stand for the first two. A histogram gives the series `_bucket`, `_sum` and
`_count`; the upper bounds of the buckets are {bounds} seconds.

- hit rate: `rate(kvcore_hit_tokens_total[5m]) / rate(kvcore_lookup_tokens_total[5m])`
- how much smaller a serde makes KV: `rate(kvcore_stored_bytes_total[5m])` over the sum of
  `rate(kvcore_tier_stored_bytes_total[5m])` of the tier that has it
- worth an alert: `kvcore_tier_degraded == 1` for some minutes, `rate(kvcore_tier_failures_total[5m]) > 0`, and
  `rate(kvcore_missed_tokens_total{{reason="not_loaded"}}[5m]) > 0`, which is KV that was there and could not be read

This page is written by `docs/generate.py` from `kvcore.telemetry.definitions.METRICS`.
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


def configuration() -> str:
    """Return the text of `configuration.md`: as it is, with the settings as the code has them."""
    begin, end = "<!-- settings: written by docs/generate.py -->\n", "<!-- end of settings -->\n"
    before, _, rest = (ROOT / "docs" / "configuration.md").read_text("utf-8").partition(begin)
    after = rest.partition(end)[2]
    other_names = {own: other for other, own in ALIASES.items()}
    sections = []
    for title, names in GROUPS.items():
        lines = [
            f"### {title}",
            "",
            _line("setting, variable", "default", "values", "what it does"),
            _line(*["---"] * 4),
        ]
        for name in names:
            field = field_of(name)
            variable = f"KVCORE_{name.replace('.', '_').upper()}"
            also = f" Alias: `{other_names[name]}`." if name in other_names else ""
            default = json.dumps(field.default).strip('"')
            cells = f"`{default}`" if default else "empty", form_of(name).text, f"{field.description}{also}"
            lines.append(_line(f"`{name}`<br>`{variable}`", *cells))
        sections.append("\n".join([*lines, ""]))
    return "".join([before, begin, "\n", "\n".join(sections), "\n", end, after])


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


def metrics() -> str:
    """Return the text of `metrics.md`."""
    common, bounds = ", ".join(f"`{name}`" for name in COMMON_LABELS), ", ".join(f"{bound:g}" for bound in SECONDS)
    groups: dict[str, list[Metric]] = {"Requests": [], "Tiers": [], "Serdes": []}
    for metric in METRICS:
        kind = {"tier": "Tiers", "serde": "Serdes"}.get(metric.name.split("_")[1], "Requests")
        groups[kind].append(metric)
    lines = [METRICS_HEADER.format(common=common, bounds=bounds)]
    for title, group in groups.items():
        lines += [f"## {title}", "", _line("metric", "kind", "unit", "labels", "what"), _line(*["---"] * 5)]
        for metric in group:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(_line(f"`{metric.name}`", metric.kind, metric.unit, labels, metric.help))
        lines.append("")
    return "\n".join(lines)


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


PAGES = {"configuration.md": configuration, "environment.md": environment, "ops.md": ops, "metrics.md": metrics}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (Path(__file__).parent / name).write_text(text(), encoding="utf-8")
