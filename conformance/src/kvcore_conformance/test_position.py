"""shift_rope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend, RopeParams
from kvcore.dtypes import to_dtype
from kvcore.errors import LayoutError
from kvcore.rope import rope_table
from kvcore_conformance.arena import clone, pattern, place
from kvcore_conformance.checks import Subject
from kvcore_conformance.profiles import explore
from kvcore_conformance.strategies import FLOATS, float_arrays, out_like, placed

pytestmark = pytest.mark.kvcore_op("shift_rope")
EVERY_FLOAT = pytest.mark.parametrize("dtype", FLOATS)
BOTH_PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def _table(tokens: int, pairs: int, seed: int) -> tuple[Any, Any]:
    """A real table for some tokens; rows of shift 0 and quarter turns among them."""
    rng = np.random.default_rng(seed)
    shift = rng.integers(-5000, 5000, tokens)
    shift[::3] = 0
    if not pairs:
        return np.zeros((tokens, 0), np.float32), np.zeros((tokens, 0), np.float32)
    cos, sin = rope_table(RopeParams(2 * pairs, theta=100.0), shift.astype(np.int64))
    if tokens > 1:
        turn = rng.integers(0, 4, pairs)
        cos[1], sin[1] = np.array([1, 0, -1, 0], np.float32)[turn], np.array([0, 1, 0, -1], np.float32)[turn]
    return cos, sin


@EVERY_FLOAT
@BOTH_PAIRINGS
@explore(
    2.0,
    data=st.data(),
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    extra=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_shift(
    subject: Subject, dtype: str, interleaved: bool, data: Any, tokens: int, heads: int, extra: int, seed: int
) -> None:
    subject.require("shift_rope", dtype=dtype)
    pairs = data.draw(st.integers(0, 4))
    if 2 * pairs + extra == 0:
        extra = 1
    shape = (*data.draw(st.sampled_from(((), (2,)))), tokens, heads, 2 * pairs + extra)
    x = data.draw(float_arrays(dtype, shape, small=False, nonfinite=data.draw(st.booleans())))
    cos, sin = _table(tokens, pairs, seed)
    target = data.draw(st.sampled_from(FLOATS))
    out = data.draw(out_like(shape, target))
    subject.check("shift_rope", x, data.draw(placed(cos)), data.draw(placed(sin)), interleaved=interleaved, out=out)


@EVERY_FLOAT
@BOTH_PAIRINGS
def test_identity_keeps_every_bit_pattern(subject: Subject, dtype: str, interleaved: bool) -> None:
    subject.require("shift_rope", dtype=dtype)
    item = to_dtype(dtype).itemsize
    x = pattern(3 * 2 * 8 * item).view(to_dtype(dtype)).reshape(3, 2, 8).copy()
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 6e-8, -np.nan, 0], np.float32).astype(to_dtype(dtype))
    x[1, 0] = special
    x[1, 1] = special[::-1]
    cos, sin = np.ones((3, 3), np.float32), np.zeros((3, 3), np.float32)
    sin[2] = -0.0
    for target in FLOATS:
        out = place(np.zeros(x.shape, to_dtype(target)))
        subject.check("shift_rope", place(x), place(cos), place(sin), interleaved=interleaved, out=out)


@EVERY_FLOAT
@BOTH_PAIRINGS
def test_channels_beyond_the_table_stay(subject: Subject, dtype: str, interleaved: bool) -> None:
    subject.require("shift_rope", dtype=dtype)
    x = place(np.linspace(-3, 3, 2 * 7, dtype=np.float32).astype(to_dtype(dtype)).reshape(2, 1, 7))
    cos, sin = _table(2, 2, 5)
    cos[0], sin[0] = 0.6, 0.8
    out = place(np.zeros(x.shape, to_dtype(dtype)))
    subject.check("shift_rope", x, place(cos), place(sin), interleaved=interleaved, out=out)


@EVERY_FLOAT
def test_nan_in_a_rotated_pair_is_the_quiet_one(subject: Subject, dtype: str) -> None:
    subject.require("shift_rope", dtype=dtype)
    x = np.ones((1, 2, 4), np.float32).astype(to_dtype(dtype))
    x[0, 0, 0], x[0, 1, 3] = np.nan, -np.float32(np.nan)
    cos, sin = place(np.full((1, 2), 0.6, np.float32)), place(np.full((1, 2), 0.8, np.float32))
    for target in FLOATS:
        subject.check("shift_rope", place(x), cos, sin, out=place(np.zeros(x.shape, to_dtype(target))))


@EVERY_FLOAT
def test_what_overflows_saturates(subject: Subject, dtype: str) -> None:
    subject.require("shift_rope", dtype=dtype)
    limit = float(np.float32(np.finfo(np.float16).max)) if dtype == "float16" else 3.3e38
    x = place(np.array([limit, limit, -limit, limit], np.float32).astype(to_dtype(dtype)).reshape(1, 1, 4))
    cos, sin = place(np.full((1, 2), 0.8, np.float32)), place(np.full((1, 2), -0.6, np.float32))
    for target in FLOATS:
        subject.check("shift_rope", x, cos, sin, out=place(np.zeros(x.shape, to_dtype(target))))


@EVERY_FLOAT
@BOTH_PAIRINGS
def test_in_place(subject: Subject, dtype: str, interleaved: bool) -> None:
    subject.require("shift_rope", dtype=dtype)
    x = place(np.linspace(-3, 3, 3 * 2 * 6, dtype=np.float32).astype(to_dtype(dtype)).reshape(3, 2, 6))
    cos, sin = map(place, _table(3, 3, 8))
    subject.check("shift_rope", x, cos, sin, interleaved=interleaved, out=x)


@EVERY_FLOAT
@BOTH_PAIRINGS
def test_without_out_and_planned(subject: Subject, dtype: str, interleaved: bool) -> None:
    subject.require("shift_rope", dtype=dtype)
    x = place(np.linspace(-3, 3, 3 * 2 * 6, dtype=np.float32).astype(to_dtype(dtype)).reshape(3, 2, 6))
    cos, sin = map(place, _table(3, 3, 8))
    out = place(np.zeros(x.shape, to_dtype(dtype)))
    subject.check_fresh("shift_rope", x, cos, sin, interleaved=interleaved, out=out)
    subject.check_plan("shift_rope", x, cos, sin, interleaved=interleaved, out=out)


@EVERY_FLOAT
@BOTH_PAIRINGS
@pytest.mark.parametrize("tokens", [1, 255, 257])
def test_larger_as_the_reference(
    subject: Subject, reference: Backend, dtype: str, interleaved: bool, tokens: int
) -> None:
    subject.require("shift_rope", dtype=dtype)
    x = np.random.default_rng(1).standard_normal((2, tokens, 3, 96)).astype(np.float32)
    cos, sin = map(place, _table(tokens, 40, 1))
    for target in FLOATS:
        out = place(np.zeros(x.shape, to_dtype(target)))
        subject.check(
            "shift_rope",
            place(x.astype(to_dtype(dtype))),
            cos,
            sin,
            interleaved=interleaved,
            out=out,
            reference=reference,
        )


def test_bad_arguments_are_refused(subject: Subject) -> None:
    x = place(np.ones((2, 1, 4), np.float16))
    cos, sin = map(place, _table(2, 2, 1))
    out = clone(x)
    subject.check_raises(LayoutError, "shift_rope", x, cos, place(np.zeros((2, 1), np.float32)), out=out)
    subject.check_raises(LayoutError, "shift_rope", x, *map(place, _table(3, 2, 1)), out=out)
    subject.check_raises(LayoutError, "shift_rope", x, *map(place, _table(2, 3, 1)), out=out)
    subject.check_raises(LayoutError, "shift_rope", x, place(np.ones((2, 2), np.float64)), sin, out=out)
    subject.check_raises(LayoutError, "shift_rope", x, cos, sin, out=place(np.zeros((2, 1, 4), np.int16)))
    subject.check_raises(LayoutError, "shift_rope", x, cos, sin, out=place(np.zeros((2, 1, 5), np.float16)))
    longer = place(np.ones((3, 1, 4), np.float16))  # in place is the same view, and no other
    subject.check_raises(LayoutError, "shift_rope", longer[:2], cos, sin, out=longer[1:])
    out.flags.writeable = False
    subject.check_raises(LayoutError, "shift_rope", x, cos, sin, out=out)
