"""decode_symbols, as ``include/kvcore/decode_symbols.hpp`` has it: tiles of modes constant, packed and rANS to values.

A program decodes some tiles, each in a row of 32 lanes. In mode rANS the lanes of a tile share one stream of words: a
prefix sum over the lanes says which word is whose. The bytes may be anything: words are read only below the tile's word
count, tables only at masked indices, and every loop is bounded by tokens and channels.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

from kvcore.entropy import KINDS, EncodedTiles, TableSet
from kvcore.kernels.triton.lang import at, device, kernel, read, report, unfailed, write
from kvcore.kernels.triton.queue import Queue, power_of_two
from kvcore.kernels.triton.views import Array

__all__ = ["decode_symbols"]

CONSTANT = tl.constexpr(0)
PACKED = tl.constexpr(1)
RANS = tl.constexpr(2)
NO_TILE = tl.constexpr(3)

INTEGER = tl.constexpr(0)
EXPONENT = tl.constexpr(1)

LOW = tl.constexpr(1 << 15)
SIZE, CLASS, STATE = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
WORDS, VALUE, PADDING = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)


@kernel
def keep_status(status: tl.int64, kept: tl.int64):
    """Put the status aside: the decoding kernel reports while it runs, and must not be stopped by itself."""
    tl.store(at(kept, tl.uint64), tl.load(at(status, tl.uint64)))


# --- bytes of tiles: `row` is where each tile begins


@device
def byte_at(row, step, index, mask):
    """Return bytes as int32, zero where `mask` is not set."""
    return tl.load(row + index * step, mask=mask, other=0).to(tl.int32)


@device
def half_at(row, step, index, mask, halves: tl.constexpr):
    """Return 16-bit words, of which the first byte has number `index`. `halves`: they can be read as such."""
    if halves:
        return tl.load((row + index).to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)
    else:
        return byte_at(row, step, index, mask) | (byte_at(row, step, index + 1, mask) << 8)


# --- symbols


@device
def value_of(symbol, class_byte, side_byte, kind: tl.constexpr):
    """Return the values of symbols other than ESC."""
    if kind == INTEGER:
        return symbol - 128 + ((side_byte ^ 0x80) - 0x80)
    elif kind == EXPONENT:
        sign = ((symbol - 1) & 1) ^ (class_byte >> 7)
        return (sign << 8) | ((side_byte - ((symbol - 1) >> 1)) & 0xFF)
    else:
        k = symbol - 128
        return tl.where(symbol == 1, 0x80, tl.where(k < 0, 0x80 | -k, k))


@device
def no_class(kind: tl.constexpr):
    """Return the bits of a class byte that no class has."""
    if kind == EXPONENT:
        return 0x60
    else:
        return 0xE0


@device
def decode_step(
    x, words_read, live, class_byte, side_byte, lookup, spans, row, step, first_word, end_word, mask, bits,
    kind: tl.constexpr, halves: tl.constexpr,
):  # fmt: skip
    """Decode a symbol in each lane that is `live`; return states, words read, and values.

    `lookup`, `spans`: of each lane's class. `first_word`, `end_word`: bytes of the tile before its words, and before
    what is behind them.
    """
    slot = x & mask
    symbol = tl.load(lookup + slot, mask=live, other=1).to(tl.int32)
    span = tl.load(spans + symbol, mask=live, other=0)
    after = (span >> 16) * (x >> bits) + slot - (span & 0xFFFF)
    low = live & (after < LOW)
    escaped = symbol == 0
    # Both counts at once: of lanes that refill, and 16 bits up of those that escape.
    votes = low.to(tl.int32) + escaped.to(tl.int32) * 65536
    ranks = tl.cumsum(votes, axis=1)
    total = tl.sum(votes, axis=1)[:, None]
    begin = first_word - 2 + 2 * words_read
    place = begin + 2 * (ranks & 0xFFFF)
    word = half_at(row, step, place, low & (place < end_word), halves)
    after = tl.where(low, (after << 16) | word.to(tl.uint32), after)
    words_read += total & 0xFFFF
    place = begin + 2 * ((total & 0xFFFF) + (ranks >> 16))
    word = half_at(row, step, place, escaped & (place < end_word), halves)
    value = tl.where(escaped, word, value_of(symbol, class_byte, side_byte, kind))
    return after, words_read + (total >> 16), value


@kernel
def decode_tiles(
    payload: tl.int64,
    modes: tl.int64,
    words: tl.int64,
    values: tl.int64,
    symbols: tl.int64,
    spans: tl.int64,
    kept: tl.int64,
    status: tl.int64,
    tiles: tl.int64,
    capacity: tl.int64,
    tokens: tl.int64,
    width: tl.int64,
    side: tl.int64,
    bits: tl.int64,
    payload_row: tl.int64,
    payload_step: tl.int64,
    mode_step: tl.int64,
    word_step: tl.int64,
    value_tile: tl.int64,
    value_token: tl.int64,
    value_step: tl.int64,
    kind: tl.constexpr,
    steps: tl.constexpr,
    halves: tl.constexpr,
    word_access: tl.constexpr,
    value_access: tl.constexpr,
    group: tl.constexpr,
    span: tl.constexpr,
):
    """Decode tiles.

    `side`: width, or 0 where channels have no second byte. `group`: tiles of a program. `span`: values of a packed tile
    that are unpacked at a time.
    """
    tile = tl.program_id(0).to(tl.int64) * group + tl.arange(0, group)
    there = (tile < tiles) & unfailed(kept, tile)
    tokens, width, side = tokens.to(tl.int32), width.to(tl.int32), side.to(tl.int32)
    mode = tl.load(at(modes, tl.uint8) + tile * mode_step, mask=there, other=0).to(tl.int32)
    count = read(words, tile * word_step, there, 2, word_access).to(tl.int32)

    lanes = tl.minimum(width, 32)
    constant_at = 2 * width if kind == EXPONENT else side
    states_at = (width + side + 3) // 4 * 4
    words_at = states_at + 4 * lanes
    size = tl.where(mode == RANS, words_at + 2 * count, 4 + 2 * count)
    size = (tl.where(mode == CONSTANT, constant_at + 1, size) + 3) // 4 * 4
    known = (mode <= RANS) & ((mode != CONSTANT) | (count == 0)) & (size <= capacity)
    report(status, there & ~known, tile, SIZE)
    mode = tl.where(there & known, mode, NO_TILE)
    row = (at(payload, tl.uint8) + tile * payload_row)[:, None]
    out = (tile * value_tile)[:, None]
    step = payload_step.to(tl.int32)
    tile = tile[:, None]

    if tl.max((mode == CONSTANT).to(tl.int32)) > 0:
        mine = (mode == CONSTANT)[:, None]
        channel = tl.arange(0, 64)[None, :]
        live = mine & (channel < width)
        symbol = byte_at(row, step, constant_at + tl.zeros((group, 1), tl.int32), mine)
        report(status, mine & (symbol == 0), tile, VALUE)
        spare = constant_at + 1 + tl.arange(0, 4)[None, :]
        filling = byte_at(row, step, spare, mine & (spare < size[:, None]))
        report(status, filling != 0, tile, PADDING)
        class_byte = tl.zeros((group, 64), tl.int32)
        if kind == EXPONENT:
            class_byte = byte_at(row, step, channel, live)
            report(status, (class_byte & no_class(kind)) != 0, tile, CLASS)
        side_byte = byte_at(row, step, constant_at - side + channel, mine & (channel < side))
        value = value_of(symbol, class_byte, side_byte, kind)
        for t in range(tokens):
            write(values, out + t * value_token + channel * value_step, value.to(tl.uint32), live, 2, value_access)

    if tl.max((mode == PACKED).to(tl.int32)) > 0:
        packed = mode == PACKED
        mine = packed[:, None]
        zero = tl.zeros((group, 1), tl.int32)
        least = half_at(row, step, zero, mine, halves)
        least = (least ^ 0x8000) - 0x8000
        each = byte_at(row, step, zero + 2, mine)
        number = tokens * width
        held = count[:, None]
        wide = mine & (each > 16)
        report(status, wide, tile, VALUE)
        wrong = mine & (each <= 16) & ((number * each + 15) // 16 != held)
        report(status, wrong, tile, WORDS)
        mine = mine & ~wide & ~wrong
        unused = 16 * held - number * each
        last = half_at(row, step, 2 + 2 * held, mine & (unused > 0), halves)
        filling = byte_at(row, step, zero + 3, mine) | (last >> tl.minimum(tl.maximum(16 - unused, 0), 16))
        filling = filling | half_at(row, step, 4 + 2 * held, mine & (held % 2 != 0), halves)
        report(status, filling != 0, tile, PADDING)
        mask = (tl.full((group, 1), 1, tl.int32) << each) - 1
        for first in range(0, number, span):
            item = first + tl.arange(0, span)[None, :]
            live = mine & (item < number)
            word, shift = item * each // 16, item * each % 16
            rest = half_at(row, step, 4 + 2 * word, live & (each > 0), halves)
            rest = rest | (half_at(row, step, 6 + 2 * word, live & (shift + each > 16), halves) << 16)
            # The sign that bit 31 makes is masked away.
            value = least + ((rest >> shift) & mask)
            report(status, live & (value > 32767), tile, VALUE)
            where = out + item // width * value_token + item % width * value_step
            write(values, where, value.to(tl.uint32), live, 2, value_access)

    if tl.max((mode == RANS).to(tl.int32)) > 0:
        mine = (mode == RANS)[:, None]
        lane = tl.arange(0, 32)[None, :]
        live = mine & (lane < width)
        class_byte = byte_at(row, step, lane, live)
        side_byte = byte_at(row, step, width + lane, mine & (lane < side))
        report(status, (class_byte & no_class(kind)) != 0, tile, CLASS)
        if steps == 2:
            live_2 = mine & (lane + 32 < width)
            class_2 = byte_at(row, step, lane + 32, live_2)
            side_2 = byte_at(row, step, width + lane + 32, mine & (lane + 32 < side))
            report(status, (class_2 & no_class(kind)) != 0, tile, CLASS)
        state_at = states_at + 4 * lane
        x = half_at(row, step, state_at, live, halves).to(tl.uint32)
        x = x | (half_at(row, step, state_at + 2, live, halves).to(tl.uint32) << 16)
        report(status, live & ((x < LOW) | (x >> 31 != 0)), tile, STATE)
        x = tl.where(live, x, LOW)
        spare = width + side + tl.arange(0, 4)[None, :]
        filling = byte_at(row, step, spare, mine & (spare < states_at))
        report(status, filling != 0, tile, PADDING)
        held = count[:, None]
        filling = half_at(row, step, words_at + 2 * held, mine & (held % 2 != 0), halves)
        report(status, filling != 0, tile, PADDING)

        shift = bits.to(tl.int32)
        lookup = at(symbols, tl.uint8) + ((class_byte & 31) << shift)
        span_row = at(spans, tl.uint32) + (class_byte & 31) * 256
        mask = ((tl.full((group, 1), 1, tl.int32) << shift) - 1).to(tl.uint32)
        end_word = words_at + 2 * held
        words_read = tl.zeros((group, 1), tl.int32)
        where = out + lane * value_step
        if steps == 2:
            lookup_2 = at(symbols, tl.uint8) + ((class_2 & 31) << shift)
            span_row_2 = at(spans, tl.uint32) + (class_2 & 31) * 256
        for _ in range(tokens):
            after, words_read, value = decode_step(
                x, words_read, live, class_byte, side_byte, lookup, span_row, row, step, words_at, end_word, mask,
                shift, kind, halves,
            )  # fmt: skip
            write(values, where, value.to(tl.uint32), live, 2, value_access)
            x = tl.where(live, after, x)
            if steps == 2:
                after, words_read, value = decode_step(
                    x, words_read, live_2, class_2, side_2, lookup_2, span_row_2, row, step, words_at, end_word, mask,
                    shift, kind, halves,
                )  # fmt: skip
                write(values, where + 32 * value_step, value.to(tl.uint32), live_2, 2, value_access)
                x = tl.where(live_2, after, x)
            where += value_token
        report(status, live & (x != LOW), tile, STATE)
        report(status, mine & (words_read != held), tile, WORDS)


# --- launching


def tables_of(tables: TableSet) -> tuple[npt.NDArray[Any], ...]:
    """Return a table set as the kernel takes it: symbol by class and slot; start and frequency by class and symbol."""
    return tables.symbol, tables.start | tables.frequency.astype(np.uint32) << np.uint32(16)


def decode_symbols(q: Queue, tiles: EncodedTiles, tables: TableSet, use_offsets: bool, out: Any) -> None:
    """Launch decode_symbols; there are tiles."""
    payload, modes, words, values = map(Array.of, (*tiles, out))
    count, tokens, width = out.shape
    kept = q.scratch(8)
    q.launch(keep_status, 1, q.status, kept, warps=1)
    symbols, spans = q.resident(tables, lambda: tables_of(tables))
    halves = payload.strides[1] in (0, 1) and not (payload.address | payload.strides[0]) % 2
    group = min(q.tiles, power_of_two(count))
    item = 2 if values.aligned else 1
    q.launch(
        decode_tiles, -(-count // group),
        payload.address, modes.address, words.address, values.address, symbols, spans, kept, q.status, count,
        tiles.payload.shape[1], tokens, width, width if use_offsets or tables.kind == "exponent" else 0, tables.bits,
        *payload.strides, *modes.strides, words.strides[0] // (2 if words.aligned else 1),
        *(step // item for step in values.strides),
        kind=KINDS.index(tables.kind), steps=2 if width > 32 else 1, halves=halves,
        word_access=0 if words.aligned else -1, value_access=0 if values.aligned else -1, group=group, span=256,
    )  # fmt: skip
