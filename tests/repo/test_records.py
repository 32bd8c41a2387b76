"""A conformance record that was committed belongs to the sources that were committed with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.hookspecs import op_names
from kvcore.plugins.verification import RECORD_NAME, source_hash

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted([*ROOT.glob(f"backends/*/src/*/{RECORD_NAME}"), *ROOT.glob(f"examples/*/src/*/{RECORD_NAME}")])


def test_the_reference_ships_a_record_of_every_op() -> None:
    record = json.loads((ROOT / "backends/cpu_ref/src/kvcore_cpu_ref" / RECORD_NAME).read_text("utf-8"))
    assert sorted(record["ops"]) == sorted(op_names())
    assert {entry["status"] for entry in record["ops"].values()} == {"executed"}


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.parent.name)
def test_a_record_is_that_of_these_sources(path: Path) -> None:
    record = json.loads(path.read_text("utf-8"))
    backend = path.parent.name.removeprefix("kvcore_")
    assert record["sources"] == source_hash(path.parent), f"run: make conformance-record BACKEND={backend}"
