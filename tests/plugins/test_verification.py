"""What is said about verification is read from the record in the package, and holds for its sources only."""

from __future__ import annotations

import json
import platform
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvcore
from kvcore import settings
from kvcore.cli import app
from kvcore.errors import ConfigError
from kvcore.hookspecs import op_names
from kvcore.kernels import get_include
from kvcore.plugins import record as records
from kvcore.plugins.discover import discover
from kvcore.plugins.link import link
from kvcore.plugins.record import (
    FORMAT,
    RECORD_NAME,
    Entry,
    Evidence,
    add_compiled,
    add_evidence,
    current_hashes,
    hashes_of,
    package_root,
    read_evidence,
    source_hash,
)
from kvcore.plugins.verification import every_recorded_status, op_statuses, recorded_statuses

DIGEST = """
from kvcore import hookimpl

@hookimpl
def kvcore_op_digest(src, *, out, stream=None, workspace=None):
    return out
"""


class Recorded:
    """An installed backend and its record."""

    def __init__(self, shelf, **spec):
        self.root = shelf.folder / shelf.add("fast", modules={"native": DIGEST, "other": DIGEST}, **spec)
        self.spec = next(c.spec for c in discover(settings.current({})) if c.name == "fast")
        hashes = current_hashes(self.spec, self.root)
        self.run = {
            "backend": "fast",
            "status": "executed",
            "suite": "0.1.0",
            "profile": "quick",
            "device": "test machine",
            "machine": platform.machine(),
            "date": "2026-01-02",
            "sources": hashes.sources,
            "kernels": hashes.kernels,
            "ops": {"digest": {"implementation": "native", "passed": 12}},
        }
        self.compilation = {
            **{key: self.run[key] for key in ("backend", "sources", "kernels")},
            "status": "compiled",
            "date": "2026-01-03",
            "targets": {"sm_80": "nvcc 13.0", "sm_90": "nvcc 13.0", "gfx942": "clang 19"},
            "ops": {"digest": {"implementation": "native"}},
        }

    def write(self, *more, **changes):
        self.write_pieces({**self.run, **changes}, *more)

    def write_pieces(self, *pieces):
        (self.root / RECORD_NAME).write_text(json.dumps({"format": FORMAT, "evidence": pieces}))

    def row(self, op="digest", kernels=()):
        rows = {row.op: row for row in op_statuses(link(self.spec, kernels))}
        assert list(rows) == list(op_names())
        return rows[op]

    def status(self, op="digest", kernels=()):
        row = self.row(op, kernels)
        return row.status, row.reason


@pytest.fixture
def recorded(shelf):
    return Recorded(shelf)


@pytest.fixture
def of_core_kernels(shelf):
    return Recorded(shelf, core_kernels="True")


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
    recorded.write_pieces(recorded.compilation)
    row = recorded.row()
    assert (row.status, row.executed_on, row.compiled_for) == ("compiled", "", "sm_80 sm_90 gfx942")
    assert row.reason == "compiled for sm_80, sm_90 by nvcc 13.0, gfx942 by clang 19, 2026-01-03; never run"


def test_an_op_may_be_executed_on_one_device_and_compiled_for_others(recorded):
    recorded.write({**recorded.run, "device": "another", "date": "2026-01-04"}, recorded.compilation)
    row = recorded.row()
    assert (row.status, row.executed_on) == ("executed", "test machine; another")
    assert row.compiled_for == "sm_80 sm_90 gfx942"
    assert "never run" not in row.reason


def test_stale_evidence_hides_none_that_is_fresh(recorded):
    recorded.write(recorded.compilation, sources="0" * 64)
    row = recorded.row()
    assert (row.status, row.executed_on) == ("compiled", "")
    recorded.write({**recorded.compilation, "sources": "0" * 64})
    assert recorded.row().status == "executed"
    assert recorded.row().compiled_for == ""


def test_evidence_of_another_backend_of_the_package_is_not_its_own(recorded):
    recorded.write(backend="fast_cpu")
    assert recorded.status() == ("not-run", "the record does not list it")


def test_a_backend_of_the_cores_kernels_is_verified_with_those_kernels_only(of_core_kernels, tmp_path, monkeypatch):
    of_core_kernels.write(of_core_kernels.compilation)
    assert of_core_kernels.row().status == "executed"
    assert of_core_kernels.run["kernels"] != ""
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(get_include()).parent, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    real = records._folder
    monkeypatch.setattr(records, "_folder", lambda name: kernels if name == "kvcore.kernels" else real(name))
    assert of_core_kernels.row().status == "executed"
    with (kernels / "check" / "sycl.cpp").open("a") as file:  # no part of any library
        file.write("// another question to the compilers")
    assert of_core_kernels.row().status == "executed"
    with (kernels / "include" / "kvcore" / "digest.hpp").open("a") as file:
        file.write("// another kernel")
    status, reason = of_core_kernels.status()
    assert status == "not-run"
    assert "the core's kernels, which it is built from, have changed since 2026-01-02; run the suite again" in reason
    assert "since 2026-01-03; compile again" in reason


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"evidence": [{}]}', "\xff"])
def test_a_record_that_is_none_counts_for_nothing(recorded, text):
    (recorded.root / RECORD_NAME).write_text(text, encoding="latin-1")
    status, reason = recorded.status()
    assert status == "not-run"
    assert RECORD_NAME in reason


def test_a_record_of_another_format_is_not_read(recorded):
    (recorded.root / RECORD_NAME).write_text(json.dumps({"format": FORMAT + 1, "evidence": "whatever"}))
    status, reason = recorded.status()
    assert status == "not-run"
    assert f"has format {FORMAT + 1}, this kvcore reads {FORMAT}" in reason


# --- a backend that is not linked


def test_a_record_is_told_of_a_backend_that_does_not_run_here(shelf):
    unusable = Recorded(shelf, probe="Probe(False, 'no driver')")
    unusable.write_pieces(unusable.compilation)
    (unusable.root / "native.py").touch()
    done = CliRunner().invoke(app, ["ops", "--backend", "fast", "--json"])
    row = next(row for row in json.loads(done.stdout) if row["op"] == "digest")
    assert (row["status"], row["implementation"], row["compiled_for"]) == ("compiled", "native", "sm_80 sm_90 gfx942")
    assert row["reason"].endswith("never run; not usable here: no driver")


def test_the_record_of_the_preferred_implementation_is_told(recorded):
    recorded.write({**recorded.run, "ops": {"digest": {"implementation": "other", "passed": 3}}})
    statuses = {row.op: row for row in recorded_statuses(recorded.spec)}
    assert (statuses["digest"].implementation, statuses["digest"].status) == ("native", "executed")
    assert [(r.implementation, r.reason[:7]) for r in every_recorded_status(recorded.spec) if r.op == "digest"] == [
        ("native", "12 test"),
        ("other", "3 tests"),
    ]


def test_machines_count_only_where_it_is_asked_for_them(recorded):
    recorded.write(machine="s390x")
    assert every_recorded_status(recorded.spec)[-1].status == "executed"
    here = {row.op: row.status for row in recorded_statuses(recorded.spec, machine=platform.machine())}
    assert here["digest"] == "not-run"


# --- writing


def piece(recorded, device="test machine", **ops):
    facts = {key: recorded.run[key] for key in ("backend", "status", "date", "sources", "kernels", "machine", "suite")}
    return Evidence(device=device, ops={op: Entry("native", passed) for op, passed in ops.items()}, **facts)


def evidence(recorded):
    return [(e.status, e.device, {op: x.passed for op, x in e.ops.items()}) for e in read_evidence(recorded.root)[0]]


def test_a_run_replaces_what_an_earlier_one_on_the_same_device_said(recorded):
    judged = {("digest", "native"), ("rotate", "native")}
    add_evidence(recorded.spec, piece(recorded, digest=1, rotate=1), judged)
    add_evidence(recorded.spec, piece(recorded, "another", digest=2), judged)
    add_evidence(recorded.spec, piece(recorded, digest=3), judged)  # rotate failed this time
    assert evidence(recorded) == [("executed", "another", {"digest": 2}), ("executed", "test machine", {"digest": 3})]
    add_evidence(recorded.spec, piece(recorded, digest=4), {("digest", "other")})
    assert len(evidence(recorded)) == 3


def test_writing_drops_what_is_stale(recorded):
    recorded.write(sources="0" * 64)
    add_compiled(recorded.spec, "native", ["digest"], {"sm_90": "nvcc 13"}, hashes_of(recorded.spec))
    assert evidence(recorded) == [("compiled", "", {"digest": 0})]


def test_a_compilation_keeps_runs_and_other_implementations(recorded):
    recorded.write(recorded.compilation)
    add_compiled(recorded.spec, "other", ["digest"], {"sm_90": "another compiler"}, hashes_of(recorded.spec))
    add_compiled(recorded.spec, "native", ["digest"], {"sm_75": "nvcc 14"}, hashes_of(recorded.spec))
    rows = {row.implementation: row for row in every_recorded_status(recorded.spec) if row.op == "digest"}
    assert (rows["native"].status, rows["native"].compiled_for) == ("executed", "sm_75")
    assert (rows["other"].status, rows["other"].compiled_for) == ("compiled", "sm_90")


def test_only_implementations_that_there_are_can_be_recorded(recorded):
    with pytest.raises(ConfigError, match="fast has no implementation 'triton'; it has native, other"):
        add_compiled(recorded.spec, "triton", ["digest"], {"sm_90": "triton 3"}, hashes_of(recorded.spec))
    with pytest.raises(ConfigError, match="the package of fast has no folder on disk"):
        hashes_of(replace(recorded.spec, probe=NoPackage()))


def test_what_changed_while_it_was_compiled_is_not_recorded(recorded):
    before = hashes_of(recorded.spec)
    (recorded.root / "native.py").write_text(DIGEST + "# edited meanwhile")
    with pytest.raises(ConfigError, match="nothing recorded: its sources have changed meanwhile"):
        add_compiled(recorded.spec, "native", ["digest"], {"sm_90": "nvcc 13"}, before)
    assert not (recorded.root / RECORD_NAME).exists()


class NoPackage:
    """A probe of a module that is not there."""

    __module__ = "kvcore_test_of_no_package"

    def __call__(self):
        raise NotImplementedError


# --- the page


def page():
    """Return the page of the documentation, of the backend of this test."""
    printed = CliRunner().invoke(app, ["ops", "--records", "--csv"])
    assert printed.exit_code == 0
    generate = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
    return generate["ops_page"](printed.stdout, ["fast"])


def test_the_page_follows_the_record(recorded):
    absent = page()
    assert "| op | fast native |" in absent
    assert "| `digest` | not run |" in absent
    recorded.write()
    assert "| `digest` | **executed** |" in page()
    assert "- 1 of 19 ops: executed on test machine" in page()
    recorded.write_pieces(recorded.compilation)
    assert "| `digest` | compiled |" in page()
    assert "- 1 of 19 ops: compiled for sm_80, sm_90, gfx942" in page()
    assert "executed on" not in page()
    (recorded.root / "native.py").write_text(DIGEST + "# changed\n")
    assert "| `digest` | not run |" in page()
    assert "- 1 of 19 ops: not run: its sources have changed since 2026-01-03; compile again" in page()


def test_the_page_has_a_column_for_each_implementation(recorded):
    recorded.write({**recorded.compilation, "ops": {"digest": {"implementation": "other"}}})
    assert "| op | fast native | fast other |" in page()
    assert "| `digest` | **executed** | compiled |" in page()
    assert "| `rotate` | not run | - |" in page()


# --- hashes


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
    assert read_evidence(package_root(spec)) != ([], "")
    rows = op_statuses(link(spec))
    assert {row.status for row in rows} <= {"executed", "not-run"}
