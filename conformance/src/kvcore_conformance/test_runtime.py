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
from kvcore.dtypes import to_dtype
from kvcore.errors import LayoutError, LeaseError, OutOfMemoryError, SlotError, UnsupportedOpError
from kvcore.ops import fetch
from kvcore_conformance.arena import arenas, pattern, place, root
from kvcore_conformance.checks import Subject
from kvcore_conformance.layouts import bound
from kvcore_conformance.placement import Placement

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
def test_arrays_are_taken_without_a_copy(subject: Subject, runtime: Any, dtype: str) -> None:
    array = place(pattern(96).view(to_dtype(dtype))[:12].reshape(3, 4), gaps=(1, 0))
    there = Placement(subject.backend, [root(array)]).over(array)
    native = runtime.array(there)
    assert (native.shape, native.dtype, native.strides) == (array.shape, array.dtype, array.strides)
    assert ArrayRef.of(native).address == ArrayRef.of(there).address
    fresh = runtime.empty((2, 3), to_dtype(dtype))
    assert (tuple(fresh.shape), fresh.dtype) == ((2, 3), to_dtype(dtype))


def test_memory_of_others_is_refused(subject: Subject, runtime: Any) -> None:
    with pytest.raises(LayoutError):
        runtime.array(ArrayRef.at(4096, (3,), "uint8", device="elsewhere:0"))
    if "cpu" not in subject.backend.spec.device_types:
        with pytest.raises(LayoutError):
            runtime.array(np.zeros(3, np.uint8))


# --- streams and events. Whatever the backend does late, an answer is there when it was waited for.


def test_events_order_streams(subject: Subject, runtime: Any) -> None:
    subject.require("copy_batch")
    first, second = runtime.stream(), runtime.stream()
    host, back = place(pattern(1000)), place(np.zeros(1000, np.uint8))
    links = [runtime.empty((1000,), np.dtype(np.uint8)) for _ in range(6)]
    subject.backend.copy_batch([host], out=[links[0]], stream=first)
    turns = (second, first)
    for i, stream in enumerate((*turns, *turns, second)):
        runtime.wait(runtime.record(turns[1 - i % 2]), stream)
        subject.backend.copy_batch([links[i]], out=[links[i + 1]], stream=stream)
    runtime.wait(runtime.record(second))  # the stream of those that name none
    subject.backend.copy_batch([links[5]], out=[back])
    runtime.synchronize()
    assert back.tobytes() == host.tobytes(), "runtime: an event did not order two streams"
    for stream in (first, second, None):
        runtime.check(stream)


def test_an_event_says_nothing_of_what_is_queued_after_it(subject: Subject, runtime: Any) -> None:
    subject.require("copy_batch")
    first, second = runtime.stream(), runtime.stream()
    values, there = [place(pattern(500, i)) for i in range(3)], runtime.empty((500,), np.dtype(np.uint8))
    outs = [place(np.zeros(500, np.uint8)) for _ in range(2)]
    subject.backend.copy_batch([values[0]], out=[there], stream=first)
    event = runtime.record(first)
    runtime.wait(event, second)
    subject.backend.copy_batch([there], out=[outs[0]], stream=second)
    runtime.wait(runtime.record(second), first)
    subject.backend.copy_batch([values[1]], out=[there], stream=first)
    runtime.wait(event, second)  # reached long ago
    subject.backend.copy_batch([values[2]], out=[outs[1]], stream=second)
    runtime.synchronize(second)
    assert outs[0].tobytes() == values[0].tobytes(), "runtime: a copy was overtaken by one that waited for it"
    assert outs[1].tobytes() == values[2].tobytes()
    runtime.synchronize(first)


def test_what_queued_work_uses_lives_until_it_is_done(subject: Subject, runtime: Any) -> None:
    subject.require("copy_batch")
    stream, targets = runtime.stream(), []
    for i in range(20):
        source = np.array(pattern(4096, i))
        middle = runtime.empty((4096,), np.dtype(np.uint8))
        targets.append(runtime.empty((4096,), np.dtype(np.uint8)))
        subject.backend.copy_batch([source], out=[middle], stream=stream)
        subject.backend.copy_batch([middle], out=[targets[-1]], stream=stream)
        del source, middle
    reuse = [(np.zeros(4096, np.uint8), runtime.empty((4096,), np.dtype(np.uint8))) for _ in range(20)]
    runtime.check(stream)
    backs = [np.array(fetch(subject.backend, target)) for target in targets]
    assert [b.tobytes() for b in backs] == [pattern(4096, i).tobytes() for i in range(20)], "runtime: freed too early"
    assert len(reuse) == 20


def test_an_error_is_raised_once_by_its_own_stream(subject: Subject, runtime: Any) -> None:
    for op in ("copy_batch", "gather_paged"):
        subject.require(op, dtype="float16", layout="L|KBNHD")
    cache = bound("L|KBNHD", {"L": 1, "B": 2, "N": 4, "H": 1, "D": 8}, {"": "float16"})
    chunk = bound("LKTHD", {"L": 1, "T": 3, "H": 1, "D": 8}, {"": "float16"}, seed=1)
    index = place(np.array([1, 8, 2], np.int64))
    where = Placement(subject.backend, arenas([cache, chunk, index]))
    args = where.over(cache), where.over(index), where.over(chunk)
    wrong, other = runtime.stream(), runtime.stream()
    a, b = (runtime.empty((100,), np.dtype(np.uint8)) for _ in range(2))
    subject.backend.copy_batch([np.zeros(100, np.uint8)] * 2, out=[a, b], stream=wrong)

    def queue() -> None:
        subject.backend.gather_paged(args[0], args[1], out=args[2], stream=wrong)
        subject.backend.copy_batch([np.ones(100, np.uint8)], out=[a], stream=other)
        subject.backend.copy_batch([a], out=[b], stream=wrong)  # does not run: something is wrong on its stream
        runtime.check(other)
        runtime.check(wrong)

    before = [m.tobytes() for m in arenas([chunk])]
    with pytest.raises(SlotError):
        queue()
    runtime.check(wrong)
    assert not fetch(subject.backend, b).any(), "runtime: an op ran after one that failed on its stream"
    where.back()
    assert [m.tobytes() for m in arenas([chunk])] == before, "runtime: an op that failed has written"
    subject.backend.copy_batch([np.full(100, 7, np.uint8)], out=[b], stream=wrong)
    runtime.check(wrong)
    assert fetch(subject.backend, b).tolist() == [7] * 100
