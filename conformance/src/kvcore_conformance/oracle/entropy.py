"""KVS1 tiles: symbols, classes and bytes, one value at a time, in Python integers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, NoReturn

import numpy.typing as npt

from kvcore.entropy import EncodedTiles, TableSet, TileChoice
from kvcore.errors import CorruptFrameError

__all__ = ["Rows", "TileCoder", "choose_classes", "decode_symbols", "encode_symbols"]

Array = npt.NDArray[Any]
Rows = list[list[int]]

CONSTANT, PACKED, RANS = 0, 1, 2
ESC, ZERO = 0, 128
LANES = 32
LOW = 1 << 15


@functools.lru_cache(maxsize=64)
def _tables(tables: TableSet) -> tuple[Rows, Rows, Rows]:
    """Return frequencies, costs, and the sums of the frequencies below each symbol."""
    frequency: Rows = tables.frequency.tolist()
    return frequency, tables.cost.tolist(), [list(accumulate(row, initial=0)) for row in frequency]


@functools.lru_cache(maxsize=64)
def _slots(tables: TableSet) -> list[bytes]:
    """Return the symbol of each of the ``2**n`` slots of each table."""
    return [b"".join(bytes([s]) * f for s, f in enumerate(row)) for row in tables.frequency.tolist()]


class TileCoder:
    """One tile at a time. Every rule is a method of its own, so that a test can get one of them wrong.

    Parameters
    ----------
    tables : TableSet
    use_offsets : bool
    """

    def __init__(self, tables: TableSet, use_offsets: bool) -> None:
        self.kind, self.n = tables.kind, tables.bits
        self.use_offsets = use_offsets
        self.frequency, self.cost, self.start = _tables(tables)
        self.slots = _slots(tables)

    # --- symbols

    def choose(self, column: Sequence[int], skip: Sequence[bool]) -> tuple[list[int], int, int]:
        """Return the symbols, the class byte and the offset byte (signed) of a channel."""
        if self.kind == "exponent":
            return self.choose_exponent(column)
        counted = [v for v, skipped in zip(column, skip, strict=True) if not skipped]
        offset = self.offset(counted) if self.use_offsets and counted else 0
        symbols = [ZERO if skipped else self.symbol(v, offset) for v, skipped in zip(column, skip, strict=True)]
        _, chosen = self.cheapest(self.statistics(symbols, skip))
        return symbols, chosen, offset

    def choose_exponent(self, column: Sequence[int]) -> tuple[list[int], int, int]:
        """Try every base and majority; the first of equals wins."""
        largest, best = max(v & 0xFF for v in column), None
        for base in range(largest - 3, largest + 3):
            for majority in (0, 1):
                if not 0 <= base <= 255:
                    continue
                symbols = [self.exponent_symbol(v, base, majority) for v in column]
                cost, chosen = self.cheapest(symbols)
                if best is None or cost < best[0]:
                    best = cost, symbols, chosen | majority << 7, base - 256 * (base > 127)
        assert best is not None
        return best[1:]

    def offset(self, counted: Sequence[int]) -> int:
        """Return the mean: half to even, within a byte without -128."""
        return max(-127, min(127, round(Fraction(sum(counted), len(counted)))))

    def symbol(self, value: int, offset: int) -> int:
        """Return the symbol of a value of kind integer or code."""
        if self.kind == "integer":
            return value - offset + ZERO if -127 <= value - offset <= 127 else ESC
        magnitude = value & 0x7F
        if not value & 0x80:
            return ZERO + magnitude
        return {0: 1, 127: ESC}.get(magnitude, ZERO - magnitude)

    def exponent_symbol(self, value: int, base: int, majority: int) -> int:
        """Return the symbol of a sign and an exponent."""
        z = base - (value & 0xFF)
        return 1 + 2 * z + (value >> 8 ^ majority) if 0 <= z <= 62 else ESC

    def statistics(self, symbols: Sequence[int], skip: Sequence[bool]) -> list[int]:
        """Return the symbols that count."""
        return [s for s, skipped in zip(symbols, skip, strict=True) if not skipped]

    def cheapest(self, symbols: Sequence[int]) -> tuple[int, int]:
        """Return the least cost and the lowest class that has it."""
        histogram = Counter(symbols).items()
        return min((sum([count * row[s] for s, count in histogram]), c) for c, row in enumerate(self.cost))

    def value(self, symbol: int, class_byte: int, offset: int) -> int:
        """Return the value of a symbol that is not ESC; `offset` is signed for kind integer only."""
        if self.kind == "integer":
            return symbol - ZERO + offset
        if self.kind == "exponent":
            sign = (symbol - 1 & 1) ^ class_byte >> 7
            return sign << 8 | (offset - (symbol - 1 >> 1)) & 0xFF
        if symbol == 1:
            return 0x80
        return symbol - ZERO if symbol >= ZERO else 0x80 | ZERO - symbol

    def table(self, class_byte: int) -> int:
        """Return the class without the majority bit."""
        return class_byte & 0x1F if self.kind == "exponent" else class_byte

    # --- encoding

    def encode(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        """Return mode, word count and bytes of a tile."""
        forms = [
            self.constant(symbols, classes, offsets),
            self.packed(tile),
            self.rans(tile, symbols, classes, offsets),
        ]
        return min((f for f in forms if f is not None), key=lambda f: (len(f[2]), f[0]))

    def constant(self, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes] | None:
        """Return the form of a tile of one symbol, if it is one."""
        seen = {s for row in symbols for s in row}
        if len(seen) != 1 or seen == {ESC}:
            return None
        return CONSTANT, 0, pad(self.constant_side(classes, offsets) + bytes(seen))

    def constant_side(self, classes: bytes, offsets: bytes) -> bytes:
        """Return what precedes the symbol."""
        return (classes if self.kind == "exponent" else b"") + self.side(offsets)

    def side(self, offsets: bytes) -> bytes:
        """Return the side bytes."""
        return offsets if self.use_offsets or self.kind == "exponent" else b""

    def packed(self, tile: Rows) -> tuple[int, int, bytes]:
        """Return the form of differences to the least value."""
        values = [v for row in tile for v in row]
        base = min(values)
        width = (max(values) - base).bit_length()
        bits = "".join(format(v - base, f"0{width}b") for v in reversed(values)) if width else ""
        nbytes = 2 * -(-len(bits) // 16)
        data = int(bits or "0", 2).to_bytes(nbytes, "little")
        return PACKED, nbytes // 2, pad(base.to_bytes(2, "little", signed=True) + bytes([width, 0]) + data)

    def rans(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        """Return the entropy-coded form."""
        width = len(tile[0])
        x = [LOW] * min(LANES, width)
        words: list[int] = []
        for t in reversed(range(len(tile))):
            for j in reversed(range(0, width, LANES)):
                lanes = range(min(LANES, width - j))
                self.push(
                    words, x, [(lane, tile[t][j + lane], symbols[t][j + lane], classes[j + lane]) for lane in lanes]
                )
        words.reverse()
        states = b"".join(state.to_bytes(4, "little") for state in x)
        coded = b"".join(word.to_bytes(2, "little") for word in words)
        return RANS, len(words), pad(pad(classes + self.side(offsets)) + states + coded)

    def push(self, words: list[int], x: list[int], step: list[tuple[int, int, int, int]]) -> None:
        """Push a sub-step: escaped values, then low words of states, both by descending lane."""
        coded = []
        for lane, value, symbol, class_byte in step:
            table = self.table(class_byte)
            s = symbol if self.frequency[table][symbol] else ESC
            coded.append((lane, value, s, self.frequency[table][s], self.start[table][s]))
        words += [self.raw(value) for _, value, s, _, _ in reversed(coded) if s == ESC]
        for lane, _, _, f, _ in reversed(coded):
            if x[lane] >= self.limit(f):
                words.append(x[lane] & 0xFFFF)
                x[lane] >>= 16
        for lane, _, _, f, start in coded:
            x[lane] = (x[lane] // f << self.n) + x[lane] % f + start

    def limit(self, f: int) -> int:
        """Return the state from which on its low word must go before a symbol of frequency f comes."""
        return f << (31 - self.n)

    def raw(self, value: int) -> int:
        """Return the word that follows an ESC."""
        return value & 0xFFFF

    # --- decoding

    def decode(self, payload: bytes, mode: int, words: int, tokens: int, width: int) -> Rows:
        """Return the values of a tile, or refuse it."""
        if mode == RANS:
            return self.from_rans(payload, words, tokens, width)
        if mode == PACKED:
            return self.from_packed(payload, words, tokens, width)
        if mode != CONSTANT or words:
            refuse(f"mode {mode} with {words} words")
        return self.from_constant(payload, tokens, width)

    def from_constant(self, payload: bytes, tokens: int, width: int) -> Rows:
        """Undo `constant`."""
        head = len(self.constant_side(bytes(width), bytes(width)))
        data = whole(payload, head + 1)
        self.check_padding(data[head + 1 :])
        if data[head] == ESC:
            refuse("a constant ESC")
        classes = data[:width] if self.kind == "exponent" else bytes(width)
        self.check_classes(classes)
        offsets = data[head - width : head] if head else bytes(width)
        return [self.values([data[head]] * width, classes, offsets) for _ in range(tokens)]

    def from_packed(self, payload: bytes, words: int, tokens: int, width: int) -> Rows:
        """Undo `packed`."""
        data = whole(payload, 4 + 2 * words)
        base, bits = int.from_bytes(data[:2], "little", signed=True), data[2]
        count = tokens * width
        if bits > 16 or data[3] or -(-count * bits // 16) != words:
            refuse(f"{bits} bits in {words} words")
        rest = int.from_bytes(data[4:], "little")
        if rest >> count * bits:
            refuse("bits after the last value")
        # As a string of digits, least value last: shifting one large number per value takes long.
        digits = format(rest, f"0{count * bits}b")[::-1] if bits else ""
        values = [base + int(digits[i * bits : (i + 1) * bits][::-1] or "0", 2) for i in range(count)]
        if max(values) > 32767:
            refuse("a value beyond int16")
        return [values[t * width : (t + 1) * width] for t in range(tokens)]

    def from_rans(self, payload: bytes, words: int, tokens: int, width: int) -> Rows:
        """Undo `rans`."""
        lanes = min(LANES, width)
        head = width + len(self.side(bytes(width)))
        states = -(-head // 4) * 4
        first = states + 4 * lanes
        data = whole(payload, first + 2 * words)
        classes, offsets = data[:width], data[width:head] or bytes(width)
        self.check_classes(classes)
        self.check_padding(data[head:states] + data[first + 2 * words :])
        x = [int.from_bytes(data[states + 4 * i :][:4], "little") for i in range(lanes)]
        if not all(LOW <= state < 1 << 31 for state in x):
            refuse("an initial state out of range")
        coded = [int.from_bytes(data[first + 2 * i :][:2], "little") for i in range(words)]
        coded.reverse()
        rows = []
        for _ in range(tokens):
            row: list[int] = []
            for j in range(0, width, LANES):
                here = slice(j, min(j + LANES, width))
                row += self.pull(coded, x, classes[here], offsets[here])
            rows.append(row)
        if coded:
            refuse("words that no symbol took")
        self.check_final(x)
        return rows

    def pull(self, words: list[int], x: list[int], classes: bytes, offsets: bytes) -> list[int]:
        """Decode a sub-step; `words` is reversed: the next one is last."""
        symbols = []
        for lane, class_byte in enumerate(classes):
            table, slot = self.table(class_byte), x[lane] & ((1 << self.n) - 1)
            s = self.slots[table][slot]
            x[lane] = self.frequency[table][s] * (x[lane] >> self.n) + slot - self.start[table][s]
            symbols.append(s)
        for lane in range(len(classes)):
            if x[lane] < LOW:
                x[lane] = x[lane] << 16 | take(words)
        values = self.values(symbols, classes, offsets)
        for lane, s in enumerate(symbols):
            if s == ESC:
                values[lane] = self.from_raw(take(words), offsets[lane])
        return values

    def values(self, symbols: list[int], classes: bytes, offsets: bytes) -> list[int]:
        """Return the values of a row of symbols; those of ESC mean nothing."""
        signed = [b - 256 * (b > 127) for b in offsets] if self.kind == "integer" else list(offsets)
        return [self.value(*channel) for channel in zip(symbols, classes, signed, strict=True)]

    def from_raw(self, word: int, offset: int) -> int:
        """Return the value of a word that follows an ESC."""
        return word - 65536 * (word > 32767)

    def check_classes(self, classes: bytes) -> None:
        """Refuse a class that there is not."""
        if any(self.table(c) > 31 or (self.kind == "exponent" and c & 0x60) for c in classes):
            refuse("a class beyond 31")

    def check_padding(self, padding: bytes) -> None:
        """Refuse padding that is not zero."""
        if any(padding):
            refuse("padding that is not zero")

    def check_final(self, x: list[int]) -> None:
        """Refuse a tile that does not end where its encoder began."""
        if any(state != LOW for state in x):
            refuse("final states that are not the first ones")


def refuse(why: str) -> NoReturn:
    """Raise what a decoder must raise."""
    raise CorruptFrameError(f"the tile has {why}", reason="stream")


def pad(data: bytes) -> bytes:
    """Fill up to a multiple of 4 with zero bytes."""
    return data + bytes(-len(data) % 4)


def whole(payload: bytes, size: int) -> bytes:
    """Return the bytes of a tile of some size before padding, with its padding."""
    size = -(-size // 4) * 4
    if size > len(payload):
        refuse(f"{len(payload)} bytes of {size}")
    return payload[:size]


def take(words: list[int]) -> int:
    """Return the next word."""
    return words.pop() if words else refuse("too few words")


def choose_classes(
    values: Array,
    tables: TableSet,
    *,
    use_offsets: bool = False,
    skip: Array | None = None,
    out: TileChoice,
    coder: type[TileCoder] = TileCoder,
) -> None:
    """Channel by channel."""
    one = coder(tables, use_offsets)
    for m, tile in enumerate(values.tolist()):
        skipped = [bool(s) for s in skip[m].tolist()] if skip is not None else [False] * len(tile)
        for c, column in enumerate(zip(*tile, strict=True)):
            symbols, class_byte, offset = one.choose(column, skipped)
            out.classes[m, c], out.offsets[m, c], out.symbols[m, :, c] = class_byte, offset, symbols


def encode_symbols(
    values: Array,
    choice: TileChoice,
    tables: TableSet,
    *,
    use_offsets: bool = False,
    out: EncodedTiles,
    coder: type[TileCoder] = TileCoder,
) -> None:
    """Tile by tile; bytes of the payload beyond a tile stay as they are."""
    one = coder(tables, use_offsets)
    for m, tile in enumerate(values.tolist()):
        classes, offsets = choice.classes[m].tobytes(), choice.offsets[m].tobytes()
        mode, words, data = one.encode(tile, choice.symbols[m].tolist(), classes, offsets)
        out.modes[m], out.words[m], out.payload[m, : len(data)] = mode, words, list(data)


def decode_symbols(
    tiles: EncodedTiles,
    tables: TableSet,
    *,
    use_offsets: bool = False,
    out: Array,
    coder: type[TileCoder] = TileCoder,
) -> None:
    """Tile by tile; nothing is written before all are known to be good."""
    one = coder(tables, use_offsets)
    _, tokens, width = out.shape
    decoded = []
    for m, (mode, words) in enumerate(zip(tiles.modes.tolist(), tiles.words.tolist(), strict=True)):
        try:
            decoded.append(one.decode(tiles.payload[m].tobytes(), mode, words, tokens, width))
        except CorruptFrameError as error:
            raise CorruptFrameError(f"tile {m}: {error}", reason=error.reason) from error
    for m, rows in enumerate(decoded):
        out[m] = rows
