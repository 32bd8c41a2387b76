"""The pytest plugin: options, header, known failures, accounting per op.

It is inert in the test runs of other projects: nothing of kvcore is imported before ``--kvcore-backend`` is given or a
test of the suite is collected.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcore_conformance.run import SuiteRun

__all__ = ["RUN"]

RUN: pytest.StashKey[SuiteRun | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("kvcore", "conformance of kvcore backends")
    group.addoption(
        "--kvcore-backend",
        metavar="NAME",
        help="backend under test: the name of an installed one, or module:factory of a BackendSpec",
    )
    profiles = ("tiny", "quick", "ci", "nightly")
    group.addoption(
        "--kvcore-store",
        metavar="URI",
        action="append",
        default=[],
        help="store under test, for kvcore_conformance.stores: a URI, or memory, fs, fs-direct, fault, capped, resp or "
        "s3, for which folders and servers are made; may be repeated",
    )
    group.addoption(
        "--kvcore-store-volatile", action="store_true", help="stores given as URIs forget their frames when closed"
    )
    group.addoption("--kvcore-profile", choices=profiles, default="quick", help="how long to search")
    group.addoption("--kvcore-ops", metavar="OP,...", default="", help="run the tests of these ops only")
    group.addoption("--kvcore-xfails", metavar="FILE", help="known failures: 'test  # reason', one a line")
    group.addoption("--kvcore-report", metavar="FILE", help="write the result as JSON")
    group.addoption(
        "--kvcore-record", action="store_true", help="write conformance.json into the package of the backend"
    )
    group.addoption(
        "--kvcore-no-shrink", action="store_true", help="report the first failing input instead of the smallest"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; open the backend if one is named."""
    # Its assertions are in modules that are imported, not collected, where a package tests a store of its own.
    pytest.register_assert_rewrite("kvcore_conformance.stores")
    config.addinivalue_line("markers", "kvcore_op(name): the op, or 'runtime', that a conformance test judges")
    config.stash[RUN] = None
    if config.getoption("kvcore_backend"):
        from kvcore_conformance.run import open_run

        run = config.stash[RUN] = open_run(config)
        config.pluginmanager.register(run, "kvcore_conformance_run")
    else:
        given = [o for o in ("ops", "xfails", "report", "record", "no_shrink") if config.getoption(f"kvcore_{o}")]
        if given:
            raise pytest.UsageError(f"--kvcore-{given[0].replace('_', '-')} needs --kvcore-backend NAME")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested, with which versions and variables."""
    run = config.stash[RUN]
    return run.header() if run is not None else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the stores' suite out where no store is named; of what the command line names, pytest does not ask."""
    if collection_path.parts[-2:] == ("kvcore_conformance", "stores") and not config.getoption("kvcore_store"):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before -k and -m: what was left out must be known
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hold the tests of the suite to the run: ops asked for, known failures."""
    own = [item for item in items if item.get_closest_marker("kvcore_op") and _of_suite(item)]
    if not own:
        return
    run = config.stash[RUN]
    if run is None:
        from kvcore_conformance.run import usable

        raise pytest.UsageError(f"the conformance suite needs --kvcore-backend NAME; usable here: {usable()}")
    dropped = run.take(own)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(map(id, dropped))
        items[:] = [item for item in items if id(item) not in gone]


def _of_suite(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    name = str(getattr(module, "__name__", ""))
    return name.startswith("kvcore_conformance.") and not name.startswith("kvcore_conformance.stores.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of ops that the backend does not have."""
    run = item.config.stash[RUN]
    if run is not None and _of_suite(item):
        run.setup(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the run wants to know of a test into its report."""
    report = yield
    run = item.config.stash[RUN]
    if run is not None and _of_suite(item):
        run.annotate(item, report, call)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Judge the known failures; write report and record."""
    run = session.config.stash.get(RUN, None)
    worker = hasattr(session.config, "workerinput")
    if run is not None and not worker and not session.config.getoption("collectonly"):
        problems = run.finish(complete=_complete(exitstatus))
        if problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _complete(exitstatus: Any) -> bool:
    return int(exitstatus) in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line per op, and what is wrong with the list of known failures."""
    run = terminalreporter.config.stash[RUN]
    if run is None:
        return
    terminalreporter.section(f"kvcore conformance of {run.subject.name}")
    for line in run.summary():
        terminalreporter.write_line(line)
    for problem in run.problems:
        terminalreporter.write_line(f"ERROR: {problem}", red=True, bold=True)
