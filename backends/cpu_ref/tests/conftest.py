"""The reference, opened without regard to what else is installed."""

from __future__ import annotations

import hypothesis
import pytest

import kvcore
from kvcore.plugins.discover import Candidate
from kvcore_cpu_ref import backend as reference
from kvcore_cpu_ref.probe import probe

# The same examples on every run, and no limit of time for one of them.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def ref():
    """Return the reference with its checked ops."""
    answer = probe()
    assert answer.usable
    found = [Candidate("cpu_ref", "usable", answer.reason, reference(), answer)]
    return kvcore.open_backend("cpu_ref", fallback="error", found=found)
