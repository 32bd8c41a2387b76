"""Tiles for the entropy-coding ops: values of every kind of table set, in every mode, with everything that escapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvcore.codecs.tables import table_set
from kvcore.dtypes import to_dtype
from kvcore.entropy import CLASSES, ESC, KINDS, SYMBOLS, ZERO, EncodedTiles, TableSet, TileChoice, tile_capacity
from kvcore_conformance.arena import place
from kvcore_conformance.oracle.entropy import Rows, TileCoder, choose_classes, encode_symbols
from kvcore_conformance.strategies import placed

__all__ = [
    "ANY",
    "RECIPES",
    "SETS",
    "WIDTHS",
    "TileCase",
    "choice_of",
    "empty_choice",
    "empty_tiles",
    "encoded",
    "make",
    "other_classes",
    "other_tables",
    "table_sets",
    "tile_cases",
]

Array = npt.NDArray[Any]

SETS = ("gauss", "exponent", "e4m3fn", "e5m2")
ANY = tuple(f"any {kind}" for kind in KINDS)
"""Names under which `table_sets` draws sets that are not shipped."""
WIDTHS = (1, 3, 31, 32, 33, 64)
"""Widths of tiles around the number of lanes."""

RECIPES = ("normal", "spikes", "escapes", "narrow", "constant", "channels", "edges", "likely")
"""What the values of a tile look like, for `make`."""

_EDGES = {
    "integer": (-32768, -32767, -256, -255, -128, -127, -1, 0, 1, 127, 128, 254, 255, 32767),
    "exponent": (0, 1, 3, 62, 63, 64, 127, 254, 255, 256, 257, 383, 510, 511),
    "code": (0x00, 0x01, 0x7E, 0x7F, 0x7C, 0x7B, 0x80, 0x81, 0xFC, 0xFD, 0xFE, 0xFF),
}
# Values that are no symbols, or unlikely ones, and leave the offsets of their channels about where they are.
_FAR = {"integer": (-255, 256), "exponent": (0, 38), "code": (0, 256)}
_RANGE = {"integer": (-32768, 32767), "exponent": (0, 511), "code": (0, 255)}


@dataclass(frozen=True, slots=True, eq=False)
class TileCase:
    """Values of tiles, and how they are to be coded; arrays in arenas.

    Parameters
    ----------
    tables : TableSet
    use_offsets : bool
    values : int16 array ``[M, T, W]``
    skip : uint8 array ``[M, T]``, optional
    """

    tables: TableSet
    use_offsets: bool
    values: Array
    skip: Array | None = None


def make(tables: TableSet, shape: Sequence[int], recipe: str, seed: int = 0) -> Array:
    """Make values ``[M, T, W]`` of a table set's kind.

    Parameters
    ----------
    tables : TableSet
    shape : sequence of int
    recipe : str
        Of `RECIPES`: ``normal`` is what KV looks like, ``spikes`` the same with values that escape, ``escapes`` has
        little else, ``narrow`` is smallest packed, ``constant`` and ``channels`` (constant per channel) smallest
        constant, ``edges`` has the ends of every range, ``likely`` the symbols of one table per channel, each as often
        as the table says.
    seed : int
    """
    random = np.random.default_rng(seed)
    shape = tuple(shape)
    low, high = _RANGE[tables.kind]
    if recipe == "edges":
        values = random.choice(_EDGES[tables.kind], shape)
    elif recipe == "escapes":
        values = random.integers(low, high + 1, shape)
    elif recipe == "narrow":
        width = int(random.integers(1, 3))
        base = int(random.integers(low, high - 3))
        values = base + random.integers(0, 1 << width, shape)
    elif recipe == "likely":
        classes = random.integers(0, CLASSES, (shape[0], 1, shape[2]))
        symbols = tables.symbol[classes, random.integers(0, 1 << tables.bits, shape)]
        base = 100 if tables.kind == "exponent" else 0
        values = np.array([TileCoder(tables, False).value(s, 0, base) for s in range(SYMBOLS)])[symbols]
        values = np.where(
            (symbols == ESC) | (random.random(shape) < 0.02), random.integers(*_FAR[tables.kind], shape), values
        )
    elif recipe == "constant":
        values = np.full(shape, random.integers(max(low, -250), min(high, 250) + 1))
    elif recipe == "channels":
        values = np.broadcast_to(random.integers(max(low, -120), min(high, 120) + 1, (shape[0], 1, shape[2])), shape)
    else:
        values = _normal(tables, shape, random)
        if recipe == "spikes":
            values = np.where(random.random(shape) < 0.1, random.integers(low, high + 1, shape), values)
    return values.astype(np.int16)


def _normal(tables: TableSet, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    by_channel = (shape[0], 1, shape[2])
    x = random.standard_normal(shape) * 2.0 ** random.uniform(-4, 6, by_channel)
    if tables.kind == "integer":
        return np.rint(np.clip(x + random.integers(-160, 161, by_channel), -32768, 32767))
    if tables.kind == "exponent":
        return (x.astype(np.float32) * np.float32(2.0 ** random.integers(-60, 60))).view(np.uint32) >> np.uint32(23)
    limited = np.clip(x / 4, -400, 400).astype(np.float32)
    known = tables.name if tables.name in SETS else "e4m3fn"
    return limited.astype(to_dtype(f"float8_{known}")).view(np.uint8)


@functools.lru_cache(maxsize=64)
def other_tables(kind: str, bits: int, seed: int = 0) -> TableSet:
    """Make a table set like none that is shipped; the same one for the same arguments, as long as it is kept.

    Parameters
    ----------
    kind : str
        Of `kvcore.entropy.KINDS`.
    bits : int
        The frequencies of a table sum to ``2**bits``.
    seed : int
        Odd: the costs follow the frequencies. Even: they do not; for multiples of 4 there are few of them, so that many
        classes cost the same.

    Notes
    -----
    Few symbols of a table have a frequency, those of the smallest values with some left out, or many, or the escape
    alone, which then has all ``2**bits``.
    """
    random, total = np.random.default_rng((bits, seed)), 1 << bits
    symbols = np.arange(1, SYMBOLS) if kind == "exponent" else 1 + np.abs(np.arange(1, SYMBOLS) - ZERO).argsort()
    frequency = np.zeros((CLASSES, SYMBOLS), np.int64)
    for table in frequency:
        count = min(int(random.choice((1, 2, 5, 40, SYMBOLS))), total)
        used = np.append(symbols[random.random(SYMBOLS - 1) < 0.8][: count - 1], ESC)
        weight = np.sort(random.random(len(used)) ** random.integers(1, 9))[::-1]
        table[used] = 1 + np.floor(weight / weight.sum() * (total - len(used))).astype(np.int64)
        table[used[0]] += total - table.sum()
    cost = random.integers(0, 1 << 16 if seed % 4 else 4, frequency.shape)
    if seed % 2:
        bitlength = bits - np.log2(np.where(frequency > 0, frequency, frequency[:, :1]))
        cost = np.rint(256 * (bitlength + 16 * ((frequency == 0) | (np.arange(SYMBOLS) == ESC))))
    return TableSet(f"any {kind}", kind, bits, frequency.astype(np.uint16), cost.astype(np.uint16), bytes(32))


@st.composite
def table_sets(draw: st.DrawFn, name: str) -> TableSet:
    """Draw the set of a name, or, if it is one of `ANY`, one of any number of bits."""
    if name in ANY:
        return other_tables(name.removeprefix("any "), draw(st.integers(1, 15)), draw(st.integers(0, 3)))
    return table_set(name)


@st.composite
def tile_cases(draw: st.DrawFn, name: str, tokens: Sequence[int] = (1, 2, 9, 40)) -> TileCase:
    """Draw a few small tiles, placed somewhere strange in memory, and the tables of that name (see `table_sets`)."""
    tables = draw(table_sets(name))
    shape = (draw(st.sampled_from((1, 2))), draw(st.sampled_from(tokens)), draw(st.sampled_from(WIDTHS)))
    recipes = draw(st.lists(st.sampled_from(RECIPES), min_size=shape[0], max_size=shape[0]))
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.concatenate([make(tables, (1, *shape[1:]), r, seed + i) for i, r in enumerate(recipes)])
    integer = tables.kind == "integer"
    skip = None
    if integer and draw(st.booleans()):
        skip = (np.random.default_rng(seed).random(shape[:2]) < draw(st.sampled_from((0.0, 0.4, 1.0)))).astype(np.uint8)
    return TileCase(
        tables,
        integer and draw(st.booleans()),
        draw(placed(values)),
        None if skip is None else draw(placed(skip)),
    )


def empty_choice(shape: Sequence[int]) -> TileChoice:
    """Return arrays in arenas for the choice of tiles ``[M, T, W]``, filled with what no op would write."""
    m, t, w = shape
    return TileChoice(
        place(np.full((m, t, w), 0xA5, np.uint8)),
        place(np.full((m, w), 0xA5, np.uint8)),
        place(np.full((m, w), -91, np.int8)),
    )


def empty_tiles(shape: Sequence[int], *, spare: int = 0) -> EncodedTiles:
    """Return arrays in arenas for coded tiles, filled with what no op would write; `spare` bytes more than needed."""
    m, t, w = shape
    return EncodedTiles(
        place(np.full((m, tile_capacity(t, w) + spare), 0xA5, np.uint8)),
        place(np.full((m,), 0xA5, np.uint8)),
        place(np.full((m,), 0xA5A5, np.uint16)),
    )


def choice_of(case: TileCase) -> TileChoice:
    """Return what the oracle chooses, in arenas."""
    choice = empty_choice(case.values.shape)
    choose_classes(case.values, case.tables, use_offsets=case.use_offsets, skip=case.skip, out=choice)
    return choice


def other_classes(case: TileCase, choice: TileChoice, seed: int) -> TileChoice:
    """Replace the classes by any others; the majority bit, which goes with the symbols, stays."""
    classes = np.random.default_rng(seed).integers(0, 32, choice.classes.shape, np.uint8)
    if case.tables.kind == "exponent":
        classes |= choice.classes & 0x80
    return TileChoice(choice.symbols, place(classes), choice.offsets)


class _RansOnly(TileCoder):
    """Codes every tile in mode rANS, whatever is smallest."""

    def encode(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        return self.rans(tile, symbols, classes, offsets)


def encoded(case: TileCase, choice: TileChoice | None = None, *, rans_only: bool = False) -> EncodedTiles:
    """Return the oracle's coded tiles, in arenas."""
    _, t, w = case.values.shape
    # At its largest, rANS takes two words a value: the value itself, and the bits of its escape.
    tiles = empty_tiles(case.values.shape, spare=(2 * t * w + 256) * rans_only)
    encode_symbols(
        case.values,
        choice if choice is not None else choice_of(case),
        case.tables,
        use_offsets=case.use_offsets,
        out=tiles,
        coder=_RansOnly if rans_only else TileCoder,
    )
    return tiles
