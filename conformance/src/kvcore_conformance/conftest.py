"""Fixtures of the suite's own tests."""

from __future__ import annotations

import pytest

from kvcore import Backend
from kvcore.plugins.link import link
from kvcore.plugins.select import Explanation
from kvcore_conformance.checks import Subject
from kvcore_conformance.plugin import RUN


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test."""
    run = request.config.stash[RUN]
    if run is None:
        raise pytest.UsageError("the conformance suite needs --kvcore-backend NAME")
    return run.subject


@pytest.fixture(scope="session")
def reference(subject: Subject) -> Backend:
    """The NumPy reference, whatever the environment says about backends; for inputs too large for the oracle."""
    if subject.is_reference:
        pytest.skip("cpu_ref is not compared with itself; the oracle judges it")
    from kvcore_cpu_ref import backend

    return Backend(link(backend()), Explanation("the reference", ()))
