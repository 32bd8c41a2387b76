"""KVS1 tiles: symbols, classes, rANS. Vectorised over tiles and lanes; the loop over tokens is the bitstream's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import hookimpl
from kvcore.entropy import (
    LANES,
    MODE_CONSTANT,
    MODE_PACKED,
    MODE_RANS,
    EncodedTiles,
    TableSet,
    TileChoice,
    tile_bytes,
)
from kvcore.errors import CorruptFrameError

__all__ = ["kvcore_op_choose_classes", "kvcore_op_decode_symbols", "kvcore_op_encode_symbols"]

LOW = np.uint32(1 << 15)  # the least state, and the one that coding starts from and decoding ends at
EXPONENT_SPAN = 63  # z of 0..62 has a symbol
Int16s = npt.NDArray[np.int16]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
States = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@hookimpl
def kvcore_op_choose_classes(
    values: Int16s,
    *,
    tables: TableSet,
    use_offsets: bool,
    skip: Bytes | None = None,
    out: TileChoice,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    if tables.kind == "exponent":
        _choose_exponents(values, tables, out)
        return out
    counted = np.ones(values.shape[:2], bool) if skip is None else skip == 0
    offsets = np.zeros((values.shape[0], values.shape[2]), np.int64)
    if use_offsets:
        offsets = _half_even_mean(np.where(counted[:, :, None], values, 0), counted.sum(axis=1))
    symbols = _symbols(values, offsets, tables)
    symbols[~counted] = 128
    out.symbols[...], out.offsets[...] = symbols, offsets
    out.classes[...] = _costs(symbols, counted, tables).argmin(axis=-1)
    return out


def _half_even_mean(values: Ints, count: Ints) -> Ints:
    """Mean over tokens ``[M, W]``, rounded half to even in integers, held within -127 .. 127; 0 of nothing."""
    total, n = values.astype(np.int64).sum(axis=1), np.maximum(count, 1)[:, None]
    floor, rest = np.divmod(total, n)
    up = (2 * rest > n) | ((2 * rest == n) & (floor % 2 == 1))
    mean: Ints = np.clip(floor + up, -127, 127)
    return mean


def _symbols(values: Int16s, offsets: Ints, tables: TableSet) -> Bytes:
    """Symbols of kinds ``integer`` and ``code``; 0 where a value needs an escape."""
    wide = values.astype(np.int64)
    if tables.kind == "integer":
        k = wide - offsets[:, None, :]
        return np.where(np.abs(k) <= 127, k + 128, 0).astype(np.uint8)
    magnitude, negative = wide & 0x7F, wide & 0x80 != 0
    symbols = 128 + np.where(negative, -magnitude, magnitude)
    symbols[negative & (magnitude == 0)] = 1
    symbols[negative & (magnitude == 127)] = 0
    return symbols.astype(np.uint8)


def _costs(symbols: Bytes, counted: npt.NDArray[np.bool_], tables: TableSet) -> Floats:
    """Return what each channel would cost in each class, ``[M, W, 32]``, in 256ths of a bit: whole numbers."""
    weight = np.broadcast_to(counted[:, :, None], symbols.shape)  # skipped tokens count with weight 0
    return _histogram(symbols, 256, weight) @ tables.cost.T.astype(np.float64)


def _histogram(values: npt.NDArray[Any], bins: int, weight: npt.NDArray[np.bool_] | None = None) -> Floats:
    """Count values ``[M, T, W]`` below `bins` by channel, ``[M, W, bins]``, as floats: BLAS multiplies them exactly."""
    tiles, _, width = values.shape
    place = (np.arange(tiles)[:, None, None] * width + np.arange(width)) * bins + values
    counts = np.bincount(place.ravel(), None if weight is None else weight.ravel(), tiles * width * bins)
    return counts.reshape(tiles, width, bins).astype(np.float64)


def _choose_exponents(values: Int16s, tables: TableSet, out: TileChoice) -> None:
    """Search base, majority and class of each channel; the first of equal costs wins."""
    fields = values.astype(np.int64)
    exponent, sign = fields & 0xFF, fields >> 8
    largest = exponent.max(axis=1)
    # All candidates see one histogram, over (largest exponent - exponent, sign). From `far` on, all of them escape.
    far = EXPONENT_SPAN + 3
    distance = np.minimum(largest[:, None, :] - exponent, far)
    histogram = _histogram(2 * distance + sign, 2 * (far + 1))
    shifts, majorities = np.arange(-3, 3)[:, None, None], np.arange(2)[:, None]
    cell = np.arange(2 * (far + 1))
    symbols = _exponent_symbols(cell // 2 + shifts, cell % 2 ^ majorities)
    cost = tables.cost[np.arange(32)[:, None], symbols[:, :, None]].astype(np.float64)  # [shift, majority, class, cell]
    costs = (histogram @ cost.reshape(-1, len(cell)).T).reshape(*largest.shape, 6, 2, 32)
    base = largest[..., None] + shifts.ravel()
    costs[(base < 0) | (base > 255)] = np.inf
    shift, majority, table = np.unravel_index(costs.reshape(*largest.shape, 6 * 2 * 32).argmin(axis=-1), (6, 2, 32))
    base = largest + shift - 3
    out.classes[...] = table | majority << 7
    out.offsets[...] = base.astype(np.uint8).view(np.int8)
    out.symbols[...] = _exponent_symbols(base[:, None, :] - exponent, sign ^ majority[:, None, :])


def _exponent_symbols(z: Ints, minority: Ints) -> Bytes:
    """Symbols of kind ``exponent``; 0 where a value needs an escape."""
    return np.where((z >= 0) & (z < EXPONENT_SPAN), 1 + 2 * z + minority, 0).astype(np.uint8)


@hookimpl
def kvcore_op_encode_symbols(
    values: Int16s,
    choice: TileChoice,
    *,
    tables: TableSet,
    use_offsets: bool,
    out: EncodedTiles,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    states, words = _encode_rans(values, choice, tables)
    for m, symbols in enumerate(choice.symbols):
        classes, offsets = choice.classes[m].tobytes(), choice.offsets[m].tobytes()
        constant, side = _side_bytes(classes, offsets, tables, use_offsets)
        coded = _padded(side) + states[m].astype("<u4").tobytes() + words[m].astype("<u2").tobytes()
        forms = {MODE_PACKED: _pack_tile(values[m]), MODE_RANS: (coded, len(words[m]))}
        if symbols.flat[0] != 0 and (symbols == symbols.flat[0]).all():
            forms[MODE_CONSTANT] = (constant + symbols.flat[0].tobytes(), 0)
        mode = min(forms, key=lambda mode: (len(_padded(forms[mode][0])), mode))
        form = _padded(forms[mode][0])
        out.payload[m, : len(form)] = np.frombuffer(form, np.uint8)
        out.modes[m], out.words[m] = mode, forms[mode][1]
    return out


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _side_bytes(classes: bytes, offsets: bytes, tables: TableSet, use_offsets: bool) -> tuple[bytes, bytes]:
    """What precedes the symbol of a constant tile, and the states of a rANS tile."""
    if tables.kind == "exponent":
        return classes + offsets, classes + offsets
    return (offsets, classes + offsets) if use_offsets else (b"", classes)


def _pack_tile(values: Int16s) -> tuple[bytes, int]:
    """Base, width, and the differences to the base, bit by bit; and the number of 16-bit words."""
    base = int(values.min())
    rest = (values.astype(np.int64) - base).ravel()
    width = int(rest.max()).bit_length()
    bits = (rest[:, None] >> np.arange(width)) & 1
    packed = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()
    packed += bytes(len(packed) % 2)
    return base.to_bytes(2, "little", signed=True) + bytes([width, 0]) + packed, len(packed) // 2


def _encode_rans(values: Int16s, choice: TileChoice, tables: TableSet) -> tuple[States, list[Words]]:
    """Return final states ``[M, lanes]`` and each tile's words, in the order they are read."""
    tiles, tokens, width = values.shape
    lanes = min(LANES, width)
    steps = [(t, c) for t in range(tokens) for c in range(0, width, LANES)]
    x = np.full((tiles, lanes), LOW)
    # The words of a step as they are read: renormalisation by lane, then escaped values by lane.
    word = np.zeros((tiles, len(steps), 2, lanes), np.uint16)
    used = np.zeros(word.shape, bool)
    shift = np.uint32(tables.bits)
    for step in reversed(range(len(steps))):
        token, first = steps[step]
        here = slice(first, min(first + LANES, width))
        live = here.stop - first
        classes = choice.classes[:, here] & 31  # bit 7 is the majority of kind "exponent"
        symbol = choice.symbols[:, token, here]
        symbol = np.where(tables.frequency[classes, symbol] == 0, 0, symbol)
        f, start = tables.frequency[classes, symbol].astype(np.uint32), tables.start[classes, symbol]
        word[:, step, 1, :live], used[:, step, 1, :live] = values[:, token, here].view(np.uint16), symbol == 0
        state = x[:, :live]
        full = state >= f << np.uint32(31 - tables.bits)
        word[:, step, 0, :live], used[:, step, 0, :live] = state & np.uint32(0xFFFF), full
        state = np.where(full, state >> np.uint32(16), state)
        x[:, :live] = (state // f << shift) + state % f + start
    return x, [w[u] for w, u in zip(word, used, strict=True)]


@hookimpl
def kvcore_op_decode_symbols(
    tiles: EncodedTiles,
    *,
    tables: TableSet,
    use_offsets: bool,
    out: Int16s,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    every = range(len(tiles.payload))
    try:
        _decode(every, tiles, tables, use_offsets, out)
    except CorruptFrameError:
        for m in every:  # they are checked one kind of fault after the other; the error names the first that is bad
            _decode([m], tiles, tables, use_offsets, out)
        raise
    return out


def _decode(which: Sequence[int], tiles: EncodedTiles, tables: TableSet, use_offsets: bool, values: Int16s) -> None:
    _, tokens, width = values.shape
    rans = []
    for m in which:
        payload, mode, words = tiles.payload[m], int(tiles.modes[m]), int(tiles.words[m])
        size = tile_bytes(mode, words, width, tables, use_offsets)
        if size is None or size > len(payload):
            raise _corrupt(m, f"mode {mode} with {words} words is no tile of {width} channels")
        if mode == MODE_RANS:
            rans.append(m)
        elif mode == MODE_PACKED:
            values[m] = _unpack_tile(m, payload[:size], words, tokens, width)
        else:
            values[m] = _decode_constant(m, payload[:size], width, tables, use_offsets)
    if rans:
        values[rans] = _decode_rans(np.array(rans), tiles, tokens, width, tables, use_offsets)


def _corrupt(tile: int, why: str) -> CorruptFrameError:
    return CorruptFrameError(f"tile {tile}: {why}", reason="stream")


def _decode_constant(m: int, form: Bytes, width: int, tables: TableSet, use_offsets: bool) -> Ints:
    head = {"integer": width * use_offsets, "exponent": 2 * width, "code": 0}[tables.kind]
    symbol = int(form[head])
    if symbol == 0 or form[head + 1 :].any():
        raise _corrupt(m, "a constant tile ends with its symbol, not ESC, and zero bytes")
    side = form[:head]
    if tables.kind == "exponent" and (side[:width] & 0x60).any():
        raise _corrupt(m, "a class beyond 31")
    classes = side[:width] if tables.kind == "exponent" else np.zeros(width, np.uint8)
    offsets = side[-width:] if head else np.zeros(width, np.uint8)
    return _values(np.full(width, symbol), classes, offsets, tables)


def _unpack_tile(m: int, form: Bytes, words: int, tokens: int, width: int) -> Ints:
    base, bits = int.from_bytes(form[:2].tobytes(), "little", signed=True), int(form[2])
    used = tokens * width * bits
    if bits > 16 or form[3] or -(-used // 16) != words:
        raise _corrupt(m, f"packed with {bits} bits in {words} words is no tile of {tokens} x {width}")
    each = np.unpackbits(form[4:], bitorder="little")
    if each[used:].any():
        raise _corrupt(m, "the padding of a packed tile is not zero")
    rest = each[:used].reshape(tokens, width, bits).astype(np.int64) @ (1 << np.arange(bits))
    if rest.size and base + rest.max() > 32767:
        raise _corrupt(m, f"a packed value of {base + rest.max()} is beyond int16")
    return base + rest


def _decode_rans(
    which: Ints, tiles: EncodedTiles, tokens: int, width: int, tables: TableSet, use_offsets: bool
) -> Ints:
    count, lanes = len(which), min(LANES, width)
    payload, limit = tiles.payload[which], tiles.words[which].astype(np.int64)
    classes, at = payload[:, :width], width
    offsets = np.zeros((count, width), np.uint8)
    if use_offsets or tables.kind == "exponent":
        offsets, at = payload[:, width : 2 * width], 2 * width
    padding = payload[:, at : at + -at % 4].any(axis=1)
    at += -at % 4
    x = np.ascontiguousarray(payload[:, at : at + 4 * lanes]).view("<u4").astype(np.uint32)
    at += 4 * lanes
    # Words beyond a tile's own read as 0: a stream that asks for them is refused at its end.
    room = int(limit.max()) + 2 * lanes
    data = np.zeros((count, 2 * room), np.uint8)
    stored = min(2 * int(limit.max()) + 2, payload.shape[1] - at)
    data[:, :stored] = payload[:, at : at + stored]
    words = data.view("<u2")
    # An odd number of words leaves one of padding up to a multiple of 4.
    padding |= (limit % 2 == 1) & (words[np.arange(count), limit] != 0)
    data[np.arange(2 * room) >= 2 * limit[:, None]] = 0
    table = classes & (0x1F if tables.kind == "exponent" else 0xFF)
    for bad, why in (
        (padding, "padding that is not zero"),
        ((classes & (0x60 if tables.kind == "exponent" else 0xE0)).any(axis=1), "a class beyond 31"),
        (((x < LOW) | (x >> np.uint32(31) != 0)).any(axis=1), "an initial state out of range"),
    ):
        if bad.any():
            raise _corrupt(int(which[np.flatnonzero(bad)[0]]), why)
    out = np.zeros((count, tokens, width), np.int64)
    read = np.zeros(count, np.int64)
    rows, mask, shift = np.arange(count)[:, None], np.uint32((1 << tables.bits) - 1), np.uint32(tables.bits)
    for token in range(tokens):
        for first in range(0, width, LANES):
            here = slice(first, min(first + LANES, width))
            live = here.stop - first
            slot = x[:, :live] & mask
            symbol = tables.symbol[table[:, here], slot]
            f, start = tables.frequency[table[:, here], symbol], tables.start[table[:, here], symbol]
            state = f * (x[:, :live] >> shift) + slot - start
            low = state < LOW
            taken, read = _take(words, rows, read, low, room)
            x[:, :live] = np.where(low, state << np.uint32(16) | taken, state)
            escaped, read = _take(words, rows, read, symbol == 0, room)
            plain = _values(symbol.astype(np.int64), classes[:, here], offsets[:, here], tables)
            out[:, token, here] = np.where(symbol == 0, escaped.view(np.int16), plain)
    for bad, why in (
        (read != limit, "its words and its symbols do not end together"),
        ((x != LOW).any(axis=1), "its final states are not those that coding started from"),
    ):
        if bad.any():
            raise _corrupt(int(which[np.flatnonzero(bad)[0]]), why)
    return out


def _take(words: Words, rows: Ints, read: Ints, wanted: npt.NDArray[np.bool_], room: int) -> tuple[Words, Ints]:
    """Give each lane that wants one its word, in ascending order; return them and the words read so far."""
    rank = np.cumsum(wanted, axis=1)
    place = np.minimum(read[:, None] + rank - 1, room - 1)
    return words[rows, place], read + rank[:, -1]


def _values(symbols: Ints, classes: Bytes, offsets: Bytes, tables: TableSet) -> Ints:
    """Undo `_symbols`: symbols ``[..., W]`` with their channels' classes and offsets; escapes come out as nonsense."""
    if tables.kind == "integer":
        return symbols - 128 + offsets.view(np.int8)
    if tables.kind == "exponent":
        z, flipped = np.divmod(symbols - 1, 2)
        fields: Ints = (flipped ^ classes >> 7) << 8 | (offsets - z) & 0xFF
        return fields
    k = symbols - 128
    codes: Ints = np.where(symbols == 1, 0x80, np.where(k < 0, 0x80 | -k, k))
    return codes
