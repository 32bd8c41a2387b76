"""A view of somebody's memory: address, shape, byte strides, element type, device. Never a copy.

`ArrayRef.of` reads it from NumPy arrays, torch tensors on any device, anything with DLPack or the array interfaces;
`ArrayRef.at` builds it from a raw pointer. torch is recognised when it is already imported, and never imported here.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcore.dtypes import DTYPES, to_dtype
from kvcore.errors import LayoutError

__all__ = ["ArrayRef", "aligned_empty", "host_array", "overlap", "same_view"]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRef:
    """A strided array in some device's memory.

    Parameters
    ----------
    address : int
        Address of the first element, 0 for arrays without storage.
    shape : tuple of int
    strides : tuple of int
        In bytes, one for each dim; may be padded, zero or negative.
    dtype : numpy.dtype
    device : str
        Device type and index as torch prints them: ``"cpu"``, ``"cuda:0"``, ``"xpu:1"``.
    readonly : bool
    owner : object
        Whatever keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str = "cpu"
    readonly: bool = False
    owner: object = None

    @property
    def device_type(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]

    @property
    def row_major(self) -> bool:
        """Whether its elements lie one after the other, in C order."""
        expected = row_major(self.shape, self.dtype.itemsize)
        return 0 in self.shape or all(
            n == 1 or have == want for n, have, want in zip(self.shape, self.strides, expected, strict=True)
        )

    @classmethod
    def at(
        cls,
        address: int,
        shape: Sequence[int],
        dtype: object,
        *,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
        owner: object = None,
    ) -> ArrayRef:
        """Describe memory at a raw pointer; `strides` in bytes, row-major if not given.

        The caller answers for the pointer: it must stay valid while the view is used (pass what owns it as `owner`).
        """
        resolved = to_dtype(dtype)
        extents = tuple(int(n) for n in shape)
        if any(n < 0 for n in extents):
            raise LayoutError(f"a shape has no negative extents, got {extents}")
        steps = row_major(extents, resolved.itemsize) if strides is None else tuple(int(s) for s in strides)
        if len(steps) != len(extents):
            raise LayoutError(f"{len(extents)} dims need as many strides, got {len(steps)}: {steps}")
        return cls(int(address), extents, steps, resolved, device, False, owner)

    @classmethod
    def of(cls, array: Any) -> ArrayRef:
        """Describe an existing array without copying it.

        Raises
        ------
        LayoutError
            The object is no array, or DLPack says that it is none of a KV cache.
        ConfigError
            Its element type is none of a KV cache.
        """
        if isinstance(array, ArrayRef):
            return array
        if isinstance(array, np.ndarray):
            return cls(
                array.__array_interface__["data"][0],
                array.shape,
                array.strides,
                to_dtype(array.dtype),
                "cpu",
                not array.flags.writeable,
                array,
            )
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            return _of_torch(array)
        if hasattr(array, "__dlpack__"):
            return _of_dlpack(array)
        if hasattr(array, "__array_interface__"):
            return cls.of(np.asarray(array))
        raise LayoutError(
            f"cannot take a {type(array).__qualname__} as an array; pass a NumPy array, a torch tensor, an object "
            "with __dlpack__, or kvcore.ArrayRef.at(pointer, shape, dtype)"
        )

    def __getitem__(self, key: Any) -> ArrayRef:
        """Return the view that NumPy's basic indexing gives: of ints, slices, None and one Ellipsis; nothing is read.

        Raises
        ------
        LayoutError
            More indices than dims, an int out of range, or an index of another kind.
        """
        keys = list(key) if isinstance(key, tuple) else [key]
        used = sum(k is not None and k is not Ellipsis for k in keys)
        rest = [slice(None)] * (len(self.shape) - used)
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
        keys[at : at + 1] = rest
        if used > len(self.shape) or any(k is Ellipsis for k in keys):
            raise LayoutError(f"index {key} has more than the {len(self.shape)} dims of {list(self.shape)}")
        address, shape, strides, dim = self.address, [], [], 0
        for k in keys:
            if k is None:
                shape.append(1)
                strides.append(0)
                continue
            extent, stride = self.shape[dim], self.strides[dim]
            dim += 1
            if isinstance(k, slice):
                chosen = range(extent)[k]
                shape.append(len(chosen))
                strides.append(chosen.step * stride)
                address += chosen.start * stride if chosen else 0
            elif isinstance(k, (int, np.integer)) and -extent <= k < extent:
                address += int(k) % extent * stride
            else:
                raise LayoutError(f"index {k!r} of a dim of {extent} is no int within it and no slice")
        return replace(self, address=address, shape=tuple(shape), strides=tuple(strides))

    __iter__ = None  # else Python would take it for a sequence of its views, and NumPy read it as one

    def reshape(self, *shape: int) -> ArrayRef:
        """Return the same elements, in C order, in another shape; one extent may be -1. Never a copy.

        Raises
        ------
        LayoutError
            Another number of elements, or dims that no strides describe.
        """
        size, known = math.prod(self.shape), math.prod(n for n in shape if n >= 0)
        wanted = tuple(size // max(known, 1) if n < 0 else n for n in shape)
        if math.prod(wanted) != size or sum(n < 0 for n in shape) > (known > 0):
            raise LayoutError(f"{size} elements {list(self.shape)} do not make {list(shape)}")
        strides = row_major(wanted, self.dtype.itemsize) if size == 0 else _strides_of(self, wanted)
        return replace(self, shape=wanted, strides=strides)

    def view(self, dtype: object) -> ArrayRef:
        """Return the same bytes as elements of another type, of which the last dim then has more or fewer.

        Raises
        ------
        LayoutError
            The last dim is not contiguous, or its bytes make no whole number of elements.
        """
        element = to_dtype(dtype)
        old, new = self.dtype.itemsize, element.itemsize
        if old == new:
            return replace(self, dtype=element)
        adjacent = bool(self.shape) and (0 in self.shape or self.shape[-1] == 1 or self.strides[-1] == old)
        if not adjacent or self.shape[-1] * old % new:
            raise LayoutError(
                f"{self.dtype} {list(self.shape)} with strides {self.strides} cannot be seen as {element}"
            )
        shape, strides = (*self.shape[:-1], self.shape[-1] * old // new), (*self.strides[:-1], new)
        return replace(self, shape=shape, strides=strides, dtype=element)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy view of host memory.

        Raises
        ------
        LayoutError
            The memory is not the host's.
        """
        if isinstance(self.owner, np.ndarray) and self.owner.dtype == self.dtype:
            owner = self.owner
            same = (owner.ctypes.data, owner.shape, owner.strides) == (self.address, self.shape, self.strides)
            if same and owner.flags.writeable != self.readonly:
                return owner
        return bytes_at(self, self.shape, self.strides, self.address).view(self.dtype)[..., 0]


def bytes_at(
    ref: ArrayRef, shape: tuple[int, ...], strides: tuple[int, ...], address: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return host memory as uint8 ``[*shape, itemsize]``: the raw bytes of each element, keeping the owner alive."""
    if ref.device_type != "cpu":
        raise LayoutError(f"memory on {ref.device} cannot be read from the host; copy it over with copy_batch")
    item = ref.dtype.itemsize
    if 0 in shape:
        return np.empty((*shape, item), np.uint8)
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0) + item
    raw = (ctypes.c_uint8 * (high - low)).from_address(address + low)
    raw._kvcore_owner = ref.owner  # type: ignore[attr-defined]  # the view's base: frees nothing before the view dies
    view = np.ndarray((*shape, item), np.uint8, buffer=memoryview(raw), offset=-low, strides=(*strides, 1))
    if ref.readonly:
        view.flags.writeable = False
    return view


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a contiguous array, last dim fastest."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _strides_of(ref: ArrayRef, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array's elements in another shape of as many."""
    runs: list[tuple[int, int]] = []  # extent and stride of dims that can be walked as one, the last dims first
    for extent, stride in zip(reversed(ref.shape), reversed(ref.strides), strict=True):
        if runs and extent != 1 and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = runs[-1][0] * extent, runs[-1][1]
        elif extent != 1:
            runs.append((extent, stride))
    strides, run, taken = [], 0, 1
    for extent in reversed(shape):
        if extent == 1:
            strides.append(ref.dtype.itemsize)
            continue
        if runs[run][0] % (taken * extent):
            raise LayoutError(f"{list(ref.shape)} with strides {ref.strides} is {list(shape)} only as a copy")
        strides.append(runs[run][1] * taken)
        taken *= extent
        if taken == runs[run][0]:
            run, taken = run + 1, 1
    return tuple(reversed(strides))


def same_view(a: Any, b: Any) -> bool:
    """Tell whether two arrays are the same elements: of one address, shape, strides and dtype."""
    if (a.shape, a.strides, a.dtype) != (b.shape, b.strides, b.dtype):
        return False
    return ArrayRef.of(a).address == ArrayRef.of(b).address


def overlap(a: Any, b: Any) -> bool:
    """Tell whether two arrays of one form, NumPy's or `ArrayRef`, share bytes.

    Arrays whose bounds cross, such as columns of one matrix, are looked at element by element; those for which that
    would take long count as sharing.
    """
    if isinstance(a, np.ndarray):
        if not np.may_share_memory(a, b):  # compares bounds
            return False
    else:
        (start, stop), (other_start, other_stop) = bounds(a), bounds(b)
        if stop <= other_start or other_stop <= start:
            return False
    try:
        return np.shares_memory(_phantom(a), _phantom(b), max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


_OVERLAP_WORK: Any = 10_000  # candidates that NumPy tries; its stubs know only the extremes


def bounds(array: Any) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and behind the last one."""
    ref = ArrayRef.of(array)
    start = stop = ref.address
    for extent, stride in zip(ref.shape, ref.strides, strict=True):
        if extent == 0:
            return ref.address, ref.address
        if stride < 0:
            start += (extent - 1) * stride
        else:
            stop += (extent - 1) * stride
    return start, stop + ref.dtype.itemsize


class _Phantom:
    """An address as NumPy takes it; it is computed with, never read."""

    def __init__(self, ref: ArrayRef) -> None:
        self.__array_interface__ = {
            "data": (ref.address, True),
            "shape": ref.shape,
            "strides": ref.strides,
            "typestr": f"|V{ref.dtype.itemsize}",
            "version": 3,
        }


def _phantom(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else np.asarray(_Phantom(ArrayRef.of(array)))


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate an uninitialised array that begins with a cache line of 64 bytes.

    NumPy promises 16: then most vectors of a copy lie in two lines, which costs up to half its speed.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + 63, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    array: np.ndarray[Any, Any] = memory[start : start + nbytes].view(dtype).reshape(shape)
    return array


def host_array(array: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view of an array in host memory, whatever library owns it; bfloat16 included.

    Raises
    ------
    LayoutError
        It is no array, or lives on a device.
    """
    if isinstance(array, np.ndarray):
        return array
    return ArrayRef.of(array).numpy()


def _of_torch(tensor: Any) -> ArrayRef:
    item = tensor.element_size()
    return ArrayRef(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(s * item for s in tensor.stride()),
        to_dtype(tensor.dtype),
        str(tensor.device),
        False,
        tensor,
    )


# --- DLPack: read the capsule's struct in place. The capsule is kept, unconsumed, as the owner; its destructor frees.


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# dlpack.h: DLDataTypeCode and DLDeviceType.
_DL_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_DL_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda", 11: "cpu", 13: "cuda", 14: "xpu"}


def _of_dlpack(array: Any) -> ArrayRef:
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        address = pointer(capsule, b"dltensor")
    except ValueError as error:
        raise LayoutError(f"__dlpack__ of {type(array).__qualname__} gave no unused 'dltensor' capsule") from error
    tensor = _DLTensor.from_address(address)
    name = _DL_DTYPES.get((tensor.dtype.code, tensor.dtype.bits))
    device = _DL_DEVICES.get(tensor.device.type)
    if name is None or tensor.dtype.lanes != 1:
        raise LayoutError(f"DLPack type code {tensor.dtype.code} with {tensor.dtype.bits} bits is no KV cache type")
    if device is None:
        raise LayoutError(f"DLPack device type {tensor.device.type} is not known to kvcore")
    dtype = DTYPES[name]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = (
        tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
        if tensor.strides
        else row_major(shape, dtype.itemsize)
    )
    full = device if device == "cpu" else f"{device}:{tensor.device.id}"
    return ArrayRef((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, full, False, (array, capsule))
