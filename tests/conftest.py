"""What holds for all tests of the core: the same examples each time, and no variable of the caller counts."""

from __future__ import annotations

import hypothesis
import pytest

from kvcore.settings import VARIABLES

# A test that passes here passes everywhere: the same examples on every run, and no limit of time for one of them, as
# machines may be slow. Exploring is the business of the conformance suite's nightly profile.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Keep the tests free of what the caller's environment says."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
