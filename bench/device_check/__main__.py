"""Runs the check: ``python -m bench.device_check --backend NAME --out FOLDER``. See docs/device-check.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.device_check.jobs import Job, Outcome, run_all
from bench.device_check.places import MERGED, child_environment, missing
from bench.device_check.report import Report
from bench.device_check.suite import golden_jobs, merged, suite_jobs, twin_jobs

_CORRECTNESS = {"exchange": 150.0, "races": 120.0, "sharing": 90.0, "host_memory": 60.0}
_FIGURES = {"bandwidth": 50.0, "coding": 40.0, "launches": 15.0}
_BUILD_S, _FACTS_S, _SUITE_S, _TWINS_S, _RECORD_S = 150.0, 60.0, 200.0, 150.0, 30.0
_LIMIT_S = 345.0


def main() -> int:
    """Run all steps; 1 if one that is required failed, 2 if the machine lacks what the check itself needs."""
    args = _arguments()
    lacking = missing()
    if lacking:
        print(f"not installed here and not packed: {', '.join(lacking)}; run `make device-pack`", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: children are stopped
    deadline = time.monotonic() + args.limit
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report = Report(args.backend, small=args.small, profile=args.profile)
    with tempfile.TemporaryDirectory(prefix="kvcore-check-") as scratch:
        folder = Path(scratch)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        environ = child_environment(folder)

        def run(jobs: Sequence[Job], workers: int) -> list[Outcome]:
            report.expect(jobs)

            def told(outcome: Outcome) -> None:
                report.add(outcome)
                print(f"{time.monotonic() - started:6.1f} s  {report.line(outcome)}", flush=True)

            return run_all(jobs, folder=folder, environ=environ, deadline=deadline, workers=workers, told=told)

        try:
            _run_steps(args, run, _wanted(args.steps), report, folder)
        finally:  # also of a run that was stopped
            report.seconds = time.monotonic() - started
            report.write(args.out)
    print(f"{report.seconds:6.1f} s  {report.verdict()}; see {args.out / 'device-check.md'}")
    return 0 if report.passed else 1


def _run_steps(
    args: argparse.Namespace,
    run: Callable[[Sequence[Job], int], list[Outcome]],
    wanted: Callable[[str], bool],
    report: Report,
    folder: Path,
) -> None:
    """Build, and see what there is; then all that is right or wrong, side by side; then the figures, each alone."""
    workers = args.workers
    first = [_step("build", args, _BUILD_S), _step("facts", args, _FACTS_S)]
    run([job for job in first if wanted(job.step)], 1)
    suite = {"profile": args.profile, "small": args.small, "limit_s": _SUITE_S}
    jobs = suite_jobs(args.backend, **suite) + golden_jobs(args.backend, **suite)
    jobs += [_step(name, args, limit) for name, limit in _CORRECTNESS.items()]
    if report.has("triton") and not args.small:
        jobs += twin_jobs(args.backend, limit_s=_TWINS_S)
    outcomes = run([job for job in jobs if wanted(job.step)], workers)
    conformance = [o for o in outcomes if o.job.step in ("conformance", "golden")]
    report.suite = merged(folder, conformance)
    if args.record and report.suite is not None:
        (folder / MERGED).write_text(json.dumps(report.suite), "utf-8")
        run([_step("record", args, _RECORD_S)], 1)
        report.keep(folder / "conformance.json", args.out)
    for kernels in ("", "triton"):
        for name, limit in _FIGURES.items():
            if wanted(name) and (not kernels or report.has(kernels)):
                run([_step(name, args, limit, kernels)], 1)


def _step(name: str, args: argparse.Namespace, limit_s: float, kernels: str = "") -> Job:
    own = f"{name}_{kernels}" if kernels else name
    command = [sys.executable, "-m", "bench.device_check.child", name, "--backend", args.backend]
    command += ["--results", f"{{folder}}/{own}.jsonl", "--seconds", "{seconds}", "--implementation", kernels]
    command += ["--small"] if args.small else []
    environ = {"KVCORE_KERNELS": f"*={kernels}"} if kernels else {}
    return Job(name, own, command, limit_s, required=name not in _FIGURES, environ=environ)


def _wanted(chosen: str) -> Callable[[str], bool]:
    names = {name for name in chosen.split(",") if name}
    return lambda step: not names or step in names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.device_check", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", required=True, metavar="NAME", help="name of a backend, or module:factory")
    parser.add_argument("--out", type=Path, default=Path("build/device-check"), metavar="FOLDER")
    parser.add_argument("--profile", choices=("quick", "ci", "nightly"), help="of the suite (default: ci)")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, metavar="SECONDS", help="for everything together")
    parser.add_argument("--steps", default="", metavar="STEP,...", help="these only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--small", action="store_true", help="sizes for an emulated device, and a part of the suite")
    parser.add_argument("--record", action="store_true", help="write a whole run's conformance.json into the package")
    args = parser.parse_args()
    args.profile = args.profile or ("quick" if args.small else "ci")
    args.out = args.out.absolute()
    return args


if __name__ == "__main__":
    sys.exit(main())
