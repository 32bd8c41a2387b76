"""choose_classes, encode_symbols and decode_symbols."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend
from kvcore.codecs.tables import table_set
from kvcore.entropy import EncodedTiles, TileChoice, tile_bytes, tile_capacity
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError
from kvcore_conformance.arena import place
from kvcore_conformance.checks import Subject
from kvcore_conformance.profiles import explore
from kvcore_conformance.strategies import out_like
from kvcore_conformance.tiles import (
    ANY,
    SETS,
    WIDTHS,
    TileCase,
    choice_of,
    empty_choice,
    empty_tiles,
    encoded,
    make,
    other_classes,
    table_sets,
    tile_cases,
)

CHOOSE = pytest.mark.kvcore_op("choose_classes")
ENCODE = pytest.mark.kvcore_op("encode_symbols")
DECODE = pytest.mark.kvcore_op("decode_symbols")
EVERY_SET = pytest.mark.parametrize("name", SETS)
ANY_SET = pytest.mark.parametrize("name", [*SETS, *ANY])
EVERY_WIDTH = pytest.mark.parametrize("width", WIDTHS)
CONSTANT, PACKED, RANS = 0, 1, 2
EVERY_MODE = pytest.mark.parametrize("mode", [CONSTANT, PACKED, RANS], ids=["constant", "packed", "rans"])


def _case(name: str, shape: tuple[int, ...], recipe: str, *, seed: int = 0, skip: bool = False) -> TileCase:
    tables = table_set(name)
    integer = tables.kind == "integer"
    rows = place((np.arange(shape[0] * shape[1]).reshape(shape[:2]) % 3 == 0).astype(np.uint8))
    return TileCase(tables, integer, place(make(tables, shape, recipe, seed)), rows if skip and integer else None)


def _case_in(mode: int, name: str, shape: tuple[int, ...]) -> TileCase:
    """Return a case whose tiles are smallest in a mode."""
    recipes = {CONSTANT: ("constant", "channels"), PACKED: ("narrow",), RANS: ("normal", "spikes")}[mode]
    for seed in range(20):
        for recipe in recipes:
            case = _case(name, shape, recipe, seed=seed)
            if set(encoded(case).modes.tolist()) == {mode}:
                return case
    raise ValueError(f"no {name} tiles {list(shape)} found that are smallest in mode {mode}")


def _check_choice(subject: Subject, case: TileCase, out: TileChoice, **how: Any) -> None:
    subject.check(
        "choose_classes", case.values, case.tables, use_offsets=case.use_offsets, skip=case.skip, out=out, **how
    )


def _check_encode(subject: Subject, case: TileCase, choice: TileChoice, out: EncodedTiles, **how: Any) -> None:
    subject.check("encode_symbols", case.values, choice, case.tables, use_offsets=case.use_offsets, out=out, **how)


def _check_decode(subject: Subject, case: TileCase, tiles: EncodedTiles, **how: Any) -> None:
    out = place(np.full(case.values.shape, -21846, np.int16))
    subject.check("decode_symbols", tiles, case.tables, use_offsets=case.use_offsets, out=out, **how)


def _decode(subject: Subject, case: TileCase, tiles: EncodedTiles) -> Any:
    out = np.zeros(case.values.shape, np.int16)
    subject.ops.decode_symbols(tiles, case.tables, use_offsets=case.use_offsets, out=out)
    subject.backend.runtime.check()
    return out


# --- choose_classes


@CHOOSE
@ANY_SET
@explore(1.5, data=st.data())
def test_choose(subject: Subject, name: str, data: Any) -> None:
    subject.require("choose_classes", dtype="int16")
    case = data.draw(tile_cases(name))
    m, t, w = case.values.shape
    out = TileChoice(
        *(data.draw(out_like(s, d)) for s, d in (((m, t, w), "uint8"), ((m, w), "uint8"), ((m, w), "int8")))
    )
    _check_choice(subject, case, out)


@CHOOSE
@EVERY_SET
@EVERY_WIDTH
def test_choose_every_width(subject: Subject, name: str, width: int) -> None:
    subject.require("choose_classes", dtype="int16")
    for recipe in ("spikes", "edges"):
        case = _case(name, (2, 7, width), recipe, skip=True)
        _check_choice(subject, case, empty_choice(case.values.shape))


@CHOOSE
@EVERY_SET
@pytest.mark.parametrize("tokens", [1, 2, 255, 256])
def test_choose_every_length(subject: Subject, name: str, tokens: int) -> None:
    subject.require("choose_classes", dtype="int16")
    case = _case(name, (1, tokens, 5), "spikes", skip=True)
    _check_choice(subject, case, empty_choice(case.values.shape))


@CHOOSE
@pytest.mark.parametrize(
    "values", [(0, 1), (1, 2), (-1, 0), (-2, -1), (0, 0, 0, 2), (126, 128), (-129, -126), (127, 128)]
)
def test_an_offset_is_rounded_half_to_even_and_held(subject: Subject, values: tuple[int, ...]) -> None:
    subject.require("choose_classes", dtype="int16")
    column = place(np.array(values, np.int16).reshape(1, -1, 1))
    for skip in (None, place(np.arange(len(values), dtype=np.uint8).reshape(1, -1) == 0).view(np.uint8)):
        case = TileCase(table_set("gauss"), True, column, skip)
        _check_choice(subject, case, empty_choice(column.shape))


@CHOOSE
def test_skipped_tokens_count_in_nothing(subject: Subject) -> None:
    subject.require("choose_classes", dtype="int16")
    values = make(table_set("gauss"), (3, 8, 4), "normal")
    values[:, 0] = 32767
    skip = np.zeros((3, 8), np.uint8)
    skip[:, 0] = 1
    skip[2] = 1  # a tile of which nothing counts
    for use_offsets in (False, True):
        case = TileCase(table_set("gauss"), use_offsets, place(values), place(skip))
        _check_choice(subject, case, empty_choice(values.shape))


@CHOOSE
@EVERY_SET
def test_of_equal_costs_the_first_candidate_is_taken(subject: Subject, name: str) -> None:
    subject.require("choose_classes", dtype="int16")
    tables = table_set(name)
    # One token: many classes cost the same; no token that counts: all do.
    for value in (0, 1, -1, 5, 127, -128, 300) if tables.kind == "integer" else range(0, 256, 5):
        values = place(np.full((1, 1, 1), value, np.int16))
        _check_choice(subject, TileCase(tables, False, values), empty_choice((1, 1, 1)))


@CHOOSE
def test_bases_beyond_a_byte_are_no_candidates(subject: Subject) -> None:
    subject.require("choose_classes", dtype="int16")
    columns = [[0, 256, 1], [1, 0, 257], [2, 258, 0], [255, 511, 254], [254, 510, 0], [253, 509, 252]]
    values = place(np.array(columns, np.int16).T.reshape(1, 3, 6).copy())
    _check_choice(subject, TileCase(table_set("exponent"), False, values), empty_choice(values.shape))


@CHOOSE
@EVERY_SET
def test_choose_without_out_and_planned(subject: Subject, name: str) -> None:
    subject.require("choose_classes", dtype="int16")
    case = _case(name, (2, 5, 33), "spikes", skip=True)
    given = {"use_offsets": case.use_offsets, "out": empty_choice(case.values.shape)}
    if case.skip is not None:
        given["skip"] = case.skip
    subject.check_fresh("choose_classes", case.values, case.tables, **given)
    subject.check_plan("choose_classes", case.values, case.tables, **given)


@CHOOSE
@EVERY_SET
def test_larger_choices_as_the_reference(subject: Subject, reference: Backend, name: str) -> None:
    subject.require("choose_classes", dtype="int16")
    for recipe in ("normal", "spikes", "edges"):
        case = _case(name, (5, 256, 64), recipe, skip=True)
        _check_choice(subject, case, empty_choice(case.values.shape), reference=reference)


# --- encode_symbols


@ENCODE
@ANY_SET
@explore(1.5, data=st.data(), seed=st.integers(0, 99))
def test_encode(subject: Subject, name: str, data: Any, seed: int) -> None:
    subject.require("encode_symbols", dtype="int16")
    case = data.draw(tile_cases(name))
    choice = choice_of(case)
    if data.draw(st.booleans()):
        choice = other_classes(case, choice, seed)
    _check_encode(subject, case, choice, empty_tiles(case.values.shape))


@ENCODE
@EVERY_SET
@EVERY_WIDTH
@EVERY_MODE
def test_encode_every_mode(subject: Subject, name: str, width: int, mode: int) -> None:
    subject.require("encode_symbols", dtype="int16")
    case = _case_in(mode, name, (1, 120, width))
    _check_encode(subject, case, choice_of(case), empty_tiles(case.values.shape))


@ENCODE
@EVERY_SET
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (2, 33), (255, 64), (256, 64), (256, 1)])
@pytest.mark.parametrize("recipe", ["normal", "spikes", "escapes"])
def test_encode_every_length(subject: Subject, name: str, tokens: int, width: int, recipe: str) -> None:
    subject.require("encode_symbols", dtype="int16")
    case = _case(name, (1, tokens, width), recipe)
    _check_encode(subject, case, choice_of(case), empty_tiles(case.values.shape))


@ENCODE
@EVERY_SET
def test_a_symbol_without_frequency_is_escaped(subject: Subject, name: str) -> None:
    subject.require("encode_symbols", dtype="int16")
    case = _case(name, (2, 30, 33), "spikes")
    for seed in range(3):
        _check_encode(subject, case, other_classes(case, choice_of(case), seed), empty_tiles(case.values.shape))


@ENCODE
def test_an_escape_carries_the_value_itself(subject: Subject) -> None:
    subject.require("encode_symbols", dtype="int16")
    values = np.full((1, 100, 2), 90, np.int16) + (np.arange(100) % 3).astype(np.int16)[:, None]
    values[0, 7] = (-30000, 20000)
    case = TileCase(table_set("gauss"), True, place(values))
    assert encoded(case).modes.tolist() == [RANS]
    _check_encode(subject, case, choice_of(case), empty_tiles(values.shape))


@ENCODE
@pytest.mark.parametrize("base", [-32768, -1, 32766])
def test_packed_widths_from_0_to_16(subject: Subject, base: int) -> None:
    subject.require("encode_symbols", dtype="int16")
    for width in range(17):
        top = min(base + (1 << width) - 1, 32767)
        values = np.array([base, top, top, base, (base + top) // 2], np.int16).reshape(1, 5, 1)
        case = TileCase(table_set("gauss"), False, place(values))
        _check_encode(subject, case, choice_of(case), empty_tiles(values.shape))


@ENCODE
@EVERY_SET
def test_encode_without_out_and_planned(subject: Subject, name: str) -> None:
    subject.require("encode_symbols", dtype="int16")
    case = TileCase(
        table_set(name),
        name == "gauss",
        place(
            np.concatenate([make(table_set(name), (1, 9, 33), recipe) for recipe in ("channels", "narrow", "normal")])
        ),
    )
    choice = choice_of(case)
    subject.check_plan(
        "encode_symbols",
        case.values,
        choice,
        case.tables,
        use_offsets=case.use_offsets,
        out=empty_tiles(case.values.shape),
    )
    wanted = encoded(case, choice)
    got = subject.ops.encode_symbols(case.values, choice, case.tables, use_offsets=case.use_offsets)
    subject.backend.runtime.check()
    shape = (3, tile_capacity(9, 33))
    assert got.payload.shape == shape, f"encode_symbols: a payload {got.payload.shape}, not {shape}"
    assert got.modes.tolist() == wanted.modes.tolist(), "encode_symbols: without out, other modes"
    assert got.words.tolist() == wanted.words.tolist(), "encode_symbols: without out, other word counts"
    for m, tile in enumerate(zip(wanted.modes.tolist(), wanted.words.tolist(), strict=True)):
        size = tile_bytes(*tile, 33, case.tables, case.use_offsets)
        same = got.payload[m, :size].tobytes() == wanted.payload[m, :size].tobytes()
        assert same, f"encode_symbols: without out, tile {m} differs"


@ENCODE
@EVERY_SET
def test_larger_tiles_as_the_reference(subject: Subject, reference: Backend, name: str) -> None:
    subject.require("encode_symbols", dtype="int16")
    for recipe in ("normal", "spikes", "escapes", "narrow"):
        case = _case(name, (5, 256, 64), recipe)
        choice = empty_choice(case.values.shape)
        reference.choose_classes(case.values, case.tables, use_offsets=case.use_offsets, out=choice)
        _check_encode(subject, case, choice, empty_tiles(case.values.shape), reference=reference)


# --- decode_symbols


@DECODE
@ANY_SET
@explore(1.5, data=st.data(), seed=st.integers(0, 99))
def test_decode(subject: Subject, name: str, data: Any, seed: int) -> None:
    subject.require("decode_symbols")
    case = data.draw(tile_cases(name))
    choice = choice_of(case)
    if data.draw(st.booleans()):
        choice = other_classes(case, choice, seed)
    out = data.draw(out_like(case.values.shape, "int16"))
    tiles = encoded(case, choice, rans_only=data.draw(st.booleans()))
    subject.check("decode_symbols", tiles, case.tables, use_offsets=case.use_offsets, out=out)


# Hostile bytes: what the oracle refuses must be refused, and what it decodes must come out the same. A changed byte
# can make another tile that is as good as any; to notice that is what the digests of a frame are for.


@DECODE
@EVERY_SET
@EVERY_MODE
def test_every_flipped_bit_is_refused_or_decoded_as_specified(subject: Subject, name: str, mode: int) -> None:
    subject.require("decode_symbols")
    case = _case(name, (1, 6, 3), "spikes", seed=1) if mode == RANS else _case_in(mode, name, (1, 6, 3))
    tiles = encoded(case, rans_only=mode == RANS)
    size = tile_bytes(mode, int(tiles.words[0]), 3, case.tables, case.use_offsets) or 0
    for at in range(size):
        for bit in range(8):
            payload = tiles.payload[:, :size].copy()
            payload[0, at] ^= 1 << bit
            _check_decode(subject, case, EncodedTiles(place(payload), tiles.modes, tiles.words))


@DECODE
@ANY_SET
@explore(
    2.0,
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    mode=st.integers(0, 2),
    words=st.integers(0, 12),
    width=st.sampled_from((1, 3, 33)),
)
def test_any_bytes_are_refused_or_decoded_as_specified(
    subject: Subject, name: str, data: Any, seed: int, mode: int, words: int, width: int
) -> None:
    subject.require("decode_symbols")
    tables = data.draw(table_sets(name))
    random = np.random.default_rng(seed)
    payload = random.integers(0, 256, (1, 300), np.uint8)
    # Few streams get further than their classes by chance: most of these do.
    if mode == RANS:
        payload[0, :width] &= 0x9F if tables.kind == "exponent" else 0x1F
        side = width * (1 + (tables.kind in ("integer", "exponent")))
        payload[0, side : side + -side % 4] = 0
        payload[0, side + -side % 4 + 3 :: 4][: min(width, 32)] &= 0x7F
    elif mode == PACKED:
        payload[0, 2:4] = (random.integers(0, 18), 0)
    values = np.zeros((1, 3, width), np.int16)
    case = TileCase(tables, tables.kind == "integer", values)
    tiles = EncodedTiles(place(payload), place(np.array([mode], np.uint8)), place(np.array([words], np.uint16)))
    _check_decode(subject, case, tiles)


@DECODE
@EVERY_SET
@EVERY_MODE
def test_modes_and_word_counts_that_lie(subject: Subject, name: str, mode: int) -> None:
    subject.require("decode_symbols")
    case = _case_in(mode, name, (1, 80, 5))
    tiles = encoded(case)
    words = int(tiles.words[0])
    for other_mode, other_words in (
        *((m, words) for m in (0, 1, 2, 3, 128, 255)),
        *((mode, w) for w in (words + 1, words + 2, max(words - 1, 0), 0, 1, 32767, 65535)),
    ):
        lie = np.array([other_mode], np.uint8), np.array([other_words], np.uint16)
        _check_decode(subject, case, EncodedTiles(tiles.payload, place(lie[0]), place(lie[1])))


@DECODE
@EVERY_SET
@EVERY_MODE
def test_a_payload_that_ends_early_is_refused(subject: Subject, name: str, mode: int) -> None:
    subject.require("decode_symbols")
    case = _case_in(mode, name, (1, 80, 5))
    tiles = encoded(case)
    size = tile_bytes(mode, int(tiles.words[0]), 5, case.tables, case.use_offsets) or 0
    for kept in {0, 1, 3, size // 2, size - 4, size - 1}:
        payload = place(tiles.payload[:, :kept].copy())
        _check_decode(subject, case, EncodedTiles(payload, tiles.modes, tiles.words))


@DECODE
@EVERY_SET
def test_a_refusal_names_the_tile_and_writes_nowhere_else(subject: Subject, name: str) -> None:
    subject.require("decode_symbols")
    case = _case(name, (3, 40, 33), "normal")
    tiles = encoded(case)
    for bad in range(3):
        payload = tiles.payload.copy()
        payload[bad, 4] = 0x7F  # no class
        hostile = EncodedTiles(place(payload), tiles.modes, tiles.words)
        _check_decode(subject, case, hostile)
        with pytest.raises(CorruptFrameError) as caught:
            _decode(subject, case, hostile)
        assert caught.value.reason == "stream", f"decode_symbols: the reason is {caught.value.reason!r}, not 'stream'"
        assert str(bad) in str(caught.value), f"decode_symbols: {caught.value} does not name tile {bad}"


@DECODE
@EVERY_SET
def test_of_several_bad_tiles_the_least_is_named(subject: Subject, name: str) -> None:
    subject.require("decode_symbols")
    case = _case(name, (9, 12, 33), "normal")
    tiles = encoded(case, rans_only=True)
    for bad in ((0, 1), (1, 2, 8), (3, 7), (7, 8), tuple(range(9))):
        # The least is refused at its end, for a word that no symbol took; those behind it at once, for their modes.
        modes, words, payload = tiles.modes.copy(), tiles.words.copy(), tiles.payload.copy()
        least, *others = bad
        payload[least, tile_bytes(RANS, int(words[least]), 33, case.tables, case.use_offsets) :] = 0
        words[least] += 1
        modes[others] = 3
        hostile = EncodedTiles(place(payload), place(modes), place(words))
        _check_decode(subject, case, hostile)
        with pytest.raises(CorruptFrameError) as caught:
            _decode(subject, case, hostile)
        named = re.search(r"\btile (\d+)", str(caught.value))
        right = named is None or int(named[1]) == least
        assert right, f"decode_symbols: of the bad tiles {bad}, {str(caught.value)!r} names another than the least"


# Whole tiles.


@DECODE
@EVERY_SET
@EVERY_WIDTH
@EVERY_MODE
def test_decode_every_mode(subject: Subject, name: str, width: int, mode: int) -> None:
    subject.require("decode_symbols")
    case = _case_in(mode, name, (1, 120, width))
    _check_decode(subject, case, encoded(case))


@DECODE
@EVERY_SET
def test_tiles_of_all_modes_in_one_call(subject: Subject, name: str) -> None:
    subject.require("decode_symbols")
    tables = table_set(name)
    parts = [_case_in(mode, name, (1, 40, 33)).values for mode in (PACKED, RANS, CONSTANT, RANS, PACKED)]
    values = np.concatenate(parts)
    case = TileCase(tables, tables.kind == "integer", place(values))
    tiles = encoded(case)
    _check_decode(subject, case, tiles)
    out = place(np.zeros(values.shape, np.int16))
    subject.check_plan("decode_symbols", tiles, tables, use_offsets=case.use_offsets, out=out)


@DECODE
@EVERY_SET
def test_a_tile_takes_no_notice_of_what_lies_behind_it(subject: Subject, name: str) -> None:
    subject.require("decode_symbols")
    case = _case(name, (3, 6, 33), "spikes")
    tiles = encoded(case)
    sizes = [
        tile_bytes(*tile, 33, case.tables, case.use_offsets) or 0
        for tile in zip(tiles.modes.tolist(), tiles.words.tolist(), strict=True)
    ]
    for spare, filling in ((0, 0), (0, 255), (5, 90)):
        payload = np.full((3, max(sizes) + spare), filling, np.uint8)
        for m, size in enumerate(sizes):
            payload[m, :size] = tiles.payload[m, :size]
        _check_decode(subject, case, EncodedTiles(place(payload), tiles.modes, tiles.words))


@ENCODE
@DECODE
@ANY_SET
@explore(1.0, data=st.data())
def test_what_was_encoded_comes_back(subject: Subject, name: str, data: Any) -> None:
    subject.require("encode_symbols", dtype="int16")
    subject.require("decode_symbols")
    case = data.draw(tile_cases(name, tokens=(1, 4, 17)))
    tiles = subject.ops.encode_symbols(case.values, choice_of(case), case.tables, use_offsets=case.use_offsets)
    out = _decode(subject, case, tiles)
    counted = np.ones(out.shape[:2], bool) if case.skip is None else case.skip == 0
    same = np.array_equal(out[counted], case.values[counted])
    assert same, "decode_symbols: it gives other values than encode_symbols was given"


@DECODE
@EVERY_SET
def test_larger_decoding_as_the_reference(subject: Subject, reference: Backend, name: str) -> None:
    subject.require("decode_symbols")
    for recipe in ("normal", "spikes", "escapes", "narrow"):
        case = _case(name, (5, 256, 64), recipe)
        choice = reference.choose_classes(case.values, case.tables, use_offsets=case.use_offsets)
        tiles = reference.encode_symbols(case.values, choice, case.tables, use_offsets=case.use_offsets)
        placed = EncodedTiles(*(place(np.ascontiguousarray(part)) for part in tiles))
        _check_decode(subject, case, placed, reference=reference)


# --- larger tiles, and everything else


@DECODE
@EVERY_SET
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (2, 33), (255, 64), (256, 64), (256, 1)])
@pytest.mark.parametrize("recipe", ["normal", "spikes", "escapes"])
def test_decode_every_length(subject: Subject, name: str, tokens: int, width: int, recipe: str) -> None:
    subject.require("decode_symbols")
    case = _case(name, (1, tokens, width), recipe)
    _check_decode(subject, case, encoded(case))


@CHOOSE
@ENCODE
@DECODE
@EVERY_SET
def test_no_tiles_at_all(subject: Subject, name: str) -> None:
    for op in ("choose_classes", "encode_symbols", "decode_symbols"):
        subject.require(op)
    case = TileCase(table_set(name), False, np.zeros((0, 3, 5), np.int16))
    choice = empty_choice((0, 3, 5))
    _check_choice(subject, case, choice)
    _check_encode(subject, case, choice, empty_tiles((0, 3, 5)))
    _check_decode(subject, case, empty_tiles((0, 3, 5)))


@CHOOSE
@ENCODE
@DECODE
def test_torch_tensors(subject: Subject) -> None:
    torch = pytest.importorskip("torch")
    for op in ("choose_classes", "encode_symbols", "decode_symbols"):
        subject.require(op)
    tables = table_set("gauss")
    case = _case("gauss", (2, 9, 33), "normal")
    values = torch.from_numpy(np.ascontiguousarray(case.values))
    choice = subject.ops.choose_classes(values, tables, use_offsets=True)
    given = TileChoice(*(torch.from_numpy(np.ascontiguousarray(part)) for part in choice))
    tiles = subject.ops.encode_symbols(values, given, tables, use_offsets=True)
    stored = EncodedTiles(*(torch.from_numpy(np.ascontiguousarray(part)) for part in tiles))
    out = torch.zeros_like(values)
    assert subject.ops.decode_symbols(stored, tables, use_offsets=True, out=out) is out
    subject.backend.runtime.check()
    assert torch.equal(out, values), "decode_symbols: torch tensors differ"


@CHOOSE
@ENCODE
@DECODE
def test_bad_arguments_are_refused(subject: Subject) -> None:
    gauss, codes = table_set("gauss"), table_set("e5m2")
    case = _case("gauss", (2, 3, 5), "normal")
    values, choice, tiles = case.values, choice_of(case), encoded(case)
    out = place(np.zeros((2, 3, 5), np.int16))
    raises = subject.check_raises
    for shape in ((2, 257, 1), (2, 3, 65), (2, 0, 5), (2, 3, 0), (3, 5)):
        wrong = place(np.zeros(shape, np.int16))
        raises(LayoutError, "choose_classes", wrong, gauss)
        raises(LayoutError, "encode_symbols", wrong, choice, gauss)
        raises(LayoutError, "decode_symbols", tiles, gauss, use_offsets=True, out=wrong)
    raises(LayoutError, "choose_classes", place(np.zeros((2, 3, 5), np.int32)), gauss)
    raises(ConfigError, "choose_classes", values, codes, use_offsets=True, out=empty_choice((2, 3, 5)))
    raises(ConfigError, "encode_symbols", values, choice, codes, use_offsets=True, out=empty_tiles((2, 3, 5)))
    raises(ConfigError, "decode_symbols", tiles, codes, use_offsets=True, out=out)
    skip = place(np.zeros((2, 3), np.uint8))
    raises(ConfigError, "choose_classes", values, codes, skip=skip, out=empty_choice((2, 3, 5)))
    raises(LayoutError, "choose_classes", values, gauss, skip=place(np.zeros((2, 4), np.uint8)))
    raises(LayoutError, "choose_classes", values, gauss, skip=place(np.zeros((2, 3), np.int8)))
    raises(LayoutError, "choose_classes", values, gauss, out=empty_choice((2, 3, 4)))
    raises(LayoutError, "encode_symbols", values, empty_choice((2, 3, 4)), gauss)
    raises(LayoutError, "encode_symbols", values, choice, gauss, out=empty_tiles((2, 2, 5)))
    raises(LayoutError, "decode_symbols", empty_tiles((3, 3, 5)), gauss, out=out)
    swapped = EncodedTiles(tiles.payload, tiles.modes, place(tiles.words.astype(np.int16)))
    raises(LayoutError, "decode_symbols", swapped, gauss, out=out)
    frozen = place(np.zeros((2, 3, 5), np.int16))
    frozen.flags.writeable = False
    raises(LayoutError, "decode_symbols", tiles, gauss, use_offsets=True, out=frozen)
