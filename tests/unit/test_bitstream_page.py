"""docs/bitstream.md: its worked examples are made by the code, its tables are those that are shipped.

`python tests/unit/test_bitstream_page.py` prints the examples as the page must have them.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.codecs import GroupInfo, PartInfo, get_codec
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.kvs1 import PRESETS as POINTS
from kvcore.codecs.quantizer import K_MAX, MULTIPLIERS, steps
from kvcore.codecs.registry import PRESETS
from kvcore.codecs.tables import DIGESTS, table_set
from kvcore.codecs.turboquant import LEVELS
from kvcore.dtypes import BFLOAT16, FLOAT8_E4M3FN
from kvcore.entropy import tile_bytes

PAGE = (Path(__file__).parents[2] / "docs" / "bitstream.md").read_text("utf-8")
TILE = [[10, 0], [11, 0], [10, 1], [9, 0], [10, 300], [10, 0], [12, -1], [10, 0]] + [[10, 0], [10, 0]] * 4
SEGMENT = [[(7 * t + 5 * c) % 11 / 4 - 1 + c for c in range(3)] for t in range(6)]
LOSSLESS = [[1.0, -0.75], [1.5, 0.5], [-1.25, 0.0]]
TURBOQUANT = [[2.0, -0.5, 1.0, 0.25], [0.0, 0.0, 0.0, 0.0], [-1.0, 8.0, 0.5, 3.0]]
ASYM = [[1.0, -0.75, 7.0], [0.5, 2.0, 0.0], [-28.0, 14.0, 1.75]]


def cells(*columns):
    return "| " + " | ".join(str(c) for c in columns) + " |"


def hexed(data):
    return f"`{data.hex(' ')}`" if data else ""


class Listing:
    """Lines of a table of bytes: offset, bytes, what they are."""

    def __init__(self, data):
        self.data, self.at = bytes(data), 0
        self.lines = ["| offset | bytes | |", "|---:|---|---|"]

    def add(self, size, what):
        if size:
            self.lines.append(cells(self.at, hexed(self.data[self.at : self.at + size]), what))
        self.at += size

    def done(self):
        assert self.at == len(self.data)
        return self.lines


def tile_example():
    """A tile in mode rANS: its bytes, and how the first symbols come out of it."""
    backend, tables = kvcore.open_backend("cpu_ref"), table_set("gauss")
    values = np.array([TILE], np.int16)
    choice = backend.choose_classes(values, tables, use_offsets=True)
    tiles = backend.encode_symbols(values, choice, tables, use_offsets=True)
    mode, words = int(tiles.modes[0]), int(tiles.words[0])
    data = tiles.payload[0, : tile_bytes(mode, words, 2, tables, True)].tobytes()
    assert mode == 2
    listing = Listing(data)
    listing.add(2, "classes {}, {}".format(*data[:2]))
    listing.add(2, "offsets {}, {}".format(*struct.unpack("bb", data[2:4])))
    x = list(struct.unpack("<2I", data[4:12]))
    listing.add(4, f"state of lane 0: {x[0]}")
    listing.add(4, f"state of lane 1: {x[1]}")
    stream = list(struct.unpack(f"<{words}H", data[12 : 12 + 2 * words]))
    for number, word in enumerate(stream):
        listing.add(2, f"word {number}: {word}")
    listing.add(-listing.at % 4, "padding")
    steps_of = [
        "| token | lane | state | slot | symbol | f | start | new state | words taken | value |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    number, decoded = iter(range(words)), []
    for t in range(len(TILE)):
        rows = []
        for lane in (0, 1):
            c, slot = data[lane], x[lane] % 2048
            s = int(tables.symbol[c, slot])
            f, start = int(tables.frequency[c, s]), int(tables.start[c, s])
            rows.append([t, lane, x[lane], slot, s, f, start, f * (x[lane] >> 11) + slot - start, []])
        for row in rows:
            if row[7] < 2**15:
                row[8].append(next(number))
                row[7] = row[7] << 16 | stream[row[8][-1]]
        for row in rows:
            x[row[1]] = row[7]
            value = row[4] - 128 + struct.unpack("b", data[2 + row[1] : 3 + row[1]])[0]
            if row[4] == 0:
                row[8].append(next(number))
                value = struct.unpack("<h", struct.pack("<H", stream[row[8][-1]]))[0]
            taken = ", ".join(map(str, row[8]))
            steps_of.append(cells(*row[:4], "0 (ESC)" if row[4] == 0 else row[4], *row[5:8], taken, value))
            decoded.append(value)
    assert decoded == [v for row in TILE for v in row]
    assert x == [2**15, 2**15]
    assert next(number, None) is None
    return [*listing.done(), "", *steps_of[:12], "| ... | | | | | | | | | |", *steps_of[-2:]]


def segment_example():
    """A segment of preset small, values: everything but a long tile."""
    backend = kvcore.open_backend("cpu_ref")
    group = GroupInfo("LKHTD", (0,), (PartInfo("V", "bfloat16", 3),), 6, 1)
    rows = allocate_rows(group)
    rows.array("V", 0)[0, :, 0] = SEGMENT
    ((segment,),) = get_codec("small").encode(backend, rows, group)
    ((mode, words),) = segment.tiles
    assert mode == 1
    data = bytes(segment.data)
    listing = Listing(data)
    k = data[0]
    listing.add(1, f"k = {k}")
    listing.add(1, "flags: none")
    listing.add(1, "1 raw row")
    listing.add(1, "zero")
    listing.add(1, "row 0 is raw")
    m = [n - 8 for byte in data[5:8] for n in (byte & 15, byte >> 4)]
    listing.add(3, f"multipliers {', '.join(map(str, m))}")
    listing.add(6, f"row 0: {', '.join(f'{v:g}' for v in SEGMENT[0])}")
    listing.add(-listing.at % 4, "padding")
    base, width = struct.unpack("<hB", data[listing.at : listing.at + 3])
    rest = int.from_bytes(data[listing.at + 4 : listing.at + 4 + 2 * words], "little")
    y = [base + (rest >> i * width) % 2**width for i in range(18)]
    listing.add(2, f"tile, mode 1: least value {base}")
    listing.add(1, f"{width} bits each")
    listing.add(1, "zero")
    listing.add(2 * words, f"y = {', '.join(map(str, y))}")
    listing.add(-listing.at % 4, "padding")
    table = ["| token | m | step | values |", "|---:|---:|---:|---|"]
    table.append(cells(0, "", "raw", ", ".join(f"{v:g}" for v in SEGMENT[0])))
    out = allocate_rows(group)
    get_codec("small").decode(backend, [[segment]], group, out)
    decoded = out.array("V", 0)[0, :, 0].astype(np.float32)
    for t in range(1, 6):
        step = float(steps(np.array([k + 2 * m[t]]))[0])
        row = [y[3 * t + c] * step for c in range(3)]
        assert np.array_equal(np.array(row, np.float32).astype(rows.array("V", 0).dtype).astype(np.float32), decoded[t])
        table.append(cells(t, m[t], f"{step:.6g}", ", ".join(f"{v:g}" for v in decoded[t])))
    return [*listing.done(), "", *table]


def lossless_example():
    """A segment of codec lossless."""
    backend = kvcore.open_backend("cpu_ref")
    group = GroupInfo("LKHTD", (0,), (PartInfo("V", "bfloat16", 2),), 3, 1)
    rows = allocate_rows(group)
    rows.array("V", 0)[0, :, 0] = LOSSLESS
    ((segment,),) = get_codec("lossless").encode(backend, rows, group)
    ((mode, words),) = segment.tiles
    assert mode == 1
    data = bytes(segment.data)
    base, width = struct.unpack("<hB", data[:3])
    rest = int.from_bytes(data[4 : 4 + 2 * words], "little")
    values = [base + (rest >> i * width) % 2**width for i in range(6)]
    listing = Listing(data)
    listing.add(2, f"tile, mode 1: least value {base}")
    listing.add(1, f"{width} bits each")
    listing.add(1, "zero")
    listing.add(2 * words, f"sign and exponent: {', '.join(map(str, values))}")
    listing.add(-listing.at % 4, "padding")
    tail = int.from_bytes(data[listing.at :], "little")
    mantissas = [tail >> 7 * i & 127 for i in range(6)]
    listing.add(len(data) - listing.at, f"mantissas, 7 bits each: {', '.join(map(str, mantissas))}")
    bits = [v >> 8 << 15 | (v & 255) << 7 | m for v, m in zip(values, mantissas, strict=True)]
    assert np.array(bits, np.uint16).tobytes() == rows.array("V", 0).tobytes()
    return listing.done()


def signs_of(count):
    """The signs of the first channels, by the page's words."""

    def mix(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    return [-1 if mix((c + 1) * 0x9E3779B97F4A7C15 % 2**64) >> 63 else 1 for c in range(count)]


def signs_example():
    lines = ["| c | signs |", "|---|---|"]
    marks = ["+-"[sign < 0] for sign in signs_of(32)]
    return [*lines, *(cells(f"{c} .. {c + 15}", f"`{' '.join(marks[c : c + 16])}`") for c in (0, 16))]


def values_of(codec, rows):
    """Encode part V of one layer and head; return the segment's bytes and what they decode to."""
    backend = kvcore.open_backend("cpu_ref")
    group = GroupInfo("LKHTD", (0,), (PartInfo("V", "bfloat16", len(rows[0])),), len(rows), 1)
    source, out = allocate_rows(group), allocate_rows(group)
    source.array("V", 0)[0, :, 0] = rows
    ((segment,),) = codec.encode(backend, source, group)
    codec.decode(backend, [[segment]], group, out)
    return bytes(segment.data), out.array("V", 0)[0, :, 0].astype(np.float32)


def turboquant_example():
    """A segment of 3-bit codes, and how its rows come out of it."""
    data, decoded = values_of(get_codec("turboquant_3bit"), TURBOQUANT)
    scales = np.frombuffer(data[:6], BFLOAT16).astype(np.float32)
    rest = int.from_bytes(data[6:], "little")
    codes = [rest >> 3 * i & 7 for i in range(12)]
    listing = Listing(data)
    listing.add(6, f"scales {', '.join(f'{v:g}' for v in scales)}")
    listing.add(5, f"codes {', '.join(map(str, codes))}")
    table = ["| token | levels times scale | rotated back |", "|---:|---|---|"]
    level = np.array([*(-v for v in reversed(LEVELS[3])), *LEVELS[3]], np.float32)
    for t in range(3):
        y = level[codes[4 * t : 4 * t + 4]] * scales[t]
        a, b, c, d = y
        a, b, c, d = a + b, a - b, c + d, c - d
        x = np.array([a + c, b + d, a - c, b - d], np.float32) * np.float32(0.5) * np.array(signs_of(4), np.float32)
        assert np.array_equal(x.astype(BFLOAT16).astype(np.float32), decoded[t])
        table.append(cells(t, *(", ".join(f"{v + 0:.6g}" for v in row) for row in (y, decoded[t]))))
    return [*listing.done(), "", *table]


def asym_example():
    """A segment of pages."""
    data, decoded = values_of(get_codec("asym_k16_v8", scope="page", page_tokens=2), ASYM)
    scales = np.frombuffer(data[4:12], "<f4")
    listing = Listing(data)
    listing.add(2, "scope: page")
    listing.add(2, "2 tokens a page")
    listing.add(8, f"scales {', '.join(f'{v:.6g}' for v in scales)}")
    codes = np.frombuffer(data[12:], FLOAT8_E4M3FN).astype(np.float32).reshape(3, 3)
    for t in range(3):
        listing.add(3, f"token {t}: codes {', '.join(f'{v + 0:g}' for v in codes[t])}")
        assert np.array_equal((codes[t] * scales[t // 2]).astype(BFLOAT16).astype(np.float32), decoded[t])
    return listing.done()


EXAMPLES = {
    "tile": tile_example,
    "segment": segment_example,
    "lossless": lossless_example,
    "signs": signs_example,
    "turboquant": turboquant_example,
    "asym": asym_example,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_what_the_code_writes(name):
    found = re.search(rf"<!-- example: {name} -->\n\n(.*?)\n\n<!-- /example -->", PAGE, re.DOTALL)
    assert found is not None
    wanted = "\n".join(EXAMPLES[name]())
    assert found[1] == wanted, f"the page must have:\n{wanted}"


def test_the_values_of_the_examples_are_those_of_the_page():
    for line in (*TILE[:5], *SEGMENT, *LOSSLESS, *TURBOQUANT, *ASYM):
        assert f"({', '.join(f'{v:g}' for v in line)})" in PAGE


def test_the_table_sets_of_the_page_are_the_shipped_ones():
    for name, digest in DIGESTS.items():
        tables = table_set(name)
        assert cells(f"`{name}`", tables.kind, tables.bits, f"`{digest}`") in PAGE


def test_the_constants_of_the_page_are_those_of_the_code():
    mantissas = [round(float(s) * 2**23) for s in steps(np.arange(8) + 128)]
    assert ", ".join(map(str, mantissas)) in PAGE
    assert f"{MULTIPLIERS[0]} .. {MULTIPLIERS[1]}" in PAGE
    assert f"k of 0 .. {K_MAX}" in PAGE
    for preset, constants in {"high": (-23, -22), "balanced": (-14, -13), "small": (-8, -8)}.items():
        point = POINTS[preset]
        assert (point.constant, point.leveled) == constants
        assert cells(f"`{preset}`", PRESETS[preset][1], *constants) in PAGE
    for bits, levels in LEVELS.items():
        assert f"L: {', '.join(map(str, levels))} |" in PAGE, bits


if __name__ == "__main__":
    for name, make in EXAMPLES.items():
        print(f"<!-- example: {name} -->\n", *make(), "\n<!-- /example -->\n", sep="\n")
