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
