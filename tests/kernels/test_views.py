from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.kernels.abi import pack_array


@st.composite
def strided(draw, shape, dtype=np.uint16):
    """Draw an array of a shape in memory of its own: axes in any order, gaps, some backwards, any alignment."""
    strides, step = [0] * len(shape), np.dtype(dtype).itemsize
    for axis in draw(st.permutations(range(len(shape)))):
        step += draw(st.integers(0, 3)) * draw(st.sampled_from((0, 0, 1)))
        strides[axis] = step
        step *= max(shape[axis], 1)
    offset = draw(st.integers(0, 3))
    for axis, extent in enumerate(shape):
        if extent and draw(st.booleans()):
            offset += strides[axis] * (extent - 1)
            strides[axis] = -strides[axis]
    memory = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, step + offset + 8, np.uint8)
    return np.ndarray(shape, dtype, memory, offset, tuple(strides))


def offsets(array):
    found = np.zeros(array.shape, np.int64)
    for axis, (extent, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        found += (np.arange(extent) * stride).reshape(-1, *(1,) * (array.ndim - axis - 1))
    return found


def locate_all(numeric, a, b, dims):
    found = np.full((max(a.size, 1), 2), -1, np.int64)
    left = numeric.locate_all(
        pack_array(a), pack_array(b), ctypes.c_uint32(dims), found.ctypes.data_as(ctypes.c_void_p)
    )
    return left, found


SHAPES = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@given(data=st.data(), shape=SHAPES)
def test_every_element_is_found(numeric, data, shape):
    a = data.draw(strided(shape))
    b = data.draw(strided(tuple(data.draw(st.sampled_from((1, n))) for n in shape)))
    left, found = locate_all(numeric, a, b, 2**32 - 1)
    assert left <= max(len(shape), 1)
    np.testing.assert_array_equal(found[:, 0], offsets(a).ravel())
    np.testing.assert_array_equal(found[:, 1], np.broadcast_to(offsets(b), shape).ravel())


@given(data=st.data(), shape=SHAPES)
def test_chosen_dims_are_those_of_index_zero_elsewhere(numeric, data, shape):
    a = data.draw(strided(shape))
    chosen = [data.draw(st.booleans()) for _ in shape]
    _, found = locate_all(numeric, a, a, sum(1 << d for d, yes in enumerate(chosen) if yes))
    part = offsets(a)[tuple(slice(None) if yes else slice(0, 1) for yes in chosen)].ravel()
    np.testing.assert_array_equal(found[: part.size, 0], part)
    assert (found[part.size :] == -1).all()


@pytest.mark.parametrize(
    ("a", "b", "left"),
    [
        ((2, 3, 4), (2, 3, 4), 1),
        ((2, 1, 4), (2, 1, 4), 1),
        ((1, 1), (1, 1), 1),
        ((), (), 1),
        ((2, 3, 4), (2, 3, 1), 2),  # a scale for each row
        ((2, 3, 4), (1, 1, 1), 1),  # one for all
        ((2, 3, 4), (2, 1, 4), 3),
    ],
)
def test_dims_that_lie_behind_one_another_are_merged(numeric, a, b, left):
    assert locate_all(numeric, np.zeros(a, np.uint16), np.zeros(b, np.uint16), 2**32 - 1)[0] == left


@given(data=st.data(), shape=st.lists(st.sampled_from((0, 1, 2, 3, 8, 9, 16, 17)), min_size=1, max_size=3).map(tuple))
def test_runs_copy_every_element_and_nothing_else(numeric, data, shape):
    source, target = data.draw(strided(shape)), data.draw(strided(shape))
    memory, wanted = target.base, target.base.copy()
    np.ndarray(shape, np.uint16, wanted, target.ctypes.data - memory.ctypes.data, target.strides)[...] = source
    if not math.prod(shape):
        wanted = memory.copy()
    numeric.copy_runs(pack_array(source), pack_array(target))
    np.testing.assert_array_equal(memory, wanted)
