"""`kvcore inspect`: everything there is to tell of a frame, and of a damaged one what is wrong and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvcore
from kvcore.cli import app
from kvcore.codecs import PRESETS, FrameReader, GroupInfo, PartInfo, encode_frame, get_codec
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.frame_format import FrameHeader
from kvcore.codecs.inspection import inspect_frame
from kvcore.rope import RopeParams

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
GOLDEN = Path(__file__).parents[1] / "golden" / "raw-v1.kvf"


def group_of(**changes: Any) -> GroupInfo:
    parts = (PartInfo("K", "bfloat16", 40), PartInfo("V", "bfloat16", 40))
    return GroupInfo(**{"layout": "LKHTD", "layers": (2, 3), "parts": parts, "rows": 60, "head_count": 2, **changes})


def rows_of(group: GroupInfo) -> kvcore.RowLayout:
    rows, rng = allocate_rows(group), np.random.default_rng(3)
    for part, layer in rows.planes():
        array = rows.array(part, layer)
        array[...] = rng.standard_normal(array.shape).astype(array.dtype)
    return rows


def frame_of(group: GroupInfo, rows: kvcore.RowLayout, codec: Any) -> bytes:
    arguments = {"tokens": group.rows, "namespace": b"n" * 32, "key": b"k" * 32}
    return bytes(encode_frame(BACKEND, [group], [rows], codec=codec, **arguments))


FRAME = frame_of(group_of(rope=RopeParams(40)), rows_of(group_of()), get_codec("balanced", levels=(8, 4)))
HEADER = FrameHeader.parse(FRAME)
LAYERS = FrameReader(FRAME, expect_namespace=None, expect_key=None, digest=BACKEND.digest).layers


@pytest.fixture
def look(tmp_path):
    def inspect(data: bytes, *options: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "a.kvf").write_bytes(data)
        done = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.kvf"), "--json", *options])
        return done.exit_code, json.loads(done.stdout)

    return inspect


def flipped(at: int) -> bytes:
    return FRAME[:at] + bytes([FRAME[at] ^ 4]) + FRAME[at + 1 :]


def test_a_good_frame(look):
    code, seen = look(FRAME)
    assert (code, seen["good"], seen["problems"]) == (0, True, [])
    assert (seen["backend"], seen["codec"], seen["chain"]) == ("cpu_ref", "balanced", ["kvs1"])
    header = seen["header"]
    assert (header["version"], header["flags"]) == ("1.0", ["UNROPED", "OFFSET", "LEVELS"])
    assert (header["levels"], header["tokens"], header["layers"]) == ([8, 4], 60, 2)
    assert header["ratio"] == round(header["raw_bytes"] / len(FRAME), 4)
    assert (seen["namespace"], seen["key"]) == ((b"n" * 32).hex(), (b"k" * 32).hex())
    assert seen["groups"][0]["layers"] == [2, 3]
    assert seen["groups"][0]["rope"]["theta"] == 10000.0
    assert [(row["layer"], row["start"], row["digest"], row["decoded"]) for row in seen["layers"]] == [
        (entry.layer, entry.start, "ok", "ok") for entry in LAYERS
    ]
    for row, entry in zip(seen["layers"], LAYERS, strict=True):
        assert row["parts"] == {
            "K": sum(s.nbytes for s in entry.segments[:2]),
            "V": sum(s.nbytes for s in entry.segments[2:]),
        }
    tiles = seen["tiles"]
    assert sum(tiles["modes"].values()) == 8
    assert sum(tiles["classes"].values()) == 40 * tiles["modes"]["rans"]
    assert tiles["symbols"] == 40 * 60 * tiles["modes"]["rans"]


def spoiled_frame() -> bytes:
    group = group_of(rows=300)
    rows = rows_of(group)
    rows.array("K", 1)[0, [5, 256], 0, 3] = np.nan  # [token, head, channel]
    rows.array("V", 0)[0, 299, 1, 7] = np.inf
    return frame_of(group, rows, get_codec("balanced", nonfinite="raw"))


def test_rows_stored_as_they_are_are_listed_by_part_and_head(look):
    _, seen = look(FRAME)
    assert [layer["raw_rows"] for layer in seen["layers"]] == [{"K": [[0], [0]], "V": [[0], [0]]}] * 2
    code, seen = look(spoiled_frame())
    assert (code, seen["problems"]) == (0, [])
    assert [layer["raw_rows"] for layer in seen["layers"]] == [
        {"K": [[0], [0]], "V": [[0], [0, 299]]},
        {"K": [[0, 5, 256], [0]], "V": [[0], [0]]},
    ]


def test_people_see_the_rows_that_most_segments_have_and_the_exceptions(tmp_path):
    (tmp_path / "a.kvf").write_bytes(spoiled_frame())
    (tmp_path / "b.kvf").write_bytes(frame_of(group_of(), rows_of(group_of()), "lossless"))
    seen, exact = (CliRunner().invoke(app, ["inspect", str(tmp_path / f"{name}.kvf")]).stdout for name in "ab")
    lines = [line.strip() for line in seen.partition("Rows stored as they are:")[2].splitlines()]
    assert lines[1:4] == ["0: 6 segments", "0, 5, 256: layer 3 K head 0", "0, 299: layer 2 V head 1"]
    assert "Rows stored" not in exact


@pytest.mark.parametrize("codec", PRESETS)
def test_frames_of_every_codec_are_good(codec):
    report = inspect_frame(frame_of(group_of(), rows_of(group_of()), codec), BACKEND)
    assert report.problems == []
    assert [layer.decoded for layer in report.layers] == ["ok", "ok"]
    assert report.codec is not None
    assert report.codec.name == codec


def test_the_golden_raw_frame_of_another_group_form(look):
    code, seen = look(GOLDEN.read_bytes())
    assert (code, seen["codec"], len(seen["groups"]), len(seen["layers"])) == (0, "raw", 2, 5)
    assert {row["digest"] for row in seen["layers"]} == {"ok"}
    assert seen["tiles"]["modes"] == {}


@pytest.mark.parametrize(("codec", "dtype"), [("high", "bfloat16"), ("lossless", "bfloat16"), ("lossless", "fp8")])
def test_escapes_are_counted(codec, dtype):
    """A value that is far out among those of its channel is escaped; each of them is counted, and no other."""
    parts = (PartInfo("K", dtype, 3),)
    group = group_of(parts=parts, rows=200, head_count=1, layers=(0,))
    if dtype == "fp8":
        raw = np.tile(np.arange(0x30, 0x38, dtype=np.uint8), 75).reshape(200, 3)
        raw[5:8, 1] = 0xFF  # NaN, which has no symbol
    else:
        raw = np.tile(np.linspace(1, 1.9, 50), 12).reshape(200, 3)
        raw[5:8, 1] = [1e-30, 0.0, -1e-30] if codec == "lossless" else [60.0, -60.0, 55.0]
    rows = allocate_rows(group)
    array = rows.array("K", 0)
    array[0, :, 0] = raw.view(array.dtype) if dtype == "fp8" else raw.astype(array.dtype)
    report = inspect_frame(frame_of(group, rows, codec), BACKEND)
    assert report.problems == []
    assert report.tiles.modes == {"rans": 1}
    assert report.tiles.symbols == 600
    assert report.tiles.escapes >= 2 if codec == "high" else report.tiles.escapes == 3


# --- damage


def test_every_part_of_a_damaged_frame_is_named(look):
    end = 72 + HEADER.varlen_bytes
    cases = {
        40: ("length", None),  # raw length
        100: ("crc", None),
        end + 3: ("crc", None),
        HEADER.head_bytes - 2: ("crc", None),
        LAYERS[1].start + 9: ("digest", 3),
        LAYERS[0].start - 1: ("digest", 2),
    }
    for at, (reason, layer) in cases.items():
        code, seen = look(flipped(at))
        assert (code, seen["good"]) == (1, False)
        assert reason in [p["reason"] for p in seen["problems"]], at
        assert layer in [p["layer"] for p in seen["problems"]]


def test_a_bad_layer_does_not_hide_the_others(look):
    code, seen = look(flipped(LAYERS[0].start))
    assert code == 1
    assert [(row["digest"], row["decoded"]) for row in seen["layers"]] == [("bad", "damaged"), ("ok", "ok")]
    (problem,) = seen["problems"]
    assert (problem["reason"], problem["layer"], problem["offset"]) == ("digest", 2, LAYERS[0].start)


def test_a_short_file_is_shown_as_far_as_it_goes(look):
    code, seen = look(FRAME[:-1])
    assert code == 1
    assert [(row["layer"], row["digest"]) for row in seen["layers"]] == [(2, "ok"), (3, "missing")]
    (problem,) = seen["problems"]
    assert (problem["reason"], problem["layer"], problem["offset"]) == ("truncated", 3, len(FRAME) - 1)
    code, seen = look(FRAME[:100])
    assert (code, seen["header"]["tokens"], seen["groups"], seen["layers"]) == (1, 60, [], [])
    assert (seen["problems"][0]["reason"], seen["problems"][0]["offset"]) == ("truncated", 100)


@pytest.mark.parametrize(
    ("data", "reason", "offset"),
    [
        (b"", "truncated", 0),
        (b"KVS1", "truncated", 4),
        (b"GGUF" + bytes(500), "foreign", 0),
        (FRAME[:4] + b"\x02\x00" + FRAME[6:], "version", 0),
        (FRAME + b"more", "length", len(FRAME)),
    ],
)
def test_what_is_no_frame(look, data, reason, offset):
    code, seen = look(data)
    assert code == 1
    assert (seen["problems"][0]["reason"], seen["problems"][0]["offset"]) == (reason, offset)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_whatever_the_bytes_are_there_is_a_report(data):
    frame = bytearray(FRAME[: data.draw(st.integers(0, len(FRAME)))])
    for _ in range(data.draw(st.integers(1, 4))):
        if frame:
            frame[data.draw(st.integers(0, min(len(frame), 600) - 1))] = data.draw(st.integers(0, 255))
    report = inspect_frame(bytes(frame), BACKEND)
    assert report.good == (bytes(frame) == FRAME)


def test_without_a_backend_the_head_is_shown():
    report = inspect_frame(FRAME, None)
    assert report.good
    assert {(layer.digest, layer.decoded) for layer in report.layers} == {("unchecked", "no backend")}
    assert sum(report.tiles.modes.values()) == 8
    assert report.tiles.symbols == 0
    assert [p.reason for p in inspect_frame(flipped(100), None).problems] == ["crc"]


# --- for people


def test_what_people_see(tmp_path):
    (tmp_path / "good").write_bytes(FRAME)
    (tmp_path / "bad").write_bytes(flipped(LAYERS[1].start))
    good, bad = (CliRunner().invoke(app, ["inspect", str(tmp_path / name)]) for name in ("good", "bad"))
    assert (good.exit_code, bad.exit_code) == (0, 1)
    for word in ("balanced", "levels K 8 V 4", "theta 10000", "Tiles: ", "Channels by table: ", "Nothing is wrong"):
        assert word in good.stdout
    assert "Damaged (digest) at byte" in bad.stdout
    assert "layer 3" in bad.stdout
    assert "Nothing is wrong" not in bad.stdout


def test_a_file_that_is_not_there_and_a_backend_that_is_not(tmp_path):
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "none")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "cannot read" in done.stderr
    (tmp_path / "good").write_bytes(FRAME)
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "good"), "--backend", "cpu-ref"]).exit_code == 2
