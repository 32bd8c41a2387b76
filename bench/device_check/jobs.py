"""Child processes with a time limit each, run side by side or alone, and what each left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "Outcome", "run_all"]

_LEAST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """A process to run.

    Parameters
    ----------
    step : str
        The step that it is a part of.
    name : str
        Its own, which files are named after.
    command : sequence of str
        ``{folder}`` stands for the scratch folder, ``{seconds}`` for the time that it has.
    limit_s : float
    required : bool
        Whether the check fails if this does.
    environ : mapping of str to str
        Beside that of all children.
    """

    step: str
    name: str
    command: Sequence[str]
    limit_s: float
    required: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of a job: ``status`` is ``ok``, ``failed``, ``timed out`` or ``not run``."""

    job: Job
    status: str
    seconds: float
    reason: str = ""
    log: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)


def run_all(
    jobs: Sequence[Job],
    *,
    folder: Path,
    environ: Mapping[str, str],
    deadline: float,
    workers: int,
    told: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run jobs, so many at a time, in their order.

    Parameters
    ----------
    jobs : sequence of Job
    folder : Path
        Scratch: NAME.log, NAME.jsonl and NAME.json are those of the job NAME.
    environ : mapping of str to str
    deadline : float
        In the time of `time.monotonic`: no job runs longer than to here.
    workers : int
    told : callable
        Called with each outcome as it comes.
    """
    outcomes = []
    running: set[int] = set()
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        for future in as_completed([pool.submit(_run, job, folder, environ, deadline, running) for job in jobs]):
            outcomes.append(future.result())
            told(outcomes[-1])
    finally:  # also of an interrupt: nothing is left behind
        pool.shutdown(wait=False, cancel_futures=True)
        for group in tuple(running):
            _kill(group)
    order = {job.name: i for i, job in enumerate(jobs)}
    return sorted(outcomes, key=lambda outcome: order[outcome.job.name])


def _run(job: Job, folder: Path, environ: Mapping[str, str], deadline: float, running: set[int]) -> Outcome:
    limit = min(job.limit_s, deadline - time.monotonic())
    if limit < _LEAST_SECONDS:
        return Outcome(job, "not run", 0.0, "no time was left")
    command = [part.replace("{folder}", str(folder)).replace("{seconds}", f"{limit:.0f}") for part in job.command]
    log = folder / f"{job.name}.log"
    start, status, reason = time.monotonic(), "ok", ""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env={**environ, **job.environ},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own children end with it
        )
        running.add(child.pid)
        try:
            code = child.wait(limit)
            if code:
                status, reason = "failed", f"exit status {code}" if code > 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            status, reason = "timed out", f"stopped after {limit:.0f} s"
        finally:
            _kill(child.pid)  # what it has started and left
            child.wait()
            running.discard(child.pid)
    records = _records(folder / f"{job.name}.jsonl")
    text = log.read_text("utf-8", "replace")
    return Outcome(job, status, time.monotonic() - start, reason, text, records)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line of a child that was stopped
            records.append(json.loads(line))
    return records
