"""The example works, stays an example, and stays short. The conformance suite tests the rest."""

from pathlib import Path

import numpy as np

import kvcore
from kvcore.settings import VARIABLES

ROOT = Path(__file__).parents[1]


def test_it_runs_when_it_is_named_and_only_then(monkeypatch):
    for variable in VARIABLES:  # of the caller's
        monkeypatch.delenv(variable.name, raising=False)
    acme, reference = kvcore.open_backend("acme"), kvcore.open_backend()
    assert reference.name != "acme"
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    np.testing.assert_array_equal(acme.reduce_absmax(x, 1), reference.reduce_absmax(x, 1))
    assert acme.plan("digest").implementation == "loops"
    assert acme.plan("reduce_absmax", dtype="float16", axes=(0,)).backend == "cpu_ref"


def test_it_is_under_150_lines():
    assert sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / "src").rglob("*.py")) < 150
