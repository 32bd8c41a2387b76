"""What is said about verification is read from the record in the package, and holds for its sources only."""

from __future__ import annotations

import json
import platform

import numpy as np
import pytest

import kvcore
from kvcore import settings
from kvcore.hookspecs import op_names
from kvcore.plugins.discover import discover
from kvcore.plugins.link import link
from kvcore.plugins.verification import RECORD_NAME, op_statuses, package_root, read_record, source_hash

DIGEST = """
from kvcore import hookimpl

@hookimpl
def kvcore_op_digest(src, *, out, stream=None, workspace=None):
    return out
"""


class Recorded:
    """An installed backend and its record."""

    def __init__(self, shelf):
        self.root = shelf.folder / shelf.add("fast", modules={"native": DIGEST, "other": DIGEST})
        self.spec = next(c.spec for c in discover(settings.current({})) if c.name == "fast")
        self.record = {
            "suite": "0.1.0",
            "device": "test machine",
            "machine": platform.machine(),
            "date": "2026-01-02",
            "sources": source_hash(self.root),
            "ops": {"digest": {"implementation": "native", "status": "executed", "passed": 12}},
        }

    def write(self, **changes):
        (self.root / RECORD_NAME).write_text(json.dumps({**self.record, **changes}))

    def status(self, op="digest", kernels=()):
        rows = {row.op: row for row in op_statuses(link(self.spec, kernels))}
        assert list(rows) == list(op_names())
        return rows[op].status, rows[op].reason


@pytest.fixture
def recorded(shelf):
    return Recorded(shelf)


def test_the_record_is_looked_for_in_the_package(recorded):
    assert package_root(recorded.spec) == recorded.root


def test_a_record_that_matches_counts(recorded):
    recorded.write()
    assert recorded.status() == ("executed", "12 tests on test machine, 2026-01-02, suite 0.1.0")


def test_an_op_that_the_backend_lacks_is_missing(recorded):
    recorded.write()
    assert recorded.status("gather_paged") == ("missing", "fast does not implement it")


def test_without_a_record_nothing_was_run(recorded):
    assert recorded.status() == ("not-run", f"its package ships no {RECORD_NAME}")


@pytest.mark.parametrize("module", ["native.py", "__init__.py"])
def test_sources_that_have_changed_since_count_for_nothing(recorded, module):
    recorded.write()
    with (recorded.root / module).open("a") as file:
        file.write("# a harmless comment\n")
    status, reason = recorded.status()
    assert status == "not-run"
    assert "sources have changed since 2026-01-02" in reason


def test_a_source_that_was_added_or_taken_away_is_a_change(recorded):
    recorded.write()
    (recorded.root / "kernel.cu").write_text("")
    assert recorded.status()[0] == "not-run"
    (recorded.root / "kernel.cu").unlink()
    assert recorded.status()[0] == "executed"
    (recorded.root / "notes.txt").write_text("no source")
    assert recorded.status()[0] == "executed"


def test_line_ends_are_no_change(recorded):
    recorded.write()
    path = recorded.root / "native.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert recorded.status()[0] == "executed"


def test_the_record_of_another_implementation_does_not_count(recorded):
    recorded.write()
    status, reason = recorded.status(kernels=(("digest", "other"),))
    assert status == "not-run"
    assert "recorded for native, bound is other (chosen by KVCORE_KERNELS)" in reason


def test_the_record_of_another_kind_of_machine_does_not_count(recorded):
    recorded.write(machine="s390x")
    assert recorded.status() == ("not-run", f"recorded on s390x, this machine is {platform.machine()}")


def test_an_op_that_the_record_does_not_list_was_not_run(recorded):
    recorded.write(ops={})
    assert recorded.status() == ("not-run", "the record does not list it")


def test_compiled_is_not_executed(recorded):
    recorded.write(ops={"digest": {"implementation": "native", "status": "compiled", "passed": 0}})
    assert recorded.status()[0] == "compiled"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"ops": []}', "\xff"])
def test_a_record_that_is_none_counts_for_nothing(recorded, text):
    (recorded.root / RECORD_NAME).write_text(text, encoding="latin-1")
    status, reason = recorded.status()
    assert status == "not-run"
    assert RECORD_NAME in reason


def test_names_and_contents_are_hashed_apart(tmp_path):
    def folder(name, **files):
        root = tmp_path / name
        root.mkdir()
        for stem, text in files.items():
            (root / f"{stem}.py").write_text(text)
        return source_hash(root)

    hashes = {folder("a", x="1", y="2"), folder("b", x="2", y="1"), folder("c", x="12", y=""), folder("d", x="1")}
    assert len(hashes) == 4
    assert folder("e", x="1", y="2") in hashes


def test_the_reference_has_a_status_for_every_op():
    backend = kvcore.open_backend("cpu_ref")
    assert backend.reduce_absmax(np.float32([2]), 0)[0] == 2
    spec = backend.spec
    record, why = read_record(spec)
    assert (record is None) == bool(why)
    rows = op_statuses(link(spec))
    assert {row.status for row in rows} <= {"executed", "not-run"}
