"""Probing: the answer is shown as it was given, and a probe that fails has said no."""

from __future__ import annotations

import pytest

from kvcore import ConfigError
from kvcore.ops import candidates
from kvcore.plugins import Probe
from kvcore.plugins.discover import Candidate
from kvcore.plugins.probe import probe


def probed(name):
    return {c.name: c for c in candidates()}[name]


def test_yes_and_what_was_found(shelf):
    shelf.add("fast", probe="Probe(True, 'driver 7 works', {'driver': '7', 'devices': '2'})")
    candidate = probed("fast")
    assert (candidate.status, candidate.reason) == ("usable", "driver 7 works")
    assert candidate.probe.details == {"driver": "7", "devices": "2"}


def test_no_and_why(shelf):
    shelf.add("fast", probe="Probe(False, 'no driver: install fast-driver')")
    candidate = probed("fast")
    assert (candidate.status, candidate.reason) == ("unusable", "no driver: install fast-driver")
    assert candidate.spec is not None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1 / 0", "its probe failed: ZeroDivisionError: division by zero"),
        ("__import__('libnothing')", "its probe failed: ModuleNotFoundError"),
        ("__import__('sys').exit(1)", "its probe failed: SystemExit: 1"),
        ("True", "its probe returned a bool, not a kvcore.Probe"),
        ("None", "its probe returned a NoneType"),
        ("Probe(True, '')", "its probe failed: ConfigError: a probe must give its reason"),
    ],
)
def test_a_probe_that_fails_has_said_no(shelf, answer, reason):
    shelf.add("shaky", probe=answer)
    shelf.add("solid")
    assert probed("shaky").status == "unusable"
    assert reason in probed("shaky").reason
    assert probed("solid").status == "usable"


@pytest.mark.parametrize("status", ["broken", "blocked", "missing"])
def test_what_has_no_spec_is_left_as_it_is(status):
    candidate = Candidate("x", status, "because")
    assert probe(candidate) is candidate


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_an_answer_without_a_reason_is_none(reason):
    with pytest.raises(ConfigError, match="must give its reason, also when it says yes"):
        Probe(True, reason)
