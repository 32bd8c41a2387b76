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


def test_the_libraries_used_last_are_kept(tmp_path):
    for number in range(12):
        for name in (f"emu-32-{number:02}.so", f"emu-64-{number:02}.so"):
            (tmp_path / name).write_bytes(b"")
            os.utime(tmp_path / name, (number, number))
    made = library(32, ("-O0",), tmp_path)
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == sorted(
        [made.name, *(f"emu-32-{n:02}.so" for n in range(5, 12)), *(f"emu-64-{n:02}.so" for n in range(12))]
    )

    os.utime(made, (0, 0))
    assert library(32, ("-O0",), tmp_path) == made
    assert made.stat().st_mtime > 12
