"""Probe: ask each backend that was found whether it works on this machine. A probe that raises says no, with why."""

from __future__ import annotations

from dataclasses import replace

from kvcore.plugins.discover import Candidate, describe
from kvcore.plugins.spec import Probe

__all__ = ["probe"]


def probe(candidate: Candidate) -> Candidate:
    """Return the candidate with its probe's answer; one that has no spec comes back as it is."""
    if candidate.spec is None:
        return candidate
    try:
        answer = candidate.spec.probe()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign code: the failure is the answer, and it is shown
        answer = Probe(False, f"its probe failed: {describe(error)}")
    if not isinstance(answer, Probe):
        answer = Probe(False, f"its probe returned a {type(answer).__qualname__}, not a kvcore.Probe")
    return replace(candidate, status="usable" if answer.usable else "unusable", reason=answer.reason, probe=answer)
