"""A call's memory where the backend computes: arenas copied over whole, arrays as views into the copies.

A backend of the host gets the arrays as they are. For a device, every arena is copied to device memory with its guards
and gaps, and copied back after the call: what a kernel wrote beside its output is seen there as on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore import Backend, Layout, RowLayout
from kvcore.arrays import ArrayRef
from kvcore.ops import fetch
from kvcore_conformance.arena import Bound, offset_in, root

__all__ = ["Placement"]

_UINT8 = np.dtype(np.uint8)


class Placement:
    """Where the arrays of one call are.

    Parameters
    ----------
    backend : Backend
    memory : list of array
        The arenas of the call.
    """

    def __init__(self, backend: Backend, memory: list[Any]) -> None:
        self.backend = backend
        self.on_host = "cpu" in backend.spec.device_types
        self._copies: dict[int, tuple[Any, ArrayRef]] = {}
        self._placed: dict[int, tuple[Any, Any]] = {}  # the value is kept, so that its id stays its own
        if self.on_host or not memory:
            return
        for base in memory:
            there = ArrayRef.of(backend.runtime.empty((base.nbytes,), _UINT8))
            self._copies[id(base)] = base, there
        self._copy(back=False)

    def over(self, value: Any) -> Any:
        """Return a value with its arrays as the backend takes them; the same array gives the same object."""
        if isinstance(value, (Bound, np.ndarray)):
            if id(value) not in self._placed:
                self._placed[id(value)] = value, self._place(value)
            return self._placed[id(value)][1]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.over, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.over, value))
        return value

    def back(self) -> None:
        """Copy what the call left behind to the arenas."""
        if self._copies:
            self._copy(back=True)

    def home(self, value: Any) -> Any:
        """Return a result that the backend allocated as arrays of the host."""
        if self.on_host or value is None:
            return value
        if isinstance(value, RowLayout):
            return self._rows_home(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.home, value))
        return fetch(self.backend, value)

    def _rows_home(self, rows: RowLayout) -> RowLayout:
        """Copy a chunk that the backend allocated, contiguous as it is."""
        first = min(base for s in rows.segments for row in s.bases for base in row)
        memory = fetch(self.backend, ArrayRef.at(first, (rows.nbytes,), _UINT8, device=rows.device, owner=rows.owner))
        return rows.moved(memory.ctypes.data - first, device="cpu", readonly=False, owner=memory)

    def _place(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if self.on_host:
            return value.rows
        layout = Layout(value.text, **{axis: value.extents[axis] for axis in value.declared})
        return layout.bind(_nested(value.tensors, self._array), dtypes=value.dtypes if value.typed else None)

    def _array(self, array: Any) -> Any:
        if self.on_host:
            return self.backend.runtime.array(array)
        base = root(array)
        there = self._copies[id(base)][1]
        where = there.address + offset_in(array, base)
        return ArrayRef(
            where, array.shape, array.strides, array.dtype, there.device, not array.flags.writeable, there.owner
        )

    def _copy(self, *, back: bool) -> None:
        hosts = [base.reshape(-1).view(_UINT8) for base, _ in self._copies.values()]
        devices = [there for _, there in self._copies.values()]
        self.backend.copy_batch(devices if back else hosts, out=hosts if back else devices)
        self.backend.runtime.synchronize()


def _nested(tensors: Any, leaf: Any) -> Any:
    return [_nested(t, leaf) for t in tensors] if isinstance(tensors, (list, tuple)) else leaf(tensors)
