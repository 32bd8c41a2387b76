"""reduce_absmax, reduce_minmax, reduce_moments and reduce_norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend
from kvcore.dtypes import to_dtype
from kvcore.errors import ConfigError, LayoutError
from kvcore_conformance.arena import place
from kvcore_conformance.checks import Subject
from kvcore_conformance.profiles import explore
from kvcore_conformance.strategies import FLOATS, float_arrays, out_like, palette, placed, shapes

ABSMAX = pytest.mark.kvcore_op("reduce_absmax")
MINMAX = pytest.mark.kvcore_op("reduce_minmax")
NORM = pytest.mark.kvcore_op("reduce_norm")
MOMENTS = pytest.mark.kvcore_op("reduce_moments")
PLAIN = pytest.mark.parametrize(
    "op",
    [pytest.param(m.args[0], marks=m) for m in (ABSMAX, MINMAX, NORM)],
)
EVERY_FLOAT = pytest.mark.parametrize("dtype", FLOATS)
POLICY = pytest.mark.parametrize("nonfinite", ["error", "saturate", "propagate"])
AXES = st.sets(st.integers(0, 2), min_size=1)


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _result(op: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return ((2,) if op in ("reduce_minmax", "reduce_moments") else ()) + _kept(shape, axes)


def _out(op: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    dtype = np.int64 if op == "reduce_moments" else np.float32
    return place(np.full(_result(op, shape, axes), 77, dtype))


def _axes(chosen: set[int], ndim: int) -> tuple[int, ...]:
    return tuple(sorted({axis % ndim for axis in chosen}))


@PLAIN
@EVERY_FLOAT
@POLICY
@explore(data=st.data(), shape=shapes(), chosen=AXES)
def test_reduce(
    subject: Subject, op: str, dtype: str, nonfinite: str, data: Any, shape: tuple[int, ...], chosen: set[int]
) -> None:
    subject.require(op, dtype=dtype)
    axes = _axes(chosen, len(shape))
    strange = nonfinite != "error" or data.draw(st.booleans())
    x = data.draw(float_arrays(dtype, shape, nonfinite=strange))
    out = data.draw(out_like(_result(op, shape, axes), "float32"))
    subject.check(op, x, axes, nonfinite=nonfinite, out=out)


@PLAIN
@EVERY_FLOAT
def test_reduce_without_out_and_planned(subject: Subject, op: str, dtype: str) -> None:
    subject.require(op, dtype=dtype)
    x = place(palette(dtype)[:30].reshape(5, 2, 3), order=(2, 0, 1))
    for axes in ((0,), (1, 2), (0, 1, 2)):
        out = _out(op, x.shape, axes)
        subject.check_fresh(op, x, axes, out=out)
        subject.check_plan(op, x, axes, nonfinite="saturate", out=out)


@PLAIN
@EVERY_FLOAT
def test_each_hard_value_alone(subject: Subject, op: str, dtype: str) -> None:
    subject.require(op, dtype=dtype)
    x = place(palette(dtype, nonfinite=True).reshape(-1, 1))
    for nonfinite in ("saturate", "propagate"):
        subject.check(op, x, (1,), nonfinite=nonfinite, out=_out(op, x.shape, (1,)))


@PLAIN
@EVERY_FLOAT
def test_the_last_element_counts(subject: Subject, op: str, dtype: str) -> None:
    subject.require(op, dtype=dtype)
    x = np.ones((2, 33), to_dtype(dtype))
    x[0, -1], x[1, -1] = 3, -3
    subject.check(op, place(x), (1,), out=_out(op, x.shape, (1,)))


@PLAIN
@EVERY_FLOAT
@pytest.mark.parametrize("special", ["nan", "inf", "-inf"])
def test_a_single_nonfinite_value(subject: Subject, op: str, dtype: str, special: str) -> None:
    subject.require(op, dtype=dtype)
    for at in (0, 16, 32):
        x = np.linspace(-2, 2, 66).astype(np.float32).reshape(2, 33)
        x[1, at] = float(special)
        array = place(x.astype(to_dtype(dtype)))
        for nonfinite in ("error", "saturate", "propagate"):
            subject.check(op, array, (1,), nonfinite=nonfinite, out=_out(op, x.shape, (1,)))


@PLAIN
def test_reduce_of_nothing_kept(subject: Subject, op: str) -> None:
    x = place(np.zeros((0, 3), np.float32))
    subject.check(op, x, (1,), out=_out(op, x.shape, (1,)))


@NORM
@EVERY_FLOAT
@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 32, 33, 96, 128])
def test_norm_adds_in_the_stated_order(subject: Subject, dtype: str, count: int) -> None:
    subject.require("reduce_norm", dtype=dtype)
    x = np.random.default_rng(count).standard_normal((4, count)).astype(np.float32)
    x[1] *= np.geomspace(1, 1e-3, count, dtype=np.float32)
    subject.check("reduce_norm", place(x.astype(to_dtype(dtype))), (1,), out=_out("reduce_norm", x.shape, (1,)))
    folded = place(x.T.copy().astype(to_dtype(dtype)).reshape(count, 2, 2))
    subject.check("reduce_norm", folded, (0, 2), out=_out("reduce_norm", folded.shape, (0, 2)))


@MOMENTS
@pytest.mark.parametrize("dtype", ["int16", *FLOATS])
@explore(2.0, data=st.data(), shape=shapes(), chosen=AXES)
def test_moments(subject: Subject, dtype: str, data: Any, shape: tuple[int, ...], chosen: set[int]) -> None:
    subject.require("reduce_moments", dtype=dtype)
    axes = _axes(chosen, len(shape))
    broadcast = tuple(1 if data.draw(st.booleans()) else n for n in shape)
    power = np.zeros(broadcast, np.int32)
    if dtype == "int16":
        seed = data.draw(st.integers(0, 99))
        values = np.random.default_rng(seed).integers(-32768, 32768, shape).astype(np.int16)
        values.flat[0] = -32768
        x = data.draw(placed(values))
    else:
        low, high = data.draw(st.sampled_from(((-3, 7), (0, 0), (-200, -100), (-1, 12), (-2000, 2000))))
        power[...] = np.random.default_rng(data.draw(st.integers(0, 9))).integers(low, high + 1, broadcast)
        x = data.draw(float_arrays(dtype, shape, nonfinite=data.draw(st.booleans()), magnitude=300))
    out = data.draw(out_like(_result("reduce_moments", shape, axes), "int64"))
    subject.check("reduce_moments", x, data.draw(placed(power)), axes, out=out)


@MOMENTS
@EVERY_FLOAT
def test_moments_round_ties_to_even(subject: Subject, dtype: str) -> None:
    subject.require("reduce_moments", dtype=dtype)
    x = place(
        np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 0.25]], np.float32).astype(to_dtype(dtype)).reshape(8, 1)
    )
    for power in (0, 1, -1):
        exponent = place(np.full((1, 1), power, np.int32))
        subject.check("reduce_moments", x, exponent, (1,), out=_out("reduce_moments", x.shape, (1,)))


@MOMENTS
@pytest.mark.parametrize(
    ("value", "power"), [(32767.0, 0), (32767.5, 0), (-32768.0, 0), (-32768.5, 0), (1.0, 15), (-1.0, 15)]
)
def test_moments_end_at_int16(subject: Subject, value: float, power: int) -> None:
    subject.require("reduce_moments", dtype="float32")
    x, exponent = place(np.array([[1, value]], np.float32)), place(np.array([[0, power]], np.int32))
    subject.check("reduce_moments", x, exponent, (1,), out=_out("reduce_moments", (1, 2), (1,)))


@MOMENTS
def test_moments_without_out_and_planned(subject: Subject) -> None:
    subject.require("reduce_moments", dtype="int16")
    x = place(np.arange(-12, 12, dtype=np.int16).reshape(2, 3, 4))
    exponent = place(np.zeros((1, 1, 1), np.int32))
    for axes in ((0,), (1, 2)):
        subject.check_fresh("reduce_moments", x, exponent, axes, out=_out("reduce_moments", x.shape, axes))
        subject.check_plan("reduce_moments", x, exponent, axes, out=_out("reduce_moments", x.shape, axes))


@PLAIN
@EVERY_FLOAT
@pytest.mark.parametrize("channels", [96, 128])
def test_larger_as_the_reference(subject: Subject, reference: Backend, op: str, dtype: str, channels: int) -> None:
    subject.require(op, dtype=dtype)
    x = np.random.default_rng(1).standard_normal((257, 2, channels)).astype(np.float32).astype(to_dtype(dtype))
    for axes in ((0,), (2,), (0, 2), (0, 1, 2)):
        subject.check(op, place(x), axes, out=_out(op, x.shape, axes), reference=reference)


@MOMENTS
def test_larger_moments_as_the_reference(subject: Subject, reference: Backend) -> None:
    subject.require("reduce_moments", dtype="float32")
    x = place(np.random.default_rng(1).standard_normal((257, 2, 96)).astype(np.float32))
    exponent = place(np.full((1, 2, 96), 12, np.int32))
    for axes in ((0,), (0, 2)):
        subject.check(
            "reduce_moments", x, exponent, axes, out=_out("reduce_moments", x.shape, axes), reference=reference
        )


@PLAIN
def test_bad_arguments_are_refused(subject: Subject, op: str) -> None:
    x = place(np.ones((2, 3), np.float32))
    out = _out(op, x.shape, (1,))
    subject.check_raises(LayoutError, op, x, (), out=out)
    subject.check_raises(LayoutError, op, x, (2,), out=out)
    subject.check_raises(LayoutError, op, x, (1, 1), out=out)
    subject.check_raises(LayoutError, op, x, (0,), out=out)
    subject.check_raises(ConfigError, op, x, (1,), nonfinite="ignore", out=out)
    subject.check_raises(LayoutError, op, place(np.ones((2, 3), np.float64)), (1,), out=out)
    subject.check_raises(LayoutError, op, place(np.ones((2, 0), np.float32)), (1,), out=out)
    subject.check_raises(LayoutError, op, x, (1,), out=place(np.zeros(_result(op, x.shape, (1,)), np.float64)))
    frozen = _out(op, x.shape, (1,))
    frozen.flags.writeable = False
    subject.check_raises(LayoutError, op, x, (1,), out=frozen)
