"""The scan of the store `fs`: no name is trusted without the head behind it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from kvcore.codecs import GroupInfo, PartInfo, write_frame
from kvcore.codecs.frame_format import FrameHeader, crc32c
from kvcore.errors import CorruptFrameError, StoreError
from kvcore.keys import StoreKey
from kvcore.tiers.stores import FsStore, StoreStats, fs_scan
from kvcore.tiers.stores.fs_scan import Scanned, check_frame_head

NAMESPACE = b"n" * 32


def key(n: int) -> StoreKey:
    return StoreKey(NAMESPACE, bytes([n]) * 32)


def frame(name: StoreKey, position: int = 0, layers: int = 2) -> bytes:
    """A frame whose layers have other bytes than their digests say: a scan reads no layer."""
    group = GroupInfo("LTC", range(layers), (PartInfo("C", "uint8", 7),), rows=5, base_position=position)
    segments = [[bytes(group.rows * 7)]] * layers
    written = write_frame(
        [group], segments, tokens=5, namespace=name.namespace, key=name.digest, digest=lambda views: [1] * len(views)
    )
    return bytes(written)


def path_of(root: Path, name: StoreKey) -> Path:
    return root / name.namespace.hex() / name.digest.hex()[:2] / f"{name.digest.hex()}.kvf"


def with_major(data: bytes, major: int) -> bytes:
    return data[:4] + bytes([major, 0]) + data[6:]


def with_unknown_dtype(data: bytes) -> bytes:
    """The same head with an element type that this build does not know, under a CRC that is right."""
    end = FrameHeader.parse(data).head_bytes
    head = data[: end - 4].replace(b"uint8", b"uint9")
    return head + crc32c(head).to_bytes(4, "little") + data[end:]


def test_it_tells_key_size_time_and_position(tmp_path: Path) -> None:
    store, names = FsStore(tmp_path), [key(n) for n in range(1, 6)]
    for n, name in enumerate(names):
        store.put(name, frame(name, position=100 * n))
        os.utime(path_of(tmp_path, name), (1000.0 + n,) * 2)
    seen: list[int] = []
    found = sorted(store.scan(progress=seen.append), key=lambda one: one.mtime)
    assert found == [
        Scanned(name, len(frame(name, position=100 * n)), 1000.0 + n, 100 * n) for n, name in enumerate(names)
    ]
    assert seen == [1, 2, 3, 4, 5]
    assert store.stats() == StoreStats(puts=5, put_bytes=sum(one.nbytes for one in found))


DAMAGE = {
    "empty": (lambda data: b"", "truncated"),
    "cut short": (lambda data: data[:-1], "truncated"),
    "cut in the head": (lambda data: data[:90], "truncated"),
    "bytes behind the end": (lambda data: data + b"\0", "length"),
    "foreign": (lambda data: b"something else altogether", "foreign"),
    "bit flip in the header": (lambda data: data[:21] + bytes([data[21] ^ 1]) + data[22:], "crc"),
    "bit flip in the directory": (
        lambda data: data[: (at := FrameHeader.parse(data).head_bytes - 9)] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "crc",
    ),
    "another chunk's": (lambda data: frame(key(9)), "identity"),
    "another namespace's": (lambda data: frame(StoreKey(bytes(32), key(1).digest)), "identity"),
    "a head that is longer than the file": (
        lambda data: data[:28] + (2**31).to_bytes(4, "little") + data[32:],
        "length",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_what_its_name_says_is_set_aside(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = DAMAGE[damage]
    store = FsStore(tmp_path)
    store.put(key(1), spoil(frame(key(1))))
    store.put(key(2), frame(key(2)))
    with caplog.at_level(logging.WARNING, "kvcore"):
        assert [one.key for one in store.scan()] == [key(2)]
    assert (tmp_path / "quarantine" / f"{NAMESPACE.hex()}.{key(1).digest.hex()}.{reason}.kvf").exists()
    assert store.get(key(1)) is None
    assert store.stats().quarantined == 1
    assert f"1 frames; set aside: 1 {reason}" in caplog.text
    store.put(key(1), frame(key(1)))
    assert {one.key for one in store.scan()} == {key(1), key(2)}, "the key can be stored again"


@pytest.mark.parametrize(
    ("changed", "reason"), [(lambda data: with_major(data, 2), "version"), (with_unknown_dtype, "layout")]
)
def test_a_whole_frame_of_another_build_is_left_alone_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed, reason: str
) -> None:
    store, data = FsStore(tmp_path), changed(frame(key(1)))
    store.put(key(1), data)
    with caplog.at_level(logging.WARNING, "kvcore"):
        (found,) = store.scan()
    assert (found.key, found.nbytes, found.unusable) == (key(1), len(data), reason)
    assert store.get(key(1)) == data
    assert f"left alone, of no use to this build: 1 {reason}" in caplog.text


def test_encrypted_frames_are_checked_without_a_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra crypto")
    from kvcore.codecs.encryption import FrameCipher
    from kvcore.codecs.key_ring import KeyRing

    cipher = FrameCipher(KeyRing.generate(tmp_path / "keys.json"))
    store = FsStore(tmp_path / "kv")
    for n in (1, 2, 3):
        store.put(key(n), cipher.seal(frame(key(n), position=n), key(n)))
    store.put(key(2), store.get(key(3)))
    assert {one.key: (one.position, one.unusable) for one in store.scan()} == {key(1): (1, ""), key(3): (3, "")}


def test_a_head_of_many_reads(tmp_path: Path) -> None:
    store, data = FsStore(tmp_path), frame(key(1), layers=900)
    assert FrameHeader.parse(data).head_bytes > 3 * fs_scan._FIRST_READ
    store.put(key(1), data)
    assert [one.unusable for one in store.scan()] == [""]
    at = FrameHeader.parse(data).head_bytes - 5
    store.put(key(1), data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert list(store.scan()) == []


def test_layers_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = FsStore(tmp_path), key(1)
    group = GroupInfo("LTC", range(1), (PartInfo("C", "uint8", 1 << 16),), rows=16)
    store.put(
        name,
        write_frame([group], [[bytes(1 << 20)]], tokens=16, namespace=NAMESPACE, key=name.digest, digest=lambda v: [1]),
    )
    read, pread = [], os.pread

    def spy(fd: int, count: int, at: int) -> bytes:
        read.append(count)
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", spy)
    assert len(list(store.scan())) == 1
    assert sum(read) <= fs_scan._FIRST_READ


def test_opaque_bytes_are_told_and_not_looked_at(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"opaque")
    (found,) = store.scan(check=None)
    assert (found.key, found.nbytes, found.position, found.unusable) == (key(1), 6, 0, "")
    assert store.get(key(1)) == b"opaque"


def test_a_check_of_ones_own(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    store.put(key(1), b"good bytes")
    store.put(key(2), b"bad")

    def check(name: StoreKey, nbytes: int, read) -> int:
        if read(4) != b"good":
            raise CorruptFrameError(f"{nbytes} bytes", reason="foreign")
        return 7

    assert [(one.key, one.position) for one in store.scan(check)] == [(key(1), 7)]
    assert store.get(key(2)) is None


def test_one_file_that_cannot_be_read_keeps_the_others_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path)
    for n in (1, 2, 3):
        store.put(key(n), frame(key(n)))
    bad, pread = os.stat(path_of(tmp_path, key(2))).st_ino, os.pread

    def failing(fd: int, count: int, at: int) -> bytes:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", failing)
    found = {one.key: one.unusable for one in store.scan()}
    assert found == {key(1): "", key(2): "unreadable", key(3): ""}
    assert store.stats().quarantined == 0, "a medium that fails is no proof against a frame"


def test_a_file_that_goes_while_it_is_scanned_is_passed_over(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    for n in (1, 2):
        store.put(key(n), frame(key(n)))
    scan = store.scan()
    other = ({key(1), key(2)} - {next(scan).key}).pop()
    store.delete(other)
    assert list(scan) == []


def test_a_closed_store_refuses(tmp_path: Path) -> None:
    store = FsStore(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.scan()


def test_every_prefix_of_a_frame_is_refused() -> None:
    """Whatever is left of a file after a crash: no prefix of a frame passes for the frame."""
    data = frame(key(1))
    assert check_frame_head(key(1), len(data), lambda count: data[:count]) == 0
    for length in range(len(data)):
        cut = data[:length]
        with pytest.raises(CorruptFrameError) as caught:
            check_frame_head(key(1), length, lambda count, cut=cut: cut[:count])
        assert caught.value.reason == "truncated"


def test_no_flip_of_a_bit_of_the_head_passes() -> None:
    data = frame(key(1))
    for bit in range(8 * FrameHeader.parse(data).head_bytes):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrameError):
            check_frame_head(key(1), len(data), lambda count, altered=altered: bytes(altered[:count]))
