"""The conformance suite, a process for each of its modules, and their reports made into one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.device_check.jobs import Job, Outcome
from bench.device_check.places import ROOT

__all__ = ["golden_jobs", "merged", "suite_jobs", "twin_jobs"]

_FOLDER = ROOT / "conformance" / "src" / "kvcore_conformance"
_COUNTS = ("passed", "failed", "skipped", "xfailed")
_SLOWEST_FIRST = ("test_entropy", "test_quantization", "test_movement")
_TWINS = {
    "twins_dequantize": ("test_quantization", ["-k", "dequantize"]),
    "twins_quantize": ("test_quantization", ["-k", "not dequantize and not larger and not many"]),
    "twins_larger": ("test_quantization", ["-k", "not dequantize and (larger or many)"]),
    **{f"twins_{name}": (f"test_{name}", []) for name in ("movement", "entropy", "reduction", "bits")},
}
"""What judges the ops that have kernels in Triton's language, in parts that compile side by side."""
_SMALL_OPS = "count_symbols,runtime"
_HALVES = {"golden_decode": "decode or altered", "golden_encode": "not (decode or altered)"}
_SMALL_GOLDEN = "tail-5 or int4 or lossless-zeros"


def suite_jobs(backend: str, *, profile: str, small: bool, limit_s: float) -> list[Job]:
    """Return a job for every module of the suite but the golden frames'; those that take longest come first."""
    modules = _modules()
    modules.sort(key=lambda m: _SLOWEST_FIRST.index(m) if m in _SLOWEST_FIRST else len(_SLOWEST_FIRST))
    options: list[str] = []
    if small:
        modules, options = ["test_bits", "test_runtime"], ["--kvcore-ops", _SMALL_OPS]
    return [_job("conformance", backend, module, profile, limit_s, options) for module in modules]


def golden_jobs(backend: str, *, profile: str, small: bool, limit_s: float) -> list[Job]:
    """Return the jobs of the golden frames, encoded and decoded: two, of about the same length."""
    if small:
        return [_job("golden", backend, "test_golden", profile, limit_s, ["-k", _SMALL_GOLDEN])]
    return [
        _job("golden", backend, "test_golden", profile, limit_s, ["-k", words], name) for name, words in _HALVES.items()
    ]


def twin_jobs(backend: str, *, limit_s: float) -> list[Job]:
    """Return jobs that judge the kernels in Triton's language, on the fewest inputs that a profile has.

    For each combination of dtype, layout and alignment a kernel is compiled, some hundreds in all.
    """
    jobs = [_job("twins", backend, module, "tiny", limit_s, words, name) for name, (module, words) in _TWINS.items()]
    return [replace(job, environ={"KVCORE_KERNELS": "*=triton"}, required=False) for job in jobs]


def _modules() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("test_*.py") if path.stem != "test_golden")


def _job(
    step: str, backend: str, module: str, profile: str, limit_s: float, options: Sequence[str], name: str = ""
) -> Job:
    own = name or module
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--import-mode=importlib"]
    # An empty file of settings: those of the checkout are for its own tests.
    command += ["-c", "{folder}/pytest.ini", "--rootdir", "{folder}", "--pyargs", f"kvcore_conformance.{module}"]
    command += ["--kvcore-backend", backend, "--kvcore-profile", profile, "--kvcore-no-shrink"]
    command += ["--kvcore-report", f"{{folder}}/{own}.json", *options]
    return Job(step, own, command, limit_s)


def merged(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return one report of the reports of some jobs, None if there is none.

    Its ``complete`` says whether they were the whole suite, and all passed.
    """
    whole: dict[str, Any] = {}
    seen = set()
    for outcome in outcomes:
        path = folder / f"{outcome.job.name}.json"
        if not path.is_file():
            continue
        report = json.loads(path.read_text("utf-8"))
        seen.add(outcome.job.name if outcome.status == "ok" and "--kvcore-ops" not in outcome.job.command else "")
        if not whole:
            ops = {op: {**entry, **dict.fromkeys(_COUNTS, 0)} for op, entry in report["ops"].items()}
            whole = {**report, "ops": ops}
        for op, entry in report["ops"].items():
            counts = Counter({name: entry[name] for name in _COUNTS})
            counts.update({name: whole["ops"][op][name] for name in _COUNTS})
            whole["ops"][op].update(counts)
    return {**whole, "complete": seen == {*_modules(), *_HALVES}} if whole else None
