"""The conformance suite of stores, on the example."""

import os
import sys

import pytest

from kvcore_conformance.stores.suite import *  # noqa: F403
from kvcore_conformance.stores.suite import Target

FOLDER = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope="session")
def store_target(tmp_path_factory):
    # What installing a package does: its module can be imported, its entry point found; in other processes, too.
    site = tmp_path_factory.mktemp("site")
    info = site / "sqlite_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvcore.stores]\nsqlite = sqlite_store:open_sqlite\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), FOLDER, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), FOLDER]))
        yield Target.at(f"sqlite:{tmp_path_factory.mktemp('store') / 'frames.db'}", name="sqlite")
