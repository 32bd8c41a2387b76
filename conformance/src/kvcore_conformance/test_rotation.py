"""rotate."""

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
from kvcore_conformance.strategies import FLOATS, float_arrays, out_like, palette

pytestmark = pytest.mark.kvcore_op("rotate")
EVERY_FLOAT = pytest.mark.parametrize("dtype", FLOATS)
SEEDS = st.one_of(st.sampled_from((0, 1, 2**63, 2**64 - 1)), st.integers(0, 2**64 - 1))


@EVERY_FLOAT
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@explore(
    3.0,
    data=st.data(),
    seed=SEEDS,
    block=st.sampled_from((1, 2, 4, 8, 16)),
    blocks=st.integers(1, 3),
    rows=st.integers(0, 3),
)
def test_rotate(
    subject: Subject, dtype: str, inverse: bool, data: Any, seed: int, block: int, blocks: int, rows: int
) -> None:
    subject.require("rotate", dtype=dtype)
    shape = (rows, block * blocks)
    x = data.draw(
        float_arrays(dtype, shape, nonfinite=data.draw(st.sampled_from((False, False, True))), magnitude=2.0**100)
    )
    out = data.draw(out_like(shape, data.draw(st.sampled_from(FLOATS))))
    subject.check("rotate", x, seed=seed, block=block, inverse=inverse, out=out)


@EVERY_FLOAT
@pytest.mark.parametrize("block", [32, 64, 128, 1024])
def test_larger_blocks(subject: Subject, dtype: str, block: int) -> None:
    subject.require("rotate", dtype=dtype)
    x = np.random.default_rng(block).standard_normal((1, 2 * block if block < 1024 else block)).astype(np.float32)
    out = place(np.zeros(x.shape, to_dtype(dtype)))
    for inverse in (False, True):
        subject.check("rotate", place(x.astype(to_dtype(dtype))), seed=12345, block=block, inverse=inverse, out=out)


@EVERY_FLOAT
def test_hard_values(subject: Subject, dtype: str) -> None:
    subject.require("rotate", dtype=dtype)
    values = palette(dtype)
    values = values[np.abs(values.astype(np.float32)) <= 2.0**100]
    x = place(np.resize(values, (len(values), 2)))
    for block in (1, 2):
        for inverse in (False, True):
            subject.check("rotate", x, seed=3, block=block, inverse=inverse, out=place(np.zeros(x.shape, np.float32)))


@pytest.mark.parametrize("value", [2.0**100, 2.0**101, -(2.0**101), np.inf, np.nan])
def test_what_is_too_large_is_refused(subject: Subject, value: float) -> None:
    subject.require("rotate", dtype="float32")
    x = np.ones((2, 4), np.float32)
    x[1, 3] = value
    subject.check("rotate", place(x), seed=1, block=4, out=place(np.zeros(x.shape, np.float32)))


@EVERY_FLOAT
def test_what_overflows_the_output_saturates(subject: Subject, dtype: str) -> None:
    subject.require("rotate", dtype=dtype)
    x = place(np.full((2, 16), 60000, np.float32).astype(to_dtype(dtype)))
    subject.check("rotate", x, seed=7, block=16, out=place(np.zeros(x.shape, np.float16)))


def test_without_out_and_planned(subject: Subject) -> None:
    subject.require("rotate", dtype="bfloat16")
    x = place(np.linspace(-3, 4, 24, dtype=np.float32).astype(to_dtype("bfloat16")).reshape(3, 8), order=(1, 0))
    for dtype in FLOATS:
        out = place(np.zeros(x.shape, to_dtype(dtype)))
        subject.check_fresh("rotate", x, seed=5, block=4, out=out)
        subject.check_plan("rotate", x, seed=5, block=4, inverse=True, out=out)


@EVERY_FLOAT
@pytest.mark.parametrize(("channels", "block"), [(96, 32), (128, 128)])
def test_larger_as_the_reference(subject: Subject, reference: Backend, dtype: str, channels: int, block: int) -> None:
    subject.require("rotate", dtype=dtype)
    x = place(np.random.default_rng(1).standard_normal((257, channels)).astype(np.float32).astype(to_dtype(dtype)))
    for inverse in (False, True):
        out = place(np.zeros(x.shape, to_dtype(dtype)))
        subject.check("rotate", x, seed=99, block=block, inverse=inverse, out=out, reference=reference)


def test_bad_arguments_are_refused(subject: Subject) -> None:
    x, out = place(np.ones((2, 12), np.float32)), place(np.zeros((2, 12), np.float32))
    for block in (0, 3, 2048, -4):
        subject.check_raises(ConfigError, "rotate", x, seed=1, block=block, out=out)
    subject.check_raises(LayoutError, "rotate", x, seed=1, block=8, out=out)
    for seed in (-1, 2**64):
        subject.check_raises(ConfigError, "rotate", x, seed=seed, block=4, out=out)
    subject.check_raises(LayoutError, "rotate", x, seed=1, block=4, out=place(np.zeros((2, 12), np.int32)))
    subject.check_raises(LayoutError, "rotate", x, seed=1, block=4, out=x)  # not in place
    subject.check_raises(LayoutError, "rotate", x, seed=1, block=4, out=place(np.zeros((2, 11), np.float32)))
