"""The implementations of `kvcore.kernels.triton.interpreter`. Its ops are done when they return."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.arrays import aligned_empty
from kvcore.kernels.abi import OK
from kvcore.kernels.library import status_error
from kvcore.kernels.triton import TWINS
from kvcore.kernels.triton.interpreter import interpret
from kvcore.kernels.triton.queue import Owner, Queue, aligned

interpret()

from kvcore.kernels.triton.ops import TritonOps  # noqa: E402  # imports Triton

_UINT8 = np.dtype(np.uint8)
_LOCK = threading.RLock()  # the interpreter swaps functions of Triton's modules for its own while a kernel runs
_KEPT = 64


class InterpreterQueue(Queue):
    """An op in the interpreter, which runs each kernel as it is launched."""

    block = 1 << 14
    tiles = 64
    programs = 4

    def __init__(self, resident: OrderedDict[int, tuple[object, list[Any]]]) -> None:
        self._words = (ctypes.c_uint64 * 2)(OK, OK)
        self.status = ctypes.addressof(self._words)
        self._memory: list[npt.NDArray[Any]] = []
        self._resident = resident

    def launch(self, kernel: Any, programs: int, *args: int, warps: int = 4, **constants: Any) -> None:
        """Run a kernel."""
        with _LOCK, np.errstate(all="ignore"):  # overflow is what the kernels' own arithmetic handles
            kernel[(programs,)](*args, **constants)

    def upload(self, *tables: npt.NDArray[Any]) -> tuple[int, ...]:
        """Return where copies of tables are."""
        joined, starts = aligned(tables)
        where = self.scratch(joined.nbytes)
        self._memory[-1][:] = joined
        return tuple(where + start for start in starts)

    def resident(self, key: object, make: Callable[[], tuple[npt.NDArray[Any], ...]]) -> tuple[int, ...]:
        """Return where tables are, made when they are asked for the first time."""
        with _LOCK:
            if id(key) not in self._resident:
                self._resident[id(key)] = key, [np.ascontiguousarray(table) for table in make()]
                while len(self._resident) > _KEPT:
                    self._resident.popitem(last=False)
            tables = self._resident[id(key)][1]
        self._memory += tables
        return tuple(table.ctypes.data for table in tables)

    def scratch(self, nbytes: int) -> int:
        """Return where memory for this op is."""
        memory = aligned_empty((nbytes,), _UINT8)
        memory.fill(0xA5)  # nothing may depend on what it holds
        self._memory.append(memory)
        return int(memory.ctypes.data)

    def close(self, op: str, keep: Any, subject: Any = None) -> None:
        """Raise what the op has found."""
        error = status_error(op, self._words[0], subject)
        if error is not None:
            raise error


class Interpreter(Owner):
    """The interpreter. It has no streams."""

    def __init__(self) -> None:
        self._resident: OrderedDict[int, tuple[object, list[Any]]] = OrderedDict()

    def open(self, op: str, stream: Any) -> InterpreterQueue:
        """Begin an op."""
        return InterpreterQueue(self._resident)


_ops = TritonOps(Interpreter())

for _op in TWINS:
    globals()[f"kvcore_op_{_op}"] = getattr(_ops, f"kvcore_op_{_op}")
