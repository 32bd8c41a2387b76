"""A conformance record that was committed belongs to the sources that were committed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.hookspecs import op_names
from kvcore.plugins.discover import discover
from kvcore.plugins.record import RECORD_NAME, current_hashes, package_root, read_evidence
from kvcore.settings import current

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted([*ROOT.glob(f"backends/*/src/*/{RECORD_NAME}"), *ROOT.glob(f"examples/*/src/*/{RECORD_NAME}")])


def test_the_reference_ships_a_record_of_every_op() -> None:
    (run,) = read_evidence(ROOT / "backends/cpu_ref/src/kvcore_cpu_ref")[0]
    assert run.status == "executed"
    assert sorted(run.ops) == sorted(op_names())


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.parent.name)
def test_a_record_is_that_of_these_sources(path: Path) -> None:
    """What can no longer be run again (a GPU that was borrowed) is dropped by writing any other evidence."""
    evidence, why = read_evidence(path.parent)
    assert not why
    assert evidence
    specs = {c.name: c.spec for c in discover(current({})) if c.spec is not None}
    for piece in evidence:
        assert piece.backend in specs, f"{piece.backend} has no entry point: nobody would see its record"
        spec = specs[piece.backend]
        assert package_root(spec) == path.parent
        verb = "conformance-record" if piece.status == "executed" else "kernels-record"
        changed = piece.hashes.difference(current_hashes(spec, path.parent))
        assert not changed, f"run: make {verb} BACKEND={piece.backend}"
        assert {entry.implementation for entry in piece.ops.values()} <= set(spec.implementations)
