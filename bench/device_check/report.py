"""What the check says in the end: a file for programs, a page for people, and the logs of what went wrong."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.device_check.jobs import Job, Outcome

__all__ = ["Report"]

_COLUMNS = {
    "implementation": "kernels",
    "row_bytes": "row",
    "value": "rate",
    "us": "us",
    "ratio": "of yardstick",
    "aim": "aim",
    "coded_bytes": "coded bytes",
    "checked_us": "queue, checked us",
    "planned_us": "queue, planned us",
    "round_trip_us": "round trip us",
}
_LOG_BYTES = 20_000
_SHOWN = 2  # failures in the line of a step
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b.*: |ERROR\b|FAILED\b")


class Report:
    """Collects outcomes.

    Parameters
    ----------
    backend : str
    small : bool
        Whether sizes were those for an emulated device: its figures mean nothing.
    profile : str
        Of the suite.
    """

    def __init__(self, backend: str, *, small: bool, profile: str) -> None:
        self.backend = backend
        self.small = small
        self.profile = profile
        self.seconds = 0.0
        self.suite: dict[str, Any] | None = None
        """The report of the conformance suite, merged."""
        self._outcomes: list[Outcome] = []
        self._order: dict[str, int] = {}

    def expect(self, jobs: Iterable[Job]) -> None:
        """Say what is run next: outcomes are shown in this order, whichever comes first."""
        for job in jobs:
            self._order.setdefault(job.name, len(self._order))

    def add(self, outcome: Outcome) -> None:
        """Take an outcome in."""
        self._outcomes.append(outcome)
        self._outcomes.sort(key=lambda o: self._order.get(o.job.name, len(self._order)))

    def has(self, kernels: str) -> bool:
        """Tell whether the backend says that it has an implementation of this name."""
        return kernels in str(self._facts().get("kernels", "")).split(", ")

    @property
    def passed(self) -> bool:
        """Whether every required step ran and is in order."""
        return bool(self._outcomes) and all(o.status == "ok" for o in self._outcomes if o.job.required)

    def verdict(self) -> str:
        """Return the result in a line."""
        bad = [o.job.name for o in self._outcomes if o.job.required and o.status != "ok"]
        return f"FAILED: {', '.join(bad)}" if bad else "passed" if self._outcomes else "FAILED: nothing was run"

    def line(self, outcome: Outcome) -> str:
        """Return an outcome in a line."""
        checks = [r for r in outcome.records if "check" in r]
        counts = {s: sum(r["status"] == s for r in checks) for s in ("ok", "failed", "forbidden")}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        failed = [f"{r['check']}: {r['detail'][:160]}" for r in checks if r["status"] == "failed"]
        more = [f"and {len(failed) - _SHOWN} more"] if len(failed) > _SHOWN else []
        bad = "; ".join(failed[:_SHOWN] + more)
        said = said or _last_words(outcome)[:160]
        reason = outcome.reason if outcome.status != "ok" and not bad else ""
        parts = [f"{outcome.job.name:<18} {outcome.status:<9} {outcome.seconds:6.1f} s", said, reason, bad]
        return "  ".join(part for part in parts if part)

    def write(self, folder: Path) -> None:
        """Write device-check.json and device-check.md, the suite's report, and device-check.log if anything failed."""
        (folder / "device-check.json").write_text(json.dumps(self._whole(), indent=1) + "\n", "utf-8")
        (folder / "device-check.md").write_text("\n".join(self._page()) + "\n", "utf-8")
        suite, log = folder / "conformance-report.json", folder / "device-check.log"
        for stale in (suite, log):
            stale.unlink(missing_ok=True)
        if self.suite is not None:
            suite.write_text(json.dumps(self.suite, indent=1, sort_keys=True) + "\n", "utf-8")
        bad = [o for o in self._outcomes if o.status != "ok"]
        if bad:
            log.write_text("\n".join(f"=== {o.job.name}: {o.status}\n{o.log[-_LOG_BYTES:]}" for o in bad), "utf-8")

    def keep(self, path: Path, folder: Path) -> None:
        """Copy a file that a step has left, if there is one."""
        if path.is_file():
            shutil.copyfile(path, folder / path.name)

    def _facts(self) -> dict[str, Any]:
        return {r["fact"]: r["value"] for o in self._outcomes for r in o.records if "fact" in r}

    def _figures(self) -> list[dict[str, Any]]:
        return [r for o in self._outcomes for r in o.records if "figure" in r]

    def _whole(self) -> dict[str, Any]:
        steps = [
            {
                "step": o.job.step,
                "name": o.job.name,
                "required": o.job.required,
                "status": o.status,
                "seconds": round(o.seconds, 2),
                "reason": o.reason,
                "checks": [r for r in o.records if "check" in r],
            }
            for o in self._outcomes
        ]
        return {
            "backend": self.backend,
            "passed": self.passed,
            "verdict": self.verdict(),
            "small": self.small,
            "profile": self.profile,
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "facts": self._facts(),
            "steps": steps,
            "figures": self._figures(),
        }

    # --- the page

    def _page(self) -> list[str]:
        lines = [f"# Device check of {self.backend}: {self.verdict()}", "", f"{self.seconds:.0f} s in all.", ""]
        lines += [f"- {name}: {value}" for name, value in self._facts().items()]
        rows = [
            [o.job.name, o.status, f"{o.seconds:.1f}", "yes" if o.job.required else "no", self._said(o)]
            for o in self._outcomes
        ]
        lines += ["", "## Steps", "", *_table(["step", "result", "s", "required", ""], rows)]
        lines += self._checks() + self._ops()
        if self._figures():
            lines += ["", "## Figures", "", "Medians. Bytes are counted once, symbols are KVS1's 16-bit values."]
            lines += ["**Small sizes: these figures mean nothing.**"] if self.small else []
        for table in dict.fromkeys(r["table"] for r in self._figures()):
            lines += ["", f"### {table}", "", *self._figure_table(table)]
        return lines

    @staticmethod
    def _said(outcome: Outcome) -> str:
        checks = [r for r in outcome.records if "check" in r]
        forbidden = sum(r["status"] == "forbidden" for r in checks)
        said = f"{sum(r['status'] == 'ok' for r in checks)} of {len(checks)} checks" if checks else ""
        said = said or _last_words(outcome)
        return said + (f", {forbidden} forbidden by the machine" if forbidden else "")

    def _checks(self) -> list[str]:
        rows = [
            [o.job.name, r["check"], r["status"], f"{r['seconds']:.2f}", r["detail"]]
            for o in self._outcomes
            for r in o.records
            if "check" in r
        ]
        return ["", "## Checks", "", *_table(["step", "check", "result", "s", ""], rows)] if rows else []

    def _ops(self) -> list[str]:
        if self.suite is None:
            return []
        counts = ("passed", "failed", "skipped", "xfailed")
        rows = [
            [op, str(entry["implementation"] or ""), *(str(entry[name]) for name in counts)]
            for op, entry in self.suite["ops"].items()
        ]
        whole = "the whole suite" if self.suite["complete"] else "NOT the whole suite, or with failures"
        head = f"Profile {self.suite['profile']}, {whole}; device {self.suite['device']}."
        return ["", "## Conformance", "", head, "", *_table(["op", "implementation", *counts], rows)]

    def _figure_table(self, table: str) -> list[str]:
        figures = [r for r in self._figures() if r["table"] == table]
        columns = [name for name in _COLUMNS if any(name in r for r in figures)]
        rows = [[r["figure"], *(_cell(name, r) for name in columns)] for r in figures]
        return _table(["case", *(_COLUMNS[name] for name in columns)], rows)


def _last_words(outcome: Outcome) -> str:
    """Return what a job said in the end: of one that failed, its error; the reason where it said nothing."""
    lines = [line for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)] if outcome.status != "ok" else []
    return errors[-1] if errors else lines[-1] if lines else outcome.reason


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if name == "value":
        return f"{value:g} {row['unit']}"
    if name == "ratio":
        return f"{value:.0%}"
    if name == "aim":
        reached = row.get("ratio") if value < 1 else row["value"]
        return f"{f'{value:.0%}' if value < 1 else f'{value:g}'} {'met' if reached and reached >= value else 'MISSED'}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *map(line, rows)]
