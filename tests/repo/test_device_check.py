"""The check that runs on machines with a device, run on the emulated one and, where it can be, on SYCL's CPU device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import venv
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from bench.device_check.jobs import Job, Outcome, run_all
from bench.device_check.places import PACKED
from bench.device_check.report import Report
from bench.device_check.suite import golden_jobs, merged, suite_jobs, twin_jobs

CORRECTNESS = {"build", "facts", "conformance", "golden", "exchange", "races", "sharing", "host_memory"}
FIGURES = {"bandwidth", "coding", "launches"}


def check(root, out, *arguments, python=sys.executable):
    command = [str(python), "-m", "bench.device_check", "--small", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=400)


def written(out):
    return json.loads((out / "device-check.json").read_text("utf-8"))


def test_the_whole_check_passes_on_the_emulated_device(root, tmp_path):
    done = check(root, tmp_path, "--backend", "emu", "--limit", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    result = written(tmp_path)
    assert result["passed"]
    assert {step["step"] for step in result["steps"]} == CORRECTNESS | FIGURES
    assert {step["status"] for step in result["steps"]} == {"ok"}
    assert {figure["table"] for figure in result["figures"]} >= {"gather and scatter", "copies over the link", "KVS1"}
    assert all(figure["value"] > 0 for figure in result["figures"] if "value" in figure)
    suite = json.loads((tmp_path / "conformance-report.json").read_text("utf-8"))
    assert not suite["complete"], "a part of the suite is not the suite"
    assert suite["ops"]["decode_symbols"]["passed"] > 0
    page = (tmp_path / "device-check.md").read_text("utf-8")
    assert "these figures mean nothing" in page
    assert "| exchange | MLA lossless | ok |" in page


@pytest.mark.slow
def test_the_whole_check_passes_on_sycls_processor(root, tmp_path):
    try:
        distribution("intel-sycl-rt"), distribution("intel-opencl-rt")
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed")
    done = check(root, tmp_path, "--backend", "kvcore_xpu:cpu_device", "--limit", "400")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_backend_that_cannot_be_used_fails_every_step_and_says_why(root, tmp_path):
    done = check(root, tmp_path, "--backend", "no_such_backend", "--steps", "facts,races,launches")
    assert done.returncode == 1
    assert {step["status"] for step in written(tmp_path)["steps"]} == {"failed"}
    assert "no_such_backend" in (tmp_path / "device-check.log").read_text("utf-8")
    assert "FAILED: facts, races" in done.stdout


@pytest.mark.slow
def test_it_needs_nothing_but_what_it_names(root, tmp_path):
    """With an empty site-packages it says what it lacks, and to pack it; it does not end in an import error."""
    venv.create(tmp_path / "venv", with_pip=False)
    done = check(root, tmp_path / "out", "--backend", "emu", python=tmp_path / "venv" / "bin" / "python")
    assert done.returncode == 2
    assert "make device-pack" in done.stderr
    assert {"numpy", "ml_dtypes", "hypothesis"} <= set(done.stderr.replace(",", " ").replace(";", " ").split())


# --- the parts


def python_job(code, *, step="step", name="job", limit_s=60.0, required=True):
    return Job(step, name, [sys.executable, "-c", code], limit_s, required)


def outcomes_of(folder, *jobs, seconds=60.0, workers=2):
    told = []
    where = {"folder": folder, "environ": {}, "deadline": time.monotonic() + seconds}
    found = run_all(jobs, **where, workers=workers, told=told.append)
    assert {id(o) for o in told} == {id(o) for o in found}
    return found


def test_a_job_that_takes_too_long_is_stopped_with_its_children_and_keeps_what_it_wrote(tmp_path):
    marker, results = tmp_path / "marker", tmp_path / "slow.jsonl"
    grandchild = f"import time, pathlib; time.sleep(8); pathlib.Path({str(marker)!r}).touch()"
    lines = '{"fact": "a", "value": 1}\n{"fact": "tor'
    code = (
        f"import subprocess, sys, time; open({str(results)!r}, 'w').write({lines!r})\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    )
    slow, after = outcomes_of(
        tmp_path, python_job(code, name="slow", limit_s=5.5), python_job("print('done')", name="after"), workers=1
    )
    assert (slow.status, slow.records) == ("timed out", [{"fact": "a", "value": 1}])
    assert (after.status, after.log) == ("ok", "done\n")
    time.sleep(4)
    assert not marker.exists(), "a child of a stopped job went on"


def test_failures_are_told_by_what_they_were(tmp_path):
    jobs = [
        python_job("raise SystemExit(3)", name="status"),
        python_job("import os; os.abort()", name="signal"),
        python_job("pass", name="good"),
    ]
    assert [(o.status, o.reason) for o in outcomes_of(tmp_path, *jobs)] == [
        ("failed", "exit status 3"),
        ("failed", "SIGABRT"),
        ("ok", ""),
    ]


def test_without_time_nothing_is_started(tmp_path):
    (late,) = outcomes_of(tmp_path, python_job(f"open({str(tmp_path / 'ran')!r}, 'w')"), seconds=1.0)
    assert (late.status, (tmp_path / "ran").exists()) == ("not run", False)


def report_of(*outcomes):
    report = Report("b", small=False, profile="ci")
    for status, required, records in outcomes:
        report.add(Outcome(python_job("", required=required), status, 1.0, records=records))
    return report


@pytest.mark.parametrize(
    ("outcomes", "passed"),
    [
        ([], False),
        ([("ok", True, [])], True),
        ([("ok", True, []), ("failed", False, [])], True),
        ([("ok", True, []), ("failed", True, [])], False),
        ([("timed out", True, []), ("ok", True, [])], False),
        ([("not run", True, [])], False),
        ([("ok", True, [{"check": "c", "status": "forbidden", "detail": "no", "seconds": 0}])], True),
    ],
)
def test_required_steps_decide(outcomes, passed):
    assert report_of(*outcomes).passed == passed


def test_aims_are_held_against_what_was_measured(tmp_path):
    rows = [
        {"figure": "a", "table": "t", "value": 2.0, "unit": "GB/s", "ratio": 0.96, "aim": 0.95},
        {"figure": "b", "table": "t", "value": 2.0, "unit": "GB/s", "ratio": 0.94, "aim": 0.95},
        {"figure": "c", "table": "t", "value": 310.0, "unit": "Gsym/s", "aim": 300.0},
        {"figure": "d", "table": "t", "value": 290.0, "unit": "Gsym/s", "aim": 300.0},
    ]
    report_of(("ok", True, rows)).write(tmp_path)
    lines = (tmp_path / "device-check.md").read_text("utf-8").splitlines()
    said = [line.rsplit("|", 2)[1].strip() for line in lines if line.startswith(tuple(f"| {c} |" for c in "abcd"))]
    assert said == ["95% met", "95% MISSED", "300 met", "300 MISSED"]


@pytest.mark.parametrize(
    "change", ["none", "a module failed", "a module left no report", "golden frames left out", "small"]
)
def test_only_the_whole_suite_without_failures_counts_as_complete(tmp_path, change):
    asked = {"profile": "quick", "small": change == "small", "limit_s": 1.0}
    jobs = suite_jobs("b", **asked) + ([] if change == "golden frames left out" else golden_jobs("b", **asked))
    entry = {"implementation": "native", "passed": 2, "failed": 0, "skipped": 1, "xfailed": 0}
    outcomes = [Outcome(job, "ok", 1.0) for job in jobs]
    for job in jobs:
        (tmp_path / f"{job.name}.json").write_text(json.dumps({"ops": {"digest": entry}, "device": "d"}), "utf-8")
    if change == "a module failed":
        outcomes[1].status = "failed"
    if change == "a module left no report":
        (tmp_path / f"{jobs[1].name}.json").unlink()
    report = merged(tmp_path, outcomes)
    assert report["complete"] == (change == "none")
    counted = len(jobs) - (change == "a module left no report")
    assert (report["ops"]["digest"]["passed"], report["ops"]["digest"]["skipped"]) == (2 * counted, counted)


def test_the_page_names_all_that_a_machine_must_have(root):
    page = (root / "docs" / "device-check.md").read_text("utf-8")
    assert [name for name in (*PACKED, "numpy", "ml_dtypes", "hypothesis") if f"`{name}`" not in page] == []


def test_the_jobs_of_the_twins_name_tests_that_there_are(tmp_path):
    for job in twin_jobs("cpu_ref", limit_s=1.0):
        assert job.environ == {"KVCORE_KERNELS": "*=triton"}
        (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
        command = [*(part.replace("{folder}", str(tmp_path)) for part in job.command), "--collect-only"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{job.name}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
