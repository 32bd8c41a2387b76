"""Writes the merged report of a whole run of the suite into the backend's package, as ``--kvcore-record`` does.

The suite itself records only what one process ran; here its modules ran side by side, and their counts are added up.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from bench.device_check.child import Given
from bench.device_check.places import MERGED
from bench.device_check.recorder import Recorder
from kvcore.errors import ConfigError
from kvcore.plugins.record import RECORD_NAME, Entry, Evidence, add_evidence, current_hashes, package_root

_OTHER_DRIVERS = ("KVCORE_CUDA_DRIVER", "KVCORE_ROCM_DRIVER")
_FACTS = ("backend", "date", "device", "machine", "suite", "profile")


def run(given: Given, recorder: Recorder) -> None:
    """Record, and leave a copy of the record beside the results."""
    recorder.check("conformance.json", partial(_recorded, given, recorder.folder))


def _recorded(given: Given, folder: Path) -> str:
    named = [name for name in _OTHER_DRIVERS if os.environ.get(name)]
    if named:
        raise ConfigError(f"nothing recorded: {named[0]} names a driver, and what that shows may be no device")
    report: dict[str, Any] = json.loads((folder / MERGED).read_text("utf-8"))
    if not report["complete"]:
        raise ConfigError("nothing recorded: only a whole run without failures is")
    spec = given.open().spec
    root = package_root(spec)
    if root is None:
        raise ConfigError(f"nothing recorded: the package of {spec.name} has no folder on disk")
    ran = {op: entry for op, entry in report["ops"].items() if entry["implementation"]}
    ops = {op: Entry(entry["implementation"], entry["passed"]) for op, entry in ran.items() if entry["passed"]}
    hashes = current_hashes(spec, root)
    facts: dict[str, str] = {name: str(report[name]) for name in _FACTS}
    piece = Evidence(ops=ops, status="executed", sources=hashes.sources, kernels=hashes.kernels, targets={}, **facts)
    add_evidence(spec, piece, {(op, entry["implementation"]) for op, entry in ran.items()})
    shutil.copyfile(root / RECORD_NAME, folder / RECORD_NAME)
    return f"{len(ops)} ops, {facts['device']}"
