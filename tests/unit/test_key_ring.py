"""Master keys: from files that only their owner may read, and never in a message."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest

from kvcore.codecs.encryption import FrameCipher
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import ConfigError

ONE, TWO = bytes(range(32)), bytes(range(100, 132))
GOOD = {"format": "kvcore-keys", "version": 1, "current": 7, "keys": {"7": ONE.hex(), "8": TWO.hex()}}


@pytest.fixture
def key_file(tmp_path):
    def write(data: bytes | dict[str, object], mode: int = 0o600):
        path = tmp_path / "keys"
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        path.chmod(mode)
        return path

    return write


def same_keys(one: KeyRing, two: KeyRing, key_id: int | None) -> bool:
    """Whether two rings have the same key of an id, told by what it encrypts."""
    masks = [ring.message_key(key_id, salt="", bits=256).masked(bytes(12), bytes(32)) for ring in (one, two)]
    return masks[0] == masks[1]


@pytest.mark.parametrize("data", [ONE, ONE.hex().encode(), ONE.hex().upper().encode() + b"\r\n"])
def test_a_file_of_one_key_without_id(key_file, data):
    ring = KeyRing.from_file(key_file(data))
    assert (ring.current, None in ring, 1 in ring) == (None, True, False)
    assert same_keys(ring, KeyRing({None: ONE}, None), None)


def test_a_file_of_keys_with_ids(key_file):
    ring = KeyRing.from_file(str(key_file({**GOOD, "unnamed": bytes(32).hex()})))
    assert (ring.current, 7 in ring, 8 in ring, None in ring, 9 in ring) == (7, True, True, True, False)
    wanted = KeyRing({7: ONE, 8: TWO, None: bytes(32)}, 7)
    assert all(same_keys(ring, wanted, key_id) for key_id in (7, 8, None))


def test_a_raw_key_that_looks_like_the_beginning_of_json(key_file):
    key = b'{"format": "kvcore-keys", "keys"'
    assert len(key) == 32
    assert same_keys(KeyRing.from_file(key_file(key)), KeyRing({None: key}, None), None)


SECRET = "5ec4e7" * 10 + "abcd"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it has 0 bytes, and is none of 32 raw bytes, a line of 64 hexadecimal digits, or JSON"),
        (ONE[:31], "it has 31 bytes"),
        (ONE + b"\n", "it has 33 bytes"),
        (SECRET[:32].encode(), "it has 32 hexadecimal digits, which are 16 bytes; a key has 64"),
        (SECRET[:63].encode(), "it has 63 bytes"),
        (SECRET[:63].encode() + b"g", "it has 64 bytes"),
        (SECRET.encode() * 2, "it has 128 bytes"),
        (f'{{"keys": "{SECRET}"'.encode(), "it begins as JSON, but is none that can be read"),
        (b'{"keys": "' + bytes([200]) * 40 + b'"}', "it begins as JSON, but is none that can be read"),
        (b"{" + b'"a": ' * (1 << 19), "it has more than 1048576 bytes"),
        (b'{"current": 1, "current": 2, "more": "to be longer than a key"}', "a field or an id is there twice"),
        ({**GOOD, "format": SECRET}, 'it does not say "format": "kvcore-keys", "version": 1'),
        ({**GOOD, "version": 2}, 'it does not say "format": "kvcore-keys", "version": 1'),
        ({**GOOD, SECRET: 1}, "1 of its fields are none of current, format, keys, unnamed, version"),
        ({**GOOD, "keys": [SECRET]}, '"keys" is an object from ids'),
        ({**GOOD, "keys": {SECRET: SECRET}}, '"keys" is an object from ids'),
        ({**GOOD, "keys": {"07": SECRET}}, '"keys" is an object from ids'),
        ({**GOOD, "keys": {"7": SECRET[:-1]}}, "key 7 is not a text of 64 hexadecimal digits"),
        ({**GOOD, "keys": {"7": SECRET[:-2] + "\n\n"}}, "key 7 is not a text of 64 hexadecimal digits"),
        ({**GOOD, "keys": {"7": 7}}, "key 7 is not a text of 64 hexadecimal digits"),
        ({**GOOD, "unnamed": SECRET[1:]}, '"unnamed" is not a text of 64 hexadecimal digits'),
        ({**GOOD, "keys": {"4294967296": SECRET}}, "the id of a master key is in 0..2\\*\\*32 - 1, got 4294967296"),
        ({**GOOD, "current": 9}, "the current master key is 9, and the ring has 7, 8"),
        ({**GOOD, "current": None, "unnamed": SECRET}, '"current" is the id of one of the keys, a number'),
        ({**GOOD, "current": True}, '"current" is the id of one of the keys, a number'),
        ({**GOOD, "keys": {"7": SECRET, "8": SECRET}}, "two of the master keys 7, 8 are the same"),
    ],
)
def test_a_file_that_holds_no_keys(key_file, data, says):
    path = key_file(data)
    with pytest.raises(ConfigError, match=f"{path} is no file of master keys: {says}") as caught:
        KeyRing.from_file(path)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET[:16] not in repr(error)
        assert not hasattr(error, "doc")  # where a JSONDecodeError keeps the whole file
        assert error.__suppress_context__ or error.__context__ is None
        error = error.__cause__


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_file_that_others_have_access_to(key_file, mode):
    path = key_file(ONE, mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}, so others than its owner have access; chmod 600 {path}"):
        KeyRing.from_file(path)
    path.chmod(0o400)
    assert KeyRing.from_file(path).current is None


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the key file .*missing: No such file"):
        KeyRing.from_file(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no regular file"):
        KeyRing.from_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        KeyRing.from_file(tmp_path / "pipe")


@pytest.mark.parametrize("key_id", [None, 0, 1, 2**32 - 1])
def test_keys_are_generated_once_and_private(tmp_path, key_id):
    path = tmp_path / "keys"
    old = os.umask(0)
    try:
        ring = KeyRing.generate(path, key_id)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists, and may hold keys that frames need"):
        KeyRing.generate(path)
    assert path.read_bytes() == before
    again = KeyRing.from_file(path)
    assert ring.current == again.current == key_id
    assert same_keys(ring, again, key_id)
    assert not same_keys(ring, KeyRing.generate(tmp_path / "other", key_id), key_id)


def test_an_id_that_is_no_id_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="got -1"):
        KeyRing.generate(tmp_path / "keys", -1)
    with pytest.raises(ConfigError, match="cannot write the key file"):
        KeyRing.generate(tmp_path / "no folder" / "keys")
    assert list(tmp_path.iterdir()) == []


def test_rotation_adds_a_key_and_keeps_those_that_were_there(tmp_path):
    path, link = tmp_path / "keys", tmp_path / "link"
    first = KeyRing.generate(path, None)
    link.symlink_to(path)
    second = KeyRing.rotate(link)
    third = KeyRing.rotate(path)
    assert (first.current, second.current, third.current) == (None, 1, 2)
    again = KeyRing.from_file(path)
    assert again.current == 2
    assert same_keys(again, first, None)
    assert same_keys(again, second, 1)
    assert same_keys(again, third, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_rotation_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    KeyRing.generate(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write the key file .*: No space left on device"):
        KeyRing.rotate(path)
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], before)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        KeyRing.rotate(path)


@pytest.mark.parametrize(
    ("masters", "current", "says"),
    [
        ({1: ONE[:16]}, 1, "master key 1 has 16 bytes, and must have 32"),
        ({}, None, "the current master key is None, and the ring has none"),
        ({None: ONE}, 1, "the current master key is 1, and the ring has one without id"),
    ],
)
def test_rings_that_are_none(masters, current, says):
    with pytest.raises(ConfigError, match=says):
        KeyRing(masters, current)


def test_nothing_that_is_shown_has_a_key_in_it():
    ring = KeyRing({7: ONE, None: TWO}, 7)
    key = ring.message_key(7, salt="a tenant", bits=128)
    shown = "".join(map(repr, (ring, key, FrameCipher(ring, salt="a tenant"))))
    assert shown == (
        "KeyRing(current=7, ids=[7, one without id])MessageKey(key_id=7, bits=128, seals=0)"
        "FrameCipher(KeyRing(current=7, ids=[7, one without id]), bits=256)"
    )


def test_no_key_is_the_front_of_another_one(monkeypatch):
    made = []
    monkeypatch.setattr("kvcore.codecs.key_ring.MessageKey", lambda key_id, *keys: made.extend(keys))
    for bits in (128, 256):
        KeyRing({7: ONE}, 7).message_key(7, salt="a", bits=bits)
    assert [len(key) for key in made] == [16, 16, 32, 32]
    assert len({key[:16] for key in made}) == 4


def test_message_keys_are_derived_once_and_counted_over_all_threads():
    ring = KeyRing({7: ONE}, 7)
    keys = [ring.message_key(7, salt=salt, bits=bits) for salt in ("", "a") for bits in (128, 256)]
    assert len({key.masked(bytes(12), bytes(16)) for key in keys}) == 4
    key = ring.message_key(7, salt="a", bits=256)
    assert key is keys[3]
    threads = [threading.Thread(target=lambda: [key.count() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert key.seals == 2000
    assert key.masked(bytes(12), key.masked(bytes(12), b"its own inverse")) == b"its own inverse"
    with pytest.raises(KeyError):
        ring.message_key(8, salt="", bits=256)
