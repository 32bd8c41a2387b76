"""Whether the emulated device can run here."""

from __future__ import annotations

import shutil

from kvcore_emu import backend
from kvcore_emu.probe import probe


def test_it_says_yes_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = probe()
    assert found.usable
    assert "/usr/bin/g++" in found.reason


def test_it_says_why_not_where_there_is_none(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = probe()
    assert not found.usable
    assert "there is no g++ on PATH" in found.reason


def test_it_is_never_taken_unless_named():
    spec = backend()
    assert (spec.priority, spec.device_types) == (-1, ("emu",))
