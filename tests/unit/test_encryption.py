"""Encrypted frames: what was sealed comes back byte for byte, and everything else is refused by its name."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs import PRESETS, FrameReader, GroupInfo, PartInfo, encode_frame
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.encryption import MAX_BYTES, FrameCipher
from kvcore.codecs.frame_format import HEADER_BYTES, FrameHeader, crc32c
from kvcore.codecs.frame_values import Flags
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError
from kvcore.keys import StoreKey, make_temp_key

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
GOLDEN = Path(__file__).parents[1] / "golden"
KEY = StoreKey(b"n" * 32, b"k" * 32)
ONE, TWO, THREE = (bytes([i]) * 32 for i in (1, 2, 3))
UNNAMED, NAMED = KeyRing({None: ONE}, None), KeyRing({7: ONE, 8: TWO}, 7)
PARTS = (PartInfo("K", "bfloat16", 12), PartInfo("V", "bfloat16", 12))


def golden() -> Any:
    spec = importlib.util.spec_from_file_location("golden_regenerate", GOLDEN / "regenerate.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frame_of(codec: str = "raw", *, layers: Any = (2, 3), rows: int = 5, key: StoreKey = KEY) -> bytes:
    group = GroupInfo("LKHTD", layers, PARTS, rows=rows, head_count=2)
    filled, rng = allocate_rows(group), np.random.default_rng(rows)
    for part, layer in filled.planes():
        array = filled.array(part, layer)
        array[...] = rng.standard_normal(array.shape).astype(array.dtype)
    identity = {"namespace": key.namespace, "key": key.digest}
    return bytes(encode_frame(BACKEND, [group], [filled], tokens=rows, codec=codec, **identity))


def read(frame: Any, **options: Any) -> FrameReader:
    return FrameReader(frame, expect_namespace=None, expect_key=None, digest=BACKEND.digest, **options)


def with_crc(frame: bytes | bytearray) -> bytes:
    end = FrameHeader.parse(frame).head_bytes - 4
    return bytes(frame[:end]) + struct.pack("<I", crc32c(bytes(frame[:end]))) + bytes(frame[end + 4 :])


def reason_of(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(CorruptFrameError) as caught:
        call(*arguments, **named)
    return caught.value.reason


FRAME = frame_of()
CIPHERS = {1: FrameCipher(UNNAMED), 2: FrameCipher(NAMED)}
SEALED = {version: bytes(cipher.seal(FRAME, KEY)) for version, cipher in CIPHERS.items()}
HEAD = FrameHeader.parse(SEALED[1]).head_bytes
both = pytest.mark.parametrize("version", [1, 2])


# What is sealed comes back


@pytest.mark.parametrize("codec", PRESETS)
@pytest.mark.parametrize("bits", [128, 256])
def test_frames_of_every_codec_come_back_byte_for_byte(codec, bits):
    frame = frame_of(codec, rows=70)
    for ring, overhead in ((UNNAMED, 29), (NAMED, 33)):
        cipher = FrameCipher(ring, salt="tenant", bits=bits)
        sealed = cipher.seal(frame, KEY)
        assert cipher.open(sealed, KEY) == frame
        # The chain's seven bytes, and the envelope.
        assert len(sealed) == cipher.sealed_size(len(frame)) == len(frame) + 7 + overhead


LAYERS = st.sets(st.integers(0, 9), min_size=1, max_size=5).map(sorted)


@given(LAYERS, st.integers(1, 9), st.sampled_from(["raw", "int4", "lossless"]))
@settings(max_examples=25)
def test_frames_of_any_shape_come_back(layers, rows, codec):
    frame = frame_of(codec, layers=layers, rows=rows)
    for cipher in CIPHERS.values():
        assert cipher.open(cipher.seal(frame, KEY), KEY) == frame


def test_a_frame_of_a_newer_minor_version_is_carried_as_it_is():
    header = FrameHeader.parse(FRAME)
    appended = replace(header, minor=1, directory_bytes=header.directory_bytes + 3, stored_bytes=len(FRAME) + 3)
    head = appended.pack() + FRAME[HEADER_BYTES : header.head_bytes - 4] + b"new"
    frame = with_crc(head + bytes(4) + FRAME[header.head_bytes :])
    assert CIPHERS[2].open(CIPHERS[2].seal(frame, KEY), KEY) == frame


@both
def test_memory_of_the_callers(version):
    cipher = CIPHERS[version]
    out = bytearray(b"\xee" * (cipher.sealed_size(len(FRAME)) + 5))
    sealed = cipher.seal(bytearray(FRAME), KEY, memoryview(out))
    assert sealed.obj is out
    assert out[len(sealed) :] == b"\xee" * 5
    plain = np.full(cipher.opened_size(len(sealed)), 0xEE, np.uint8)
    assert plain.nbytes - len(FRAME) in (0, 4)
    opened = cipher.open(sealed, make_temp_key(KEY), plain.data)
    assert (opened, bytes(plain[: len(FRAME)])) == (FRAME, FRAME)


@both
def test_two_seals_differ_and_open_to_the_same(version):
    cipher = CIPHERS[version]
    one, two = bytes(cipher.seal(FRAME, KEY)), bytes(cipher.seal(FRAME, KEY))
    same = sum(a == b for a, b in zip(one[HEAD:], two[HEAD:], strict=True))
    assert same < len(one[HEAD:]) / 10
    at = HEADER_BYTES + FrameHeader.parse(one).varlen_bytes
    assert one[at : at + 8] != two[at : at + 8]  # the first digest, which says nothing of the KV
    assert cipher.open(one, KEY) == cipher.open(two, KEY)


def test_the_head_is_as_it_was_but_for_four_fields():
    plain, sealed = read(FRAME), read(SEALED[2])
    assert sealed.header == replace(
        plain.header,
        flags=plain.header.flags | Flags.ENCRYPTED,
        varlen_bytes=plain.header.varlen_bytes + 7,
        stored_bytes=len(SEALED[2]),
    )
    assert (sealed.namespace, sealed.key, sealed.groups) == (plain.namespace, plain.key, plain.groups)
    assert sealed.codecs == ("raw", "aesgcm")
    assert sealed.layers == tuple(replace(entry, digest=0) for entry in plain.layers)


# The bytes, by the page's definition


def derived(master: bytes, info: bytes, nbytes: int) -> bytes:
    """HKDF-SHA256 of RFC 5869, with no salt and at most 32 bytes."""
    secret = hmac.new(bytes(32), master, hashlib.sha256).digest()
    return hmac.new(secret, info + b"\x01", hashlib.sha256).digest()[:nbytes]


@pytest.mark.parametrize(
    ("version", "master", "salt", "nbytes"), [(1, 100, b"", 16), (2, 100, "tenant-\u00e4".encode(), 32)]
)
def test_golden_frames_are_what_the_page_says(version, master, salt, nbytes):
    module = golden()
    data = (GOLDEN / f"encrypted-v{version}.kvf").read_bytes()
    assert data == module.files()[f"encrypted-v{version}.kvf"]
    plain = (GOLDEN / "raw-v1.kvf").read_bytes()
    master = module.counting_bytes(32, seed=master)
    varlen, directory = struct.unpack_from("<II", data, 28)
    head, body = data[: 72 + varlen + directory], data[72 + varlen + directory + 4 :]
    iv, rest = body[1:13], body[13:]
    assert body[0] == version
    assert iv == module.counting_bytes(12, seed=9)
    if version == 2:
        assert rest[:4] == struct.pack("<I", 7)
        rest = rest[4:]
    identity = bytes(range(32)) + bytes(range(32, 64))
    domain = b"kvcore aesgcm v1 128" if nbytes == 16 else b"kvcore aesgcm v1 256"
    gcm = AESGCM(derived(master, domain + b"\n" + salt, nbytes))
    varlen_plain, directory_plain = struct.unpack_from("<II", plain, 28)
    assert gcm.decrypt(iv, rest, head + identity) == plain[72 + varlen_plain + directory_plain + 4 :]
    # Layers have 4 segments, or 1: their digests stand before them.
    places, at = [], 0
    for segments in (4, 4, 1, 4, 1):
        places.append(at)
        at += 8 + 6 * segments
    mask = AES(derived(master, domain + b" digests\n" + salt, nbytes))
    masked = b"".join(data[72 + varlen + place :][:8] for place in places)
    digests = Cipher(mask, CTR(iv + bytes(4))).decryptor().update(masked)
    assert digests == b"".join(plain[72 + varlen_plain + place :][:8] for place in places)
    assert data[8:12] == struct.pack("<I", 8)
    assert data[72 + 64 : 72 + 64 + 12] == b"\x02\x03raw\x06aesgcm"


def test_golden_frames_open():
    module = golden()
    plain = (GOLDEN / "raw-v1.kvf").read_bytes()
    older = FrameCipher(module.UNNAMED, bits=128)
    assert older.open((GOLDEN / "encrypted-v1.kvf").read_bytes(), module.KEY) == plain
    newer = FrameCipher(module.NAMED, salt="tenant-\u00e4")
    assert newer.open((GOLDEN / "encrypted-v2.kvf").read_bytes(), module.KEY) == plain


# What is refused at opening


@both
def test_a_frame_that_was_swapped_for_another_of_the_tenant(version):
    cipher, other = CIPHERS[version], StoreKey(KEY.namespace, b"o" * 32)
    assert cipher.open(cipher.seal(frame_of(key=other), other), other) == frame_of(key=other)
    assert reason_of(cipher.open, cipher.seal(frame_of(key=other), other), KEY) == "authentication"
    assert reason_of(cipher.open, SEALED[version], StoreKey(b"m" * 32, KEY.digest)) == "authentication"
    # Nor does it help to write the other name into the head.
    forged = with_crc(SEALED[version].replace(KEY.digest, other.digest))
    assert read(forged).key == other.digest
    assert reason_of(cipher.open, forged, other) == "authentication"


def test_tenants_masters_and_lengths_of_keys_are_apart():
    sealed = FrameCipher(UNNAMED, salt="a").seal(FRAME, KEY)
    assert FrameCipher(UNNAMED, salt="a").open(sealed, KEY) == FRAME
    for other in (
        FrameCipher(UNNAMED, salt="b"),
        FrameCipher(UNNAMED),
        FrameCipher(UNNAMED, salt="a", bits=128),
        FrameCipher(KeyRing({None: TWO}, None), salt="a"),
    ):
        assert reason_of(other.open, sealed, KEY) == "authentication"


def test_rotation_opens_what_older_keys_have_sealed_while_the_ring_holds_them():
    first = FrameCipher(KeyRing({None: ONE}, None))
    second = FrameCipher(KeyRing({None: ONE, 1: TWO}, 1))
    third = FrameCipher(KeyRing({1: TWO, 2: THREE}, 2))
    old, new, newest = (bytes(cipher.seal(FRAME, KEY)) for cipher in (first, second, third))
    assert [frame[HEAD] for frame in (old, new, newest)] == [1, 2, 2]
    assert second.open(old, KEY) == second.open(new, KEY) == third.open(new, KEY) == third.open(newest, KEY) == FRAME
    assert reason_of(third.open, old, KEY) == "key"
    assert reason_of(second.open, newest, KEY) == "key"
    assert reason_of(first.open, new, KEY) == "key"
    with pytest.raises(
        CorruptFrameError, match=r"sealed with key 2, and the ring is KeyRing\(current=1, ids=\[one without id, 1\]\)"
    ):
        second.open(newest, KEY)


def opened_or_reason(cipher: FrameCipher, data: bytes) -> str:
    out = bytearray(b"\xee" * len(data))
    reason = reason_of(cipher.open, data, KEY, out)
    # Untouched, or taken back: nothing that did not authenticate stays.
    assert FRAME[-64:] not in out
    assert set(out) <= {0xEE, 0}
    return reason


@both
def test_every_flipped_bit_is_refused(version):
    """Of the head, the envelope, the ciphertext and the tag; once as it is, and once with the head's CRC put right."""
    cipher, sealed = CIPHERS[version], SEALED[version]
    head = {"crc", "foreign", "version", "length", "truncated"}
    altered = {"authentication", "key", "unsupported", "length", "truncated", "layout"}
    for at in range(len(sealed)):
        if HEAD + 200 <= at < len(sealed) - 40:
            continue  # more of the same ciphertext
        for bit in (1 << i for i in range(8)):
            flipped = bytearray(sealed)
            flipped[at] ^= bit
            assert opened_or_reason(cipher, bytes(flipped)) in (head if at < HEAD else altered)
            if 6 <= at < HEAD - 4 and not 28 <= at < 36:  # the lengths of the head's parts say where the CRC is
                assert opened_or_reason(cipher, with_crc(flipped)) in altered


@given(st.integers(0, 8 * len(SEALED[2]) - 1))
@settings(max_examples=150)
def test_any_flipped_bit_is_refused(bit):
    flipped = bytearray(SEALED[2])
    flipped[bit // 8] ^= 1 << bit % 8
    assert opened_or_reason(CIPHERS[2], bytes(flipped))


@given(st.integers(0, len(SEALED[2])), st.binary(max_size=12), st.integers(0, 12))
@settings(max_examples=200)
def test_no_altered_frame_does_worse_than_a_typed_error(at, value, drop):
    altered = SEALED[2][:at] + value + SEALED[2][at + drop :]
    if altered == SEALED[2]:
        return
    assert opened_or_reason(CIPHERS[2], altered)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (HEAD, b"\x03", "unsupported"),  # another envelope
        (HEAD, b"\x02", "key"),  # four bytes of ciphertext are taken for the id
        (8, bytes(4), "unsupported"),  # not encrypted, says the flag
        (72 + 64 + 1 + 4 + 1, b"aesgcn", "unsupported"),  # not encrypted, says the chain
    ],
)
def test_forged_forms(at, value, reason):
    forged = bytearray(SEALED[1])
    forged[at : at + len(value)] = value
    assert reason_of(CIPHERS[1].open, with_crc(forged), KEY) == reason


@pytest.mark.parametrize("kept", [0, 1, 12, 13, 16])
def test_a_body_shorter_than_its_envelope(kept):
    short = bytearray(SEALED[2][: HEAD + kept])
    short[44:52] = struct.pack("<Q", len(short))
    assert reason_of(CIPHERS[2].open, with_crc(short), KEY) == "truncated"


def test_a_plain_frame_is_not_taken_for_an_encrypted_one():
    assert reason_of(CIPHERS[1].open, FRAME, KEY) == "authentication"


def test_a_directory_that_ends_before_its_layers():
    header = FrameHeader.parse(FRAME)
    at = header.head_bytes - 4 - header.directory_bytes + 8 + 4
    forged = with_crc(FRAME[:at] + struct.pack("<H", 0xFFFF) + FRAME[at + 2 :])
    header = replace(header, directory_bytes=header.directory_bytes - 6, stored_bytes=header.stored_bytes - 6)
    head = header.pack() + FRAME[HEADER_BYTES : header.head_bytes - 4]
    shorter = with_crc(head + bytes(4) + FRAME[header.head_bytes + 6 :])
    assert reason_of(CIPHERS[1].seal, shorter, KEY) == "length"
    # What is whole but means nothing is carried, and refused by who reads it.
    assert CIPHERS[1].open(CIPHERS[1].seal(forged, KEY), KEY) == forged
    assert reason_of(read, forged) == "length"


@both
def test_a_frame_that_is_longer_than_any_that_is_sealed_is_a_miss(version, monkeypatch):
    monkeypatch.setattr("kvcore.codecs.encryption.MAX_BYTES", len(FRAME))
    assert CIPHERS[version].open(SEALED[version], KEY) == FRAME
    monkeypatch.setattr("kvcore.codecs.encryption.MAX_BYTES", len(FRAME) - 1)
    assert reason_of(CIPHERS[version].open, SEALED[version], KEY) == "length"


# What is refused at sealing


def test_only_whole_plain_frames_are_sealed():
    cipher, out = CIPHERS[1], bytearray(b"\xee" * (len(FRAME) + 100))
    assert reason_of(cipher.seal, FRAME[:-1], KEY, out) == "truncated"
    assert reason_of(cipher.seal, FRAME + b"\0", KEY, out) == "length"
    assert reason_of(cipher.seal, b"text " * 50, KEY, out) == "foreign"
    with pytest.raises(ConfigError, match="encrypted already"):
        cipher.seal(SEALED[2], KEY, out)
    assert out == b"\xee" * len(out)


@pytest.mark.parametrize("direction", ["seal", "open"])
def test_memory_that_does_not_fit(direction):
    source = FRAME if direction == "seal" else SEALED[1]
    call = getattr(CIPHERS[1], direction)
    needs = CIPHERS[1].sealed_size(len(FRAME)) if direction == "seal" else len(FRAME)
    with pytest.raises(LayoutError, match=f"{needs} writable bytes, got {needs - 1}"):
        call(source, KEY, bytearray(needs - 1))
    with pytest.raises(LayoutError, match="read-only"):
        call(source, KEY, bytes(needs))
    memory = bytearray(source + bytes(200))
    with pytest.raises(LayoutError, match="in place"):
        call(memoryview(memory)[: len(source)], KEY, memory)
    assert memory == source + bytes(200)


def test_other_bad_arguments():
    with pytest.raises(ConfigError, match="128 or 256 bits here, not 192"):
        FrameCipher(UNNAMED, bits=192)
    with pytest.raises(ConfigError, match="UTF-8"):
        FrameCipher(UNNAMED, salt="\ud800")
    with pytest.raises(LayoutError, match="shorter chunks"):
        CIPHERS[1].sealed_size(MAX_BYTES + 1)

    class Short:
        namespace, digest = KEY.namespace, KEY.digest[:-1]

    for call, data in ((CIPHERS[1].seal, FRAME), (CIPHERS[1].open, SEALED[1])):
        with pytest.raises(ConfigError, match="32 bytes each, got 32 and 31"):
            call(data, Short())


def test_the_library_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r'pip install "kvcore\[crypto\]"'):
        FrameCipher(UNNAMED)


def test_a_library_that_is_too_old(monkeypatch):
    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", type("AESGCM", (), {}))
    with pytest.raises(ConfigError, match="cryptography 47 or later"):
        FrameCipher(UNNAMED)


# Keys that have sealed enough


def test_a_warning_at_half_of_what_a_key_may_seal_and_then_an_end(monkeypatch, caplog):
    monkeypatch.setattr("kvcore.codecs.key_ring.MESSAGES", 4)
    monkeypatch.setattr("kvcore.codecs.key_ring._WARN_AT", 2)
    ring = KeyRing({7: os.urandom(32)}, 7)
    tenant, again, other = FrameCipher(ring, salt="a"), FrameCipher(ring, salt="a"), FrameCipher(ring, salt="b")
    sealed = tenant.seal(FRAME, KEY)
    other.seal(FRAME, KEY)
    assert caplog.records == []
    again.seal(FRAME, KEY)  # the same key
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "master key 7 has sealed 2 frames" in caplog.text
    again.seal(FRAME, KEY)
    tenant.seal(FRAME, KEY)
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match="may seal no more; rotate it"):
        tenant.seal(FRAME, KEY)
    assert ring.message_key(7, salt="a", bits=256).seals == 4
    assert tenant.open(sealed, KEY) == FRAME
