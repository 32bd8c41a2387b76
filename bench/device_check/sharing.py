"""Memory and events between processes: what one exports another imports, reads, writes and waits for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Forbidden, Recorder, pattern, same
from kvcore import Backend
from kvcore.errors import KVCoreError
from kvcore.ops import fetch, send
from kvcore.runtime import unique_shared_name

_UINT8 = np.dtype(np.uint8)
_WAIT_S = 60.0


def run(given: Given, recorder: Recorder) -> None:
    """Run all checks."""
    backend, nbytes = given.open(), 10_000 if given.small else 64 << 20
    recorder.check("host memory", partial(_host_memory, given, backend, nbytes))
    recorder.check("device memory", partial(_device_memory, given, backend, nbytes))
    recorder.check("a part of an allocation", partial(_part, given, backend, nbytes))
    recorder.check("events", partial(_events, given, backend, nbytes))


def _host_memory(given: Given, backend: Backend, nbytes: int) -> str:
    try:
        buffer = backend.runtime.alloc_host(nbytes, shared_name=unique_shared_name("kvcore-check"))
    except KVCoreError as error:  # containers have little of it, or none
        raise Forbidden(f"no shared memory here: {error}") from error
    buffer.array[:] = pattern(nbytes, 1)
    handle = backend.runtime.export_buffer(buffer)
    _with_child(given, _change_host, handle)
    same(buffer.array.tobytes() == pattern(nbytes, 2).tobytes(), True, "what the other process wrote is seen here")
    buffer.free()
    return f"{nbytes} B"


def _device_memory(given: Given, backend: Backend, nbytes: int) -> str:
    memory = send(backend, pattern(nbytes, 1))
    backend.runtime.check()
    handle = _exported(lambda: backend.runtime.export_buffer(memory))
    _with_child(given, _change_device, handle)
    found = fetch(backend, memory).tobytes()
    same(found == pattern(nbytes, 2).tobytes(), True, "what the other process wrote is seen here")
    return f"{nbytes} B"


def _part(given: Given, backend: Backend, nbytes: int) -> str:
    memory = send(backend, np.concatenate([np.zeros(4096, np.uint8), pattern(nbytes, 1)]))
    backend.runtime.check()
    handle = _exported(lambda: backend.runtime.export_buffer(memory[4096:]))
    _with_child(given, _change_device, handle)
    found = fetch(backend, memory)
    same(any(found[:4096]), False, "the other process wrote in front of what it got")
    same(found[4096:].tobytes() == pattern(nbytes, 2).tobytes(), True, "what the other process wrote is seen here")
    return ""


def _events(given: Given, backend: Backend, nbytes: int) -> str:
    """The other process reads memory behind an event that is recorded behind a lot of queued work."""
    runtime, stream, copies = backend.runtime, backend.runtime.stream(), 20 if given.small else 2000
    first, memory = send(backend, pattern(nbytes, 1)), send(backend, np.zeros(nbytes, np.uint8))
    middle = runtime.empty((nbytes,), _UINT8)
    runtime.check()
    handle = _exported(lambda: runtime.export_buffer(memory))
    probe = _exported(lambda: runtime.export_event(runtime.record(stream, shared=True)))
    if probe is None:
        raise Forbidden("events of this runtime are reached at once, and need no handle")

    def queue() -> Any:
        for _ in range(copies):
            backend.copy_batch([first], out=[middle], stream=stream)
        backend.copy_batch([middle], out=[memory], stream=stream)
        event = runtime.record(stream, shared=True)
        return event, runtime.export_event(event)

    _with_child(given, _read_behind, handle, queue, lambda: runtime.check(stream))
    return f"behind {copies} copies of {nbytes} B"


def _exported(export: Callable[[], Any]) -> Any:
    try:
        return export()
    except KVCoreError as error:
        raise Forbidden(f"cannot be exported here: {error}") from error


def _with_child(
    given: Given,
    work: Callable[[Connection, str, Any], None],
    handle: Any,
    queue: Callable[[], tuple[Any, Any]] | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Run work in another process, and take its answer.

    One that is ready for an event gets it from `queue`, which returns the event and its handle. When it has queued its
    own work behind that, `finish` waits here for what the event stands behind.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, given.backend, handle), daemon=True)
    process.start()
    there.close()
    event = None
    try:
        answer = _answer(here)
        if answer == "ready" and queue is not None:
            event, exported = queue()
            here.send(exported)
            answer = _answer(here)
        if answer == "queued":
            finish()
            answer = _answer(here)
        if answer.startswith("forbidden: "):
            raise Forbidden(answer.removeprefix("forbidden: "))
        same(answer, "done", "answer of the other process")
        process.join(_WAIT_S)
        same(process.exitcode, 0, "exit status of the other process")
    finally:
        if process.is_alive():
            process.kill()
        here.close()
        del event  # kept until the other process is done with it


def _answer(pipe: Connection) -> str:
    if not pipe.poll(_WAIT_S):
        raise TimeoutError(f"the other process said nothing for {_WAIT_S:.0f} s")
    try:
        return str(pipe.recv())
    except EOFError:
        return "it ended without a word"


# --- in the other process


def _change_host(pipe: Connection, name: str, handle: Any) -> None:
    buffer = _opened(name).runtime.import_buffer(handle)
    _changed(pipe, buffer.array, lambda: buffer.array, lambda new: np.copyto(buffer.array, new))
    buffer.free()


def _change_device(pipe: Connection, name: str, handle: Any) -> None:
    backend = _opened(name)
    memory = _imported(pipe, lambda: backend.runtime.import_buffer(handle))
    if memory is None:
        return

    def write(new: Any) -> None:
        backend.copy_batch([new], out=[memory])
        backend.runtime.check()

    _changed(pipe, memory, lambda: fetch(backend, memory), write)


def _changed(pipe: Connection, memory: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    nbytes = memory.shape[0]
    found = np.array(read()).tobytes()
    if found != pattern(nbytes, 1).tobytes():
        pipe.send("found other bytes than were exported")
        return
    write(pattern(nbytes, 2))
    pipe.send("done")


def _read_behind(pipe: Connection, name: str, handle: Any) -> None:
    backend = _opened(name)
    memory = _imported(pipe, lambda: backend.runtime.import_buffer(handle))
    if memory is None:
        return
    pipe.send("ready")
    exported = pipe.recv()
    event = _imported(pipe, lambda: backend.runtime.import_event(exported))
    if event is None:  # said already
        return
    stream, found = backend.runtime.stream(), np.zeros(memory.shape, np.uint8)
    backend.runtime.wait(event, stream)
    backend.copy_batch([memory], out=[found], stream=stream)
    pipe.send("queued")
    backend.runtime.check(stream)
    right = found.tobytes() == pattern(memory.shape[0], 1).tobytes()
    pipe.send("done" if right else "read memory before the event was reached")


def _imported(pipe: Connection, get: Callable[[], Any]) -> Any:
    """Return what another process exported; where this machine forbids it, say so and return None."""
    try:
        return get()
    except KVCoreError as error:
        pipe.send(f"forbidden: cannot be imported here: {error}")
        return None


def _opened(name: str) -> Backend:
    from kvcore_conformance.run import open_named

    return open_named(name)
