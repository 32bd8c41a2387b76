"""The runtime beside the ops: host memory, what is granted, sharing between processes, streams and events."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvcore.arrays import ArrayRef
from kvcore.errors import LeaseError, OutOfMemoryError, UnsupportedOpError
from kvcore_conformance.arena import pattern, place
from kvcore_conformance.checks import Subject

pytestmark = pytest.mark.kvcore_op("runtime")

_CHILD = """
import sys
from kvcore_conformance.run import open_named
from kvcore.runtime import SharedName
runtime = open_named(sys.argv[1]).runtime
buffer = runtime.import_buffer(SharedName(sys.argv[2], int(sys.argv[3])))
assert buffer.array.tobytes() == bytes(i * 7 % 256 for i in range(buffer.nbytes)), "not what the parent wrote"
buffer.array[:] = 0x42
buffer.free()
"""


@pytest.fixture
def runtime(subject: Subject) -> Any:
    """The runtime of the backend under test."""
    return subject.backend.runtime


@pytest.fixture
def shared_name() -> str:
    """A name for shared memory that nobody else has."""
    return f"kvcore-suite-{os.getpid()}-{secrets.token_hex(6)}"


def test_it_names_its_architecture(runtime: Any) -> None:
    assert isinstance(runtime.arch, str)
    assert runtime.arch


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 4097, (2 << 20) + 1])
def test_host_memory_is_writable_and_page_aligned(runtime: Any, nbytes: int) -> None:
    buffer = runtime.alloc_host(nbytes)
    assert buffer.array.dtype == np.uint8
    assert buffer.nbytes == buffer.array.nbytes == nbytes
    assert ArrayRef.of(buffer.array).address % 4096 == 0
    assert buffer.granted == {}
    buffer.array[:] = pattern(nbytes)
    assert buffer.array.tobytes() == pattern(nbytes).tobytes()
    buffer.free()


@pytest.mark.parametrize("wish", [{"pinned": True}, {"hugepages": True}, {"numa_node": 0}], ids=lambda w: next(iter(w)))
def test_every_wish_is_answered(runtime: Any, wish: dict[str, Any]) -> None:
    buffer = runtime.alloc_host(10000, **wish)
    assert set(buffer.granted) == set(wish)
    for answer in buffer.granted.values():
        assert answer == "yes" or answer.isdigit() or (answer.startswith("no: ") and len(answer) > 4), answer
    assert buffer.nbytes == 10000
    buffer.array[:] = 1
    buffer.free()


def test_all_wishes_at_once(runtime: Any, shared_name: str) -> None:
    buffer = runtime.alloc_host(5000, pinned=True, hugepages=True, numa_node=0, shared_name=shared_name)
    assert set(buffer.granted) == {"pinned", "hugepages", "numa_node", "shared_name"}
    buffer.array[:] = 3
    buffer.free()


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_sizes_that_cannot_be_had(runtime: Any, nbytes: int) -> None:
    with pytest.raises(OutOfMemoryError):
        runtime.alloc_host(nbytes)


def test_freeing_twice(runtime: Any) -> None:
    buffer = runtime.alloc_host(100)
    buffer.free()
    with pytest.raises(LeaseError):
        buffer.free()


def test_freeing_under_a_view(runtime: Any) -> None:
    buffer = runtime.alloc_host(100)
    view = buffer.array[10:20]
    with pytest.raises(LeaseError):
        buffer.free()
    view[:] = 5
    assert buffer.array[10:20].tolist() == [5] * 10
    del view
    buffer.free()


def test_shared_memory_reaches_another_process(subject: Subject, runtime: Any, shared_name: str) -> None:
    buffer = runtime.alloc_host(1000, shared_name=shared_name)
    buffer.array[:] = np.arange(1000) * 7 % 256
    handle = runtime.export_buffer(buffer)
    assert (handle.name, handle.nbytes) == (shared_name, 1000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", _CHILD, subject.name, handle.name, str(handle.nbytes)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    assert buffer.array.tolist() == [0x42] * 1000, "what the other process wrote is not seen here"
    buffer.free()


def test_an_imported_buffer_is_the_same_memory(runtime: Any, shared_name: str) -> None:
    buffer = runtime.alloc_host(300, shared_name=shared_name)
    other = runtime.import_buffer(runtime.export_buffer(buffer))
    buffer.array[:] = 9
    assert other.array.tolist() == [9] * 300
    other.free()
    buffer.array[:] = 8  # freeing the import leaves the owner's memory alone
    again = runtime.import_buffer(runtime.export_buffer(buffer))
    assert again.array.tolist() == [8] * 300
    again.free()
    handle = runtime.export_buffer(buffer)
    buffer.free()
    with pytest.raises(FileNotFoundError):
        runtime.import_buffer(handle)


def test_a_taken_name_is_refused(runtime: Any, shared_name: str) -> None:
    buffer = runtime.alloc_host(100, shared_name=shared_name)
    with pytest.raises(FileExistsError):
        runtime.alloc_host(100, shared_name=shared_name)
    buffer.free()
    runtime.alloc_host(100, shared_name=shared_name).free()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "."])
def test_names_that_are_paths_are_refused(runtime: Any, name: str) -> None:
    with pytest.raises(UnsupportedOpError):
        runtime.alloc_host(100, shared_name=name)


def test_private_memory_is_not_exported(runtime: Any) -> None:
    buffer = runtime.alloc_host(100)
    with pytest.raises(UnsupportedOpError):
        runtime.export_buffer(buffer)
    buffer.free()


def test_foreign_memory_is_registered_and_let_go(runtime: Any) -> None:
    memory = place(pattern(4096))
    before = memory.tobytes()
    handle = runtime.register_host(memory)
    runtime.unregister_host(handle)
    assert memory.tobytes() == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int64"])
def test_arrays_are_taken_without_a_copy(runtime: Any, dtype: str) -> None:
    from kvcore.dtypes import to_dtype

    array = place(pattern(96).view(to_dtype(dtype))[:12].reshape(3, 4), gaps=(1, 0))
    native = runtime.array(array)
    assert (native.shape, native.dtype, native.strides) == (array.shape, array.dtype, array.strides)
    assert ArrayRef.of(native).address == ArrayRef.of(array).address
    fresh = runtime.empty((2, 3), to_dtype(dtype))
    assert (tuple(fresh.shape), fresh.dtype) == ((2, 3), to_dtype(dtype))


def test_ops_on_streams_wait_for_events(subject: Subject, runtime: Any) -> None:
    subject.require("copy_batch")
    first, second = runtime.stream(), runtime.stream()
    a, b, c = place(pattern(100)), place(np.zeros(100, np.uint8)), place(np.zeros(100, np.uint8))
    subject.backend.copy_batch([a], out=[b], stream=first)
    runtime.wait(runtime.record(first), second)
    subject.backend.copy_batch([b], out=[c], stream=second)
    runtime.synchronize(second)
    runtime.check(first)
    runtime.check(second)
    assert c.tobytes() == a.tobytes()
