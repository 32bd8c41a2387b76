"""Decode a kvcore frame with the standard library alone: docs/frame.md and docs/bitstream.md as a program.

    python kvs1_decode.py FRAME TABLES_DIR [--json]

TABLES_DIR holds the shipped table sets (kvcore/codecs/tables). Decoded are codecs raw, kvs1 (high, balanced, small) and
lossless of bfloat16, float16 and float32. Skipped, and named where it happens: values of kvs1 stay float32, they are
not rounded to their element type, and RoPE, whose parameters are read, is not put back onto keys that had it taken off;
lossless of 8-bit floats, codecs grouped, fp8, cachegen, turboquant and asym are not decoded. It checks, and is slow.
"""
# ruff: noqa: D102, D103, T201 -- the two pages describe every step

from __future__ import annotations

import hashlib
import json
import struct
import sys
from itertools import accumulate, chain, product
from pathlib import Path

M64 = 2**64 - 1
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
FIELDS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}  # bits of exponent and mantissa
MANTISSA = (8388608, 9147842, 9975792, 10878679, 11863283, 12937002, 14107901, 15384775)  # 2**(23 + i/8)
HEADER = "major minor flags codec preset n reserved tokens layers groups varlen directory raw stored tables profile end"


def need(fact: object, why: str) -> None:
    if not fact:
        raise ValueError(why)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        crc = crc >> 1 ^ (0x82F63B78 if (crc ^ bit) & 1 else 0)
    return crc ^ 0xFFFFFFFF


def digest(data: bytes) -> int:
    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
        return z ^ z >> 31

    g, total = 0x9E3779B97F4A7C15, mix(len(data) ^ 0xD6E8FEB86659FD93)
    for i, (lo, hi) in enumerate(struct.iter_unpack("<QQ", data + bytes(-len(data) % 16))):
        total += mix((mix(lo + g * (2 * i + 1) & M64) ^ hi) + g * (2 * i + 2) & M64)
    return total & M64


class Bytes:
    """Bytes that are read from front to back, and never past their end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        need(self.at + size <= len(self.data), f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def read(self, form: str) -> tuple:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def text(self) -> str:
        return self.take(*self.read("B")).decode("ascii")

    def pad(self, to: int) -> None:
        need(not any(self.take(-self.at % to)), "padding that is not zero")


def read_group(b: Bytes) -> dict:
    g = {"layout": b.text(), **dict(zip(("base_position", "rows", "head_start", "heads"), b.read("qIII"), strict=True))}
    g["layers"] = [first + i for first, n in [b.read("II") for _ in range(*b.read("H"))] for i in range(n)]
    g["parts"] = [(b.text(), b.text(), *b.read("I")) for _ in range(*b.read("B"))]
    if b.read("B")[0]:
        g["rope"] = dict(zip(("dims", "interleaved", "theta", "factor"), b.read("IBdd"), strict=True))
        g["rope"]["scaling"], (g["rope"]["form"], count) = b.text(), b.read("BI")
        g["rope"]["numbers"] = b.read(f"{count}d")
    return g


def read_head(frame: bytes) -> tuple[dict, list[dict], list[tuple]]:
    """Return the header, the groups, and for every segment: layer, group, part, dtype, width, head, bytes, tiles."""
    need(frame[:4] == b"KVS1" and len(frame) >= 72, "no frame: the header is missing")
    h = dict(zip(HEADER.split(), struct.unpack("<HHIHHB3sIHHIIQQ8s8sI", frame[4:72]), strict=True))
    need(h["major"] == 1 and not h["flags"] & 8, f"format {h['major']}" if h["major"] != 1 else "it is encrypted")
    end = 72 + h["varlen"] + h["directory"]
    need(h["stored"] == len(frame) >= end + 4, f"{len(frame)} bytes, the header says {h['stored']}")
    need(crc32c(frame[:end]) == int.from_bytes(frame[end : end + 4], "little"), "the CRC32C of the head differs")
    b = Bytes(frame[72 : 72 + h["varlen"]])
    h["namespace"], h["key"], h["chain"] = b.take(32), b.take(32), [b.text() for _ in range(*b.read("B"))]
    groups = [read_group(Bytes(b.take(*b.read("I")))) for _ in range(h["groups"])]
    b, at, segments = Bytes(frame[72 + h["varlen"] : end]), end + 4, []
    for layer, i in sorted((layer, i) for i, g in enumerate(groups) for layer in g["layers"]):
        (stored,) = b.read("Q")
        start = at = at + -at % 256
        for part, head in product(groups[i]["parts"], range(groups[i]["heads"])):
            size, count = b.read("IH")
            at += -at % 16
            segments.append((layer, i, *part, head, frame[at : at + size], [b.read("BH") for _ in range(count)]))
            at += size
        need(at <= len(frame) and digest(frame[start:at]) == stored, f"layer {layer} is not what was written")
    return h, groups, segments


def load_tables(folder: Path, name: str) -> dict:
    data = (folder / f"{name}.json").read_bytes()
    t = json.loads(data) | {"digest": hashlib.sha256(data).digest()}
    t["start"] = [list(accumulate(row, initial=0)) for row in t["frequency"]]
    t["symbol"] = [[s for s, f in enumerate(row) for _ in range(f)] for row in t["frequency"]]
    return t


def symbol_value(kind: str, symbol: int, class_byte: int, offset: int) -> int:
    if kind == "integer":
        return symbol - 128 + (offset ^ 128) - 128
    return (symbol - 1 & 1 ^ class_byte >> 7) << 8 | offset - (symbol - 1 >> 1) & 255


def decode_tile(b: Bytes, tile: tuple[int, int], tokens: int, width: int, t: dict) -> list[list[int]]:
    """Return a tile's values, ``[tokens][width]``. Both kinds have a byte for each channel: an offset, or a base."""
    (mode, words), kind, n = tile, t["kind"], t["bits"]
    if mode == 0:
        need(words == 0, "a constant tile has no words")
        classes = b.take(width) if kind == "exponent" else bytes(width)
        offsets, (symbol,) = b.take(width), b.read("B")
        b.pad(4)
        need(symbol and not any(c & 96 for c in classes), "a constant tile of ESC, or a class beyond 31")
        return [[symbol_value(kind, symbol, c, o) for c, o in zip(classes, offsets, strict=True)]] * tokens
    if mode == 1:
        base, bits, zero = b.read("hBB")
        need(bits <= 16 and not zero and words == -(-tokens * width * bits // 16), "a packed tile of another size")
        rest = int.from_bytes(b.take(2 * words), "little")
        b.pad(4)
        need(not rest >> tokens * width * bits, "bits that belong to no value")
        y = [[base + (rest >> (i * width + j) * bits) % (1 << bits) for j in range(width)] for i in range(tokens)]
        need(max(map(max, y)) < 2**15, "a packed value beyond 16 bits")
        return y
    need(mode == 2, f"mode {mode}")
    classes, offsets = b.take(width), b.take(width)
    b.pad(4)
    x, stream = list(b.read(f"{min(32, width)}I")), iter(b.read(f"{words}H"))
    b.pad(4)
    need(all(2**15 <= s < 2**31 for s in x), "an initial state out of range")
    need(not any(c & (96 if kind == "exponent" else 224) for c in classes), "a class beyond 31")
    rows = []
    for _ in range(tokens):
        row = []
        for first in range(0, width, 32):
            symbols = []
            for lane, class_byte in enumerate(classes[first : first + 32]):
                c, slot = class_byte & 31, x[lane] % (1 << n)
                s = t["symbol"][c][slot]
                x[lane] = t["frequency"][c][s] * (x[lane] >> n) + slot - t["start"][c][s]
                symbols.append(s)
            x = [state << 16 | next(stream, 0) if state < 2**15 else state for state in x]
            for c, s in enumerate(symbols, first):
                escape = s == 0 and (next(stream, 0) ^ 32768) - 32768
                row.append(symbol_value(kind, s, classes[c], offsets[c]) if s else escape)
        rows.append(row)
    need(next(stream, None) is None and set(x) == {2**15}, "the tile does not end where its encoder began")
    return rows


def decode_tiles(b: Bytes, tiles: list, tokens: int, width: int, t: dict) -> list[list[int]]:
    """Decode the tiles of up to 256 tokens and put them side by side; takes them off the front of `tiles`."""
    parts = [decode_tile(b, tiles.pop(0), tokens, min(64, width - first), t) for first in range(0, width, 64)]
    return [list(chain(*rows)) for rows in zip(*parts, strict=True)]


def elements(data: bytes, size: int, width: int) -> list[list[int]]:
    flat = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def to_float(bits: int, dtype: str) -> float:
    form, shift = ("<e", 0) if dtype == "float16" else ("<f", 16 if dtype == "bfloat16" else 0)
    return struct.unpack(form, (bits << shift).to_bytes(struct.calcsize(form), "little"))[0]


def decode_kvs1(b: Bytes, tiles: list, tokens: int, width: int, dtype: str, t: dict) -> dict:
    out: dict = {"k": [], "raw": [], "y": [], "values": []}
    for start in range(0, tokens, 256):
        count = min(256, tokens - start)
        k, flags, raw, zero = b.read("BBBB")
        all_raw = flags & 2
        need(flags < 4 and not zero and raw in ((count,) if all_raw else range(5)), "a segment's head means nothing")
        rows = list(range(count)) if all_raw else list(b.take(raw))
        nibbles = [] if all_raw else [n for byte in b.take((count + 1) // 2) for n in (byte & 15, byte >> 4)]
        need(rows == sorted(set(rows)) and max(rows, default=0) < count, "raw rows out of order")
        kept = dict(zip(rows, elements(b.take(raw * width * SIZES[dtype]), SIZES[dtype], width), strict=True))
        b.pad(4)
        m = [n - 8 for n in nibbles[:count]] or [0] * count
        y = [[0] * width] * count if all_raw else decode_tiles(b, tiles, count, width, t)
        for row, line in enumerate(y):
            octave, eighth = divmod(k + 2 * m[row], 8)
            step = MANTISSA[eighth] * 2.0 ** (octave - 16 - 23)
            # The product of 16 and 24 bits is exact in float64; struct rounds it to float32 once.
            values = struct.unpack(f"<{width}f", struct.pack(f"<{width}f", *(v * step for v in line)))
            out["values"].append([to_float(e, dtype) for e in kept[row]] if row in kept else values)
        out = {**out, "k": [*out["k"], k], "y": out["y"] + y, "raw": out["raw"] + [start + row for row in rows]}
        out["skipped"] = "rounding to the element type" + (", RoPE" if flags & 1 else "")
    return out


def decode_lossless(b: Bytes, tiles: list, tokens: int, width: int, dtype: str, t: dict) -> dict:
    y = [row for at in range(0, tokens, 256) for row in decode_tiles(b, tiles, min(256, tokens - at), width, t)]
    exponent, mantissa = FIELDS[dtype]
    high, low, count = mantissa % 8, mantissa // 8, tokens * width
    packed = int.from_bytes(b.take((count * high + 7) // 8), "little")
    need(not packed >> count * high, "bits that belong to no mantissa")
    tails = elements(b.take(count * low), low, count)[0] if low else [0] * count
    need(all(0 <= v < 512 and v & 255 < 1 << exponent for row in y for v in row), "a value beyond sign and exponent")
    tops = [(v >> 8 << exponent | v & 255) << mantissa for row in y for v in row]
    bits = [top | (packed >> i * high) % (1 << high) << 8 * low | tails[i] for i, top in enumerate(tops)]
    return {"bits": [bits[i : i + width] for i in range(0, count, width)]}


def main(frame: str, folder: str, *options: str) -> str | None:
    decoded = []
    try:
        h, groups, segments = read_head(Path(frame).read_bytes())
        tables = {name: load_tables(Path(folder), name) for name in ("gauss", "exponent", "e4m3fn", "e5m2")}
        gauss, *three = (t["digest"] for t in tables.values())
        named = {1: gauss[:8], 2: hashlib.sha256(b"".join(three)).digest()[:8]}
        need(h["tables"] == named.get(h["codec"], h["tables"]), "the frame was coded with other tables")
        for layer, i, part, dtype, width, head, data, tiles in segments:
            b, rows, left = Bytes(data), groups[i]["rows"], list(tiles)
            if h["codec"] == 1:
                out = decode_kvs1(b, left, rows, width, dtype, tables["gauss"])
            elif h["codec"] == 2 and dtype in FIELDS:
                out = decode_lossless(b, left, rows, width, dtype, tables["exponent"])
            elif h["codec"] == 0:
                out = {"bits": elements(b.take(rows * width * SIZES[dtype]), SIZES[dtype], width)}
            else:
                out, left, b.at = {"skipped": f"codec {h['codec']} of {dtype}"}, [], len(data)
            need(not left and b.at == len(data), "bytes or tiles follow the end of a segment")
            about = {"layer": layer, "part": part, "head": head, "dtype": dtype, "bytes": len(data), "tiles": tiles}
            decoded.append({"skipped": "nothing"} | about | out)
    except (ValueError, LookupError, struct.error) as error:
        return f"{frame}: {error}"
    line = "layer {layer} {part} head {head}: {bytes} bytes, tiles {tiles}, skipped: {skipped}"
    everything = json.dumps({"header": h, "groups": groups, "segments": decoded}, default=bytes.hex)
    return print(everything if "--json" in options else "\n".join(line.format(**s) for s in decoded))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 2 else __doc__)
