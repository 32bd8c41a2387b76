"""A backend on one stream: for code that calls several ops and lets its caller choose where they are queued."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from kvcore.hookspecs import op_names
from kvcore.ops.backend import Backend
from kvcore.runtime import Runtime

__all__ = ["StreamBackend", "of_all_streams", "on_stream"]


def on_stream(backend: Backend, stream: Any) -> Backend:
    """Return a backend whose ops, waits and checks are those of a stream unless they name one: itself for None."""
    return backend if stream is None else StreamBackend(backend, stream)


def of_all_streams(backend: Backend) -> Backend:
    """Undo `on_stream`."""
    return backend.device if isinstance(backend, StreamBackend) else backend


class StreamBackend(Backend):
    """A backend of which one stream is the default.

    Parameters
    ----------
    device : Backend
    stream : stream
        Of the backend's runtime.
    """

    def __init__(self, device: Backend, stream: Any) -> None:
        super().__init__(device._linked, device.explain(), device._fallback, device._no_fallback)
        self.device = device
        self._stream = stream
        self._on_stream = cast(Runtime, _StreamRuntime(device.runtime, stream))

    @property
    def runtime(self) -> Runtime:
        """The backend's runtime, which waits for the stream."""
        return self._on_stream

    def fused(self, composite: str) -> Callable[..., Any] | None:
        """Return the backend's own implementation of a composite, on the stream, or None."""
        function = super().fused(composite)
        return None if function is None else functools.partial(function, stream=self._stream)


def _queued(op: str) -> Callable[..., Any]:
    method = getattr(Backend, op)

    @functools.wraps(method)
    def run(self: StreamBackend, *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        return method(self, *args, stream=self._stream if stream is None else stream, **kwargs)

    return run


for _op in op_names():
    setattr(StreamBackend, _op, _queued(_op))


class _StreamRuntime:
    """A runtime of which one stream is the default."""

    def __init__(self, runtime: Runtime, stream: Any) -> None:
        self._runtime, self._stream = runtime, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def synchronize(self, stream: Any = None) -> None:
        self._runtime.synchronize(self._or_own(stream))

    def check(self, stream: Any = None) -> None:
        self._runtime.check(self._or_own(stream))

    def record(self, stream: Any = None, *, shared: bool = False) -> Any:
        return self._runtime.record(self._or_own(stream), shared=shared)

    def wait(self, event: Any, stream: Any = None) -> None:
        self._runtime.wait(event, self._or_own(stream))

    def _or_own(self, stream: Any) -> Any:
        return self._stream if stream is None else stream
