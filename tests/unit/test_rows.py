"""`RowLayout`: addresses, narrowing, and what must not be written."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Layout, LayoutError

L, B, N, H, D = 3, 2, 4, 5, 6


@pytest.fixture
def cache():
    return [np.arange(2 * B * N * H * D, dtype=np.float32).reshape(2, B, N, H, D) + 1000 * i for i in range(L)]


@pytest.fixture
def rows(cache):
    return Layout("L|KBNHD").bind(cache)


def test_a_segment_says_where_each_element_lies(rows, cache):
    (segment,) = rows.segments
    assert (segment.parts, segment.heads, segment.width, segment.contiguous_rows) == (("K", "V"), H, D, True)
    for (side, part), layer, b, n, h, d in [((1, "V"), 2, 1, 3, 4, 5), ((0, "K"), 1, 0, 2, 1, 0)]:
        address = (
            segment.bases[segment.parts.index(part)][layer]
            + b * segment.block_stride
            + n * segment.token_stride
            + h * segment.head_stride
            + d * segment.dim_stride
        )
        assert address == cache[layer][side, b, n, h].ctypes.data + d * 4


def test_parts_of_one_shape_and_type_share_a_segment():
    pages = [np.zeros((B, N * 5), np.uint8)]
    two = Layout("L|B[a:N3,b:N2]", N=N).bind(pages)
    one = Layout("L|B[a:N2,b:N2,c:N1]", N=N).bind(pages)
    assert [s.parts for s in two.segments] == [("a",), ("b",)]
    assert [s.parts for s in one.segments] == [("a", "b"), ("c",)]
    assert two.parts == ("a", "b")


def test_planes_come_layer_by_layer(rows):
    assert list(rows.planes()) == [(p, i) for i in range(L) for p in ("K", "V")]


def test_views_share_memory_with_the_cache(rows, cache):
    rows.array("V", 1)[1, 2] = -1
    assert (cache[1][1, 1, 2] == -1).all()
    assert rows.bytes_view("V", 1).shape == (B, N, H, D, 4)
    assert np.shares_memory(rows.bytes_view("K", 0), cache[0])


def test_unknown_parts_are_refused_with_those_there_are(rows):
    with pytest.raises(LayoutError, match=r"L\|KBNHD has no part 'C'; it has K, V"):
        rows.array("C", 0)


def test_it_prints_what_it_is(rows):
    text = repr(rows)
    for fact in ("L|KBNHD", "3 layers", "2x4", "K/V[5x6]", "float32", "cpu"):
        assert fact in text
    assert "4 tokens" in repr(Layout("TC").bind(np.zeros((4, 8), np.uint8)))


# --- narrowing


@given(st.data())
def test_narrowing_keeps_the_elements_of_the_range(data):
    chunk = np.arange(L * 2 * 7 * H * D, dtype=np.float32).reshape(L, 2, 7, H, D)
    ranges = {}
    for name, extent in (("layers", L), ("heads", H), ("tokens", 7)):
        low = data.draw(st.integers(0, extent))
        ranges[name] = data.draw(st.none() | st.tuples(st.just(low), st.integers(low, extent)))
    narrowed = Layout("LKTHD").bind(chunk).select(**ranges)
    cut = {name: slice(*r) if r else slice(None) for name, r in ranges.items()}
    expected = chunk[cut["layers"]][:, :, cut["tokens"]][:, :, :, cut["heads"]]
    assert narrowed.layers == expected.shape[0]
    assert narrowed.nbytes == expected.nbytes
    for layer, (side, part) in itertools.product(range(narrowed.layers), enumerate("KV")):
        np.testing.assert_array_equal(narrowed.array(part, layer)[0], expected[layer, side])


def test_narrowing_twice_is_narrowing_once(rows):
    twice = rows.select(layers=(1, 3), heads=(1, 5)).select(layers=(1, 2), heads=(2, 3))
    once = rows.select(layers=(2, 3), heads=(3, 4))
    assert [s.bases for s in twice.segments] == [s.bases for s in once.segments]
    np.testing.assert_array_equal(twice.array("V", 0), once.array("V", 0))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"layers": (0, 4)}, "layers 0:4 do not lie within 0:3"),
        ({"layers": (-1, 2)}, "layers -1:2 do not lie within 0:3"),
        ({"heads": (3, 2)}, "heads 3:2 do not lie within 0:5"),
        ({"tokens": (0, 1)}, "is paged: its tokens are chosen by slots"),
    ],
)
def test_ranges_that_do_not_lie_within_are_refused(rows, ranges, message):
    with pytest.raises(LayoutError, match=message):
        rows.select(**ranges)


# --- what must not be written


def test_ordinary_memory_may_be_written(rows):
    rows.check_writable()
    Layout("L|KBNHD").bind([np.zeros((2, B, N, H, D))[:, ::-1, :, :, ::-2]]).check_writable()
    # Elements of K and V interleaved: their spans overlap, their bytes do not.
    Layout("L|BHN(KD)").bind([np.zeros((B, H, N, 2 * D))]).check_writable()


def test_read_only_memory_is_refused(cache):
    cache[1].flags.writeable = False
    rows = Layout("L|KBNHD").bind(cache)
    with pytest.raises(LayoutError, match="read-only"):
        rows.check_writable()
    with pytest.raises(ValueError, match="read-only"):
        rows.array("K", 0)[...] = 0


@pytest.mark.parametrize("axis", range(2, 6))
def test_broadcast_dims_are_refused(axis):
    shape = [1, 2, B, N, H, D]
    small = list(shape)
    small[axis] = 1
    rows = Layout("LKBNHD").bind(torch.zeros(small).expand(shape))
    with pytest.raises(LayoutError, match="share bytes"):
        rows.check_writable()


@pytest.mark.parametrize(("shape", "small"), [((2, 2, 4, 8), (1, 2, 4, 8)), ((2, 2, 4, 8), (2, 1, 4, 8))])
def test_broadcast_layers_and_sides_are_refused(shape, small):
    rows = Layout("LKTD").bind(torch.zeros(small).expand(shape))
    with pytest.raises(LayoutError, match="same memory"):
        rows.check_writable()


def test_one_tensor_given_for_two_layers_is_refused():
    tensor = np.zeros((2, B, N, H, D), np.float32)
    rows = Layout("L|KBNHD").bind([tensor, tensor])
    with pytest.raises(LayoutError, match="same memory"):
        rows.check_writable()
    np.testing.assert_array_equal(rows.array("K", 0), rows.array("K", 1))  # it may be read


def test_overlapping_windows_are_refused():
    base = np.zeros(100, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(base, 8, writeable=True)[:4]
    with pytest.raises(LayoutError, match="share bytes"):
        Layout("TD").bind(windows).check_writable()


@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.lists(st.integers(-40, 40), min_size=4, max_size=4))
def test_what_is_called_writable_has_no_two_elements_in_one_place(extents, strides):
    base = np.zeros(1000, np.uint8)[500:]
    view = np.ndarray(extents, np.uint8, buffer=base.base, offset=500, strides=strides)
    rows = Layout("BNHD").bind(view)
    offsets = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*extents)]
    try:
        rows.check_writable()
    except LayoutError:
        return
    assert len(set(offsets)) == len(offsets)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copy_of_rows_is_the_same_memory_with_tables_of_its_own(again):
    tensor = np.arange(B * N * H * D, dtype=np.float32).reshape(B, N, H, D)
    rows = Layout("BNHD").bind(tensor)
    tables = rows.native()
    other = again(rows)
    assert repr(other) == repr(rows)
    assert other.native().planes_at != tables.planes_at
    assert other.native().planes.tolist() == tables.planes.tolist()
    address = tensor.ctypes.data
    del rows, tensor
    assert other.array("X", 0).ctypes.data == address
    assert other.array("X", 0).sum() == sum(range(B * N * H * D))


def test_pickled_rows_carry_no_addresses_of_tables():
    rows = Layout("BNHD").bind(np.zeros((B, N, H, D), np.float32))
    fresh = pickle.dumps(rows)
    rows.native()
    assert pickle.dumps(rows) == fresh
    assert pickle.loads(fresh).segments == rows.segments
