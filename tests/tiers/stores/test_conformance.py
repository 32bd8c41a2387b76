"""The conformance suite of stores, in its quick profile, over memory, a folder, and servers that it starts."""

from __future__ import annotations

import pytest

from kvcore_conformance.stores.suite import *  # noqa: F403
from kvcore_conformance.stores.suite import target_of


@pytest.fixture(scope="session", params=["memory", "fs", "fault", "resp", "s3"])
def store_target(request):
    with target_of(request.param) as target:
        yield target
