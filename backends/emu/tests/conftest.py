"""Fixtures of the emulated device's tests."""

from __future__ import annotations

import hypothesis
import pytest

import kvcore
from kvcore import settings

# Every run draws the same examples, however slow the machine is.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def emu():
    """The device, with the seed that the environment gives it, before and after."""
    backend = kvcore.open_backend("emu", fallback="error")
    backend.runtime.reseed(settings.current().emu_seed)
    yield backend
    backend.runtime.reseed(settings.current().emu_seed)
