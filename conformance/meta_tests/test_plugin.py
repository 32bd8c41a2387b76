"""The plugin: options, header, known failures, report, record; and that it leaves others alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap

import pytest

from kvcore.hookspecs import op_names
from kvcore.plugins.link import link
from kvcore.plugins.record import package_root, read_evidence
from kvcore.plugins.verification import op_statuses
from kvcore.settings import VARIABLES
from kvcore_conformance import __version__
from kvcore_conformance.xfails import read_xfails, stale

MADE = "kvcore_conformance.mutants.made"
DROPS_255 = f"{MADE}:count_symbols_symbol_255_dropped"
PARTIAL = """
from kvcore import API_VERSION, BackendSpec, Probe

def probe():
    return Probe(True, "always there")

def backend():
    return BackendSpec("partial_one", ("cpu",), -1, API_VERSION, probe, {"some": "kvcore_partial.ops"})
"""
PARTIAL_OPS = "from kvcore_cpu_ref.ops import kvcore_op_count_symbols, kvcore_op_digest\n"


def suite(*arguments, backend=f"{MADE}:unchanged", ops="count_symbols"):
    """Run the suite in this process; return its exit status and what it printed."""
    printed = io.StringIO()
    named = [] if backend is None else ["--kvcore-backend", backend]
    chosen = [] if ops is None else ["--kvcore-ops", ops]
    common = ["--pyargs", "kvcore_conformance", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = pytest.main([*common, *named, *chosen, *map(str, arguments)])
    return int(status), printed.getvalue()


@pytest.fixture
def partial(tmp_path, monkeypatch):
    """Return the folder of a backend package that has two ops; it is used as kvcore_partial:backend."""
    package = tmp_path / "kvcore_partial"
    package.mkdir()
    (package / "__init__.py").write_text(PARTIAL)
    (package / "ops.py").write_text(PARTIAL_OPS)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [n for n in sys.modules if n.partition(".")[0] == "kvcore_partial"]:
        del sys.modules[name]


# --- the unchanged reference, in the wrapping that the mutants have


def test_the_reference_in_a_mutants_wrapping_conforms():
    status, printed = suite("-q", ops=None)
    assert status == 0, printed[-3000:]
    assert f"{len(op_names())} of {len(op_names())} ops conform" in printed
    assert "skipped" not in printed.rpartition("\n=")[2]


# --- choosing a backend


def test_without_a_backend_it_names_those_that_there_are():
    status, printed = suite(backend=None, ops=None)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "needs --kvcore-backend NAME; usable here: " in printed
    assert "cpu_ref" in printed


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("cpu_reff", "either misspelled or not installed"),
        ("no_such_module:backend", "No module named"),
        ("kvcore_conformance.run:usable", "not a kvcore.BackendSpec"),
        (f"{MADE}:nothing", "no mutant"),
    ],
)
def test_a_backend_that_cannot_be_used_is_a_usage_error(backend, says):
    status, printed = suite(backend=backend)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert says in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kvcore-ops", "quantise"], "no op quantise"),
        (["--kvcore-record"], "leave --kvcore-ops out"),
        (["--kvcore-xfails", "no/such/file"], "cannot be read"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(arguments, says):
    status, printed = suite(*arguments)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert says in printed


def test_options_without_a_backend_are_usage_errors():
    status, printed = suite("--kvcore-report", "x.json", backend=None, ops=None)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--kvcore-report needs --kvcore-backend" in printed


def test_other_projects_do_not_notice_the_plugin(tmp_path):
    (tmp_path / "test_other.py").write_text(
        textwrap.dedent(
            """
            import sys

            from hypothesis import settings

            def test_nothing_of_kvcore_came_in():
                assert [m for m in sys.modules if m == "kvcore" or m.startswith(("kvcore.", "kvcore_cpu"))] == []
                assert settings.get_current_profile_name() in ("default", "ci")
            """
        )
    )
    # The plugin comes in by its entry point; where the suite is not installed there is nothing to notice.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kvcore" not in done.stdout


# --- header and summary


def test_the_header_says_what_is_tested_and_every_variable(monkeypatch):
    monkeypatch.setenv("KVCORE_STRICT", "1")
    monkeypatch.delenv("KVCORE_BACKEND", raising=False)
    _, printed = suite("--collect-only")
    head = printed.partition("collected")[0]
    assert f"kvcore conformance {__version__}: backend {MADE}:unchanged" in head
    assert "count_symbols=mutant" in head
    assert "numpy" in head
    for variable in VARIABLES:
        assert f"\n{variable.name}: " in head
    assert "\nKVCORE_STRICT: '1'" in head
    assert "\nKVCORE_BACKEND: unset" in head


def test_a_failure_names_the_op_and_prints_its_source():
    status, printed = suite("--tb=short", "-x", "--kvcore-no-shrink", backend=DROPS_255)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "ConformanceFailure: count_symbols: out [" in printed
    assert "source that reproduces it" in printed
    assert "result = backend.count_symbols(" in printed
    assert f"0 of {len(op_names())} ops conform" in printed


def test_a_failing_input_is_made_small():
    _, printed = suite("--tb=short", "-x", "-k", "test_count and not around", backend=DROPS_255)
    assert "shape=(1, 1)" in printed


def test_a_partial_backend_is_told_so(partial):
    status, printed = suite("-q", "-rs", backend="kvcore_partial:backend", ops=None)
    assert status == 0, printed[-3000:]
    assert "partial_one has no quantize" in printed
    assert f"2 of {len(op_names())} ops conform; 2 of {len(op_names())} are implemented" in printed


# --- known failures


@pytest.fixture
def xfails(tmp_path):
    """Return a function that writes the list of known failures, and its path."""

    def write(*lines):
        path = tmp_path / "xfails.txt"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_known_failures_do_not_fail_the_run(xfails):
    path = xfails("# our list", "", "test_bits.py::test_count*  # symbol 255 is reserved on this device")
    chosen = ("-k", "test_count and (of_one_symbol or 257)")
    status, printed = suite("--kvcore-xfails", path, *chosen, backend=DROPS_255)
    # Those that pass all the same make the line an error; here one test of symbol 0 does.
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "XPASS(strict)" in printed
    exact = xfails(
        "test_bits.py::test_count_of_one_symbol[255]  # symbol 255 is reserved on this device",
        "test_bits.py::test_count_around_a_chunk[*-257]  # the same",
    )
    status, printed = suite("--kvcore-xfails", exact, *chosen, backend=DROPS_255)
    assert status == 0, printed[-3000:]
    assert "xfailed" in printed
    assert "symbol 255 is reserved" not in printed.partition("short test summary")[0]


def test_a_known_failure_that_passes_fails_the_run(xfails):
    path = xfails("test_bits.py::test_count_of_one_symbol[255]  # was broken once")
    status, printed = suite("--kvcore-xfails", path)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "XPASS(strict)" in printed


@pytest.mark.parametrize(
    "line", ["test_bits.py::test_count", "test_bits.py::test_count  #", "test_bits.py::test_count # "]
)
def test_a_line_without_a_reason_is_an_error(xfails, line):
    status, printed = suite("--kvcore-xfails", xfails(line))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "xfails.txt:1" in printed
    assert "has no reason" in printed


def test_a_line_that_means_no_test_is_an_error(xfails):
    path = xfails("test_bits.py::test_count_of_one_symbol[256]  # no such symbol")
    status, printed = suite("--kvcore-xfails", path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "line 1: test_bits.py::test_count_of_one_symbol[256]" in printed


def test_patterns_take_brackets_as_they_are(xfails):
    known = read_xfails(xfails("a.py::t[x-*]  # r # s", "b.py::?[1]  # r"))
    assert [k.reason for k in known] == ["r # s", "r"]
    assert known[0].matches("a.py::t[x-1]")
    assert not known[0].matches("a.py::tx-1")
    assert known[1].matches("b.py::t[1]")
    assert not known[1].matches("b.py::t1")
    assert stale(known, ["a.py::t[x-]"]) == [known[1]]


# --- report and record


def test_the_report_counts_by_op(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCORE_KERNELS", "*=mutant")
    path = tmp_path / "report.json"
    status, _ = suite("--kvcore-report", path, backend=DROPS_255, ops="count_symbols,pack_bits")
    report = json.loads(path.read_text())
    assert status == pytest.ExitCode.TESTS_FAILED
    assert (report["suite"], report["profile"], report["total"]) == (__version__, "quick", len(op_names()))
    assert set(report["environment"]) == {variable.name for variable in VARIABLES}
    assert report["environment"]["KVCORE_KERNELS"] == "*=mutant"
    assert {"machine", "device", "date", "versions"} <= set(report)
    assert set(report["ops"]) == {*op_names(), "runtime"}
    assert report["ops"]["count_symbols"]["implementation"] == "mutant"
    assert report["ops"]["count_symbols"]["failed"] > 0
    assert report["ops"]["pack_bits"]["passed"] > 0
    assert report["ops"]["pack_bits"]["failed"] == 0
    assert report["ops"]["shift_rope"]["passed"] == 0  # an op that no frame shares with those that were asked for


def test_worker_processes_are_counted_together(tmp_path):
    pytest.importorskip("xdist")
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvcore_conformance.test_bytes", "-n", "2", "-q"]
    chosen = ["-c", os.devnull, "--kvcore-backend", f"{MADE}:unchanged", "--kvcore-ops", "digest"]
    done = subprocess.run(
        [*command, *chosen, "-p", "no:cacheprovider", "--kvcore-report", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(path.read_text())["ops"]["digest"]
    assert f"{counts['passed']} passed" in done.stdout.splitlines()[-1]
    assert counts["passed"] > 5


def test_a_report_that_cannot_be_written_fails_the_run(tmp_path):
    status, printed = suite("--kvcore-report", tmp_path / "missing" / "report.json", "-k", "test_count_of_one_symbol")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "ERROR: the report could not be written" in printed


def recorded(package):
    """Return the ops that a package's record names."""
    return {op for piece in read_evidence(package)[0] for op in piece.ops}


def test_the_record_is_what_the_core_reads(partial):
    status, printed = suite("--kvcore-record", backend="kvcore_partial:backend", ops=None)
    assert status == 0, printed[-3000:]
    from kvcore_partial import backend

    (piece,), why = read_evidence(package_root(backend()))
    assert why == ""
    assert (piece.backend, piece.status, piece.suite) == (backend().name, "executed", __version__)
    assert set(piece.ops) == {"count_symbols", "digest"}
    assert piece.ops["digest"].passed > 5
    statuses = {s.op: s.status for s in op_statuses(link(backend()))}
    assert statuses["digest"] == "executed"
    assert statuses["quantize"] == "missing"
    (partial / "ops.py").write_text(PARTIAL_OPS + "# changed since\n")
    assert {s.status for s in op_statuses(link(backend()))} == {"missing", "not-run"}


def test_an_op_that_fails_is_not_recorded(partial):
    (partial / "ops.py").write_text(
        PARTIAL_OPS.replace("kvcore_op_digest", "kvcore_op_pack_bits")
        + "from kvcore_conformance.mutants.catalogue import MUTANTS, _around\n"
        + "wrong = next(m for m in MUTANTS if m.key == 'pack_bits_unused_bits_set')\n"
        + "kvcore_op_pack_bits = __import__('kvcore').hookimpl(_around(kvcore_op_pack_bits, wrong.defect))\n"
    )
    status, printed = suite("-q", "--kvcore-record", "--kvcore-no-shrink", backend="kvcore_partial:backend", ops=None)
    assert status == pytest.ExitCode.TESTS_FAILED, printed[-3000:]
    assert set(recorded(partial)) == {"count_symbols"}


@pytest.mark.parametrize("arguments", [["-k", "test_digest"], ["--maxfail=1", "-k", "not test_count"]])
def test_a_run_of_some_tests_records_only_ops_that_ran_in_full(partial, arguments):
    _, printed = suite("-q", "--kvcore-record", *arguments, backend="kvcore_partial:backend", ops=None)
    assert "count_symbols" not in recorded(partial), printed[-2000:]
