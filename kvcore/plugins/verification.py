"""What can be said of every op of a backend: executed, compiled, not run; read from its record, never from hope."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.hookspecs import op_names
from kvcore.plugins.link import LinkedBackend
from kvcore.plugins.record import Entry, Evidence, current_hashes, package_root, read_evidence
from kvcore.plugins.spec import BackendSpec

__all__ = ["OpStatus", "every_recorded_status", "op_statuses", "recorded_statuses"]


@dataclass(frozen=True, slots=True)
class OpStatus:
    """One op of one backend.

    Parameters
    ----------
    op, backend : str
    implementation : str
        That the status is about; empty where there is none.
    status : {"executed", "compiled", "not-run", "missing"}
    executed_on : str
        The devices that the suite has run it on, joined by "; ".
    compiled_for : str
        The architectures that it was compiled for, joined by blanks.
    reason : str
    """

    op: str
    backend: str
    implementation: str
    status: str
    executed_on: str
    compiled_for: str
    reason: str


def op_statuses(linked: LinkedBackend) -> list[OpStatus]:
    """Return the status of every op of a linked backend: of the implementation that is bound."""
    spec = linked.spec
    record = _Record(spec, platform.machine())
    rows = []
    for op in op_names():
        binding = linked.bindings.get(op)
        if binding is None:
            rows.append(OpStatus(op, spec.name, "", "missing", "", "", f"{spec.name} does not implement it"))
            continue
        # That a preferred implementation does not load is part of the answer.
        remark = linked.remark if binding.implementation != next(iter(spec.implementations)) else ""
        rows.append(record.status(op, binding.implementation, binding.reason, remark))
    return rows


def recorded_statuses(spec: BackendSpec, *, machine: str | None = None, remark: str = "") -> list[OpStatus]:
    """Return what a backend's record says of every op, without importing its implementations.

    An op's status is that of the preferred implementation that the record lists it for.

    Parameters
    ----------
    spec : BackendSpec
    machine : str, optional
        Count only what was executed on this type of processor; None counts what was run anywhere.
    remark : str
        To be added to every reason: why the backend is not linked.
    """
    record = _Record(spec, machine)
    return [record.status(op, record.recorded(op)[0], "", remark) for op in op_names()]


def every_recorded_status(spec: BackendSpec) -> list[OpStatus]:
    """Return the same on whatever machine it was made, with a row for each implementation that has a record of the op.

    Parameters
    ----------
    spec : BackendSpec
    """
    record = _Record(spec, None)
    return [record.status(op, implementation, "") for op in op_names() for implementation in record.recorded(op)]


class _Record:
    """The evidence of a backend, told apart by whether it counts."""

    def __init__(self, spec: BackendSpec, machine: str | None) -> None:
        self.spec = spec
        root = package_root(spec)
        everything, self.absent = read_evidence(root)
        evidence = [piece for piece in everything if piece.backend == spec.name]
        self.valid: list[Evidence] = []
        self.rejected: list[tuple[Evidence, str]] = []
        if root is not None and evidence:
            now = current_hashes(spec, root)
            for piece in evidence:
                why = piece.rejection(now, machine)
                if why:
                    self.rejected.append((piece, why))
                else:
                    self.valid.append(piece)

    def recorded(self, op: str) -> list[str]:
        """Return the implementations that valid evidence lists an op for, in order; without any, the preferred one."""
        known = {piece.ops[op].implementation for piece in self.valid if op in piece.ops}
        names = list(self.spec.implementations)
        return [name for name in names if name in known] or names[:1] or [""]

    def status(self, op: str, implementation: str, bound: str, remark: str = "") -> OpStatus:
        """Return what the evidence says of an implementation of an op."""
        found = [(p, p.ops[op]) for p in self.valid if op in p.ops and p.ops[op].implementation == implementation]
        executed = [(p, entry) for p, entry in found if p.status == "executed"]
        compiled = [p for p, _ in found if p.status == "compiled"]
        said = [_ran(p, entry) for p, entry in executed] + [_built(p) for p in compiled]
        if not executed and compiled:
            said.append("never run")
        if not found:
            said.append(self._nothing(op, implementation, bound))
        if remark:
            said.append(remark)
        status = "executed" if executed else "compiled" if compiled else "not-run"
        devices = "; ".join(dict.fromkeys(p.device for p, _ in executed))
        targets = " ".join(dict.fromkeys(arch for p in compiled for arch in p.targets))
        return OpStatus(op, self.spec.name, implementation, status, devices, targets, "; ".join(said))

    def _nothing(self, op: str, implementation: str, bound: str) -> str:
        """Say why no evidence counts for an implementation of an op."""
        if self.absent:
            return self.absent
        others = sorted({p.ops[op].implementation for p in self.valid if op in p.ops})
        if others:
            return f"recorded for {', '.join(others)}, bound is {implementation} ({bound})"
        rejected = dict.fromkeys(why for piece, why in self.rejected if op in piece.ops)
        return "; ".join(rejected) or "the record does not list it"


def _ran(piece: Evidence, entry: Entry) -> str:
    return f"{entry.passed} tests on {piece.device}, {piece.date}, suite {piece.suite}"


def _built(piece: Evidence) -> str:
    return f"compiled for {_by_compiler(piece.targets)}, {piece.date}"


def _by_compiler(targets: Mapping[str, str]) -> str:
    compilers: dict[str, list[str]] = {}
    for arch, compiler in targets.items():
        compilers.setdefault(compiler, []).append(arch)
    return ", ".join(f"{', '.join(archs)} by {compiler}" for compiler, archs in compilers.items())
