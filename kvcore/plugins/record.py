"""A backend's conformance record: the ``conformance.json`` in its package, read, judged and written.

A record is a list of pieces of evidence. Each is one run of the suite on one device, or one compilation for several,
and names the hashes of the sources that it was made from: sources that hash to something else were changed since, so
the piece says nothing about them. Nobody ever types a status by hand.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.util
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.hookspecs import op_names
from kvcore.plugins.spec import BackendSpec

__all__ = [
    "FORMAT",
    "RECORD_NAME",
    "Entry",
    "Evidence",
    "Hashes",
    "add_compiled",
    "add_evidence",
    "current_hashes",
    "hashes_of",
    "package_root",
    "read_evidence",
    "source_hash",
    "write_evidence",
]

RECORD_NAME = "conformance.json"
FORMAT = 2
"""Version of the file's form. Another one is not read: the suite is run again."""

_SOURCES = frozenset({".py", ".hpp", ".h", ".cpp", ".cu", ".hip", ".cl"})
_NOT_SHIPPED = ("check",)
"""Folders of the core's kernels that are in no library: the program that asks compilers."""


@dataclass(frozen=True, slots=True)
class Hashes:
    """What a backend's code is made of.

    Parameters
    ----------
    sources : str
        `source_hash` of its package.
    kernels : str
        `source_hash` of the core's kernels where the backend is built from them, else empty.
    """

    sources: str
    kernels: str = ""

    def difference(self, now: Hashes) -> str:
        """Return what has changed since, or an empty string."""
        if self.sources != now.sources:
            return "its sources have changed"
        return "" if self.kernels == now.kernels else "the core's kernels, which it is built from, have changed"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a piece of evidence says of one op.

    Parameters
    ----------
    implementation : str
    passed : int
        Tests of the suite; 0 where the op was compiled only.
    """

    implementation: str
    passed: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """A run of the suite on a device, or a compilation for some.

    Parameters
    ----------
    backend : str
        A package may hold several.
    status : {"executed", "compiled"}
    date : str
        ISO 8601.
    sources, kernels : str
        See `Hashes`.
    ops : mapping of str to Entry
        Executed: the ops that passed everything. Compiled: those that did for all of `targets`.
    device, machine, suite, profile : str
        Of a run: the device with its architecture, the type of the processor, version and profile of the suite.
    targets : mapping of str to str
        Of a compilation: architecture -> the compiler and its version.
    """

    backend: str
    status: str
    date: str
    sources: str
    kernels: str
    ops: Mapping[str, Entry]
    device: str = ""
    machine: str = ""
    suite: str = ""
    profile: str = ""
    targets: Mapping[str, str] = field(default_factory=dict)

    @property
    def hashes(self) -> Hashes:
        """What it was made from."""
        return Hashes(self.sources, self.kernels)

    def rejection(self, now: Hashes, machine: str | None) -> str:
        """Return why it counts for nothing, or an empty string.

        Parameters
        ----------
        now : Hashes
            Of the sources as they are.
        machine : str, optional
            The type of this processor; None asks what was run anywhere.
        """
        changed = self.hashes.difference(now)
        if changed:
            return f"{changed} since {self.date}; {'run the suite' if self.status == 'executed' else 'compile'} again"
        if self.status == "executed" and machine not in (None, self.machine):
            return f"recorded on {self.machine}, this machine is {machine}"
        return ""


def package_root(spec: BackendSpec) -> Path | None:
    """Return the folder of a backend's top-level package, or None if it has none on disk.

    A backend that is part of kvcore itself has the subpackage that its probe is in.
    """
    top, _, rest = spec.probe.__module__.partition(".")
    return _folder(f"{top}.{rest}".rpartition(".")[0] if top == "kvcore" and "." in rest else top)


def source_hash(root: Path, skip: Collection[str] = ()) -> str:
    """Return the SHA-256 of a folder's sources: names and contents, in order of name, line ends made equal.

    Parameters
    ----------
    root : Path
    skip : collection of str
        Folders right under `root` that do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCES):
        relative = path.relative_to(root)
        if relative.parts[0] in skip:
            continue
        text = path.read_bytes().replace(b"\r\n", b"\n")
        name = relative.as_posix().encode()
        digest.update(len(name).to_bytes(4, "little") + name + len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def current_hashes(spec: BackendSpec, root: Path) -> Hashes:
    """Return the hashes of a backend's sources as they are.

    Parameters
    ----------
    spec : BackendSpec
    root : Path
        Its package.
    """
    kernels = _folder("kvcore.kernels") if spec.core_kernels else None
    return Hashes(source_hash(root), "" if kernels is None else source_hash(kernels, _NOT_SHIPPED))


def hashes_of(spec: BackendSpec) -> Hashes:
    """Return the hashes of a backend's sources as they are: before a run or a compilation that is to be recorded.

    Raises
    ------
    ConfigError
        Its package has no folder on disk, so that nothing can be recorded.
    """
    root = package_root(spec)
    if root is None:
        raise ConfigError(f"nothing recorded: the package of {spec.name} has no folder on disk")
    return current_hashes(spec, root)


def read_evidence(root: Path | None) -> tuple[list[Evidence], str]:
    """Return the evidence in a package, whatever it is worth now, and why there is none.

    Parameters
    ----------
    root : Path, optional
        The package's folder.
    """
    if root is None:
        return [], "its package has no folder to look for a record in"
    path = root / RECORD_NAME
    if not path.is_file():
        return [], f"its package ships no {RECORD_NAME}"
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return [], f"{RECORD_NAME} cannot be read: {error}"
    if isinstance(record, dict) and record.get("format", FORMAT) != FORMAT:
        return [], f"{RECORD_NAME} has format {record['format']}, this kvcore reads {FORMAT}; run the suite again"
    try:
        return [_evidence(piece) for piece in record["evidence"]], ""
    except (AttributeError, KeyError, TypeError, ValueError):
        return [], f"{RECORD_NAME} is no conformance record"


def write_evidence(root: Path, evidence: Sequence[Evidence]) -> None:
    """Write a package's record anew.

    Raises
    ------
    OSError
        It cannot be written.
    """
    pieces = [_without_blanks(asdict(piece)) for piece in evidence]
    record = {"format": FORMAT, "evidence": pieces}
    (root / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def add_evidence(spec: BackendSpec, piece: Evidence, judged: Collection[tuple[str, str]]) -> None:
    """Add to a backend's record, and drop from it what is stale or has been judged anew.

    Parameters
    ----------
    spec : BackendSpec
    piece : Evidence
    judged : collection of (op, implementation)
        What was run or compiled, with success or without: earlier evidence of the same kind for these (on the same
        device, for the same targets) is no longer true.

    Raises
    ------
    ConfigError
        The package has no folder on disk, or its sources have changed since the evidence began.
    OSError
        The record cannot be written.
    """
    now = hashes_of(spec)
    root = package_root(spec)
    changed = piece.hashes.difference(now)
    if changed or root is None:
        raise ConfigError(f"nothing recorded: {changed} meanwhile; do it again")
    kept = []
    for old in read_evidence(root)[0]:
        if old.backend == spec.name and old.hashes.difference(now):
            continue
        left = _without(old, lambda op, e: (op, e.implementation) in judged) if _same_subject(old, piece) else old
        if left.ops:
            kept.append(left)
    kept += [piece] if piece.ops else []
    write_evidence(root, sorted(kept, key=lambda e: (e.backend, e.status != "executed", e.device, e.date)))


def add_compiled(
    spec: BackendSpec, implementation: str, ops: Collection[str], targets: Mapping[str, str], hashes: Hashes
) -> None:
    """Add to a backend's record that ops of an implementation were compiled today.

    Parameters
    ----------
    spec : BackendSpec
    implementation : str
    ops : collection of str
        Those all of whose kernels compiled for all `targets`. Earlier compilations of the implementation fall out.
    targets : mapping of str to str
        Architecture -> the compiler and its version.
    hashes : Hashes
        `hashes_of` the backend before the compilation.

    Raises
    ------
    ConfigError, OSError
        As `add_evidence`; or the backend has no such implementation.
    """
    if implementation not in spec.implementations:
        known = ", ".join(spec.implementations) or "none"
        raise ConfigError(f"nothing recorded: {spec.name} has no implementation {implementation!r}; it has {known}")
    piece = Evidence(
        backend=spec.name,
        status="compiled",
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        sources=hashes.sources,
        kernels=hashes.kernels,
        ops={op: Entry(implementation) for op in ops},
        targets=targets,
    )
    add_evidence(spec, piece, {(op, implementation) for op in op_names()})


def _without_blanks(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_blanks(v) if isinstance(v, dict) else v for k, v in values.items() if v}


def _same_subject(old: Evidence, new: Evidence) -> bool:
    # A compilation is for all targets at once: one that it no longer has falls out.
    return (old.backend, old.status, old.device, old.machine) == (new.backend, new.status, new.device, new.machine)


def _without(piece: Evidence, drop: Callable[[str, Entry], bool]) -> Evidence:
    return replace(piece, ops={op: entry for op, entry in piece.ops.items() if not drop(op, entry)})


def _evidence(piece: Mapping[str, Any]) -> Evidence:
    ops = {op: Entry(str(e["implementation"]), int(e.get("passed", 0))) for op, e in piece["ops"].items()}
    targets = {str(arch): str(compiler) for arch, compiler in piece.get("targets", {}).items()}
    if piece["status"] not in ("executed", "compiled"):
        raise ValueError(piece["status"])
    texts = {key: str(piece.get(key, "")) for key in ("device", "machine", "suite", "profile", "kernels")}
    texts |= {key: str(piece[key]) for key in ("backend", "status", "date", "sources")}
    return Evidence(ops=ops, targets=targets, **texts)


def _folder(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))
