"""The score of the suite against kernels that are wrong on purpose, printed at the end."""

from __future__ import annotations

import pytest

SCORE = pytest.StashKey[dict[str, bool]]()


def pytest_configure(config):
    config.stash[SCORE] = {}


@pytest.fixture(scope="session")
def score(pytestconfig):
    """Return mutant -> caught, which the last line of the run is made from."""
    return pytestconfig.stash[SCORE]


def pytest_terminal_summary(terminalreporter):
    caught = terminalreporter.config.stash[SCORE]
    if caught:
        terminalreporter.write_line(f"kernel mutants caught: {sum(caught.values())}/{len(caught)}", bold=True)
