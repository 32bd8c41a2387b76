"""``kvcore doctor``: what is installed, what of it works here, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore import __version__
from kvcore.cli.machine import VENDORS, advice, gpus
from kvcore.cli.output import console, plain_table, print_json
from kvcore.errors import ConfigError, KVCoreError, NoBackendError
from kvcore.ops import candidates
from kvcore.plugins.discover import Candidate
from kvcore.plugins.link import link
from kvcore.plugins.select import Explanation, Verdict, select
from kvcore.plugins.torch_build import torch_build
from kvcore.settings import VARIABLES, Settings, current

__all__ = ["collect", "doctor"]

_PACKAGES = ("numpy", "ml_dtypes", "pluggy", "blake3", "google-crc32c", "torch", "transformers", "triton")
_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_ADVICE = 'install a backend: pip install kvcore-cpu-ref (the NumPy reference), or "kvcore[cpu]", "kvcore[cuda]", ...'


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Show which backends work here, why others do not, and what would change that.

    Also versions, KVCORE_* variables and memory limits. Exits with 1 if no backend can serve the CPU's memory, or a
    device's backend that is usable cannot be taken: it does not load, or another one has the same priority.
    """
    report = collect()
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(1 if report["problems"] else 0)


def collect() -> dict[str, Any]:
    """Return what `doctor` shows, as plain values. Imports no torch and no vendor library of its own."""
    settings, variables, problems = _settings()
    found = candidates(settings)
    taken, explanation, more = _taken(found, settings)
    problems += more
    details = {c.name: dict(c.probe.details) for c in found if c.probe is not None}
    present, build = gpus(), torch_build()
    torch = None if build is None else build.kind
    return {
        "kvcore": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "gpus": None if present is None else [VENDORS[name].gpu for name in present],
        "torch_build": torch,
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "request": explanation.request,
        "selected": taken["cpu"],
        "taken": taken,
        "backends": [asdict(verdict) | {"found": details.get(verdict.name, {})} for verdict in explanation.verdicts],
        "variables": variables,
        "host": _host(),
        "advice": advice(found, present, torch),
        "problems": problems,
    }


def _taken(found: list[Candidate], settings: Settings) -> tuple[dict[str, str | None], Explanation, list[str]]:
    """Return the backend taken for each type of device, every candidate with its reason, and what is wrong."""
    verdicts = tuple(
        Verdict(c.name, c.status, False, c.reason, c.spec.priority if c.spec else None, (), c.distribution)
        for c in found
    )
    explanation = Explanation("a backend for device type 'cpu'", verdicts)
    usable = [c.spec for c in found if c.status == "usable" and c.spec is not None and c.spec.priority >= 0]
    types = dict.fromkeys(["cpu", *(t for spec in usable for t in spec.device_types)])
    taken: dict[str, str | None] = {}
    remarks, problems = {}, []
    # A backend that is named serves every type of memory that it is asked for.
    for device_type in ["cpu"] if settings.backend else types:
        taken[device_type] = None
        try:
            spec, why = select(found, name=settings.backend or None, named_by="KVCORE_BACKEND", device_type=device_type)
            if device_type == "cpu":
                explanation = why
            # A backend whose probe says yes and that does not load is no use. KVCORE_KERNELS is that of the first.
            linked = link(spec, settings.kernels if device_type == "cpu" else ())
            taken[device_type] = spec.name
            remarks[spec.name] = linked.remark
        except NoBackendError as error:
            first = str(error).splitlines()[0]
            problems.append(f"{first}; {_ADVICE}" if "no usable backend" in first else first)
        except KVCoreError as error:
            problems.append(str(error))
    shown = (
        replace(v, reason=f"{v.reason}; {remarks[v.name]}") if remarks.get(v.name) else v for v in explanation.verdicts
    )
    return taken, Explanation(explanation.request, tuple(shown)), problems


def _settings() -> tuple[Settings, list[dict[str, Any]], list[str]]:
    """Read every variable by itself, so that one bad value does not hide the others."""
    good, rows, problems = dict(os.environ), [], []
    for variable in VARIABLES:
        try:
            variable.read(os.environ)
        except ConfigError as error:
            del good[variable.name]
            problems.append(str(error))
        shown = variable.shown(os.environ)
        rows.append({"name": variable.name, "value": shown, "default": variable.default, "help": variable.help})
    return current(good), rows, problems


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host() -> dict[str, Any]:
    """Memory that pinned and hugepage buffers can have, in bytes; None where the system does not say."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _meminfo("MemTotal"),
        "available_bytes": _meminfo("MemAvailable"),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "hugepages_2mib": _number(_HUGEPAGES / "nr_hugepages"),
        "hugepages_2mib_free": _number(_HUGEPAGES / "free_hugepages"),
    }


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _print(report: dict[str, Any]) -> None:
    out = console()
    out.print(f"kvcore {report['kvcore']}, Python {report['python']}, {report['machine']}\n")
    table = plain_table("", "backend", "status", "from", "why")
    for row in report["backends"]:
        table.add_row("*" if row["taken"] else "", row["name"], row["status"], row["distribution"], row["reason"])
    out.print(table)
    for row in report["backends"]:
        if row["status"] == "unusable" and row["found"]:
            facts = "; ".join(f"{name}: {value}" for name, value in row["found"].items())
            out.print(f"\nwhat {row['name']} found: {facts}", style="dim", markup=False, highlight=False)
    out.print(f"\nTaken (*) for the CPU's memory: {report['selected'] or 'none'}")
    for device_type, name in report["taken"].items():
        if device_type != "cpu":
            out.print(f"Taken for {device_type} memory: {name or 'none'}")
    have = "cannot be told" if report["gpus"] is None else ", ".join(report["gpus"]) or "none"
    out.print(f"GPUs on the PCI bus: {have}; torch is built for {report['torch_build'] or 'nothing: not installed'}\n")
    packages = plain_table("package", "version")
    for name, version in report["packages"].items():
        packages.add_row(name, version or "not installed")
    out.print(packages)
    variables = plain_table("\nvariable", "\nvalue", "\nmeaning")
    for row in report["variables"]:
        variables.add_row(row["name"], "(unset)" if row["value"] is None else repr(row["value"]), row["help"])
    out.print(variables)
    host = report["host"]
    memory = plain_table("\nhost", "", header=True)
    memory.add_row("CPUs for this process", str(host["cpus"]))
    memory.add_row("memory, available of all", f"{_gib(host['available_bytes'])} of {_gib(host['memory_bytes'])}")
    limit = "unlimited" if host["memlock_bytes"] is None else f"{host['memlock_bytes']:,} B"
    memory.add_row("memory that may be locked (RLIMIT_MEMLOCK)", limit)
    total, free = host["hugepages_2mib"], host["hugepages_2mib_free"]
    memory.add_row("2 MiB pages, free of all", "unknown" if total is None else f"{free} of {total}")
    out.print(memory)
    for line in report["advice"]:
        out.print(f"\nAdvice: {line}", style="bold")
    for problem in report["problems"]:
        out.print(f"\nProblem: {problem}", style="bold red")


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"
