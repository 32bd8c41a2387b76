"""KVS1 segments: what goes in comes out within half a step, the same bytes every time, and bad bytes are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.parts import Reader
from kvcore.codecs.quantizer import steps
from kvcore.codecs.segments import Decoded, StepRule, chunks_of, decode_segments, encode_segments
from kvcore.codecs.tables import table_set
from kvcore.dtypes import BFLOAT16
from kvcore.errors import CorruptFrameError, LayoutError, QuantizationError

GAUSS = table_set("gauss")
RULE = StepRule(-14)


@pytest.fixture(scope="module")
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref")


def keys(seed: int, segments: int, tokens: int, channels: int, *, spread: float = 1.0) -> Any:
    """Keys as models have them: channels with means, tokens with magnitudes of their own."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal((segments, 1, channels)) * 2
    size = np.exp(spread * rng.standard_normal((segments, tokens, 1)) / 2)
    return (mean + size * rng.standard_normal((segments, tokens, channels))).astype(BFLOAT16)


def encode(backend: kvcore.Backend, x: Any, rule: StepRule = RULE, **how: Any) -> list[CodedSegment]:
    return encode_segments(backend, x, tables=GAUSS, rule=rule, **how)


def decode(backend: kvcore.Backend, segments: list[CodedSegment], x: Any) -> Decoded:
    readers = [Reader(s.data) for s in segments]
    decoded = decode_segments(
        backend,
        readers,
        [s.tiles for s in segments],
        tables=GAUSS,
        tokens=x.shape[1],
        channels=x.shape[2],
        dtype=np.dtype(x.dtype),
    )
    for reader in readers:
        reader.finish()
    return decoded


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    segments=st.integers(1, 3),
    tokens=st.one_of(st.integers(1, 40), st.sampled_from([255, 256])),
    channels=st.sampled_from([1, 3, 32, 64, 65, 96, 128]),
    constant=st.sampled_from([-23, -14, -8]),
    first_raw=st.booleans(),
)
def test_every_value_comes_back_within_half_a_step(
    seed: int, segments: int, tokens: int, channels: int, constant: int, first_raw: bool
) -> None:
    backend = kvcore.open_backend("cpu_ref")
    x = keys(seed, segments, tokens, channels)
    raw_rows = [[0]] * segments if first_raw else []
    coded = encode(backend, x, StepRule(constant), raw_rows=raw_rows)
    assert coded == encode(backend, x, StepRule(constant), raw_rows=raw_rows)
    decoded = decode(backend, coded, x)
    y = decoded.values
    for s, segment in enumerate(coded):
        rows = set(decoded.rows[s])
        assert decoded.raw[s].tobytes() == x[s, decoded.rows[s]].tobytes()
        assert (0 in rows) == (first_raw or len(rows) == tokens)
        head = bytes(segment.data[: 4 + len(rows) + (tokens + 1) // 2])
        for t in set(range(tokens)) - rows:
            nibble = head[4 + len(rows) + t // 2] >> 4 * (t % 2) & 15
            step = float(steps(np.array([head[0] + 2 * (nibble - 8)]))[0])
            error = np.abs(y[s, t].astype(np.float64) - x[s, t].astype(np.float64)).max()
            assert error <= step * 0.5001


def test_segments_do_not_depend_on_their_company(backend: kvcore.Backend) -> None:
    x = keys(1, 5, 64, 64)
    together = encode(backend, x)
    assert together == [encode(backend, x[s : s + 1])[0] for s in range(5)]


def test_the_presets_constants_are_sizes(backend: kvcore.Backend) -> None:
    x = keys(2, 2, 256, 64)
    sizes = [sum(len(s.data) for s in encode(backend, x, StepRule(c))) for c in (-23, -14, -8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < x.nbytes / 4


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-5, 2.0**-140, 300.0])
def test_constant_segments(backend: kvcore.Backend, value: float) -> None:
    x = np.full((1, 256, 64), value, np.float32)
    coded = encode(backend, x)
    y = decode(backend, coded, x).values
    assert np.abs(y - x).max() <= max(abs(value) * 2.0**-13, 2.0**-15)  # k = 0 with the largest multiplier
    assert len(coded[0].data) < 300


def test_an_outlier_token_does_not_cost_the_others_their_step(backend: kvcore.Backend) -> None:
    x = keys(3, 1, 256, 64, spread=0.2)
    x[0, 100] *= 64
    y = decode(backend, encode(backend, x), x).values
    error = np.abs(y.astype(np.float64) - x.astype(np.float64))[0]
    assert error[100].max() > 4 * np.delete(error, 100, axis=0).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(backend: kvcore.Backend, bad: float) -> None:
    x = keys(4, 2, 16, 8)
    x[1, 3, 5] = bad
    with pytest.raises(QuantizationError):
        encode(backend, x)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [-1], [16], [0, 1, 2, 3, 4]])
def test_raw_rows_that_mean_nothing_are_refused(backend: kvcore.Backend, rows: list[int]) -> None:
    with pytest.raises(LayoutError):
        encode(backend, keys(5, 2, 16, 8), raw_rows=[[0], rows])


def test_every_segment_takes_a_list_of_raw_rows(backend: kvcore.Backend) -> None:
    for rows in ([[0]], [[0], [], [1]]):
        with pytest.raises(LayoutError, match="2 segments take a list"):
            encode(backend, keys(5, 2, 16, 8), raw_rows=rows)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(st.sets(st.integers(0, 7), max_size=4).map(sorted), min_size=1, max_size=4),
    tokens=st.sampled_from([8, 9, 64]),
    filler=st.sampled_from([0.0, np.nan, np.inf, 3e38]),
)
def test_raw_rows_may_hold_anything_and_segments_differ_in_them(
    seed: int, rows: list[list[int]], tokens: int, filler: float
) -> None:
    backend = kvcore.open_backend("cpu_ref")
    x = keys(seed, len(rows), tokens, 8)
    spoiled = x.copy()
    for s, raw in enumerate(rows):
        spoiled[s, raw] = filler
    coded = encode(backend, spoiled, raw_rows=rows, raw_values=x)
    assert coded == encode(backend, x, raw_rows=rows)
    assert coded == [encode(backend, x[s : s + 1], raw_rows=[raw])[0] for s, raw in enumerate(rows)]
    decoded = decode(backend, coded, x)
    assert decoded.rows == rows
    assert [r.tobytes() for r in decoded.raw] == [x[s, raw].tobytes() for s, raw in enumerate(rows)]


@pytest.mark.parametrize("tokens", [12, 33, 64])
def test_steps_are_those_of_the_segment_without_its_raw_rows(backend: kvcore.Backend, tokens: int) -> None:
    x, rows = keys(9, 2, tokens, 8), [[], [0, 3, 10]]
    x[1, rows[1]] *= 100
    segment = encode(backend, x, raw_rows=rows)[1].data
    alone = encode(backend, np.delete(x[1:], rows[1], axis=1))[0].data
    nibbles = [
        [b >> shift & 15 for b in data[start:] for shift in (0, 4)] for data, start in ((segment, 7), (alone, 4))
    ]
    assert segment[0] == alone[0]
    assert [nibbles[0][t] for t in range(tokens) if t not in rows[1]] == nibbles[1][: tokens - 3]
    assert [nibbles[0][t] for t in rows[1]] == [8, 8, 8]


def test_a_segment_with_fewer_than_two_other_rows_is_stored_whole_and_no_other(backend: kvcore.Backend) -> None:
    x = keys(8, 3, 5, 70)
    coded = encode(backend, x, raw_rows=[[0], [0, 1, 2, 4], [1, 2, 3]])
    assert [len(s.tiles) for s in coded] == [2, 0, 2]
    decoded = decode(backend, coded, x)
    assert (decoded.rows, decoded.tiles) == ([[0], [0, 1, 2, 3, 4], [1, 2, 3]], [2, 0, 2])
    assert decoded.raw[1].tobytes() == x[1].tobytes()
    assert np.abs(decoded.values[0, 1:] - x[0, 1:].astype(np.float32)).max() < 1


def test_more_tokens_than_a_tile_are_refused(backend: kvcore.Backend) -> None:
    with pytest.raises(LayoutError, match="1 to 256"):
        encode(backend, keys(5, 1, 257, 8))


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (np.zeros((1, 16, 8), np.float64), "not float64"),
        (np.zeros((1, 16, 8), np.int16), "not int16"),
        (np.zeros((1, 16, 0), np.float32), "at least one channel"),
        (np.zeros((0, 16, 8), np.float32), "at least one, of"),
        (np.zeros((1, 0, 8), np.float32), "1 to 256 tokens"),
        (np.zeros((1, 257, 8), np.float32), "1 to 256 tokens"),
        (np.zeros((16, 8), np.float32), r"\[S, T, C\]"),
    ],
)
def test_what_is_no_segment_reaches_no_implementation(backend: kvcore.Backend, x: Any, complaint: str) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the fused implementation was called")

    fusing = cast(kvcore.Backend, SimpleNamespace(fused=lambda _: never))
    for one in (backend, fusing):
        with pytest.raises(LayoutError, match=complaint):
            encode(one, x)
    count, tokens, channels = x.shape if x.ndim == 3 else (1, *x.shape[:1], 0)
    with pytest.raises(LayoutError):
        decode_segments(
            backend, [Reader(b"")] * count, [()] * count, tables=GAUSS, tokens=tokens, channels=channels, dtype=x.dtype
        )


def test_raw_values_have_the_shape_of_the_segments(backend: kvcore.Backend) -> None:
    with pytest.raises(LayoutError, match="raw values"):
        encode(backend, keys(5, 2, 16, 8), raw_rows=[[0], [0]], raw_values=keys(5, 2, 15, 8))


def test_short_and_altered_segments_are_refused_or_harmless(backend: kvcore.Backend) -> None:
    x = keys(6, 1, 12, 5)
    segment = encode(backend, x, raw_rows=[[0]])[0]
    whole = bytes(segment.data)
    for cut in range(len(whole)):
        with pytest.raises(CorruptFrameError):
            decode(backend, [CodedSegment(whole[:cut], segment.tiles)], x)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            y = decode(backend, [CodedSegment(bytes(flipped), segment.tiles)], x).values
        except CorruptFrameError:
            continue
        assert y.shape == x.shape  # a flipped step or multiplier is another value; the frame's digest finds those


def test_tile_entries_that_lie_are_refused(backend: kvcore.Backend) -> None:
    x = keys(7, 1, 64, 64)
    segment = encode(backend, x)[0]
    mode, words = segment.tiles[0]
    for tiles in ((), ((3, words),), ((mode, words - 1),), ((0, 0),), ((1, words),)):
        with pytest.raises(CorruptFrameError):
            decode(backend, [CodedSegment(segment.data, tiles)], x)


@given(
    tokens=st.lists(st.sampled_from((1, 3, 4, 5, 40, 256)), min_size=1, max_size=3),
    channels=st.sampled_from((1, 31, 64, 65, 130)),
    raw=st.lists(st.integers(0, 3), max_size=3, unique=True),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_a_segment_is_cut_where_its_chunks_end(
    backend: kvcore.Backend, tokens: list[int], channels: int, raw: list[int], data: st.DataObject
) -> None:
    tokens = [256] * (len(tokens) - 1) + tokens[-1:]
    rows = [sorted(r for r in raw if r < n) for n in tokens]
    pieces = [
        encode(backend, keys(i, 1, n, channels), raw_rows=[r])[0]
        for i, (n, r) in enumerate(zip(tokens, rows, strict=True))
    ]
    whole = CodedSegment(b"".join(bytes(p.data) for p in pieces), tuple(t for p in pieces for t in p.tiles))
    shape: dict[str, Any] = {"tables": GAUSS, "tokens": sum(tokens), "channels": channels, "dtype": BFLOAT16}
    cut = chunks_of(whole, **shape)
    assert [(bytes(c.data), c.tiles) for c in cut] == [(bytes(p.data), p.tiles) for p in pieces]
    stop = data.draw(st.integers(0, len(whole.data) - 1))
    for data_, tiles in (
        (whole.data[:stop], whole.tiles),
        (whole.data + bytes(4), whole.tiles),
        (whole.data, (*whole.tiles, (1, 0))),
        *([(whole.data, whole.tiles[:-1])] if whole.tiles else []),
    ):
        with pytest.raises(CorruptFrameError):
            chunks_of(CodedSegment(data_, tiles), **shape)
