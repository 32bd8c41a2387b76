"""The store `fs` over a medium that fails: what was stored stays, and nothing is left over."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import StoreError
from kvcore.keys import StoreKey
from kvcore.tiers.stores import FsStore

ROOT = Path(__file__).parents[3]


def key(n: int) -> StoreKey:
    return StoreKey(b"n" * 32, bytes([n]) * 32)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 9000), max_size=6),
    number=st.sampled_from([errno.ENOSPC, errno.EDQUOT, errno.EIO]),
    nbytes=st.integers(1, 20_000),
    direct=st.booleans(),
)
def test_a_medium_that_fails_anywhere(pieces: list[int], number: int, nbytes: int, direct: bool) -> None:
    """Some short writes, then an error: the frame is as it was, or, if all of it was written, the new one."""
    with tempfile.TemporaryDirectory() as folder:
        store, old, new = FsStore(folder, direct=direct, sync=False), b"old" * 100, b"n" * nbytes
        store.put(key(1), old)
        before, real, left = files_below(Path(folder)), os.write, list(pieces)

        def write(fd: int, data: memoryview) -> int:
            if not left:
                raise OSError(number, os.strerror(number))
            return real(fd, data[: left.pop(0)])

        with mock.patch.object(os, "write", write):
            (outcome,) = store.put_batch([(key(1), new)])
        if isinstance(outcome, StoreError):
            assert outcome.errno == number
            assert store.get(key(1)) == old
        else:
            assert store.get(key(1)) == new
        assert files_below(Path(folder)) == before
        assert store.put(key(1), new) == nbytes
        assert store.get(key(1)) == new


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("function", ["replace", "ftruncate", "fsync"])
def test_whatever_step_of_a_put_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, function: str
) -> None:
    store = FsStore(tmp_path, direct=True)
    if function == "ftruncate" and not store.direct:
        pytest.skip("files are only cut where O_DIRECT is")
    store.put(key(1), b"old")
    before = files_below(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, function, failing(number))
        with pytest.raises(StoreError, match="cannot write") as caught:
            store.put(key(1), b"new frame")
        assert caught.value.errno == number
        with pytest.raises(StoreError):
            store.put(key(2), b"new frame")
    assert files_below(tmp_path) == before
    assert store.get(key(1)) == b"old"
    assert store.get(key(2)) is None


def test_permission_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"frame")
    with monkeypatch.context() as patched:
        for function in ("unlink", "replace", "mkdir", "scandir", "stat"):
            patched.setattr(os, function, failing(errno.EACCES))
        calls: list[Callable[[], Any]] = [
            lambda: store.delete(key(1)),
            lambda: store.quarantine(key(1), "digest"),
            lambda: store.put(key(2), b"frame"),
            lambda: list(store.list()),
            lambda: list(store.scan()),
            lambda: store.stat(key(1)),
        ]
        for call in calls:
            with pytest.raises(StoreError, match="write access") as caught:
                call()
            assert caught.value.errno == errno.EACCES
    assert list(store.list()) == [key(1)]
    assert store.get(key(1)) == b"frame"
    assert store.stats().deletes == store.stats().quarantined == 0


def test_a_name_that_could_not_be_synced_is_told_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename is done and cannot be undone: the call fails, and readers have the new frame."""
    store, real, synced = FsStore(tmp_path), os.fsync, 0
    store.put(key(1), b"old")

    def fsync(fd: int) -> None:
        nonlocal synced
        synced += 1
        if synced == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError):
            store.put(key(1), b"new")
    assert store.get(key(1)) == b"new"
    assert list((tmp_path / "incoming").iterdir()) == []


LIMITED = """
import resource, sys
from kvcore.errors import StoreError
from kvcore.tiers.stores import FsStore, StoreKey
store, key = FsStore(sys.argv[1], direct=sys.argv[2] == "1"), StoreKey(b"n" * 32, b"d" * 32)
store.put(key, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.put(key, bytes(300_000))
except StoreError as error:
    print(error.errno, error)
store.put(key, bytes(90_000))
"""


@pytest.mark.parametrize("direct", ["0", "1"])
def test_a_limit_of_the_system_is_met_in_the_middle_of_a_frame(tmp_path: Path, direct: str) -> None:
    """A real short write and a real error: the limit of file sizes (ulimit -f), in a process of its own."""
    pytest.importorskip("resource", reason="limits are those of Unix")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), direct], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{errno.EFBIG} ")
    assert "raise the limit of file sizes" in done.stdout
    assert [path.split("/")[0] for path in files_below(tmp_path)] == [(b"n" * 32).hex(), "kvcore-store.json"]
    assert FsStore(tmp_path).get(StoreKey(b"n" * 32, b"d" * 32)) == bytes(90_000)
