"""Defects of tiles: symbols, classes, the bitstream.

A defect is the oracle's coder with one rule wrong, in place of the reference's implementation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from kvcore.entropy import EncodedTiles, TableSet
from kvcore.errors import CorruptFrameError
from kvcore_conformance.mutants.catalogue import MUTANTS, Call, Mutant, mutant
from kvcore_conformance.oracle.entropy import (
    CONSTANT,
    ESC,
    LANES,
    LOW,
    ZERO,
    Rows,
    TileCoder,
    choose_classes,
    decode_symbols,
    encode_symbols,
    pad,
    take,
)

__all__: list[str] = []

_OPS: dict[str, Any] = {
    "choose_classes": choose_classes,
    "encode_symbols": encode_symbols,
    "decode_symbols": decode_symbols,
}


def wrong_rule(*ops: str) -> Any:
    """Add a coder with a wrong rule to the list of mutants, once for each op that is to have it."""

    def add(coder: type[TileCoder]) -> type[TileCoder]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", coder.__name__).lower()
        MUTANTS.extend(Mutant(name, op, _defect(op, coder)) for op in ops)
        return coder

    return add


def _defect(op: str, coder: type[TileCoder]) -> Any:
    def run(call: Call) -> Any:
        given = {name: value for name, value in call.kwargs.items() if name not in ("stream", "workspace", "tables")}
        _OPS[op](*call.args, call.kwargs["tables"], **given, coder=coder)
        return call.kwargs["out"]

    return run


# --- choosing


@wrong_rule("choose_classes")
class OffByOneClass(TileCoder):
    def cheapest(self, symbols: Sequence[int]) -> tuple[int, int]:
        cost, chosen = super().cheapest(symbols)
        return cost, min(chosen + 1, 31)


@wrong_rule("choose_classes")
class HighestClassOfEqualCost(TileCoder):
    def cheapest(self, symbols: Sequence[int]) -> tuple[int, int]:
        cost, _ = super().cheapest(symbols)
        costs = [sum(row[s] for s in symbols) for row in self.cost]
        return cost, max(c for c, other in enumerate(costs) if other == cost)


@wrong_rule("choose_classes")
class OffsetMeanHalfUp(TileCoder):
    def offset(self, counted: Sequence[int]) -> int:
        return max(-127, min(127, math.floor(sum(counted) / len(counted) + 0.5)))


@wrong_rule("choose_classes")
class OffsetMeanTruncated(TileCoder):
    def offset(self, counted: Sequence[int]) -> int:
        return max(-127, min(127, int(sum(counted) / len(counted))))


@wrong_rule("choose_classes")
class OffsetReachesMinus128(TileCoder):
    def offset(self, counted: Sequence[int]) -> int:
        return max(-128, min(127, round(sum(counted) / len(counted))))


@wrong_rule("choose_classes")
class SkippedTokensCounted(TileCoder):
    def statistics(self, symbols: Sequence[int], skip: Sequence[bool]) -> list[int]:
        return list(symbols)


@wrong_rule("choose_classes")
class SymbolOfMinus127Escapes(TileCoder):
    def symbol(self, value: int, offset: int) -> int:
        symbol = super().symbol(value, offset)
        return ESC if symbol == 1 else symbol


@wrong_rule("choose_classes")
class NegativeZeroIsZero(TileCoder):
    def symbol(self, value: int, offset: int) -> int:
        return ZERO if self.kind == "code" and value == 0x80 else super().symbol(value, offset)


@wrong_rule("choose_classes")
class MajorityOneFirst(TileCoder):
    def choose_exponent(self, column: Sequence[int]) -> tuple[list[int], int, int]:
        symbols, class_byte, base = super().choose_exponent([v ^ 0x100 for v in column])
        return symbols, class_byte ^ 0x80, base


@wrong_rule("choose_classes")
class BasesWrapAround(TileCoder):
    def choose_exponent(self, column: Sequence[int]) -> tuple[list[int], int, int]:
        symbols, class_byte, base = super().choose_exponent(column)
        largest = max(v & 0xFF for v in column)
        if largest < 3 and all(v & 0xFF == largest for v in column):
            base = (largest - 3) % 256 - 256
            symbols = [self.exponent_symbol(v, base & 0xFF, class_byte >> 7) for v in column]
        return symbols, class_byte, base


# --- the bitstream


@wrong_rule("encode_symbols", "decode_symbols")
class LanesDescending(TileCoder):
    def push(self, words: list[int], x: list[int], step: list[tuple[int, int, int, int]]) -> None:
        before = len(words)
        super().push(words, x, step)
        if not any(symbol == ESC for _, _, symbol, _ in step):
            words[before:] = reversed(words[before:])

    def pull(self, words: list[int], x: list[int], classes: bytes, offsets: bytes) -> list[int]:
        symbols: list[int] = []
        for lane, class_byte in reversed(list(enumerate(classes))):
            table, slot = self.table(class_byte), x[lane] & ((1 << self.n) - 1)
            s = self.slots[table][slot]
            x[lane] = self.frequency[table][s] * (x[lane] >> self.n) + slot - self.start[table][s]
            if x[lane] < LOW:
                x[lane] = x[lane] << 16 | take(words)
            symbols.insert(0, s)
        values = self.values(symbols, classes, offsets)
        for lane, s in enumerate(symbols):
            if s == ESC:
                values[lane] = self.from_raw(take(words), offsets[lane])
        return values


@wrong_rule("encode_symbols", "decode_symbols")
class EscapeCarriesTheDifferenceToTheOffset(TileCoder):
    def rans(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        if not self.use_offsets:
            return super().rans(tile, symbols, classes, offsets)
        signed = [b - 256 * (b > 127) for b in offsets]
        return super().rans([[v - o for v, o in zip(r, signed, strict=True)] for r in tile], symbols, classes, offsets)

    def from_raw(self, word: int, offset: int) -> int:
        value = super().from_raw(word, offset)
        return max(-32768, min(32767, value + offset - 256 * (offset > 127))) if self.use_offsets else value


@wrong_rule("encode_symbols")
class RenormalisedForElevenBits(TileCoder):
    def limit(self, f: int) -> int:
        return f << (31 - 11)


@wrong_rule("decode_symbols")
class FrequencyOfAllSlotsIsNone(TileCoder):
    def __init__(self, tables: TableSet, use_offsets: bool) -> None:
        super().__init__(tables, use_offsets)
        self.frequency = [[f % (1 << self.n) for f in row] for row in self.frequency]


@wrong_rule("encode_symbols")
class EscapeWordsBehindRenormalisationWords(TileCoder):
    def push(self, words: list[int], x: list[int], step: list[tuple[int, int, int, int]]) -> None:
        before = len(words)
        super().push(words, x, step)
        escapes = sum(not self.frequency[self.table(c)][s] or s == ESC for _, _, s, c in step)
        words[before:] = words[before + escapes :] + words[before : before + escapes]


@wrong_rule("encode_symbols")
class SecondSubStepFirst(TileCoder):
    def rans(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        width = len(tile[0])
        x = [LOW] * min(LANES, width)
        words: list[int] = []
        for t in reversed(range(len(tile))):
            for j in range(0, width, LANES):
                lanes = range(min(LANES, width - j))
                self.push(words, x, [(i, tile[t][j + i], symbols[t][j + i], classes[j + i]) for i in lanes])
        words.reverse()
        states = b"".join(state.to_bytes(4, "little") for state in x)
        coded = b"".join(word.to_bytes(2, "little") for word in words)
        return 2, len(words), pad(pad(classes + self.side(offsets)) + states + coded)


@wrong_rule("encode_symbols")
class UnusedSymbolsCodedAsZero(TileCoder):
    def push(self, words: list[int], x: list[int], step: list[tuple[int, int, int, int]]) -> None:
        unused = [not self.frequency[self.table(c)][s] and self.frequency[self.table(c)][ZERO] for _, _, s, c in step]
        super().push(words, x, [(i, v, ZERO if u else s, c) for u, (i, v, s, c) in zip(unused, step, strict=True)])


@wrong_rule("encode_symbols")
class ModeOfEqualSizeHighest(TileCoder):
    def encode(self, tile: Rows, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes]:
        forms = [
            self.constant(symbols, classes, offsets),
            self.packed(tile),
            self.rans(tile, symbols, classes, offsets),
        ]
        return min((f for f in forms if f is not None), key=lambda f: (len(f[2]), -f[0]))


@wrong_rule("encode_symbols")
class ConstantWithoutOffsets(TileCoder):
    def constant_side(self, classes: bytes, offsets: bytes) -> bytes:
        return b"" if self.kind == "integer" else super().constant_side(classes, offsets)


@wrong_rule("encode_symbols")
class ConstantEscape(TileCoder):
    def constant(self, symbols: Rows, classes: bytes, offsets: bytes) -> tuple[int, int, bytes] | None:
        if {s for row in symbols for s in row} != {ESC}:
            return super().constant(symbols, classes, offsets)
        return CONSTANT, 0, pad(self.constant_side(classes, offsets) + bytes(1))


@wrong_rule("encode_symbols", "decode_symbols")
class PackedMostSignificantBitFirst(TileCoder):
    def packed(self, tile: Rows) -> tuple[int, int, bytes]:
        mode, words, data = super().packed(tile)
        return mode, words, data[:4] + bytes(int(f"{b:08b}"[::-1], 2) for b in data[4:])

    def from_packed(self, payload: bytes, words: int, tokens: int, width: int) -> Rows:
        turned = bytes(int(f"{b:08b}"[::-1], 2) for b in payload[4:])
        return super().from_packed(payload[:4] + turned, words, tokens, width)


@wrong_rule("encode_symbols")
class PackedChannelMajor(TileCoder):
    def packed(self, tile: Rows) -> tuple[int, int, bytes]:
        return super().packed([list(column) for column in zip(*tile, strict=True)])


@wrong_rule("decode_symbols")
class PackedBaseUnsigned(TileCoder):
    def from_packed(self, payload: bytes, words: int, tokens: int, width: int) -> Rows:
        base = int.from_bytes(payload[:2], "little")
        if base < 32768:
            return super().from_packed(payload, words, tokens, width)
        rows = super().from_packed(b"\0\0" + payload[2:], words, tokens, width)
        return [[min(v + base, 32767) for v in row] for row in rows]


@wrong_rule("decode_symbols")
class OffsetSubtracted(TileCoder):
    def value(self, symbol: int, class_byte: int, offset: int) -> int:
        return super().value(symbol, class_byte, -offset if self.kind == "integer" else offset)


@wrong_rule("decode_symbols")
class OffsetUnsigned(TileCoder):
    def value(self, symbol: int, class_byte: int, offset: int) -> int:
        return super().value(symbol, class_byte, offset % 256)


@wrong_rule("decode_symbols")
class MajorityIgnored(TileCoder):
    def value(self, symbol: int, class_byte: int, offset: int) -> int:
        return super().value(symbol, class_byte & 0x7F, offset)


@wrong_rule("decode_symbols")
class ConstantIgnoresOffsets(TileCoder):
    def from_constant(self, payload: bytes, tokens: int, width: int) -> Rows:
        head = len(self.constant_side(bytes(width), bytes(width)))
        zeros = bytes(head) if self.kind == "integer" else payload[:head]
        return super().from_constant(zeros + payload[head:], tokens, width)


@wrong_rule("decode_symbols")
class FinalStatesUnchecked(TileCoder):
    def check_final(self, x: list[int]) -> None:
        pass


@wrong_rule("decode_symbols")
class ClassesUnchecked(TileCoder):
    def table(self, class_byte: int) -> int:
        return class_byte & 0x1F

    def check_classes(self, classes: bytes) -> None:
        pass


@wrong_rule("decode_symbols")
class PaddingUnchecked(TileCoder):
    def check_padding(self, padding: bytes) -> None:
        pass


@wrong_rule("decode_symbols")
class LeftOverWordsIgnored(TileCoder):
    def from_rans(self, payload: bytes, words: int, tokens: int, width: int) -> Rows:
        for fewer in range(min(words, 8)):
            try:
                return super().from_rans(payload, words - fewer, tokens, width)
            except ValueError as error:
                if "no symbol took" not in str(error):
                    raise
        return super().from_rans(payload, words, tokens, width)


@mutant("decode_symbols")
def last_bad_tile_named(call: Call) -> Any:
    tiles, out = call.args[0], call.kwargs["out"]
    try:
        return call.run()
    except CorruptFrameError:
        for m in reversed(range(len(out))):
            call.args[0], call.kwargs["out"] = EncodedTiles(*(part[m : m + 1] for part in tiles)), out[m : m + 1]
            try:
                call.run()
            except CorruptFrameError as error:
                raise CorruptFrameError(f"tile {m} is bad", reason=error.reason) from error
        raise
