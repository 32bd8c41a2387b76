"""Selection: argument, then KVCORE_BACKEND, then priority; obeyed or raised, never guessed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvcore
from kvcore import NoBackendError
from kvcore.plugins import BackendSpec, Probe
from kvcore.plugins.discover import Candidate
from kvcore.plugins.select import select


def candidate(name, priority=0, devices=("cpu",), status="usable", reason="ready"):
    spec = BackendSpec(name, devices, priority, 1, lambda: Probe(True, "ready"))
    return Candidate(name, status, reason, None if status in {"broken", "blocked", "missing"} else spec)


def choose(*candidates, name=None, named_by="the argument", device="cpu"):
    return select(candidates, name=name, named_by=named_by, device_type=device)


def test_the_highest_priority_of_the_device_type_wins():
    spec, explanation = choose(
        candidate("ref"),
        candidate("simd", 50),
        candidate("gpu", 100, ("cuda",)),
        candidate("dead", 90, status="unusable"),
    )
    assert spec.name == "simd"
    assert [(v.name, v.taken) for v in explanation.verdicts] == [
        ("ref", False),
        ("simd", True),
        ("gpu", False),
        ("dead", False),
    ]
    reasons = {v.name: v.reason for v in explanation.verdicts}
    assert reasons["ref"] == "usable, but priority 0 is below simd's 50"
    assert reasons["gpu"] == "usable, but for cuda memory only"
    assert choose(candidate("ref"), candidate("gpu", 100, ("cuda",)), device="cuda")[0].name == "gpu"


def test_a_tie_is_an_error_that_names_both_and_what_to_do():
    with pytest.raises(
        NoBackendError, match="one and two both have priority 7; name one, as in KVCORE_BACKEND=one"
    ) as caught:
        choose(candidate("one", 7), candidate("two", 7), candidate("three", 3))
    assert "three" in str(caught.value)
    assert choose(candidate("one", 7), candidate("two", 7), name="two")[0].name == "two"


def test_a_tie_below_the_top_is_none():
    assert choose(candidate("one", 7), candidate("two", 3), candidate("three", 3))[0].name == "one"


def test_negative_priorities_are_taken_only_when_named():
    with pytest.raises(NoBackendError, match="no usable backend for device type 'cpu'") as caught:
        choose(candidate("emu", -1))
    assert "usable, but taken only when named: KVCORE_BACKEND=emu" in str(caught.value)
    assert choose(candidate("emu", -1), name="emu")[0].name == "emu"
    assert choose(candidate("emu", -1), candidate("ref", 0))[0].name == "ref"


def test_a_named_backend_is_obeyed_whatever_the_priorities():
    spec, explanation = choose(candidate("ref"), candidate("simd", 50), name="ref")
    assert spec.name == "ref"
    assert {v.name: v.reason for v in explanation.verdicts}["simd"] == "another one is named by the argument"


@pytest.mark.parametrize("status", ["unusable", "broken", "blocked", "missing"])
def test_a_named_backend_that_cannot_be_used_is_not_replaced(status):
    with pytest.raises(NoBackendError, match="backend 'gpu' cannot be used: the driver is too old") as caught:
        choose(candidate("ref"), candidate("gpu", 100, status=status, reason="the driver is too old"), name="gpu")
    assert "ref" in str(caught.value)


def test_a_misspelled_name_suggests_the_right_one():
    with pytest.raises(NoBackendError, match="'cpuref' is either misspelled or not installed; did you mean 'cpu_ref'"):
        choose(candidate("cpu_ref"), candidate("cuda", 100, ("cuda",)), name="cpuref")
    with pytest.raises(NoBackendError, match="'quantum' is either misspelled or not installed\n"):
        choose(candidate("cpu_ref"), name="quantum")


def test_no_candidates_at_all():
    with pytest.raises(NoBackendError, match="no usable backend for device type 'cpu'"):
        choose()


def test_the_explanation_prints_as_a_table():
    _, explanation = choose(candidate("ref"), candidate("gpu", 100, status="missing", reason="not installed"))
    lines = str(explanation).splitlines()
    assert lines[0] == "Asked for a backend for device type 'cpu':"
    assert lines[1].split() == ["*", "ref", "usable", "ready"]
    assert lines[2].split() == ["gpu", "missing", "not", "installed"]


# --- through the front door


def test_argument_over_variable_over_priority(shelf, monkeypatch):
    shelf.add("low", priority="70")
    shelf.add("high", priority="80")
    shelf.add("shy", priority="-1")
    assert kvcore.open_backend().name == "high"
    monkeypatch.setenv("KVCORE_BACKEND", "low")
    assert kvcore.open_backend().name == "low"
    assert "named by KVCORE_BACKEND" in kvcore.explain().request
    assert kvcore.open_backend("shy").name == "shy"
    assert "named by the argument" in kvcore.explain("shy").request


def test_the_variable_is_obeyed_or_the_call_raises(monkeypatch):
    monkeypatch.setenv("KVCORE_BACKEND", "cpu_reff")
    with pytest.raises(NoBackendError, match="did you mean 'cpu_ref'"):
        kvcore.open_backend()


def test_the_device_of_an_array_is_asked_for(shelf):
    shelf.add("metal", device_types="('meta',)", priority="100")
    assert kvcore.open_backend(device=torch.zeros(2, device="meta")).name == "metal"
    assert kvcore.open_backend(device="meta:1").name == "metal"
    assert kvcore.open_backend(device=np.zeros(2)).name != "metal"
    with pytest.raises(NoBackendError, match="no usable backend for device type 'npu'"):
        kvcore.open_backend(device="npu:0")


def test_an_open_backend_explains_how_it_was_chosen(shelf):
    shelf.add("sick", light="raise OSError('libsick is missing')")
    explanation = kvcore.open_backend("cpu_ref").explain()
    verdicts = {v.name: v for v in explanation.verdicts}
    assert [name for name, v in verdicts.items() if v.taken] == ["cpu_ref"]
    assert {"cpu_ref", "cpu", "cuda", "rocm", "xpu", "sick"} <= set(verdicts)
    assert all(v.reason for v in verdicts.values())
    assert "libsick is missing" in str(explanation)
    assert verdicts["cpu_ref"].distribution.startswith("kvcore-cpu-ref ")
