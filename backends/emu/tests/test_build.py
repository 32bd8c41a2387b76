"""Compiled kernels: where they are kept, and how many."""

from __future__ import annotations

import os

import pytest

from kvcore.errors import BackendLoadError
from kvcore_emu.build import library


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "taken").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(BackendLoadError, match=rf"cannot be kept in {tmp_path}/taken/kvcore: .*XDG_CACHE_HOME"):
        library(32)


def test_a_library_is_compiled_once_for_its_options(tmp_path):
    made = library(32, ("-O0",), tmp_path)
    os.utime(made, (0, 0))
    assert library(32, ("-O0",), tmp_path) == made
    assert made.stat().st_mtime > 0
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    assert library(64, ("-O0",), tmp_path) != made
