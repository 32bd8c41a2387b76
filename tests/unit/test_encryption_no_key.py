"""Encrypted frames for who has no key: the head can be read, the layers are refused and never taken for KV."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvcore
from kvcore.cli import app
from kvcore.codecs import FrameReader, GroupInfo, PartInfo, encode_frame, stream_layers
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.encryption import FrameCipher
from kvcore.codecs.frame_format import FrameHeader, crc32c
from kvcore.codecs.inspection import inspect_frame
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import CorruptFrameError
from kvcore.keys import StoreKey

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
KEY = StoreKey(b"n" * 32, b"k" * 32)
PARTS = (PartInfo("K", "bfloat16", 12), PartInfo("V", "bfloat16", 12))
GROUP = GroupInfo("LKHTD", (2, 3), PARTS, rows=40, head_count=2)


def filled() -> kvcore.RowLayout:
    rows, rng = allocate_rows(GROUP), np.random.default_rng(1)
    for part, layer in rows.planes():
        array = rows.array(part, layer)
        array[...] = rng.standard_normal(array.shape).astype(array.dtype)
    return rows


def frame_of(codec: str) -> bytes:
    identity = {"namespace": KEY.namespace, "key": KEY.digest}
    return bytes(encode_frame(BACKEND, [GROUP], [filled()], tokens=40, codec=codec, **identity))


def read(frame: Any, **options: Any) -> FrameReader:
    return FrameReader(frame, expect_namespace=None, expect_key=None, digest=BACKEND.digest, **options)


def with_crc(frame: bytes | bytearray) -> bytes:
    end = FrameHeader.parse(frame).head_bytes - 4
    return bytes(frame[:end]) + struct.pack("<I", crc32c(bytes(frame[:end]))) + bytes(frame[end + 4 :])


def reason_of(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(CorruptFrameError) as caught:
        call(*arguments, **named)
    return caught.value.reason


FRAME = frame_of("raw")
CIPHERS = {1: FrameCipher(KeyRing({None: b"1" * 32}, None)), 2: FrameCipher(KeyRing({7: b"1" * 32}, 7))}
SEALED = {version: bytes(cipher.seal(FRAME, KEY)) for version, cipher in CIPHERS.items()}
HEAD = FrameHeader.parse(SEALED[1]).head_bytes
both = pytest.mark.parametrize("version", [1, 2])


@pytest.fixture
def look(tmp_path):
    def inspect(data: bytes, *options: str) -> tuple[int, str]:
        (tmp_path / "a.kvf").write_bytes(data)
        done = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.kvf"), *options])
        return done.exit_code, done.stdout

    return inspect


@both
def test_layers_of_an_encrypted_frame_are_never_garbage(version):
    sealed = SEALED[version]
    reader = read(sealed, expect_groups=read(FRAME).groups)
    assert reader.available_layers == 0
    rows = [allocate_rows(group) for group in reader.groups]
    for part, layer in rows[0].planes():
        rows[0].array(part, layer)[...] = 3
    assert reason_of(reader.layer, 0) == "encrypted"
    assert reason_of(reader.segments, 1) == "encrypted"
    assert reason_of(reader.verify) == "encrypted"
    assert reason_of(reader.decode, BACKEND, rows) == "encrypted"
    assert reason_of(reader.decode_layers, BACKEND, 0, 2, rows[0]) == "encrypted"
    assert {int(value) for part, layer in rows[0].planes() for value in rows[0].array(part, layer).ravel()} == {3}
    identity = {"expect_namespace": KEY.namespace, "expect_key": KEY.digest, "digest": BACKEND.digest}
    assert reason_of(list, stream_layers([sealed[:HEAD], sealed[HEAD:]], **identity)) == "encrypted"


def test_the_head_alone_is_enough_to_look_at():
    reader = read(SEALED[2][:HEAD], partial=True)
    assert (reader.namespace, reader.key, reader.available_layers) == (KEY.namespace, KEY.digest, 0)
    assert reader.extend(SEALED[2]) == 0
    with pytest.raises(CorruptFrameError, match="asked was"):
        FrameReader(SEALED[2], expect_namespace=KEY.namespace, expect_key=b"o" * 32, digest=BACKEND.digest)


@pytest.mark.parametrize("added", [-1, 1, 3])
def test_an_encrypted_frame_of_a_length_that_no_envelope_gives(added):
    sealed = bytearray(SEALED[1] + bytes(8))[: len(SEALED[1]) + added]
    sealed[44:52] = struct.pack("<Q", len(sealed))
    assert reason_of(read, with_crc(sealed)) == "length"


# kvcore inspect


@pytest.mark.parametrize(("version", "key_id"), [(1, None), (2, 7)])
@pytest.mark.parametrize("codec", ["raw", "balanced"])
def test_inspect_shows_the_head_and_no_garbage(look, version, key_id, codec):
    plain = frame_of(codec)
    code, text = look(bytes(CIPHERS[version].seal(plain, KEY)), "--json")
    seen = json.loads(text)
    assert (code, seen["good"], seen["problems"]) == (0, True, [])
    assert (seen["codec"], seen["chain"]) == (codec, [*read(plain).codecs, "aesgcm"])
    assert seen["envelope"] == {"version": version, "key_id": key_id}
    assert "ENCRYPTED" in seen["header"]["flags"]
    assert (seen["namespace"], seen["key"]) == (KEY.namespace.hex(), KEY.digest.hex())
    assert [(layer["start"], layer["nbytes"]) for layer in seen["layers"]] == [
        (entry.start, entry.stop - entry.start) for entry in read(plain).layers
    ]
    assert {(layer["digest"], layer["decoded"]) for layer in seen["layers"]} == {("encrypted", "encrypted")}
    assert [layer["raw_rows"] for layer in seen["layers"]] == [{}, {}]
    assert (seen["tiles"]["symbols"], sum(seen["tiles"]["modes"].values())) == (0, 8 if codec == "balanced" else 0)


@pytest.mark.parametrize(("version", "key"), [(1, "the key without id"), (2, "key 7")])
def test_people_are_told_that_layers_were_not_checked(look, version, key):
    code, text = look(SEALED[version])
    assert code == 0
    assert f"AES-GCM, envelope version {version}, {key}\n" in "\n".join(line.rstrip() for line in text.splitlines())
    assert "raw, aesgcm" in text
    assert "Layers are encrypted, and were not checked." in text
    assert "Nothing is wrong with its head." in text


def test_a_plain_frame_has_no_envelope(look):
    assert json.loads(look(FRAME, "--json")[1])["envelope"] is None
    assert "encrypt" not in look(FRAME)[1]


@pytest.mark.parametrize(
    ("data", "reasons", "key_id"),
    [
        (SEALED[2][:-1], ["truncated"], 7),
        (SEALED[2][: HEAD + 3], ["truncated", "truncated"], None),
        (SEALED[2][:HEAD], ["truncated", "truncated"], None),
        (SEALED[2][:HEAD] + b"\x09" + SEALED[2][HEAD + 1 :], ["unsupported"], None),
        (with_crc(SEALED[2][:8] + bytes(4) + SEALED[2][12:]), ["unsupported"], None),
    ],
)
def test_damage_that_shows_without_a_key(data, reasons, key_id):
    report = inspect_frame(data, BACKEND)
    assert [problem.reason for problem in report.problems][: len(reasons)] == reasons
    assert (report.envelope.key_id if report.envelope else None) == key_id
    assert all(layer.decoded != "ok" for layer in report.layers)
