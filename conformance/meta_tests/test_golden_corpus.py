"""The golden corpus: it holds what it should, it is what the generator makes, and the generator counts as it says."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

import kvcore
from kvcore.codecs import PRESETS
from kvcore.codecs.segments import raw_rows_of
from kvcore.codecs.tables import table_set
from kvcore.dtypes import to_dtype
from kvcore.rope import SCALING_PARAMETERS
from kvcore_conformance import golden

MASK = 2**64 - 1


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def draw(stream, i):
    return mix((stream << 32) + i * 0x9E3779B97F4A7C15 & MASK)


def bell(value):
    return (sum(value >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070) / 2**15


def test_the_committed_files_are_what_the_generator_makes(capsys):
    assert golden.main([]) == 0, capsys.readouterr().out


def test_it_covers_what_a_decoder_can_get_wrong():
    known, cases = golden.manifest(), golden.CASES.values()
    assert set(known) == set(golden.CASES)
    assert {case.codec for case in cases} == set(PRESETS)
    rows = {group.rows for case in cases for group in case.groups if case.codec == "balanced"}
    assert {1, 4, 5, 31, 255, 256, 257} <= rows
    for codecs in (("high", "balanced", "small"), ("lossless",)):
        of = [name for name, facts in known.items() if facts["codec"] in codecs]
        assert all(any(known[n]["tiles"][mode] for n in of) for mode in ("constant", "packed", "rans"))
        assert any(len(case.groups) > 1 and case.codec in codecs for case in cases)
        assert any([p.name for p in g.parts] == ["C", "R"] for c in cases if c.codec in codecs for g in c.groups)
    lossless = {p.dtype for case in cases if case.codec == "lossless" for g in case.groups for p in g.parts}
    assert lossless == {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"}
    rope = [g.rope for case in cases if case.codec in ("high", "balanced", "small") for g in case.groups if g.rope]
    assert {r.interleaved for r in rope} == {False, True}
    assert {r.scaling for r in rope} == set(SCALING_PARAMETERS)
    assert {r.scaling for r in rope if r.parameters} == {"yarn", "llama3"}
    assert any(r.inv_freq for r in rope)
    assert any(SCALING_PARAMETERS[r.scaling] and not r.parameters and r.inv_freq is None for r in rope)
    assert {parts for case in cases for g in case.groups for parts in ["".join(p.name for p in g.parts)]} >= {"K", "V"}
    spoiled = [case for case in cases if case.recipe == "nonfinite"]
    assert {case.options["nonfinite"] for case in spoiled} == {"raw", "saturate"}
    assert any(len(g.parts) == 2 and g.parts[1].name == "R" and g.rope for case in spoiled for g in case.groups)
    assert {g.rows > 256 for case in spoiled for g in case.groups} == {False, True}


def test_raw_rows_differ_by_head_and_not_all_heads_are_raw_as_a_whole():
    names, shape = ("nonfinite-raw", "nonfinite-raw-5"), {"tables": table_set("gauss")}
    for name in names:
        reader = golden.open_frame(kvcore.open_backend("cpu_ref"), (golden.FOLDER / f"{name}.kvf").read_bytes())
        group = reader.groups[0]
        shape |= {"tokens": group.rows, "channels": group.parts[0].width, "dtype": to_dtype(group.parts[0].dtype)}
        lists = [raw_rows_of(segment, **shape) for segment in reader.segments(0)[: group.head_count]]
        assert all(0 in rows for rows in lists)
        assert len({tuple(rows) for rows in lists}) >= 2
        if name == "nonfinite-raw-5":
            assert {len(rows) for rows in lists} == {3, 5}


def test_it_is_small():
    assert sum(path.stat().st_size for path in golden.FOLDER.iterdir()) < 600_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2"])
def test_the_generator_counts_as_it_says(dtype):
    stream, shape = zlib.crc32(b"some name"), (3, 2, 5)
    made = golden.values("plain", shape, dtype, stream)
    for i, (t, h, w) in enumerate(np.ndindex(shape)):
        channel = draw(stream, h * shape[2] + w)
        value = 2.0 ** ((channel >> 7) % 5 - 3) * bell(draw(stream + 1, i)) + 4 * bell(channel)
        exact = struct.unpack("<f", struct.pack("<f", value))[0]
        assert exact == value
        assert made[t, h, w] == np.float32(exact).astype(to_dtype(dtype))


def test_cases_differ_and_a_case_is_the_same_every_time():
    one, other = (golden.CASES[name] for name in ("tail-31", "tail-256"))
    assert golden.fingerprint(golden.inputs(one)) == golden.fingerprint(golden.inputs(one))
    first = golden.inputs(one)[0].array("K", 0)[0, :31]
    assert not np.array_equal(first, golden.inputs(other)[0].array("K", 0)[0, :31])


def test_a_difference_is_told_and_only_writing_removes_it(tmp_path, monkeypatch, capsys):
    few = {name: golden.CASES[name] for name in ("tail-1", "width-1")}
    monkeypatch.setattr(golden, "CASES", few)
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    assert golden.main([]) == 1
    assert golden.main(["--write"]) == 0
    assert golden.main([]) == 0
    (tmp_path / "tail-1.kvf").write_bytes(b"damaged")
    (tmp_path / "stray.kvf").write_bytes(b"")
    capsys.readouterr()
    assert golden.main([]) == 1
    printed = capsys.readouterr().out
    assert "tail-1.kvf: DIFFERENT" in printed
    assert "stray.kvf: NOT MADE BY ANY CASE" in printed
    assert golden.main(["--write"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "tail-1.kvf", "width-1.kvf"]
