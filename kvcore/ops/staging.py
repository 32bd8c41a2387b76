"""Host arrays through a device's ops: copied over, computed there, copied back.

What is composed on the host (codecs put segments and frames together there) calls ops with host arrays. A device cannot
reach those; `on_host` gives its backend a form that can be called with them all the same. It is the slow and safe way,
which works for every backend. Codecs that can be run on a device's memory do not take it (`kvcore.codecs.composites`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef, host_array, overlap, same_view
from kvcore.errors import LayoutError, UnsupportedOpError
from kvcore.hookspecs import op_names
from kvcore.ops.backend import Backend, open_host
from kvcore.ops.streams import StreamBackend
from kvcore.rows import RowLayout

__all__ = ["StagedBackend", "fetch", "on_host", "send"]

_UINT8 = np.dtype(np.uint8)
_BUFFERS = (bytes, bytearray, memoryview)


def on_host(backend: Backend) -> Backend:
    """Return a backend whose ops take arrays in host memory: itself where it computes there, else a `StagedBackend`."""
    if "cpu" in backend.spec.device_types:
        return backend
    if isinstance(backend, StreamBackend):  # one for each call, perhaps
        return StagedBackend(backend, _staged_backend(backend.device))
    return _staged_backend(backend)


@functools.lru_cache(maxsize=8)
def _staged_backend(device: Backend) -> StagedBackend:
    return StagedBackend(device, open_host())


def fetch(backend: Backend, array: Any) -> np.ndarray[Any, Any]:
    """Copy a row-major array of a device to the host, and wait for it.

    Raises
    ------
    LayoutError
        Its elements are not one after the other, in C order.
    """
    ref = ArrayRef.of(array)
    if not ref.row_major:
        raise LayoutError(
            f"fetch copies row-major arrays, got strides of {ref.strides} B for {ref.dtype} {list(ref.shape)}; "
            "fetch the whole array that it is a view of, and index it on the host"
        )
    host = np.empty(ref.shape, ref.dtype)
    if host.nbytes:
        source = ArrayRef(ref.address, (host.nbytes,), (1,), _UINT8, ref.device, True, ref.owner)
        backend.copy_batch([source], out=[host.reshape(-1).view(_UINT8)])
        backend.runtime.check()
    return host


def send(backend: Backend, array: Any) -> Any:
    """Copy an array of the host to the device, in C order; the copy is queued, and keeps the array until it is done.

    Raises
    ------
    LayoutError
        It is no array of the host.
    """
    held = host_array(array)
    placed = backend.runtime.empty(held.shape, held.dtype)
    if held.nbytes:
        target = ArrayRef.of(placed)
        flat = ArrayRef(target.address, (held.nbytes,), (1,), _UINT8, target.device, False, placed)
        backend.copy_batch([np.ascontiguousarray(held).reshape(-1).view(_UINT8)], out=[flat])
    return placed


class StagedBackend(Backend):
    """A device's backend for callers that hold host arrays.

    Every op copies its arrays over, `out` among them (an op need not write all of it), runs on the device, waits,
    raises what the op found, and copies the result back. It takes no stream: it is done when it returns.
    Rows (`RowLayout`) in host memory are moved by the host's own backend: to bring them to the device only to rearrange
    them would gain nothing. What the device does not do runs on the host as well.

    Parameters
    ----------
    device : Backend
        Of the device.
    host : Backend
        Does what the device does not.
    """

    def __init__(self, device: Backend, host: Backend) -> None:
        self._device = device
        super().__init__(host._linked, device.explain(), host._fallback, host._no_fallback)

    @property
    def name(self) -> str:
        """The device's backend, with what is special here."""
        return f"{self._device.name} (staged)"

    def refusal(self, op: str, *, dtype: object = None, layout: str | None = None) -> str | None:
        """Return why neither the device nor the host does an op, or None."""
        why = self._device.refusal(op, dtype=dtype, layout=layout)
        return None if why is None else super().refusal(op, dtype=dtype, layout=layout)

    def fused(self, composite: str) -> Callable[..., Any] | None:
        """None: fused composites of a device take its own memory, not the host's."""
        return None


def _staged(op: str) -> Callable[..., Any]:
    method = getattr(Backend, op)

    @functools.wraps(method)
    def run(self: StagedBackend, *args: Any, out: Any = None, stream: Any = None, **kwargs: Any) -> Any:
        if stream is not None:
            raise UnsupportedOpError(
                f"{op} of host arrays waits for the device and takes no stream; give arrays of the device to backend "
                f"{self._device.name} to queue it on {stream!r}"
            )
        if self._device.refusal(op) is not None or _holds_rows((args, out)):
            return method(self, *args, out=out, **kwargs)
        inputs = {n: v for n, v in kwargs.items() if n != "digests"}  # of copy_batch: they are written, as `out` is
        staging = _Staging(self._device)
        placed = staging.place((args, inputs))
        results = {"out": out, "digests": kwargs.get("digests")}
        written = {n: staging.place_out(v) for n, v in results.items() if v is not None}
        try:
            result = getattr(self._device, op)(*placed[0], **placed[1], **written)
        except UnsupportedOpError:  # it does the op, and not of this element type
            return method(self, *args, out=out, **kwargs)
        self._device.runtime.check()
        staging.bring_back()
        return _map(result, lambda a: fetch(self._device, a)) if out is None else out

    return run


for _op in op_names():
    setattr(StagedBackend, _op, _staged(_op))


class _Staging:
    """The arrays of one call: views of the same elements are one array on the device as well."""

    def __init__(self, device: Backend) -> None:
        self._device = device
        self._inputs: list[tuple[np.ndarray[Any, Any], Any]] = []
        self._outputs: list[tuple[np.ndarray[Any, Any], Any]] = []

    def place(self, value: Any) -> Any:
        """Return a value with its arrays on the device."""
        return _map(value, self._input)

    def place_out(self, value: Any) -> Any:
        """The same for what the op writes; it must be writable, and share bytes only with a view like itself."""
        return _map(value, self._output)

    def bring_back(self) -> None:
        """Copy what was written to the host's arrays."""
        for target, placed in self._outputs:
            target[...] = fetch(self._device, placed)

    def _input(self, item: Any) -> Any:
        if not _is_array(item):
            return item
        array = _host(item)
        self._inputs.append((array, send(self._device, array)))
        return self._inputs[-1][1]

    def _output(self, item: Any) -> Any:
        array = _host(item)
        if not array.flags.writeable:
            raise LayoutError("out is read-only")
        placed = None
        for other, there in self._inputs:
            if same_view(array, other):
                placed = there
            elif overlap(array, other):
                raise LayoutError("out shares memory with an input; give it memory of its own")
        self._outputs.append((array, send(self._device, array) if placed is None else placed))
        return self._outputs[-1][1]


def _holds_rows(value: Any) -> bool:
    if isinstance(value, RowLayout):
        return True
    return isinstance(value, (list, tuple)) and any(map(_holds_rows, value))


def _map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply a function to the arrays in a value: tuples with names keep theirs, None stays None."""
    if value is None:
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, leaf) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, leaf) for item in value)
    if isinstance(value, dict):
        return {name: _map(item, leaf) for name, item in value.items()}
    return leaf(value)


def _is_array(item: Any) -> bool:
    known = isinstance(item, (ArrayRef, *_BUFFERS))
    return known or hasattr(item, "__array_interface__") or hasattr(item, "__dlpack__")


def _host(item: Any) -> np.ndarray[Any, Any]:
    """Return an array of the host as ops of the host take it: buffers of bytes too."""
    return np.frombuffer(item, np.uint8) if isinstance(item, _BUFFERS) else host_array(item)
