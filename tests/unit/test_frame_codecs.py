"""Frames of every codec: what is decoded is what the codec decodes, layer by layer and at once; damage is told."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs import (
    PRESETS,
    CodedSegment,
    FrameReader,
    GroupInfo,
    PartInfo,
    encode_frame,
    get_codec,
    plan_frame,
    stream_layers,
    write_frame,
)
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.frame_format import FrameHeader, crc32c
from kvcore.codecs.frame_values import Flags
from kvcore.codecs.kvs1 import Kvs1
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError, QuantizationError
from kvcore.rope import RopeParams, rope_table

NAMESPACE, KEY = bytes(range(32)), bytes(range(32, 64))
BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
SMALL = GroupInfo(
    "LKHTD", (0, 1), (PartInfo("K", "bfloat16", 4), PartInfo("V", "bfloat16", 4)), rows=6, rope=RopeParams(4)
)
WHOLE = [name for name in PRESETS if not getattr(get_codec(name), "omits", ())]  # of others: test_codec_asym.py
CODERS = [name for name in WHOLE if name != "raw"]


def filled(group: GroupInfo, seed: int = 0) -> kvcore.RowLayout:
    """Rows of normal values, each channel with a size of its own."""
    rows, rng = allocate_rows(group), np.random.default_rng(seed)
    for part, layer in rows.planes():
        array = rows.array(part, layer)
        scale = np.exp2(rng.integers(-3, 4, array.shape[-1]))
        array[...] = (rng.standard_normal(array.shape) * scale).astype(array.dtype)
    return rows


def content(rows: kvcore.RowLayout) -> list[bytes]:
    return [rows.bytes_view(part, layer).tobytes() for part, layer in rows.planes()]


def frame_of(*groups: GroupInfo, codec: Any = "balanced", seed: int = 0) -> bytes:
    rows = [filled(group, seed + i) for i, group in enumerate(groups)]
    tokens = groups[0].rows
    return bytes(encode_frame(BACKEND, groups, rows, tokens=tokens, namespace=NAMESPACE, key=KEY, codec=codec))


def read(buffer: bytes | bytearray | memoryview, **options: Any) -> FrameReader:
    arguments = {"expect_namespace": NAMESPACE, "expect_key": KEY, "digest": BACKEND.digest, **options}
    return FrameReader(buffer, **arguments)


def decoded(frame: bytes | bytearray) -> list[list[bytes]]:
    reader = read(frame)
    rows = [allocate_rows(group) for group in reader.groups]
    reader.decode(BACKEND, rows)
    return [content(one) for one in rows]


def reason_of(buffer: bytes | bytearray, **options: Any) -> str:
    with pytest.raises(CorruptFrameError) as caught:
        read(buffer, **options).verify()
    return caught.value.reason


def sealed(frame: bytes | bytearray) -> bytes:
    """Make the digests and the CRC right again after a change: what no accident does."""
    forged = bytearray(frame)
    header = FrameHeader.parse(forged)
    at = 72 + header.varlen_bytes
    for entry in read(FRAME).layers:
        (digest,) = BACKEND.digest([bytes(forged[entry.start : entry.stop])])
        forged[at : at + 8] = struct.pack("<Q", int(digest))
        at += 8 + sum(6 + 3 * len(segment.tiles) for segment in entry.segments)
    return with_crc(forged)


def with_crc(frame: bytes | bytearray) -> bytes:
    end = FrameHeader.parse(frame).head_bytes - 4
    return bytes(frame[:end]) + struct.pack("<I", crc32c(bytes(frame[:end]))) + bytes(frame[end + 4 :])


def put(frame: bytes, at: int, value: bytes) -> bytes:
    return with_crc(frame[:at] + value + frame[at + len(value) :])


FRAME = frame_of(SMALL)


# What is written is read


@pytest.mark.parametrize("name", WHOLE)
def test_a_frame_decodes_to_what_its_codec_decodes(name: str) -> None:
    codec = get_codec(name)
    group = replace(SMALL, rows=70, head_count=2, base_position=0)
    rows = filled(group)
    segments = codec.encode(BACKEND, rows, group)
    expected = allocate_rows(group)
    codec.decode(BACKEND, segments, group, expected)
    frame = encode_frame(BACKEND, [group], [rows], tokens=70, namespace=NAMESPACE, key=KEY, codec=name)
    reader = read(frame, expect_groups=[group])
    assert (reader.codec.name, reader.codecs, reader.header.preset) == (name, codec.chain, codec.preset)
    assert (reader.header.precision, reader.header.tables) == (codec.precision, codec.tables)
    assert [[(bytes(s.data), s.tiles) for s in reader.segments(i)] for i in range(2)] == [
        [(bytes(s.data), s.tiles) for s in layer] for layer in segments
    ]
    assert decoded(frame) == [content(expected)]
    if codec.lossless:
        assert content(expected) == content(rows)
    else:
        assert len(frame) < group.raw_bytes + 1024


shapes = st.builds(
    GroupInfo,
    layout=st.just("LKHTD"),
    layers=st.sets(st.integers(0, 9), min_size=1, max_size=3).map(sorted),
    parts=st.sampled_from(
        [
            (PartInfo("K", "bfloat16", 6), PartInfo("V", "float16", 5)),
            (PartInfo("K", "float32", 4),),
            (PartInfo("V", "float16", 33),),
        ]
    ),
    rows=st.integers(1, 40),
    head_count=st.integers(1, 2),
    base_position=st.integers(-3, 2000) | st.sampled_from([2**20 - 1, 2**20, 2**62]),
    rope=st.none()
    | st.just(RopeParams(4))
    | st.just(RopeParams(4, scaling="yarn", factor=2.0))
    | st.just(RopeParams(4, scaling="yarn", factor=2.0, original_tokens=64)),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(shapes, min_size=1, max_size=2), st.sampled_from(CODERS), st.integers(1, 700))
def test_layers_that_arrive_one_by_one_are_those_of_the_whole(groups: list[GroupInfo], name: str, cut: int) -> None:
    frame = frame_of(*groups, codec=name)
    whole = decoded(frame)
    rows = [allocate_rows(group) for group in groups]
    places, seen = [0] * len(groups), []
    pieces = [frame[at : at + cut] for at in range(0, len(frame), cut)]
    for reader, index in stream_layers(pieces, expect_namespace=NAMESPACE, expect_key=KEY, digest=BACKEND.digest):
        group = reader.layers[index].group
        out = rows[group].select(layers=(places[group], places[group] + 1))
        reader.decode_layers(BACKEND, index, 1, out)
        places[group] += 1
        seen.append(index)
    assert seen == list(range(sum(len(group.layers) for group in groups)))
    assert [content(one) for one in rows] == whole


@pytest.mark.parametrize("parts", ["C", "CR"])
@pytest.mark.parametrize("name", ["lossless", "balanced"])
def test_mla_rows(name: str, parts: str) -> None:
    widths = {"C": 70, "R": 8}
    infos = tuple(PartInfo(part, "bfloat16", widths[part]) for part in parts)
    group = GroupInfo("LTC", (3, 4), infos, rows=20, base_position=256, rope=RopeParams(8))
    frame = frame_of(group, codec=name)
    reader = read(frame, expect_groups=[group])
    assert [len(entry.segments) for entry in reader.layers] == [len(parts)] * 2
    assert bool(reader.header.flags & Flags.UNROPED) == (name == "balanced" and parts == "CR")
    out = allocate_rows(group)
    reader.decode(BACKEND, [out])
    expected = filled(group)
    if name == "lossless":
        assert content(out) == content(expected)
    else:
        for part, layer in out.planes():
            x, y = (rows.array(part, layer).astype(np.float32) for rows in (out, expected))
            assert np.abs(x - y).max() < np.abs(y).max() / 8


def test_level_constants_are_in_the_header() -> None:
    plain, leveled = read(FRAME), read(frame_of(SMALL, codec=get_codec("high", levels=(-128, 127))))
    assert plain.header.levels is None
    assert plain.header.reserved == bytes(7)
    assert leveled.header.levels == (-128, 127)
    assert leveled.header.flags == plain.header.flags | Flags.LEVELS
    assert leveled.codec == Kvs1("high", (-128, 127))
    with pytest.raises(ConfigError, match=r"-128\.\.127"):
        plan_frame(
            [SMALL],
            tokens=6,
            namespace=NAMESPACE,
            key=KEY,
            codec=get_codec("high", levels=(128, 0)),
            sizes=[[(0, ()), (0, ())]] * 2,
        )


class Unturned(Kvs1):
    """A writer that does not know how to take RoPE off."""

    def flags(self, group: GroupInfo) -> Flags:
        return super().flags(group) & ~Flags.UNROPED

    def encode(self, backend: Any, rows: Any, group: GroupInfo) -> Any:
        return super().encode(backend, rows, replace(group, rope=None))


def test_keys_that_kept_their_rope_are_read() -> None:
    frame = frame_of(SMALL, codec=Unturned("balanced"))
    assert not read(frame).header.flags & Flags.UNROPED
    assert decoded(frame) == decoded(frame_of(replace(SMALL, rope=None)))


def turned_keys(group: GroupInfo) -> kvcore.RowLayout:
    """Rows whose keys are alike at every position but for noise, and then rotated as the group's model would."""
    rows, rng = allocate_rows(group), np.random.default_rng(3)
    assert group.rope is not None
    cos, sin = rope_table(group.rope, np.arange(group.base_position, group.base_position + group.rows))
    for part, layer in rows.planes():
        array = rows.array(part, layer)[0]  # [T, H, C]
        channels = 32 * rng.standard_normal(array.shape[1:])
        values = (channels + rng.standard_normal(array.shape)).astype(np.float32)
        if part == "K":
            values = BACKEND.shift_rope(values, cos, sin)
        array[...] = values.astype(array.dtype)
    return rows


@pytest.mark.parametrize(
    "rope",
    [
        RopeParams(32, 5e5),
        RopeParams(32, 1e4, scaling="linear", factor=4.0),
        RopeParams(32, 1e4, scaling="ntk", factor=4.0),
        RopeParams(32, 1e4, scaling="yarn", factor=4.0, original_tokens=512),
        RopeParams(
            32, 5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=512
        ),
    ],
    ids=lambda rope: rope.scaling,
)
def test_keys_without_their_rope_take_less_room_and_come_back_closer(rope: RopeParams) -> None:
    parts = (PartInfo("K", "bfloat16", 32), PartInfo("V", "bfloat16", 32))
    group = GroupInfo("LKHTD", (0, 1), parts, 256, base_position=1024, rope=rope)
    rows = turned_keys(group)

    sizes, errors = [], []
    for codec in (Kvs1("small"), Unturned("high")):
        frame = bytes(encode_frame(BACKEND, [group], [rows], tokens=256, namespace=NAMESPACE, key=KEY, codec=codec))
        reader = read(frame, expect_groups=[group])
        assert bool(reader.header.flags & Flags.UNROPED) == (not isinstance(codec, Unturned))
        out = allocate_rows(group)
        reader.decode(BACKEND, [out])
        pairs = [[one.array("K", layer).astype(np.float32) for one in (rows, out)] for layer in (0, 1)]
        errors.append(max(float(np.linalg.norm(x - y) / np.linalg.norm(x)) for x, y in pairs))
        sizes.append(len(frame))
    # Steps follow the spread about the channel means, which a rotation by the positions makes wide.
    assert errors[0] < 0.02
    assert errors[0] < 0.75 * errors[1]
    assert sizes[0] < 0.7 * sizes[1]


def test_keys_whose_scaling_is_not_known_keep_their_rope() -> None:
    unknown = replace(SMALL, rope=RopeParams(4, scaling="llama3", factor=8.0))
    frame = frame_of(unknown)
    assert not read(frame).header.flags & Flags.UNROPED
    assert read(frame).groups == (unknown,)
    assert decoded(frame) == decoded(frame_of(replace(SMALL, rope=None)))
    flags = read(frame).header.flags | Flags.UNROPED
    assert reason_of(put(frame, 8, struct.pack("<I", flags))) == "unsupported"


# Parts of a frame


def test_layers_are_decoded_in_any_range_of_one_group() -> None:
    other = GroupInfo("LKHTD", (1,), (PartInfo("K", "bfloat16", 8),), rows=6)
    reader = read(frame_of(replace(SMALL, layers=(0, 1, 2)), other))
    whole = [allocate_rows(group) for group in reader.groups]
    reader.decode(BACKEND, whole)
    assert [(e.layer, e.group) for e in reader.layers] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    out = allocate_rows(replace(SMALL, layers=(0, 1)))
    reader.decode_layers(BACKEND, 0, 2, out)
    assert content(out) == content(whole[0])[:4]
    with pytest.raises(LayoutError, match="several groups"):
        reader.decode_layers(BACKEND, 1, 2, out)
    for first, count in ((0, 0), (-1, 1), (3, 2)):
        with pytest.raises(IndexError):
            reader.decode_layers(BACKEND, first, count, out)
    with pytest.raises(LayoutError, match="do not fit"):
        reader.decode_layers(BACKEND, 0, 1, out)
    with pytest.raises(LayoutError, match="2 groups, rows were given for 1"):
        reader.decode(BACKEND, [whole[0]])
    with pytest.raises(LayoutError):
        reader.decode_layers(BACKEND, 0, 1, allocate_rows(replace(SMALL, layers=(0,), head_count=2)))


def test_a_reader_goes_on_with_a_longer_prefix() -> None:
    entries = read(FRAME).layers
    reader = read(FRAME[: entries[0].stop - 1], partial=True)
    assert reader.available_layers == 0
    assert reader.extend(FRAME[: entries[0].stop]) == 1
    assert reader.extend(bytearray(FRAME)) == 2
    assert [bytes(reader.layer(i)) for i in range(2)] == [FRAME[e.start : e.stop] for e in entries]
    for buffer, reason in (
        (FRAME[:-1], "truncated"),
        (FRAME + b"\0", "length"),
        (frame_of(SMALL, seed=1), "identity"),
    ):
        with pytest.raises(CorruptFrameError) as caught:
            reader.extend(buffer)
        assert caught.value.reason == reason
    assert reader.available_layers == 2


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "truncated"),
        ([FRAME[:50]], "truncated"),
        ([FRAME[:-1]], "truncated"),
        ([FRAME, b"\0"], "length"),
        ([b"something else that goes on and on"] * 3, "foreign"),
        ([FRAME[:44], struct.pack("<Q", 80), FRAME[52:90]], "length"),
    ],
)
def test_a_stream_that_is_no_frame(pieces: list[bytes], reason: str) -> None:
    with pytest.raises(CorruptFrameError) as caught:
        list(stream_layers(pieces, expect_namespace=NAMESPACE, expect_key=KEY, digest=BACKEND.digest))
    assert caught.value.reason == reason


def test_views_of_a_stream_stay_good_while_it_goes_on() -> None:
    group = GroupInfo("LKHTD", range(4), (PartInfo("K", "float32", 64),), rows=256)  # type: ignore[arg-type]
    frame = frame_of(group, codec="lossless")
    assert len(frame) > 1 << 17
    held = [
        reader.layer(index)
        for reader, index in stream_layers(
            [frame[at : at + 5000] for at in range(0, len(frame), 5000)],
            expect_namespace=NAMESPACE,
            expect_key=KEY,
            digest=BACKEND.digest,
        )
    ]
    assert [bytes(view) for view in held] == [frame[e.start : e.stop] for e in read(frame).layers]


# What is refused at writing


def test_values_that_a_codec_does_not_take() -> None:
    rows = filled(SMALL)
    rows.array("V", 1)[0, 3, 0, 2] = np.nan
    with pytest.raises(QuantizationError, match="nan"):
        encode_frame(BACKEND, [SMALL], [rows], tokens=6, namespace=NAMESPACE, key=KEY, codec="small")
    frame = encode_frame(BACKEND, [SMALL], [rows], tokens=6, namespace=NAMESPACE, key=KEY, codec="lossless")
    assert decoded(frame) == [content(rows)]


def test_rows_and_groups_that_do_not_go_together() -> None:
    rows = filled(SMALL)
    arguments: dict[str, Any] = {"tokens": 6, "namespace": NAMESPACE, "key": KEY, "codec": "balanced"}
    with pytest.raises(LayoutError, match="2 groups"):
        encode_frame(BACKEND, [SMALL, SMALL], [rows], **arguments)
    with pytest.raises(LayoutError, match="1 layers of 6 tokens"):
        encode_frame(BACKEND, [replace(SMALL, layers=(0,))], [rows], **arguments)
    with pytest.raises(LayoutError, match="give them"):
        plan_frame([SMALL], **arguments)
    with pytest.raises(ConfigError, match="no codec 'zip'"):
        plan_frame([SMALL], **{**arguments, "codec": "zip"})
    segments = get_codec("balanced").encode(BACKEND, rows, SMALL)
    with pytest.raises(LayoutError, match="segments by layer"):
        write_frame([SMALL], segments[:1], digest=BACKEND.digest, **arguments)
    many = [[CodedSegment(b"", ((0, 0),) * 65536), CodedSegment(b"")]] * 2
    with pytest.raises(LayoutError, match="tiles"):
        write_frame([SMALL], many, digest=BACKEND.digest, **arguments)


# Damage


def test_every_truncation_is_detected() -> None:
    assert {reason_of(FRAME[:size]) for size in range(len(FRAME))} == {"truncated"}
    assert reason_of(FRAME + b"\0") == "length"


def test_every_bit_flip_is_detected() -> None:
    reasons = set()
    for bit in range(8 * len(FRAME)):
        flipped = bytearray(FRAME)
        flipped[bit // 8] ^= 1 << bit % 8
        reasons.add(reason_of(flipped))
    assert reasons == {"foreign", "version", "crc", "digest", "truncated", "length"}


def test_another_major_version_is_refused() -> None:
    for major in (0, 2, 65535):
        assert reason_of(FRAME[:4] + struct.pack("<H", major) + FRAME[6:]) == "version"


@pytest.mark.parametrize("name", CODERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_segments_that_are_wrong_though_all_sums_are_right(name: str, data: st.DataObject) -> None:
    """An altered segment decodes to something of the right shape, or to a typed error; nothing else happens."""
    group = replace(
        SMALL, rows=data.draw(st.sampled_from([3, 33])), rope=data.draw(st.sampled_from([None, SMALL.rope]))
    )
    frame = bytearray(frame_of(group, codec=name))
    entry = data.draw(st.sampled_from(read(frame).layers))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(entry.start, entry.stop - 1))
        frame[at] = data.draw(st.integers(0, 255) | st.just(frame[at] ^ 1))
    reader = read(frame)
    segments = [CodedSegment(bytes(frame[s.offset : s.offset + s.nbytes]), s.tiles) for s in entry.segments]
    one = replace(group, layers=(entry.layer,))
    reason = ""
    try:
        reader.codec.decode(BACKEND, [segments], one, allocate_rows(one))
    except CorruptFrameError as error:
        reason = error.reason
    assert reason in {"", "stream", "length"}


# Heads that are wrong though their CRC is right

GROUP = 72 + 64 + 1 + 5  # the group's length field: after two digests and the chain ["kvs1"]
BASE, ROWS = GROUP + 4 + 6, GROUP + 4 + 6 + 8
ROPE = GROUP + 4 + struct.unpack("<I", FRAME[GROUP : GROUP + 4])[0] - (1 + 21 + 5 + 5)
DIRECTORY = 72 + FrameHeader.parse(FRAME).varlen_bytes


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (8, struct.pack("<I", 0), "unsupported"),  # offsets are no choice of the writer's
        (8, struct.pack("<I", 3 | 8), "unsupported"),  # encrypted
        (8, struct.pack("<I", 3 | 1 << 31), "unsupported"),
        (12, struct.pack("<H", 0), "unsupported"),
        (12, struct.pack("<H", 2), "unsupported"),
        (12, struct.pack("<H", 999), "unsupported"),
        (14, struct.pack("<H", 0), "unsupported"),
        (14, struct.pack("<H", 2 | 1 << 8), "unsupported"),  # another tier
        (16, b"\x0c", "unsupported"),
        (17, b"\x01", "unsupported"),  # levels without their flag
        (52, b"12345678", "unsupported"),
        (60, b"12345678", "unsupported"),
        (36, struct.pack("<Q", 1), "length"),
        (72 + 64 + 2, b"kvs2", "unsupported"),
        (ROPE, struct.pack("<BI", 1, 2**32 - 2), "unsupported"),
        (BASE, struct.pack("<q", 2**63 - 1), "unsupported"),
        (BASE, struct.pack("<q", -1), "unsupported"),
        (DIRECTORY + 8 + 6, b"\x03", "length"),
        (DIRECTORY + 8 + 7, struct.pack("<H", 65535), "length"),
    ],
)
def test_forged_heads(at: int, value: bytes, reason: str) -> None:
    assert FRAME[ROPE : ROPE + 5] == struct.pack("<BI", 1, 4)
    forged = put(FRAME, at, value)
    tracemalloc.start()
    try:
        assert reason_of(forged) == reason
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_rows_that_the_bytes_cannot_hold_are_refused_before_they_are_allocated() -> None:
    frame, rows = frame_of(replace(SMALL, rope=None), codec="lossless"), 2**32 - 1
    at = ROWS + len("lossless") - len("kvs1")
    assert frame[at : at + 4] == struct.pack("<I", 6)
    forged = put(frame, at, struct.pack("<I", rows))
    assert reason_of(put(forged, 36, struct.pack("<Q", 2 * 2 * rows * 4 * 2))) == "length"


def test_level_constants_of_a_codec_without_them() -> None:
    frame = frame_of(replace(SMALL, rope=None), codec="lossless")
    assert reason_of(put(frame, 8, struct.pack("<I", Flags.LEVELS))) == "unsupported"
    leveled = frame_of(SMALL, codec=get_codec("high", levels=(1, 2)))
    assert reason_of(put(leveled, 19, b"\x01")) == "unsupported"


@settings(deadline=None, max_examples=300)
@given(st.integers(8, FrameHeader.parse(FRAME).head_bytes - 5), st.binary(min_size=1, max_size=8))
def test_no_forged_head_does_worse_than_a_typed_error(at: int, value: bytes) -> None:
    value = value[: FrameHeader.parse(FRAME).head_bytes - 4 - at]
    # The two part lengths say where the CRC is: with these changed there is no CRC to make right.
    assume(not 28 - len(value) < at < 36)
    reason = ""
    try:
        reader = FrameReader(put(FRAME, at, value), expect_namespace=None, expect_key=None, digest=BACKEND.digest)
        reader.decode(BACKEND, [allocate_rows(group) for group in reader.groups])
    except CorruptFrameError as error:
        reason = error.reason
    except LayoutError:
        assert reader.groups[0].parts != SMALL.parts  # well formed, but no keys and values
    assert reason in {"", "length", "layout", "unsupported", "digest", "stream", "truncated"}


def test_a_forged_layer_is_sealed_by_its_digest_only() -> None:
    """`sealed` makes a frame whose bytes were altered pass all sums: the digest is no protection against attackers."""
    entry = read(FRAME).layers[1]
    altered = bytearray(FRAME)
    altered[entry.start + 3] ^= 0xFF  # the zero in the segment's head
    assert reason_of(altered) == "digest"
    reader = read(sealed(altered))
    reader.verify()
    with pytest.raises(CorruptFrameError) as caught:
        reader.decode(BACKEND, [allocate_rows(SMALL)])
    assert caught.value.reason == "stream"


def test_the_docs_have_every_codec_with_its_numbers_for_ever() -> None:
    text = (Path(__file__).parents[2] / "docs" / "frame.md").read_text("utf-8")
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].isdigit() and cells[3].startswith("`"):
            names, numbers = cells[0].replace("`", "").split(", "), cells[2].split(", ")
            found.update(
                {n: (int(cells[1]), int(p), (cells[3].strip("`"),)) for n, p in zip(names, numbers, strict=True)}
            )
    codecs = [get_codec(name) for name in PRESETS]
    assert found == {codec.name: (codec.codec_id, codec.preset, codec.chain) for codec in codecs}
