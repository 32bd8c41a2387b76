"""The store `fs` with its options: past the page cache, without syncing, and into the caller's memory."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import StoreKey
from kvcore.tiers.stores import FsStore, fs_io, open_store
from kvcore.tiers.stores.fs import open_fs
from kvcore.tiers.stores.fs_io import ALIGN, O_DIRECT, aligned_bytes, probe_direct

SIZES = [0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 5 * ALIGN, (1 << 20) + 3, (2 << 20) + ALIGN - 1]


def key(n: int) -> StoreKey:
    return StoreKey(b"n" * 32, bytes([n]) * 32)


def content(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def direct(tmp_path: Path) -> FsStore:
    """A store that goes past the page cache."""
    why = probe_direct(tmp_path)
    if why is not None and "come back" not in why:
        pytest.skip(f"no O_DIRECT where the tests' files are: {why}")
    store = FsStore(tmp_path / "kv", direct=True)
    assert store.direct
    assert store.notes == ()
    return store


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The flags of all files that are opened from now on."""
    flags, real = [], os.open

    def spy(path: Any, flag: int, *args: Any, **kwargs: Any) -> int:
        flags.append(flag)
        return real(path, flag, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    return flags


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "shifted"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_frames_of_any_length_and_place_come_back(direct: FsStore, tmp_path: Path, nbytes: int, shift: int) -> None:
    frame = aligned_bytes(nbytes + shift)[shift:]
    frame[:] = content(nbytes)
    assert direct.put(key(1), frame) == nbytes
    assert direct.stat(key(1)).nbytes == nbytes
    assert direct.get(key(1)) == content(nbytes)
    assert FsStore(tmp_path / "kv").get(key(1)) == content(nbytes), "the same file for those who use the cache"
    for place in (0, 1, 512):
        for more in (0, 1, ALIGN):
            out = aligned_bytes(place + nbytes + more)[place:]
            assert direct.get_into(key(1), out) == nbytes
            assert out[:nbytes] == content(nbytes)


def test_both_ways_go_past_the_cache(direct: FsStore, opened: list[int]) -> None:
    direct.put(key(1), b"frame")
    assert [flag for flag in opened if flag & os.O_CREAT and flag & O_DIRECT]
    opened.clear()
    direct.get(key(1))
    direct.get_into(key(1), memoryview(bytearray(9)))
    assert [bool(flag & O_DIRECT) for flag in opened] == [True, True]


def test_aligned_memory_is_read_into_without_a_buffer(direct: FsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = content(3 * ALIGN + 7)
    direct.put(key(1), frame)
    out = aligned_bytes(4 * ALIGN)
    buffers: list[int] = []
    monkeypatch.setattr(fs_io, "aligned_bytes", lambda nbytes: buffers.append(nbytes) or aligned_bytes(nbytes))
    assert direct.get_into(key(1), out) == len(frame)
    assert buffers == []
    assert direct.get_into(key(1), out[: len(frame)]) == len(frame)
    assert buffers == [ALIGN], "its last block alone"
    assert out[: len(frame)] == frame


@pytest.mark.parametrize("past_the_cache", [False, True])
def test_a_frame_that_is_longer_than_the_memory_is_torn(tmp_path: Path, past_the_cache: bool) -> None:
    store = FsStore(tmp_path, direct=past_the_cache)
    store.put(key(1), b"longer")
    assert store.get_into(key(1), memoryview(bytearray(5))) is None
    assert store.get_into(key(2), memoryview(bytearray(5))) is None
    assert (store.stats().misses, store.stats().torn, store.stats().hits) == (2, 1, 0)


@pytest.mark.parametrize("left", [0, 2, ALIGN, ALIGN + 2])
def test_a_file_that_shrinks_while_it_is_read_is_a_miss(
    direct: FsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    direct.put(key(1), content(3 * ALIGN + 5))
    path, fstat = tmp_path / "kv" / (b"n" * 32).hex() / "01" / f"{'01' * 32}.kvf", os.fstat

    def fstat_then_shrink(fd: int) -> os.stat_result:
        found = fstat(fd)
        os.truncate(path, left)
        return found

    monkeypatch.setattr(os, "fstat", fstat_then_shrink)
    assert direct.get(key(1)) is None
    direct.put(key(1), content(3 * ALIGN + 5))
    assert direct.get_into(key(1), aligned_bytes(3 * ALIGN + 5)) is None
    assert direct.stats().torn == 2


def test_a_disk_that_fills_up_half_way(direct: FsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, 2 * ALIGN

    def limited(fd: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[:ALIGN])
        room -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", limited)
        with pytest.raises(StoreError, match="free some space"):
            direct.put(key(1), content(3 * ALIGN))
    assert files_below(tmp_path / "kv") == ["kvcore-store.json"]
    assert direct.get(key(1)) is None


def test_a_file_system_without_it_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.WARNING, "kvcore"):
        store = FsStore(tmp_path, direct=True)
        for n in range(3):
            store.put(key(n), b"frame")
            assert store.get(key(n)) == b"frame"
    assert not store.direct
    (note,) = store.notes
    assert "page cache" in note
    assert "Invalid argument" in note
    assert [record.getMessage() for record in caplog.records] == [note]
    assert not list((tmp_path / "incoming").iterdir())


def test_a_system_without_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_io, "O_DIRECT", 0)
    store = FsStore(tmp_path, direct=True)
    assert not store.direct
    assert "has no O_DIRECT" in store.notes[0]


def test_without_sync_nothing_is_synced_and_everything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store = FsStore(tmp_path / "kv", sync=False)
    store.put(key(1), b"frame")
    store.quarantine(key(1), "digest")
    store.put(key(1), b"again")
    assert synced == []
    assert FsStore(tmp_path / "kv").get(key(1)) == b"again"
    FsStore(tmp_path / "kv").put(key(1), b"frame")
    assert len(synced) == 2, "the file, and the folder of its name"


def test_a_folder_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    for folder in ((b"n" * 32).hex() + "/01", "incoming"):
        store.put(key(1), b"frame")
        for path in (tmp_path / folder).glob("*"):
            path.unlink()
        (tmp_path / folder).rmdir()
        assert store.put(key(1), b"again") == 5
        assert store.get(key(1)) == b"again"


def test_a_directory_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    store = FsStore(tmp_path / "kv")
    for n in (1, 1, 2):
        store.put(key(n), b"frame")
        shutil.rmtree(tmp_path / "kv")
        assert store.get(key(n)) is None
        assert list(store.list()) == []
        store.put(key(n), b"again")
        assert FsStore(tmp_path / "kv").get(key(n)) == b"again", "with the marker that it is a store"


# URIs


def test_uris(tmp_path: Path) -> None:
    plain = open_store(f"fs:{tmp_path}/kv")
    quick = open_store(f"fs:{tmp_path}/kv?sync=0&direct=0")
    assert isinstance(plain, FsStore)
    assert plain.name == quick.name == f"fs:{tmp_path}/kv"
    plain.put(key(1), b"opaque")
    assert quick.get(key(1)) == b"opaque"
    assert list(open_fs(f"{tmp_path}/kv?scan=0").list()) == [key(1)]
    assert list(open_fs(f"{tmp_path}/kv?scan=1").list()) == [], "these bytes are no frame"


@pytest.mark.parametrize(
    ("rest", "match"),
    [
        ("", "needs a directory"),
        ("?sync=0", "needs a directory"),
        ("/a?sink=0", "no option 'sink'; there are direct, sync, scan"),
        ("/a?sync=2", "write 1 or 0"),
        ("/a?sync=0&sync=1", "twice"),
    ],
)
def test_uris_that_mean_nothing(rest: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", lambda *args: pytest.fail("a directory was made"))
    with pytest.raises(ConfigError, match=match):
        open_fs(rest)
