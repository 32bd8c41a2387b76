"""Fuzzes the decoders of tiles and segments: ``python backends/cpu/fuzz/run.py [INPUTS [SEED]]``.

Builds `decode_fuzzer.cpp` and the library's sources with AddressSanitizer and UndefinedBehaviorSanitizer, and gives it
tiles and segments of the reference as seeds: all modes, all kinds of table sets, wide and narrow.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvcore
from kvcore.codecs.segments import StepRule, encode_segments
from kvcore.codecs.tables import table_set
from kvcore.entropy import KINDS, EncodedTiles, TableSet, tile_bytes
from kvcore.ops import Backend

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src" / "kvcore_cpu" / "csrc"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
SETS = ("gauss", "exponent", "e4m3fn", "e5m2")
SHAPES = ((1, 1), (7, 3), (16, 31), (33, 32), (40, 33), (64, 64), (256, 64))
SANITIZERS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-ffp-contract=off",
]
AVX2 = ["-mavx2", "-mf16c", "-mbmi2", "-DKVCORE_ISA_AVX2=1"]

Int16s = npt.NDArray[np.int16]


def build(folder: Path) -> Path:
    """Compile the fuzzer; return its path."""
    target = subprocess.run([*COMPILER, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    flags = [*SANITIZERS, f"-I{kvcore.get_include()}", f"-I{SOURCES}"]
    units = [("decode_fuzzer", HERE, []), ("decoders", HERE, []), ("support", SOURCES, [])]
    if target.startswith("x86_64"):
        units.append(("decoders", HERE, AVX2))
        flags.append("-DKVCORE_HAVE_AVX2=1")
    objects = [str(folder / f"{number}.o") for number in range(len(units))]
    for (name, source, own), to in zip(units, objects, strict=True):
        subprocess.run([*COMPILER, *flags, *own, "-c", str(source / f"{name}.cpp"), "-o", to], check=True)
    result = folder / "decode_fuzzer"
    subprocess.run([*COMPILER, *SANITIZERS, "-pthread", *objects, "-o", str(result)], check=True)
    return result


def corpus() -> bytes:
    """Return table sets and seeds, as the fuzzer reads them."""
    backend = kvcore.open_backend("cpu_ref")
    sets = [table_set(name) for name in SETS]
    seeds = [seed for index, tables in enumerate(sets) for seed in tile_seeds(backend, index, tables)]
    seeds += segment_seeds(backend, sets[0])
    return _u32(len(sets)) + b"".join(map(_table_bytes, sets)) + _u32(len(seeds)) + b"".join(seeds)


def tile_seeds(backend: Backend, index: int, tables: TableSet) -> Iterator[bytes]:
    """Encode tiles of a table set in every mode."""
    random = np.random.default_rng(index)
    for tokens, width in SHAPES:
        for values in tile_values(random, tables, tokens, width):
            for use_offsets in {False, tables.kind == "integer"}:
                choice = backend.choose_classes(values, tables, use_offsets=use_offsets)
                coded = EncodedTiles(*backend.encode_symbols(values, choice, tables, use_offsets=use_offsets))
                mode, words = int(coded.modes[0]), int(coded.words[0])
                data = coded.payload[0, : tile_bytes(mode, words, width, tables, use_offsets)].tobytes()
                yield _seed(False, use_offsets, index, (tokens, width), [(mode, words)], data)


def tile_values(random: np.random.Generator, tables: TableSet, tokens: int, width: int) -> Iterator[Int16s]:
    """Make tiles that are constant, narrow, spread, and full of escapes."""
    shape = (1, tokens, width)
    yield np.full(shape, 5, np.int16)
    if tables.kind == "integer":
        yield random.integers(-2, 3, shape).astype(np.int16)
        yield np.rint(random.normal(3, 8, shape)).astype(np.int16)
        yield np.rint(random.normal(0, 200, shape)).astype(np.int16)
    elif tables.kind == "exponent":
        yield (120 + random.geometric(0.5, shape).clip(1, 8) + 256 * random.integers(0, 2, shape)).astype(np.int16)
        yield random.integers(0, 512, shape).astype(np.int16)
    else:
        yield (40 + random.integers(-6, 6, shape) + 128 * random.integers(0, 2, shape)).astype(np.int16)
        yield random.integers(0, 256, shape).astype(np.int16)


def segment_seeds(backend: Backend, tables: TableSet) -> Iterator[bytes]:
    """Encode segments: with raw rows and without, all raw, narrow and wide."""
    random = np.random.default_rng(7)
    for tokens in (3, 5, 33, 64, 256):
        for channels in (3, 64, 130):
            x = random.normal(0, 1, (1, tokens, channels)).astype(np.float16)
            for segment in encode_segments(backend, x, tables=tables, rule=StepRule(-14), unroped=tokens % 2 == 0):
                yield _seed(True, True, 0, (tokens, channels), segment.tiles, bytes(segment.data))


def _seed(
    segment: bool,
    use_offsets: bool,
    tables: int,
    shape: tuple[int, int],
    tiles: tuple[tuple[int, int], ...] | list[tuple[int, int]],
    data: bytes,
) -> bytes:
    head = np.array([segment, use_offsets, tables, *shape, len(tiles)], "<i4").tobytes()
    directory = b"".join(bytes([mode]) + words.to_bytes(2, "little") for mode, words in tiles)
    return head + directory + _u32(len(data)) + data


def _table_bytes(tables: TableSet) -> bytes:
    head = np.array([tables.bits, KINDS.index(tables.kind)], "<i4").tobytes()
    arrays = (tables.frequency, tables.cost, tables.start, tables.symbol)
    return head + b"".join(array.tobytes() for array in arrays)


def _u32(n: int) -> bytes:
    return n.to_bytes(4, "little")


def main(inputs: int = 20_000, seed: int = 1) -> int:
    """Build and run; return the fuzzer's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer, seeds = build(Path(folder)), Path(folder, "corpus")
        seeds.write_bytes(corpus())
        return subprocess.run([str(fuzzer), str(seeds), str(inputs), str(seed)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
