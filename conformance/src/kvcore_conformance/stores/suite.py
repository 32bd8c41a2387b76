"""Everything of the suite in one name space, for a package that tests a store of its own.

A test module imports all of it and says what is under test::

    from kvcore_conformance.stores.suite import *

    @pytest.fixture(scope="session")
    def store_target(tmp_path_factory):
        folder = tmp_path_factory.mktemp("store")
        return Target("mine", lambda: MyStore(folder))
"""

from __future__ import annotations

from kvcore_conformance.stores import (
    test_batches,
    test_calls,
    test_crash,
    test_frames,
    test_leaks,
    test_model,
    test_server,
    test_threads,
)
from kvcore_conformance.stores.fixtures import effort, space, store, store_target
from kvcore_conformance.stores.targets import Target, target_of
from kvcore_conformance.stores.test_server import server

_MODULES = (
    test_batches,
    test_calls,
    test_crash,
    test_frames,
    test_leaks,
    test_model,
    test_server,
    test_threads,
)
_TESTS = {name: test for module in _MODULES for name, test in vars(module).items() if name.startswith("test_")}
globals().update(_TESTS)

__all__ = ["Target", "effort", "server", "space", "store", "store_target", "target_of"]
__all__ += list(_TESTS)
