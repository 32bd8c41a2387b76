"""One run of the suite: the backend under test, what was counted per op, and the reports made of it."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvcore import Backend, BackendSpec, open_backend
from kvcore.errors import ConfigError, KVCoreError
from kvcore.hookspecs import op_names
from kvcore.ops import candidates
from kvcore.plugins.discover import Candidate, describe
from kvcore.plugins.probe import probe
from kvcore.plugins.record import RECORD_NAME, Entry, Evidence, Hashes, add_evidence, hashes_of
from kvcore.settings import VARIABLES
from kvcore_conformance import __version__
from kvcore_conformance.checks import ConformanceFailure, Subject
from kvcore_conformance.profiles import Profile, activate
from kvcore_conformance.xfails import KnownFailure, read_xfails, stale

__all__ = ["SuiteRun", "open_named", "open_run", "usable"]

_PROPERTY = "kvcore_op"
SECTION = "source that reproduces it"
_OUTCOMES = ("passed", "failed", "skipped", "xfailed")


def usable() -> str:
    """Return the names of the backends that can be tested here, for messages."""
    try:
        names = [c.name for c in candidates() if c.status == "usable"]
    except ConfigError as error:
        return f"unknown ({error})"
    return ", ".join(names) or "none (install kvcore-cpu-ref, or your backend)"


def open_named(name: str) -> Backend:
    """Open a backend by its installed name, or as ``module:factory``; what it lacks it lacks.

    Raises
    ------
    KVCoreError
        It cannot be used; the message says why.
    """
    module, colon, factory = name.partition(":")
    if not colon:
        return open_backend(name, fallback="error")
    try:
        spec = getattr(import_module(module), factory)()
    except Exception as error:  # foreign code: whatever it raises is the reason
        raise ConfigError(f"{name} gives no backend: {describe(error)}") from error
    if not isinstance(spec, BackendSpec):
        raise ConfigError(f"{name} returned a {type(spec).__qualname__}, not a kvcore.BackendSpec")
    found = [probe(Candidate(spec.name, "found", f"given as {name}", spec))]
    return open_backend(spec.name, fallback="error", found=found)


def open_run(config: pytest.Config) -> SuiteRun:
    """Open the backend that the options name.

    Raises
    ------
    pytest.UsageError
        An option means nothing, or the backend cannot be used here.
    """
    name = config.getoption("kvcore_backend")
    ops = tuple(op.strip() for op in config.getoption("kvcore_ops").split(",") if op.strip())
    unknown = sorted(set(ops) - {*op_names(), "runtime"})
    if unknown:
        raise pytest.UsageError(f"--kvcore-ops: no op {', '.join(unknown)}; ops are {', '.join(op_names())}, runtime")
    if ops and config.getoption("kvcore_record"):
        raise pytest.UsageError("--kvcore-record records whole runs; leave --kvcore-ops out")
    path = config.getoption("kvcore_xfails")
    try:
        known = read_xfails(Path(path)) if path else []
        backend = open_named(name)
    except KVCoreError as error:
        raise pytest.UsageError(f"--kvcore-backend {name}: {error}" if path is None else str(error)) from error
    profile = activate(config.getoption("kvcore_profile"), shrink=not config.getoption("kvcore_no_shrink"))
    report = config.getoption("kvcore_report")
    return SuiteRun(
        Subject(backend, name),
        profile,
        ops,
        known,
        Path(report) if report else None,
        _hashes(backend) if config.getoption("kvcore_record") else None,
    )


def _hashes(backend: Backend) -> Hashes:
    """Return the hashes of what is about to run: the record is for these, whatever is edited meanwhile."""
    try:
        return hashes_of(backend.spec)
    except ConfigError as error:
        raise pytest.UsageError(f"--kvcore-record: {error}") from error


@dataclass(slots=True, eq=False)
class SuiteRun:
    """The state of a run."""

    subject: Subject
    profile: Profile
    ops: tuple[str, ...]
    known: list[KnownFailure]
    report_path: Path | None
    hashes: Hashes | None  # where the run is to be recorded
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    planned: Counter[str] = field(default_factory=Counter)
    whole: bool = False
    problems: list[str] = field(default_factory=list)

    # --- before

    def header(self) -> list[str]:
        """Return the lines that say what is tested, with what."""
        backend = self.subject.backend
        candidate = next((v for v in backend.explain().verdicts if v.taken), None)
        source = candidate.distribution if candidate is not None else ""
        lines = [
            f"kvcore conformance {__version__}: backend {self.subject.name} ({source or 'not installed'}), "
            f"{len(backend.bindings)} of {len(op_names())} ops, profile {self.profile.name}",
            "kvcore versions: " + ", ".join(f"{name} {number}" for name, number in _versions().items()),
            f"kvcore device: {self._device()}",
            "kvcore bindings: " + ", ".join(f"{op}={b.implementation}" for op, b in backend.bindings.items()),
        ]
        lines += [f"{name}: {'unset' if value is None else repr(value)}" for name, value in _environment().items()]
        return lines

    def take(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Mark known failures, and return the tests that were not asked for.

        Raises
        ------
        pytest.UsageError
            A known failure means no test.
        """
        tests = {path.name for path in Path(__file__).parent.glob("test_*.py")}
        self.whole = tests <= {item.path.name for item in items}
        old = stale(self.known, map(_name, items)) if self.whole else []
        if old:
            what = "; ".join(f"line {k.line}: {k.pattern}" for k in old)
            raise pytest.UsageError(f"known failures that mean no test of the suite: {what}; remove them")
        dropped = []
        for item in items:
            if self.ops and not set(self.ops) & set(_ops(item)):
                dropped.append(item)
                continue
            self.planned.update(_ops(item))
            for known in self.known:
                if known.matches(_name(item)):
                    item.add_marker(pytest.mark.xfail(reason=known.reason, strict=True))
                    break
        return dropped

    def setup(self, item: pytest.Item) -> None:
        """Skip a test of an op that the backend does not have."""
        for op in _ops(item):
            if op != "runtime" and op not in self.subject.backend.bindings:
                pytest.skip(f"{self.subject.backend.name} has no {op}")

    # --- during

    def annotate(self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Write into the report of a test's phase which ops it judges, and the source that reproduces a failure."""
        report.user_properties += [(_PROPERTY, op) for op in _ops(item)]
        if report.failed and call.excinfo is not None:
            for failure in _failures(call.excinfo.value):
                report.sections.append((SECTION, failure.source))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a phase of a test. Reports come from worker processes too."""
        if report.when == "call" or not report.passed:
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            for name, op in report.user_properties:
                if name == _PROPERTY:
                    self.counts[str(op)][outcome] += 1

    # --- after

    def finish(self, *, complete: bool) -> list[str]:
        """Write what was asked for; return what went wrong with it."""
        if self.report_path is not None:
            try:
                self.report_path.write_text(json.dumps(self._report(), indent=1, sort_keys=True) + "\n", "utf-8")
            except OSError as error:
                self.problems.append(f"the report could not be written: {error}")
        if self.hashes is not None:
            self._record(complete, self.hashes)
        return self.problems

    def summary(self) -> list[str]:
        """Return a line per op."""
        backend = self.subject.backend
        width = max(map(len, op_names()))
        lines = []
        conforming = 0
        for op in (*op_names(), "runtime"):
            binding = backend.bindings.get(op)
            counts = self.counts[op]
            if op != "runtime" and binding is None:
                lines.append(f"  {op:<{width}}  {backend.name} has no {op}")
                continue
            implementation = binding.implementation if binding is not None else type(backend.runtime).__name__
            numbers = ", ".join(f"{counts[o]} {o}" for o in _OUTCOMES if counts[o]) or "not run"
            lines.append(f"  {op:<{width}}  {implementation}: {numbers}")
            conforming += op != "runtime" and self._conforms(op)
        total = len(op_names())
        lines.append(f"  {conforming} of {total} ops conform; {len(backend.bindings)} of {total} are implemented")
        return lines

    def _conforms(self, op: str) -> bool:
        counts = self.counts[op]
        return counts["passed"] > 0 and not counts["failed"] and not counts["xfailed"]

    def _device(self) -> str:
        backend = self.subject.backend
        name = getattr(backend.runtime, "device_name", "")  # runtimes of devices have one: "NVIDIA H200"
        return f"{'/'.join(backend.spec.device_types)} {backend.runtime.arch}" + (f" ({name})" if name else "")

    def _facts(self) -> dict[str, Any]:
        return {
            "suite": __version__,
            "backend": self.subject.backend.name,
            "device": self._device(),
            "machine": platform.machine(),
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
            "profile": self.profile.name,
        }

    def _report(self) -> dict[str, Any]:
        backend = self.subject.backend
        ops = {}
        for op in (*op_names(), "runtime"):
            binding = backend.bindings.get(op)
            implementation = binding.implementation if binding is not None else None
            ops[op] = {"implementation": implementation, **{o: self.counts[op][o] for o in _OUTCOMES}}
        return {
            **self._facts(),
            "versions": _versions(),
            "environment": _environment(),
            "implemented": len(backend.bindings),
            "total": len(op_names()),
            "ops": ops,
            "problems": list(self.problems),
        }

    def _record(self, complete: bool, hashes: Hashes) -> None:
        backend = self.subject.backend
        if not complete or not self.whole:
            self.problems.append("nothing recorded: the whole suite must run, in one process")
            return
        ops = {}
        for op, binding in backend.bindings.items():
            ran = sum(self.counts[op].values()) >= self.planned[op]
            if self._conforms(op) and ran:
                ops[op] = Entry(binding.implementation, self.counts[op]["passed"])
        facts = self._facts()
        piece = Evidence(
            backend=backend.spec.name,
            status="executed",
            date=facts["date"],
            sources=hashes.sources,
            kernels=hashes.kernels,
            ops=ops,
            **{name: facts[name] for name in ("device", "machine", "suite", "profile")},
        )
        judged = {(op, binding.implementation) for op, binding in backend.bindings.items()}
        try:
            add_evidence(backend.spec, piece, judged)
        except ConfigError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{RECORD_NAME} could not be written: {error}")


def _ops(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("kvcore_op") for name in marker.args]


def _name(item: pytest.Item) -> str:
    """Return a test's name within the suite: it is the same wherever the suite is installed."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _failures(error: BaseException) -> Iterator[ConformanceFailure]:
    if isinstance(error, ConformanceFailure):
        yield error
    for inner in getattr(error, "exceptions", ()):
        yield from _failures(inner)


def _versions() -> dict[str, str]:
    names = ("kvcore", "numpy", "ml_dtypes", "hypothesis", "pytest")
    found = {"python": platform.python_version()}
    for name in names:
        found[name] = import_module(name).__version__ if name == "kvcore" else version(name)
    return found


def _environment() -> dict[str, str | None]:
    return {variable.name: variable.shown(os.environ) for variable in VARIABLES}
