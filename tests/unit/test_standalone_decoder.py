"""docs/decoder/kvs1_decode.py, held to the golden frames: it must say what kvcore's reference says."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.codecs import FrameReader
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.contract import part_arrays
from kvcore.dtypes import finite_max, to_dtype
from kvcore.rope import rope_table

ROOT = Path(__file__).parents[2]
DECODER = ROOT / "docs" / "decoder" / "kvs1_decode.py"
TABLES = ROOT / "kvcore" / "codecs" / "tables"
GOLDEN = ROOT / "conformance" / "src" / "kvcore_conformance" / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
KVS1 = ("high", "balanced", "small")
WHOLE = ("bfloat16", "float16", "float32")  # what it decodes of codec lossless


def named(*codecs):
    return pytest.mark.parametrize("name", [n for n, facts in MANIFEST.items() if facts["codec"] in codecs])


@pytest.fixture(scope="module")
def decoder():
    return runpy.run_path(str(DECODER))


@pytest.fixture
def decode(decoder, capsys):
    """Return a function from a frame to what the decoder prints, as values."""

    def run(path):
        assert decoder["main"](str(path), str(TABLES), "--json") is None
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def backend():
    return kvcore.open_backend("cpu_ref")


def opened(backend, name):
    frame = (GOLDEN / f"{name}.kvf").read_bytes()
    return FrameReader(frame, expect_namespace=None, expect_key=None, digest=backend.digest)


def stored(reader):
    """Yield (layer, group, part, head, segment) in stored order."""
    for index, entry in enumerate(reader.layers):
        group = reader.groups[entry.group]
        segments = iter(reader.segments(index))
        for part in group.parts:
            for head in range(group.head_count):
                yield entry, group, part, head, next(segments)


def decoded_arrays(backend, reader):
    """Return {(group, part): array [layers, heads, T, width]} of a frame, as kvcore decodes it."""
    rows = [allocate_rows(group) for group in reader.groups]
    reader.decode(backend, rows)
    return {
        (index, name): array
        for index, group in enumerate(reader.groups)
        for name, array in part_arrays(backend, rows[index], group).items()
    }


def finished(backend, one, part, group):
    """Do what the decoder skipped: RoPE, and the rounding to the element type."""
    dtype, values = to_dtype(part.dtype), np.array(one["values"], np.float32)
    limit = finite_max(dtype)
    final = np.clip(values, -limit, limit).astype(dtype)
    if "RoPE" in one["skipped"]:
        positions = np.arange(group.base_position, group.base_position + group.rows)
        cos, sin = rope_table(group.rope, positions)
        turned = np.empty((group.rows, 1, part.width), dtype)
        backend.shift_rope(values[:, None], cos, sin, interleaved=group.rope.interleaved, out=turned)
        final = turned[:, 0]
    final[one["raw"]] = values[one["raw"]].astype(dtype)
    return final


@named(*KVS1)
def test_kvs1_values_are_those_of_the_reference(name, decode, backend):
    reader = opened(backend, name)
    found = decode(GOLDEN / f"{name}.kvf")["segments"]
    arrays = decoded_arrays(backend, reader)
    for (entry, group, part, head, _), one in zip(stored(reader), found, strict=True):
        assert (one["layer"], one["part"], one["head"]) == (entry.layer, part.name, head)
        wanted = arrays[entry.group, part.name][group.layers.index(entry.layer), head]
        final, nan = finished(backend, one, part, group), np.isnan(wanted.astype(np.float32))
        # It prints numbers: a NaN of a raw row is there, its payload is not.
        assert np.array_equal(np.isnan(final.astype(np.float32)), nan)
        assert final[~nan].tobytes() == wanted[~nan].tobytes()


@named(*KVS1)
def test_kvs1_integers_are_those_of_the_reference(name, decode, backend, monkeypatch):
    made = []
    original = type(backend).decode_symbols

    def noted(self, tiles, tables, *, out, **how):
        original(self, tiles, tables, out=out, **how)
        made.extend(np.array(tile) for tile in out)
        return out

    monkeypatch.setattr(type(backend), "decode_symbols", noted)
    decoded_arrays(backend, opened(backend, name))
    monkeypatch.undo()
    found = decode(GOLDEN / f"{name}.kvf")["segments"]
    tiles = [
        np.array(one["y"], np.int16)[start : start + 256, first : first + 64]
        for one in found
        if one["tiles"]
        for start in range(0, len(one["y"]), 256)
        for first in range(0, len(one["y"][0]), 64)
    ]
    # The last chunk of 257 tokens is one raw row, without tiles.
    coded = sorted(tile.tobytes() for tile in tiles if len(tile) > 4)
    assert coded == sorted(tile.tobytes() for tile in made)


@named("lossless", "raw")
def test_lossless_bits_are_those_of_the_reference(name, decode, backend):
    reader = opened(backend, name)
    found = decode(GOLDEN / f"{name}.kvf")["segments"]
    arrays = decoded_arrays(backend, reader)
    for (entry, group, part, head, _), one in zip(stored(reader), found, strict=True):
        if MANIFEST[name]["codec"] == "lossless" and part.dtype not in WHOLE:
            assert one["skipped"] == f"codec 2 of {part.dtype}"
            continue
        assert one["skipped"] == "nothing"
        final = np.ascontiguousarray(arrays[entry.group, part.name][group.layers.index(entry.layer), head])
        bits = np.array(one["bits"], np.uint64).astype(f"<u{final.dtype.itemsize}")
        assert bits.tobytes() == final.tobytes()


@named("int8", "fp8", "cachegen", "turboquant_4bit", "asym_k16_v8", "asym_k_elsewhere_v8")
def test_what_it_does_not_decode_it_names(name, decode):
    for one in decode(GOLDEN / f"{name}.kvf")["segments"]:
        assert one["skipped"].startswith("codec ")
        assert "values" not in one


def test_header_and_groups_are_those_of_the_reader(decode, backend):
    ropes = ("rope-table", "rope-unknown", "rope-ntk", "rope-yarn", "rope-llama3")
    for name in ("hybrid", "mla", "levels", *ropes):
        reader, found = opened(backend, name), decode(GOLDEN / f"{name}.kvf")
        assert found["header"]["tokens"] == reader.header.tokens
        assert found["header"]["key"] == reader.key.hex()
        for group, one in zip(reader.groups, found["groups"], strict=True):
            assert (one["rows"], one["heads"], one["base_position"]) == (
                group.rows,
                group.head_count,
                group.base_position,
            )
            assert one["layers"] == list(group.layers)
            assert one["parts"] == [[p.name, p.dtype, p.width] for p in group.parts]
            assert ("rope" in one) == (group.rope is not None)
            if group.rope is not None:
                assert one["rope"]["scaling"] == group.rope.scaling
                assert one["rope"]["numbers"] == [*(group.rope.inv_freq or group.rope.parameters.values())]


@pytest.mark.parametrize("name", ["tail-5", "lossless-zeros", "raw-fp8"])
def test_altered_frames_are_refused(name, decoder, tmp_path):
    frame = (GOLDEN / f"{name}.kvf").read_bytes()
    head = frame.find(bytes(17), 200)  # the padding before the first layer, which it does not look at
    for at in [*range(0, head, 29), *range(len(frame) - 40, len(frame), 7)]:
        path = tmp_path / "altered.kvf"
        path.write_bytes(frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :])
        assert str(path) in decoder["main"](str(path), str(TABLES)), f"byte {at}"
        path.write_bytes(frame[:at])
        assert str(path) in decoder["main"](str(path), str(TABLES)), f"first {at} bytes"


def test_other_tables_are_refused(decoder, tmp_path):
    for file in TABLES.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes() + b"\n" * (file.name == "gauss.json"))
    assert "other tables" in decoder["main"](str(GOLDEN / "tail-5.kvf"), str(tmp_path))
    assert decoder["main"](str(GOLDEN / "lossless-zeros.kvf"), str(tmp_path)) is None


def test_it_is_short_and_needs_the_standard_library_only():
    source = DECODER.read_text()
    assert len(source.splitlines()) <= 250
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module)])
    }
    assert imported <= sys.stdlib_module_names | {"__future__"}


def test_it_runs_as_a_program_without_any_package():
    # -I and -S: neither this project nor anything that was installed can be found.
    command = [sys.executable, "-I", "-S", str(DECODER)]
    frame = str(GOLDEN / "tail-5.kvf")
    done = subprocess.run([*command, frame, str(TABLES)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    assert first.startswith("layer 0 K head 0: ")
    assert first.endswith("skipped: rounding to the element type, RoPE")
    done = subprocess.run(
        [*command, str(DECODER), str(TABLES)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "no frame" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "FRAME TABLES_DIR" in done.stderr
