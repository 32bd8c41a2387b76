"""A native library that exports the C ABI: loading it, calling it, and turning its status words into errors."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcore.entropy import KINDS, TableSet
from kvcore.errors import (
    BackendLoadError,
    CorruptFrameError,
    DeviceError,
    KVCoreError,
    LayoutError,
    OutOfMemoryError,
    QuantizationError,
    SlotError,
    UnsupportedOpError,
)
from kvcore.hookspecs import op_names
from kvcore.kernels.abi import ABI_VERSION, OK, TablesArgs, address
from kvcore.rows import RowLayout

__all__ = ["HostLibrary", "Indexed", "Library", "status_error"]

_KEPT_TABLES = 64
_StatusWords = ctypes.c_uint64 * 2

_TILE_CODES = {
    7: "its mode and word count are no tile, or are more than there are bytes",
    8: "a class beyond 31",
    9: "a state that no encoder leaves",
    10: "words are missing or left over",
    11: "a value that means nothing",
    12: "padding is not zero",
}
_NO_SLOT, _SAME_SLOT, _NONFINITE, _SCALE, _RANGE, _LEVEL = range(1, 7)
_BEYOND = {
    "pack_bits": "does not fit in so many bits",
    "reduce_moments": "is beyond -32768 .. 32767 when scaled by its exponent",
    "rotate": "is beyond 2**100 in magnitude",
}
_POLICIES = ("quantize", "reduce_absmax", "reduce_minmax", "reduce_norm")


class Indexed(NamedTuple):
    """What the positions of gather and scatter count in: an index into a cache."""

    index: Any
    cache: RowLayout
    unit: str


def status_error(op: str, status: int, subject: Any = None) -> KVCoreError | None:
    """Return the error that a status word stands for; None for `OK`.

    Parameters
    ----------
    op : str
        Its name; those of several that may have left the status, joined by "or".
    status : int
    subject : Indexed or array, optional
        What the position counts in, where it is known and in reach of the host: then the message shows it.
    """
    if status == OK:
        return None
    code, position = status & 0xFF, status >> 8
    if code in _TILE_CODES:
        return CorruptFrameError(f"tile {position}: {_TILE_CODES[code]}", reason="stream")
    if code in (_NO_SLOT, _SAME_SLOT):
        return SlotError(f"{op}: {_slot(code, position, subject)}; nothing was written")
    return QuantizationError(f"{op}: {_element(op, code, position, subject)}; nothing was written")


def _slot(code: int, position: int, subject: Indexed | None) -> str:
    what = f"entry {position} of the index"
    if subject is not None:
        what += f", {subject.unit} {int(subject.index[position])},"
    if code == _SAME_SLOT:
        return f"{what} has the same target as an earlier one; each slot takes one token"
    if subject is None:
        return f"{what} is outside of the cache; -1 skips a token"
    limit = subject.cache.tokens if subject.unit == "slot" else subject.cache.blocks
    return f"{what} is outside of -1 .. {limit - 1} of {subject.cache!r}; -1 skips a token"


def _element(op: str, code: int, position: int, array: Any) -> str:
    """Say which element, and what is wrong with it; a scale is named by its group's first element."""
    if array is None:
        where = f"element {position} in C order"
    else:
        index = tuple(int(i) for i in np.unravel_index(position, array.shape))
        where = f"element {list(index)}" if code == _SCALE else f"element {list(index)}, {array[index]},"
    if code == _NONFINITE:
        advice = "; nonfinite='saturate' takes it" if op in _POLICIES else ""
        return f"{where} is not finite{advice}"
    if code == _SCALE:
        return f"the scale of the group that begins with {where} is outside of 2**-100 .. 2**125"
    if code == _LEVEL:
        return f"{where} is a code that the codebook has no level for"
    if code == _RANGE:
        return f"{where} {_BEYOND.get(op, 'cannot be represented')}"
    return f"{where} has status {code}"


class _Tables:
    """A table set as the library holds it; given back when the last user lets go."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, handle: int, destroy: Any) -> None:
        self.handle = handle
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.handle)


class Library(ABC):
    """A shared library with the functions of ``abi.h``.

    Parameters
    ----------
    path : Path

    Raises
    ------
    BackendLoadError
        It does not load, or was built for another version of the ABI.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.dll = ctypes.CDLL(str(path))  # calls release the GIL
        except OSError as error:
            raise BackendLoadError(f"{path} does not load: {error}; reinstall the backend's package") from error
        try:
            version = self.dll.kvcore_abi_version()
            self._last_error = self.dll.kvcore_last_error
            self._create, self._destroy = self.dll.kvcore_tables_create, self.dll.kvcore_tables_destroy
        except AttributeError as error:
            raise BackendLoadError(f"{path} is no kvcore kernel library: {error}") from error
        if version != ABI_VERSION:
            raise BackendLoadError(
                f"{path} has ABI version {version}, this kvcore has {ABI_VERSION}; install both of one release"
            )
        self._last_error.restype = ctypes.c_char_p
        self._create.restype, self._create.argtypes = ctypes.c_void_p, (ctypes.POINTER(TablesArgs),)
        self._destroy.restype, self._destroy.argtypes = None, (ctypes.c_void_p,)
        self._functions = {}
        for op in op_names():
            function = getattr(self.dll, f"kvcore_{op}", None)
            if function is not None:
                function.restype = ctypes.c_int32
                function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
                self._functions[op] = function
        self._tables: OrderedDict[tuple[int, int], tuple[TableSet, _Tables]] = OrderedDict()
        self._lock = threading.Lock()
        _libraries.add(self)

    def tables(self, tables: TableSet, stream: Any = None) -> _Tables:
        """Return a table set in the library's form, where ops on a stream reach it; the last few used are kept.

        Raises
        ------
        OutOfMemoryError, DeviceError
        """
        key = self.use(stream), id(tables)
        with self._lock:
            found = self._tables.get(key)
            if found is not None:
                self._tables.move_to_end(key)
                return found[1]
            args = TablesArgs(
                *(address(a) for a in (tables.frequency, tables.cost, tables.start, tables.symbol)),
                tables.bits,
                KINDS.index(tables.kind),
            )
            handle = self._create(ctypes.byref(args))
            if not handle:
                raise OutOfMemoryError(f"no memory for table set {tables.name!r}: {self._reason()}")
            held = _Tables(handle, self._destroy)
            self._tables[key] = tables, held  # the set itself is kept, so that its id stays its own
            if len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
            return held

    def use(self, stream: Any) -> int:
        """Let tables that this thread makes be within reach of ops on a stream; return the number of their device."""
        return 0

    def launch(self, op: str, args: bytes, stream: int | None, status: int) -> None:
        """Call an op.

        Parameters
        ----------
        op : str
        args : bytes
            The packed struct.
        stream : int, optional
            The backend's stream handle.
        status : int
            Address of the status word.

        Raises
        ------
        UnsupportedOpError, OutOfMemoryError, LayoutError, DeviceError
            The launch did not take place.
        """
        code = self._functions[op](args, stream, status)
        if code:
            raise self.failure(code, f"{op} was not launched")

    @abstractmethod
    def run(self, op: str, args: bytes, stream: Any, keep: tuple[Any, ...], subject: Any = None) -> None:
        """Run an op as the hooks ask for it.

        Parameters
        ----------
        op : str
        args : bytes
            The packed struct.
        stream : object
            As the hook was given it.
        keep : tuple
            What must live until the stream has passed.
        subject : Indexed or array, optional
            What positions in errors count in, see `status_error`.
        """

    def failure(self, code: int, what: str) -> KVCoreError:
        """Return the error for a KV_FAIL code that a function of the library just gave this thread."""
        kind = {1: UnsupportedOpError, 2: OutOfMemoryError, 3: LayoutError}.get(code, DeviceError)
        return kind(f"{what}: {self._reason()}")

    def _reason(self) -> str:
        text = self._last_error()
        return text.decode("utf-8", "replace") if text else "no reason was given"


_libraries: weakref.WeakSet[Library] = weakref.WeakSet()


def _unlock() -> None:
    """Give a forked process locks of its own: the thread that held one in its parent is not there to let it go."""
    for library in _libraries:
        library._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class HostLibrary(Library):
    """A library whose ops are done when they return."""

    def run(self, op: str, args: bytes, stream: Any, keep: tuple[Any, ...], subject: Any = None) -> None:
        """Run an op, and raise what it found in the data."""
        status = _StatusWords(OK, OK)
        self.launch(op, args, None, ctypes.addressof(status))
        error = status_error(op, status[0], subject)
        if error is not None:
            raise error
