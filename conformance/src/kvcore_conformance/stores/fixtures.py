"""Fixtures of the suite. A package that tests a store of its own overrides `store_target`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore.tiers.stores import Store
from kvcore_conformance.stores.effort import EFFORTS, Effort
from kvcore_conformance.stores.space import Space
from kvcore_conformance.stores.targets import Target, target_of

__all__ = ["effort", "space", "store", "store_target"]


@pytest.fixture(scope="session")
def store_target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The store under test: the one of the parameter, a name or URI."""
    volatile = bool(request.config.getoption("kvcore_store_volatile"))
    with target_of(request.param, volatile=volatile) as target:
        yield target


@pytest.fixture(scope="session")
def effort(request: pytest.FixtureRequest) -> Effort:
    """How much each test does: by ``--kvcore-profile``."""
    return EFFORTS[request.config.getoption("kvcore_profile")]


@pytest.fixture
def space(store_target: Target) -> Iterator[Space]:
    """The store under test, opened, with keys of this test's own."""
    with Space(store_target) as opened:
        yield opened


@pytest.fixture
def store(space: Space) -> Store:
    """The open store itself."""
    return space.store
