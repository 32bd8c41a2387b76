"""The suite of stores catches every mutant, with the test whose business it is, and passes what is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
try:
    import store_mutants as mutants
finally:
    sys.path.remove(str(FOLDER))

FAILED = re.compile(r"^(?:FAILED|ERROR) \S+::(\w+)\[(mutant-\w+):", re.MULTILINE)
VOLATILE = [kind for kind in mutants.CAUGHT_BY if not issubclass(kind, mutants.FsStore)]
PERSISTENT = [kind for kind in mutants.CAUGHT_BY if issubclass(kind, mutants.FsStore)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the environment of a process in which a package brings the mutants."""
    site = tmp_path_factory.mktemp("site")
    info = site / "store_mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: store-mutants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(mutants.entry_points())
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(FOLDER)])}


def failures(environment, right, kinds, uri, *options):
    """Run the tests that are to catch some mutants, over these and over what is right.

    Returns scheme -> names of the tests that failed, and what was printed.
    """
    tests = {kind: mutants.CAUGHT_BY[kind] for kind in kinds}
    chosen = [f"({mutants.scheme(kind)} and {test})" for kind, test in tests.items()]
    chosen.append(f"({mutants.scheme(right)} and ({' or '.join(set(tests.values()))}))")
    stores = [word for kind in [right, *kinds] for word in ("--kvcore-store", f"{mutants.scheme(kind)}:{uri(kind)}")]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "-k", " or ".join(chosen), "--pyargs", "kvcore_conformance.stores", *stores],
        env={**environment, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    failed = defaultdict(set)
    for test, scheme in FAILED.findall(done.stdout):
        failed[scheme].add(test)
    return failed, done.stdout + done.stderr


@pytest.fixture(scope="module")
def volatile(installed):
    options = ("--kvcore-store-volatile", "--kvcore-profile", "tiny")
    return failures(installed, mutants.Unchanged, VOLATILE, lambda kind: "//user:correct-horse@host", *options)


@pytest.fixture(scope="module")
def persistent(installed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    options = ("--kvcore-profile", "quick")
    return failures(installed, mutants.UnchangedFiles, PERSISTENT, lambda kind: folder / kind.__name__, *options)


@pytest.mark.parametrize("kind", mutants.CAUGHT_BY, ids=lambda kind: kind.__name__)
def test_the_suite_catches(kind, request, score):
    failed, output = request.getfixturevalue("persistent" if kind in PERSISTENT else "volatile")
    caught = score[f"store {kind.__name__}"] = mutants.CAUGHT_BY[kind] in failed[mutants.scheme(kind)]
    assert caught, f"failed: {sorted(failed[mutants.scheme(kind)])}\n{output[-3000:]}"


def test_what_is_right_passes(volatile, persistent):
    assert not volatile[0][mutants.scheme(mutants.Unchanged)], volatile[1][-3000:]
    assert not persistent[0][mutants.scheme(mutants.UnchangedFiles)], persistent[1][-3000:]
    assert " passed" in volatile[1]
    assert " passed" in persistent[1]
