"""The file system store: what is on disk, and what is left when things go wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.tiers.stores import FsStore, StoreKey

ROOT = Path(__file__).parents[3]
NAMESPACE = b"n" * 32


def key(n: int) -> StoreKey:
    return StoreKey(NAMESPACE, bytes([n]) * 32)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_layout_on_disk(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    store.put(StoreKey(NAMESPACE, b"\xab" * 32), b"frame")
    store.put(StoreKey(NAMESPACE, b"\xcd" * 32), b"bad")
    store.quarantine(StoreKey(NAMESPACE, b"\xcd" * 32), "digest")
    namespace = NAMESPACE.hex()
    assert files_below(tmp_path) == [
        f"{namespace}/ab/{'ab' * 32}.kvf",
        "kvcore-store.json",
        f"quarantine/{namespace}.{'cd' * 32}.digest.kvf",
    ]
    assert json.loads((tmp_path / "kvcore-store.json").read_text()) == {
        "format": "kvcore-fs-store",
        "version": 1,
    }


def test_a_store_is_found_again_by_another(tmp_path: Path) -> None:
    first, second = FsStore(tmp_path / "deep" / "er"), FsStore(str(tmp_path / "deep" / "er"))
    first.put(key(1), b"frame")
    first.close()
    assert second.get(key(1)) == b"frame"
    assert list(FsStore(tmp_path / "deep" / "er").list(NAMESPACE)) == [key(1)]


# Directories that are no store


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("notes.txt", b"mine", "not a kvcore store: it has 'notes.txt'"),
        ("kvcore-store.json", b'{"format": "kvcore-fs-store", "version": 2}', "version"),
        ("kvcore-store.json", b'{"format": "other", "version": 1}', "other"),
        ("kvcore-store.json", b"[]", "format"),
        ("kvcore-store.json", b"{", "not JSON"),
        ("kvcore-store.json", b"\xff\xfe", "not JSON"),
    ],
)
def test_a_foreign_directory_is_refused_untouched(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match=match) as caught:
        FsStore(tmp_path)
    assert caught.value.errno == errno.EEXIST
    assert files_below(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("below", ["file", "file/store", "file/a/b"])
def test_a_path_through_a_file_cannot_be_opened(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="choose another directory") as caught:
        FsStore(tmp_path / below)
    assert caught.value.errno == errno.ENOTDIR
    assert isinstance(caught.value, OSError)


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", failing(errno.EACCES))
    with pytest.raises(StoreError, match="write access") as caught:
        FsStore(tmp_path / "new")
    assert caught.value.errno == errno.EACCES


# Writing


@pytest.mark.parametrize(
    ("function", "number"),
    [("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.ENOSPC), ("open", errno.EACCES)],
)
def test_a_failed_put_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"old")
    before, counted = files_below(tmp_path), store.stats()
    with monkeypatch.context() as patched:
        patched.setattr(os, function, failing(number))
        for n in (1, 2):
            with pytest.raises(StoreError, match="cannot write") as caught:
                store.put(key(n), b"new frame")
            assert caught.value.errno == number
    assert files_below(tmp_path) == before
    assert store.get(key(1)) == b"old"
    assert store.get(key(2)) is None
    assert store.stats().puts == counted.puts
    store.put(key(2), b"new frame")
    assert store.get(key(2)) == b"new frame"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = FsStore(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    frame = bytes(range(256))
    assert store.put(key(1), frame) == 256
    assert store.get(key(1)) == frame


def test_a_disk_that_fills_up_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = FsStore(tmp_path), os.write
    room = 100

    def limited(fd: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, bytes(data[: min(room, 30)]))
        room -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", limited)
        with pytest.raises(StoreError, match="free some space"):
            store.put(key(1), bytes(256))
    assert files_below(tmp_path) == ["kvcore-store.json"]


def test_a_system_that_writes_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(StoreError, match="wrote 0 of 5 bytes"):
        store.put(key(1), b"frame")


def test_the_order_is_write_sync_rename_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"old")
    calls: list[str] = []

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for owner, name in ((os, "write"), (os, "fsync"), (os, "close"), (os, "replace")):
        spy(owner, name)
    store.put(key(1), b"new")
    assert calls == ["write", "fsync", "close", "replace", "fsync", "close"]


def test_a_temporary_name_that_is_taken_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "0" * 2 * nbytes)
    taken = tmp_path / "incoming" / f"{os.getpid()}-{'0' * 16}.tmp"
    taken.write_bytes(b"another writer's")
    with pytest.raises(StoreError) as caught:
        store.put(key(1), b"frame")
    assert caught.value.errno == errno.EEXIST
    assert taken.read_bytes() == b"another writer's"


def test_an_interrupted_put_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)

    def interrupt(fd: int, data: memoryview) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(key(1), b"frame")
    assert files_below(tmp_path) == ["kvcore-store.json"]


# Reading


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, fstat = FsStore(tmp_path), os.fstat
    store.put(key(1), b"frame")
    path = tmp_path / NAMESPACE.hex() / "01" / f"{'01' * 32}.kvf"

    def fstat_then_shrink(fd: int) -> os.stat_result:
        found = fstat(fd)
        os.truncate(path, 2)
        return found

    monkeypatch.setattr(os, "fstat", fstat_then_shrink)
    assert store.get(key(1)) is None
    assert (store.stats().misses, store.stats().torn, store.stats().hits) == (1, 1, 0)


def test_a_file_that_a_network_file_system_drops_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"frame")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing(errno.ESTALE))
        assert store.get(key(1)) is None
    assert store.stats().torn == 1


def test_a_medium_that_fails_is_an_error_not_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"frame")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing(errno.EIO))
        with pytest.raises(StoreError, match="cannot read") as caught:
            store.get(key(1))
    assert caught.value.errno == errno.EIO


def test_listing_passes_over_what_is_not_named_like_a_frame(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"frame")
    shard = tmp_path / NAMESPACE.hex() / "01"
    (shard / f"{'02' * 32}.kvf").write_bytes(b"")  # in the folder of another digest
    (shard / f"{'01' * 31}.kvf").write_bytes(b"")
    (shard / f"{'01' * 32}.kvf~").write_bytes(b"")
    (shard / f"{'0A' * 32}.kvf").write_bytes(b"")
    (tmp_path / NAMESPACE.hex() / "readme").write_bytes(b"")
    (tmp_path / NAMESPACE.hex() / "02").write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    assert list(store.list()) == list(store.list(NAMESPACE)) == [key(1)]


# Crashes


def test_leftovers_are_removed_when_they_are_old(tmp_path: Path) -> None:
    FsStore(tmp_path)
    old, young = f"7-{'0' * 16}.tmp", f"8-{'1' * 16}.tmp"
    other = "notes.tmp"
    for folder in (tmp_path, tmp_path / "incoming"):
        for name in (old, young, other):
            (folder / name).write_bytes(b"half")
        for name in (old, other):
            os.utime(folder / name, (time.time() - 3700,) * 2)
    FsStore(tmp_path)
    left = ["incoming/" + young, "incoming/" + other, young, "kvcore-store.json", other]
    assert files_below(tmp_path) == sorted(left)


def test_a_directory_where_opening_was_interrupted_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / f"7-{'0' * 16}.tmp").write_bytes(b"half a marker")
    FsStore(tmp_path).put(key(1), b"frame")
    assert FsStore(tmp_path).get(key(1)) == b"frame"


WRITER = """
import hashlib, itertools, sys
from kvcore.tiers.stores import FsStore, StoreKey
store = FsStore(sys.argv[1])
for n in itertools.count():
    digest = hashlib.sha256(b"%d" % (n % 20)).digest()
    store.put(StoreKey(b"n" * 32, digest), digest * (1000 + 37 * (n % 400)))
    if not n:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_whole_frames_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chance = random.Random(0)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.05 + chance.random() / 5)
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        store = FsStore(tmp_path)
        found = list(store.list())
        assert found
        for name in found:
            frame = store.get(name)
            assert frame is not None
            assert len(frame) >= 32000
            assert bytes(frame) == name.digest * (len(frame) // 32)
        assert store.stats().misses == 0
    known = {hashlib.sha256(b"%d" % n).digest() for n in range(20)}
    assert {name.digest for name in FsStore(tmp_path).list()} <= known
