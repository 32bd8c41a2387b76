"""The conformance suite of stores, in its quick profile, over memory, a folder, and servers that it starts."""

from __future__ import annotations

import pytest

from kvcore.tiers.stores.guarded import open_guarded
from kvcore_conformance.stores.suite import *  # noqa: F403
from kvcore_conformance.stores.suite import target_of
from kvcore_conformance.stores.targets import Target


@pytest.fixture(scope="session", params=["memory", "fs", "fault", "guarded", "resp", "s3"])
def store_target(request):
    if request.param == "guarded":
        yield Target("guarded", lambda: open_guarded("memory:"), persistent=False)
        return
    with target_of(request.param) as target:
        yield target
