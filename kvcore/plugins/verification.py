"""What the conformance suite has really run: read from the ``conformance.json`` that ships inside a backend's package.

The record names the hash of the sources it was made from. A package whose sources hash to something else was changed
since, so the record says nothing about it; nobody ever types a status by hand.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.hookspecs import op_names
from kvcore.plugins.link import LinkedBackend
from kvcore.plugins.spec import BackendSpec

__all__ = ["RECORD_NAME", "OpStatus", "op_statuses", "package_root", "read_record", "source_hash"]

RECORD_NAME = "conformance.json"
_SOURCES = frozenset({".py", ".hpp", ".h", ".cpp", ".cu", ".hip", ".cl"})


@dataclass(frozen=True, slots=True)
class OpStatus:
    """One op of one backend: ``executed`` (on this kind of machine), ``compiled``, ``not-run`` or ``missing``."""

    op: str
    backend: str
    implementation: str
    status: str
    reason: str


def package_root(spec: BackendSpec) -> Path | None:
    """Return the folder of a backend's top-level package, or None if it has none on disk."""
    module = spec.probe.__module__.partition(".")[0]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def source_hash(root: Path) -> str:
    """Return the SHA-256 of a package's sources: names and contents, in order of name, line ends made equal."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCES):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(root).as_posix().encode()
        digest.update(len(name).to_bytes(4, "little") + name + len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def read_record(spec: BackendSpec) -> tuple[Mapping[str, Any] | None, str]:
    """Return a backend's conformance record, or None and the reason why it counts for nothing here."""
    root = package_root(spec)
    if root is None:
        return None, "its package has no folder to look for a record in"
    path = root / RECORD_NAME
    if not path.is_file():
        return None, f"its package ships no {RECORD_NAME}"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return None, f"{RECORD_NAME} cannot be read: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("ops"), dict):
        return None, f"{RECORD_NAME} is no conformance record"
    if record.get("sources") != source_hash(root):
        return None, f"its sources have changed since {record.get('date', 'the record')}; run the suite again"
    machine = platform.machine()
    if record.get("machine") != machine:
        return None, f"recorded on {record.get('machine')}, this machine is {machine}"
    return record, ""


def op_statuses(linked: LinkedBackend) -> list[OpStatus]:
    """Return the status of every op of a linked backend."""
    record, why = read_record(linked.spec)
    rows = []
    for op in op_names():
        binding = linked.bindings.get(op)
        name = linked.spec.name
        if binding is None:
            rows.append(OpStatus(op, name, "", "missing", f"{name} does not implement it"))
            continue
        entry = record["ops"].get(op) if record is not None else None
        if record is None or entry is None:
            reason = why or "the record does not list it"
            rows.append(OpStatus(op, name, binding.implementation, "not-run", reason))
        elif entry.get("implementation") != binding.implementation:
            reason = f"recorded for {entry.get('implementation')}, bound is {binding.implementation} ({binding.reason})"
            rows.append(OpStatus(op, name, binding.implementation, "not-run", reason))
        else:
            reason = f"{entry['passed']} tests on {record['device']}, {record['date']}, suite {record['suite']}"
            rows.append(OpStatus(op, name, binding.implementation, str(entry["status"]), reason))
    return rows
