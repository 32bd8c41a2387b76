"""Run the suite against a mutant, in this process, up to the first failure."""

from __future__ import annotations

import contextlib
import io
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcore_conformance import golden
from kvcore_conformance.mutants.catalogue import COMPOSITES, Mutant

__all__ = ["Outcome", "judge"]


@dataclass(slots=True, eq=False)
class Outcome:
    """What the suite said about a mutant.

    Parameters
    ----------
    passed : int
        Tests that passed before the first one failed.
    failed : str
        Name of the test that failed, empty if none did.
    message : str
        What it said.
    source : str
        The snippet it printed.
    """

    passed: int = 0
    failed: str = ""
    message: str = ""
    source: str = ""
    output: str = field(default="", repr=False)

    def caught(self, op: str) -> bool:
        """Tell whether the suite failed for the right reason: an assertion that names the op, or a golden frame."""
        said = self.message.partition("\n")[0]
        named = "|".join(golden.CASES) if op in COMPOSITES else op
        return bool(self.failed) and (
            op == "runtime" or re.match(rf"(\w+\.)*(ConformanceFailure|AssertionError): ({named})\b", said) is not None
        )

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test said."""
        if report.failed and not self.failed:
            self.failed = report.nodeid.partition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = str(getattr(crash, "message", report.longrepr))
            self.source = "".join(content for name, content in report.sections if name.startswith("source"))
        elif report.passed and report.when == "call":
            self.passed += 1


def judge(mutant: Mutant, key: str | None = None) -> Outcome:
    """Run the tests of a mutant's op, without shrinking; of a composite, the golden frames.

    Tests of an op that compare with the reference, or with golden files, are left out: the oracle alone must catch
    every defect, and by its op. `key` names another backend to run them against, in `kvcore_conformance.mutants.made`.
    """
    outcome = Outcome()
    of_op = ("--kvcore-ops", mutant.op, "-k", "not as_the_reference and not golden")
    arguments = [
        "--pyargs",
        "kvcore_conformance",
        *("--kvcore-backend", f"kvcore_conformance.mutants.made:{key or mutant.key}"),
        *(("-k", "golden") if mutant.op in COMPOSITES else of_op),
        *("--kvcore-no-shrink", "-x", "-q", "--tb=short", "--import-mode=importlib", "-p", "no:cacheprovider"),
        # Whatever the project around configures (warnings as errors, say) must not decide what is caught.
        *("-c", os.devnull, f"--rootdir={Path(__file__).parents[1]}"),
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        plugins: list[Any] = [outcome]
        pytest.main(arguments, plugins=plugins)
    outcome.output = printed.getvalue()
    return outcome
