"""Views of foreign memory: the address is the owner's, and nothing is ever copied."""

from __future__ import annotations

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ArrayRef, LayoutError
from kvcore.arrays import host_array, overlap, row_major, same_view


class Capsule:
    """An array of some library that has nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Interface:
    """An array that has nothing but NumPy's array interface."""

    def __init__(self, array):
        self._array = array

    @property
    def __array_interface__(self):
        return self._array.__array_interface__


# --- NumPy


def test_numpy_keeps_its_address_shape_strides_and_type():
    base = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    view = base[1:, ::-2, 1::2]
    ref = ArrayRef.of(view)
    assert ref.address == view.ctypes.data
    assert (ref.shape, ref.strides) == (view.shape, view.strides)
    assert (ref.dtype, ref.device, ref.device_type, ref.readonly) == (np.float32, "cpu", "cpu", False)
    assert ref.numpy() is view


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-2, -1, 1, 2, 3])), min_size=0, max_size=4),
    st.sampled_from(["float32", "uint8", "bfloat16", "int64"]),
)
def test_any_numpy_view_reads_back_through_its_pointer(dims, name):
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    base = np.arange(int(np.prod([n * abs(s) for n, s in dims], dtype=int))).astype(dtype)
    view = base.reshape([n * abs(s) for n, s in dims])[(..., *(slice(None, None, s) for _, s in dims))]
    ref = ArrayRef.at(view.ctypes.data, view.shape, name, strides=view.strides, owner=(base,))
    again = ref.numpy()
    assert again.ctypes.data == view.ctypes.data
    np.testing.assert_array_equal(again.astype(np.float64), view.astype(np.float64))


def test_read_only_arrays_stay_read_only():
    array = np.zeros(4)
    array.flags.writeable = False
    ref = ArrayRef.of(array)
    assert ref.readonly
    assert not ref.numpy().flags.writeable


def test_the_view_keeps_the_owner_alive():
    source = np.full(1 << 16, 7, np.uint8)
    ref = ArrayRef.at(source.ctypes.data, (1 << 15,), "uint8", owner=source)
    died = weakref.ref(source)
    del source
    view = ref.numpy()
    del ref
    gc.collect()
    assert died() is not None
    assert view.sum() == 7 << 15
    half = view[5:]
    del view
    gc.collect()
    assert half[-1] == 7
    assert died() is not None
    del half
    gc.collect()
    assert died() is None


# --- torch


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int64"])
def test_torch_on_the_host_is_read_in_place(name):
    raw = torch.arange(1, 97, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, name)).reshape(2, -1)[:, 1:].T
    ref = ArrayRef.of(tensor)
    assert ref.address == tensor.data_ptr()
    assert ref.strides == tuple(s * tensor.element_size() for s in tensor.stride())
    view = host_array(tensor)
    assert view.ctypes.data == tensor.data_ptr()
    expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    np.testing.assert_array_equal(np.ascontiguousarray(view).reshape(-1).view(np.uint8), expected)


def test_writes_go_to_torchs_memory_and_it_lives_as_long_as_the_view():
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    alias = tensor[:10]
    view = host_array(tensor)
    view[3] = 2.5
    assert alias[3] == 2.5
    del tensor, alias
    gc.collect()
    assert view[3] == 2.5


def test_a_tensor_of_a_device_is_described_but_not_read():
    ref = ArrayRef.of(torch.empty((2, 3), dtype=torch.float16, device="meta").T)
    assert (ref.device, ref.shape, ref.strides) == ("meta", (3, 2), (2, 6))
    with pytest.raises(LayoutError, match="memory on meta cannot be read from the host; copy it over with copy_batch"):
        ref.numpy()


def test_device_and_index_are_told_apart():
    ref = ArrayRef.at(4096, (2,), "float32", device="cuda:1")
    assert (ref.device, ref.device_type) == ("cuda:1", "cuda")


# --- DLPack and array interfaces


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int8", "uint8", "int64", "float8_e4m3fn"])
def test_dlpack_is_read_in_place(name):
    tensor = torch.arange(48, dtype=torch.uint8).view(getattr(torch, name)).reshape(2, -1)[:, ::2]
    ref = ArrayRef.of(Capsule(tensor))
    assert ref.address == tensor.data_ptr()
    assert (ref.shape, ref.device, str(ref.dtype)) == (tuple(tensor.shape), "cpu", name)
    assert ref.strides == tuple(s * tensor.element_size() for s in tensor.stride())
    np.testing.assert_array_equal(
        ref.numpy().view(f"u{tensor.element_size()}"), host_array(tensor).view(f"u{tensor.element_size()}")
    )


def test_dlpack_keeps_its_producer_alive():
    tensor = torch.full((4096,), 1.5, dtype=torch.bfloat16)
    view = host_array(Capsule(tensor))
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    others = [torch.zeros(4096, dtype=torch.bfloat16) for _ in range(32)]  # what would be put into freed memory
    assert view.ctypes.data == address
    assert (view.astype(np.float32) == 1.5).all()
    assert all(o.data_ptr() != address for o in others)


def test_dlpack_types_that_no_cache_has_are_refused():
    with pytest.raises(LayoutError, match="DLPack type code 5 with 64 bits"):
        ArrayRef.of(Capsule(np.zeros(2, np.complex64)))


def test_a_used_capsule_is_refused():
    class Used:
        def __dlpack__(self):
            capsule = np.zeros(2).__dlpack__()
            rename = ctypes.pythonapi.PyCapsule_SetName
            rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
            rename(capsule, b"used_dltensor")
            return capsule

    with pytest.raises(LayoutError, match="Used gave no unused 'dltensor' capsule"):
        ArrayRef.of(Used())


def test_the_array_interface_is_read_in_place():
    array = np.arange(6, dtype=np.int16)[::-1]
    ref = ArrayRef.of(Interface(array))
    assert ref.address == array.ctypes.data
    np.testing.assert_array_equal(ref.numpy(), array)


# --- raw pointers


def test_a_raw_pointer_is_row_major_unless_strides_are_given():
    array = np.arange(24, dtype=np.int32)
    rows = ArrayRef.at(array.ctypes.data, (4, 6), "int32", owner=array)
    assert rows.strides == (24, 4) == row_major((4, 6), 4)
    np.testing.assert_array_equal(rows.numpy(), array.reshape(4, 6))
    columns = ArrayRef.at(array.ctypes.data + 4, (2, 3), "int32", strides=(8, 0), owner=array)
    np.testing.assert_array_equal(columns.numpy(), [[1, 1, 1], [3, 3, 3]])


def test_a_pointer_into_its_owner_is_not_mistaken_for_the_owner():
    pool = np.arange(8, dtype=np.int64)
    other = np.arange(100, 108, dtype=np.int64)
    ref = ArrayRef.at(other.ctypes.data, (8,), "int64", owner=pool)
    np.testing.assert_array_equal(ref.numpy(), other)


def test_an_empty_array_has_no_bytes_to_read():
    assert ArrayRef.at(0, (0, 5), "bfloat16").numpy().shape == (0, 5)
    assert host_array(np.empty((3, 0))).shape == (3, 0)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, -1), {}, r"no negative extents, got \(2, -1\)"),
        ((2, 3), {"strides": (4,)}, r"2 dims need as many strides, got 1: \(4,\)"),
    ],
)
def test_a_pointer_with_a_wrong_shape_is_refused(shape, options, message):
    with pytest.raises(LayoutError, match=message):
        ArrayRef.at(4096, shape, "uint8", **options)


@pytest.mark.parametrize("value", [None, 3, "KBNHD", [1, 2], object(), b"bytes"])
def test_what_is_no_array_is_refused_with_what_would_do(value):
    with pytest.raises(LayoutError, match=rf"cannot take a {type(value).__name__} as an array; .*ArrayRef\.at"):
        ArrayRef.of(value)


def test_an_element_type_of_no_cache_is_refused():
    with pytest.raises(ValueError, match=r"unknown element type .*complex64"):
        ArrayRef.of(np.zeros(3, np.complex64))
    with pytest.raises(ValueError, match=r"unknown element type .*complex64"):
        ArrayRef.of(torch.zeros(3, dtype=torch.complex64))


@st.composite
def views(draw):
    """Two views of one buffer of 64 bytes: where they begin, their extents, strides and item sizes."""
    found = []
    for _ in range(2):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        strides = [draw(st.integers(-6, 6)) for _ in shape]
        found.append((draw(st.integers(30, 34)), shape, strides, draw(st.sampled_from(["uint8", "int16", "int32"]))))
    return found


@given(views())
def test_arrays_overlap_where_they_have_a_byte_in_common(pair):
    memory = np.zeros(100, np.uint8)
    arrays = [np.ndarray(shape, dtype, memory, start, strides) for start, shape, strides, dtype in pair]
    refs = [
        ArrayRef.at((1 << 60) + start, shape, dtype, strides=strides, device="emu:0")
        for start, shape, strides, dtype in pair
    ]
    bytes_of = []
    for start, shape, strides, dtype in pair:
        firsts = [start + sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*shape)]
        bytes_of.append({first + b for first in firsts for b in range(np.dtype(dtype).itemsize)})
    assert overlap(*arrays) == overlap(*refs) == bool(bytes_of[0] & bytes_of[1])
    assert same_view(*arrays) == same_view(*refs) == (pair[0] == pair[1])


# --- views of views


def described(array):
    """Return what a view is, save strides and addresses that say nothing: of one element, or of none."""
    ref = ArrayRef.of(array)
    if 0 in ref.shape:
        return ref.shape, ref.dtype
    strides = [s if n != 1 else None for n, s in zip(ref.shape, ref.strides, strict=True)]
    return ref.shape, ref.dtype, ref.address, strides


@st.composite
def keys(draw, shape):
    """Draw an index as NumPy's basic indexing takes it."""
    first = draw(st.integers(0, len(shape)))
    last = draw(st.integers(first, len(shape)))  # what lies between is the Ellipsis
    key = [draw(st.one_of(st.slices(n), st.integers(-n, n - 1) if n else st.slices(n))) for n in shape]
    key[first:last] = [Ellipsis]  # without one NumPy may give an element instead of a view
    for extra in draw(st.lists(st.just(None), max_size=2)):
        key.insert(draw(st.integers(0, len(key))), extra)
    return tuple(key)


shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@given(st.data())
def test_views_are_indexed_as_numpy_has_it(data):
    array = np.zeros(data.draw(shapes), np.int16)
    ref = ArrayRef.of(array)
    for _ in range(3):
        key = data.draw(keys(array.shape))
        array, ref = array[key], ref[key]
        assert described(ref) == described(array)
    assert described(ref[()]) == described(array)


@given(st.data())
def test_views_are_reshaped_as_numpy_has_it_or_refused_where_it_copies(data):
    array = np.zeros(data.draw(shapes), np.int16)
    array = array[data.draw(keys(array.shape))]
    ref = ArrayRef.of(array)
    for new in ((-1,), (2, -1), (*array.shape[:-2], -1), (*array.shape[:-1], 2, -1), (array.size,), (3, 0), (-1, -1)):
        try:
            known = array.reshape(new)
        except ValueError:
            with pytest.raises(LayoutError, match="do not make"):
                ref.reshape(*new)
            continue
        if np.may_share_memory(known, array) or not array.size:
            assert described(ref.reshape(*new)) == described(known)
        else:
            with pytest.raises(LayoutError, match="only as a copy"):
                ref.reshape(*new)


@given(st.data(), st.sampled_from(["uint8", "float16", "int32"]))
def test_bytes_are_seen_as_numpy_sees_them(data, dtype):
    array = np.zeros(data.draw(shapes), np.int16)
    array = array[data.draw(keys(array.shape))]
    try:
        known = array.view(dtype)
    except (ValueError, TypeError):
        if array.ndim == 0 or (array.shape[-1] != 1 and array.size):
            with pytest.raises(LayoutError, match="cannot be seen as"):
                ArrayRef.of(array).view(dtype)
    else:
        assert described(ArrayRef.of(array).view(dtype)) == described(known)


@pytest.mark.parametrize("key", [(0, 0, 0), 2, -3, [0, 1], np.zeros(2, bool), "K", (..., ...), 1.0])
def test_an_index_that_is_none_is_refused(key):
    with pytest.raises(LayoutError, match="index"):
        ArrayRef.of(np.zeros((2, 3)))[key]


def test_a_view_of_device_memory_is_no_sequence():
    ref = ArrayRef.at(1 << 60, (2, 3), "float32", device="emu:0")
    with pytest.raises(TypeError):
        iter(ref)
    assert (ref[1, 1:].address, ref[1, 1:].device, ref[1, 1:].owner) == ((1 << 60) + 16, "emu:0", None)
