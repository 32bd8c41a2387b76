"""One run of each test for each ``--kvcore-store``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore_conformance.stores.fixtures import effort, space, store, store_target
from kvcore_conformance.stores.targets import masked

__all__ = ["effort", "space", "store", "store_target"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the stores that the options name."""
    if "store_target" not in metafunc.fixturenames:
        return
    named = metafunc.config.getoption("kvcore_store")
    if named:
        metafunc.parametrize("store_target", named, ids=map(masked, named), indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say once what is missing, where no store is named: here, not for each module as it is collected."""
    own = (item for item in items if item.path.parent == Path(__file__).parent)
    if not config.getoption("kvcore_store") and any(own):
        raise pytest.UsageError(
            "the conformance suite of stores needs --kvcore-store URI, for example --kvcore-store fs:/tmp/of-this-test"
        )
