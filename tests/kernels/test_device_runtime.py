"""The runtime of devices, on a vendor that is not part of kvcore (`vendor/fakevendor`) and whose streams are late."""

from __future__ import annotations

import ctypes
import gc
import mmap
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvcore
from kvcore.arrays import ArrayRef
from kvcore.codecs.tables import table_set
from kvcore.errors import (
    BackendLoadError,
    ConfigError,
    DeviceError,
    LayoutError,
    LeaseError,
    OutOfMemoryError,
    QuantizationError,
    UnsupportedOpError,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

VENDOR = Path(__file__).parent / "vendor"
UINT8 = np.dtype(np.uint8)
FREED = 0xDD


def put(backend, array, stream=None):
    there = backend.runtime.empty(array.shape, array.dtype)
    flat = ArrayRef.at(there.address, (array.nbytes,), "uint8", device=there.device, owner=there)
    backend.copy_batch([array.reshape(-1).view(np.uint8)], out=[flat], stream=stream)
    return there


def fetch(backend, there, stream=None):
    host = np.empty(there.shape, there.dtype)
    flat = ArrayRef.at(there.address, (host.nbytes,), "uint8", device=there.device, owner=there)
    backend.copy_batch([flat], out=[host.reshape(-1).view(np.uint8)], stream=stream)
    backend.runtime.synchronize(stream)
    return host


def torch_stream(machine, ordinal, kind="fake"):
    """What torch's stream objects say about themselves, for a stream of this vendor."""
    device = SimpleNamespace(type=kind, index=ordinal)
    return SimpleNamespace(cuda_stream=machine.stream(ordinal), device=device)


# --- the vendor


@pytest.mark.parametrize("options", ["", "-DFAKEVENDOR_ARGUMENTS_IN_MEMORY=true"])
def test_the_next_vendor_conforms(options, monkeypatch):
    """What it wrote is a driver and a few names; kvcore is as it was."""
    monkeypatch.setenv("PYTHONPATH", str(VENDOR))
    monkeypatch.setenv("FAKEVENDOR_OPTIONS", options)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--pyargs", "kvcore_conformance"),
        *("--kvcore-backend", "fakevendor:backend", "--kvcore-profile", "quick"),
        *("--kvcore-ops", "pack_bits,count_symbols,copy_batch,rotate" if options else "dequantize,reduce_norm,digest"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=VENDOR)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_a_driver_that_is_not_there_is_a_backend_that_does_not_load(fake):
    library = fake.runtime.library
    with pytest.raises(BackendLoadError, match=r"driver_open: libnothere\.so is no driver"):
        type(library)(library.path, "fake", driver="libnothere.so", image=lambda *_: b"", tuning=None)


def test_an_image_that_the_driver_refuses_is_said_with_the_device(fake):
    library = fake.runtime.library
    code = (
        "import fakevendor.device as d, dataclasses\n"
        "d.image = lambda *_: b'of another vendor'\n"
        "import kvcore; from kvcore.kernels.device_runtime import DeviceRuntime\n"
        "library = d.device()\n"
        "DeviceRuntime(library, lambda: None)\n"
        "library.load(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=VENDOR)
    assert "BackendLoadError: fake:1 (Fake 1, fake32) does not take the kernels" in done.stderr, done.stderr
    assert "the image is of no known kind" in done.stderr
    assert library.info(1).name == "Fake 1"
    with pytest.raises(DeviceError, match="there is no device 2; the driver shows 2"):
        library.info(2)


# --- streams


def test_work_is_queued_and_what_it_uses_is_kept_until_it_is_done(fake, machine):
    fake.runtime.synchronize()  # there is a default stream from now on
    stream, before = fake.runtime.stream(), machine.in_use()
    source = put(fake, np.arange(10_000, dtype=np.uint8), stream)
    target = fake.runtime.empty((10_000,), UINT8)
    fake.copy_batch([source], out=[target], stream=stream)
    address = source.address
    del source
    gc.collect()
    assert (ctypes.c_uint8 * 1).from_address(address)[0] != FREED
    assert fetch(fake, target, stream).tolist() == np.arange(10_000, dtype=np.uint8).tolist()
    del target
    gc.collect()
    del stream
    fake.runtime.empty((0,), UINT8)  # memory is freed on a stream as well, that of allocations
    gc.collect()
    assert machine.in_use() < before


def test_a_stream_that_is_behind_keeps_all_and_lets_go_as_it_moves_on(fake):
    stream = fake.runtime.stream()
    there = put(fake, np.ones(8, np.uint8), stream)
    kept = [np.zeros(8, np.uint8) for _ in range(40)]
    references = [sys.getrefcount(array) for array in kept]
    for array in kept:
        fake.copy_batch([there], out=[array], stream=stream)
    del array
    now = [sys.getrefcount(array) for array in kept]
    assert now[-1] > references[-1]  # the last one is still to come
    assert now[0] == references[0]  # though nobody waited
    stream.synchronize()
    assert [sys.getrefcount(array) for array in kept] == references
    assert all(array.all() for array in kept)


def test_a_dropped_stream_finishes_its_work(fake):
    stream, back = fake.runtime.stream(), np.zeros(10, np.uint8)
    fake.copy_batch([put(fake, np.arange(10, dtype=np.uint8), stream)], out=[back], stream=stream)
    del stream
    gc.collect()
    assert back.tolist() == list(range(10))


def test_many_uploads_of_one_stream_do_not_overtake_one_another(fake):
    """Arguments go through a ring of 1 MiB; here are several of it, none of which has been read when the next comes."""
    stream, sources, targets = fake.runtime.stream(), [], []
    count = 3000
    base = put(fake, np.arange(count, dtype=np.uint8), stream)
    for turn in range(20):
        order = [(i * 7 + turn) % count for i in range(count)]
        target = fake.runtime.empty((count,), UINT8)
        parts = [ArrayRef.at(base.address + i, (1,), "uint8", device="fake:0", owner=base) for i in order]
        spread = [ArrayRef.at(target.address + i, (1,), "uint8", device="fake:0", owner=target) for i in range(count)]
        fake.resolve("copy_batch")(parts, out=spread, stream=stream)
        sources.append([i % 256 for i in order])
        targets.append(target)
    stream.synchronize()
    assert [fetch(fake, t).tolist() for t in targets] == sources


def test_events_order_streams(fake):
    first, second = fake.runtime.stream(), fake.runtime.stream()
    there, back = put(fake, np.ones(64, np.uint8), first), np.zeros(64, np.uint8)
    event = fake.runtime.record(first)
    assert not event.passed()
    fake.runtime.wait(event, second)
    fake.copy_batch([there], out=[back], stream=second)
    fake.runtime.synchronize(second)
    assert back.all()
    assert event.passed()
    event.synchronize()
    with pytest.raises(ConfigError, match="is no event of this backend"):
        fake.runtime.wait(object(), second)


def test_without_a_stream_ops_go_to_torch_s_current_one(fake, machine):
    native = machine.stream(0)
    fake.runtime.torch = (0, native)
    there = put(fake, np.arange(5, dtype=np.uint8))
    assert machine.waiting(native) > 0
    fake.runtime.synchronize()
    assert machine.waiting(native) == 0
    assert fetch(fake, there).tolist() == [0, 1, 2, 3, 4]
    found = [fake.runtime.library.resolve(None) for _ in range(2)]
    assert found[0] is found[1]  # one status, one list of what is held
    fake.runtime.torch = None
    assert fake.runtime.library.resolve(None) is not None
    fake.copy_batch([there], out=[np.zeros(5, np.uint8)])
    assert machine.waiting(native) == 0
    fake.runtime.synchronize()


def test_what_was_queued_before_torch_began_comes_first(fake, machine):
    there, back = put(fake, np.arange(5, dtype=np.uint8)), np.zeros(5, np.uint8)
    fake.runtime.synchronize()
    fake.copy_batch([there], out=[back])
    assert not back.any()
    fake.runtime.torch = (0, machine.stream(0))
    fake.runtime.record()
    assert back.tolist() == [0, 1, 2, 3, 4]


def test_torch_s_streams_are_taken_and_others_refused(fake, machine):
    stream = torch_stream(machine, 0)
    there = put(fake, np.arange(5, dtype=np.uint8), stream)
    assert machine.waiting(stream.cuda_stream) > 0
    fake.runtime.check(stream)
    fake.runtime.wait(fake.runtime.record(stream), stream)
    assert fetch(fake, there, stream).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"is a int, and no stream; take one from the backend's runtime\.stream\(\)"):
        fake.runtime.check(7)
    with pytest.raises(ConfigError, match=r"the stream is one of .*type='cuda'.*; this backend has fake:0, fake:1"):
        fake.runtime.check(torch_stream(machine, 0, "cuda"))
    with pytest.raises(DeviceError, match="no stream of this device"):
        fake.runtime.check(SimpleNamespace(cuda_stream=12345, device=SimpleNamespace(type="fake", index=1)))


def test_threads_share_a_stream_and_have_their_own(fake):
    failed, shared = [], fake.runtime.stream()

    def work(number):
        for turn in range(15):
            stream = shared if turn % 2 else fake.runtime.stream()
            values = np.random.default_rng(100 * number + turn).integers(0, 256, 3000, np.uint8)
            copy, back = fake.runtime.empty((3000,), UINT8), np.empty(3000, np.uint8)
            fake.copy_batch([put(fake, values, stream)], out=[copy], stream=stream)
            fake.copy_batch([copy], out=[back], stream=stream)
            fake.runtime.check(stream)
            if (back != values).any():
                failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# --- several devices


def test_a_device_is_chosen_by_on_and_by_streams(fake):
    with fake.runtime.on(1):
        stream = fake.runtime.stream()
        there = put(fake, np.full((4, 8), 3, np.float32))
        assert there.device == "fake:1"
        absmax = fake.reduce_absmax(there, 1)
        assert fetch(fake, absmax).tolist() == [[3]] * 4
    assert fake.runtime.empty((1,), UINT8).device == "fake:0"
    with fake.runtime.on("fake:1"):
        out = fake.runtime.empty((4, 1), np.dtype(np.float32))
    fake.reduce_absmax(there, 1, out=out, stream=stream)
    assert fetch(fake, out, stream).tolist() == [[3]] * 4
    with pytest.raises(ConfigError, match="there is no device 'fake:2'; this backend has fake:0, fake:1"):
        fake.runtime.on(2)


def test_an_array_of_another_device_than_the_stream_s_is_refused(fake):
    with fake.runtime.on(1):
        there = put(fake, np.ones((4, 8), np.float32))
        out = fake.runtime.empty((4, 1), np.dtype(np.float32))
    with pytest.raises(
        LayoutError, match=r"reduce_absmax: an array is memory of fake:1, and the stream is one of fake:0"
    ):
        fake.reduce_absmax(there, 1, out=out)
    here = fake.runtime.empty((4, 8), np.dtype(np.float32))
    flat, target = (ArrayRef.at(a.address, (128,), "uint8", device=a.device, owner=a) for a in (there, here))
    fake.copy_batch([flat], out=[target])  # copies cross
    assert fetch(fake, here).all()


def test_rows_in_host_memory_are_refused_before_a_kernel_reads_them(fake):
    cache = kvcore.Layout("BNHD").bind(np.zeros((2, 4, 1, 8), np.float16))
    chunk = kvcore.Layout("THD").bind(np.zeros((1, 1, 8), np.float16))
    with pytest.raises(LayoutError, match="gather_paged: an array is memory of cpu"):
        fake.gather_paged(cache, put(fake, np.array([0])), out=chunk)


def test_tables_are_on_the_device_that_uses_them(fake):
    tables = table_set("gauss")
    library = fake.runtime.library
    first = library.tables(tables)
    with fake.runtime.on(1):
        second = library.tables(tables)
    assert library.tables(tables) is first
    assert first is not second
    assert first.handle != second.handle


# --- arrays


def test_memory_of_others_is_refused(fake):
    for array, where in ((np.zeros(3), "cpu"), (ArrayRef.at(64, (3,), "uint8", device="fake:2"), "fake:2")):
        with pytest.raises(LayoutError, match=f"memory on {where} cannot be reached from here, .* fake:0, fake:1"):
            fake.runtime.array(array)
    array = fake.runtime.empty((2, 3), np.dtype(np.int32))
    assert fake.runtime.array(array) is array
    assert (array.shape, array.strides, array.device, array.readonly) == ((2, 3), (12, 4), "fake:0", False)
    with pytest.raises(LayoutError, match="cannot be negative"):
        fake.runtime.empty((-1, -2), UINT8)


@pytest.mark.parametrize("shape", [(2**34,), (2**40, 2**40)])
def test_more_memory_than_there_is(fake, shape):
    with pytest.raises(OutOfMemoryError, match=r"fake:0 has no \d+ B"):
        fake.runtime.empty(shape, UINT8)


def test_out_of_memory_says_what_there_is(fake):
    with pytest.raises(OutOfMemoryError, match=rf"it has {1 << 30} B in all, .*free arrays first .* B are free"):
        fake.runtime.empty((2**34,), UINT8)


def test_memory_that_only_queued_work_uses_is_waited_for_before_an_allocation_fails(fake, machine):
    stream, nbytes = fake.runtime.stream(), 1_000_000
    there = fake.runtime.empty((nbytes,), UINT8)
    fake.copy_batch([there], out=[np.zeros(nbytes, np.uint8)], stream=stream)
    machine.limit(machine.in_use() + nbytes // 2)
    with pytest.raises(OutOfMemoryError):
        fake.runtime.empty((nbytes,), UINT8)  # somebody has it
    fake.copy_batch([there], out=[np.zeros(nbytes, np.uint8)], stream=stream)
    del there
    assert fake.runtime.empty((nbytes,), UINT8).shape == (nbytes,)


def test_a_stream_that_there_is_no_memory_for_leaves_nothing(fake, machine):
    fake.runtime.synchronize()
    before = machine.streams(), machine.in_use()
    machine.refuse_allocation(1)
    with pytest.raises(OutOfMemoryError, match="stream_create: the driver has no memory left"):
        fake.runtime.stream()
    assert (machine.streams(), machine.in_use()) == before


# --- failures


def batches(fake):
    """Ops that need memory of their own, with what they write."""
    values = put(fake, np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32))
    out = put(fake, np.full((1, 512), 7, np.float32))
    yield "reduce_absmax", out, lambda: fake.reduce_absmax(values, 0, out=out)
    stored = put(fake, np.full((64, 4, 1, 8), 7, np.float16))
    cache = kvcore.Layout("BNHD").bind(stored)
    chunk = kvcore.Layout("THD").bind(put(fake, np.ones((256, 1, 8), np.float16)))
    index = put(fake, np.arange(256)[::-1].copy())
    yield "scatter_paged", stored, lambda: fake.scatter_paged(chunk, index, out=cache)
    count = 25_000  # more than the ring for uploads takes
    ones, whole = put(fake, np.ones(9 * count, np.uint8)), put(fake, np.full(9 * count, 7, np.uint8))
    sources, targets = (
        [ArrayRef.at(there.address + 9 * i, (9,), "uint8", device="fake:0", owner=there) for i in range(count)]
        for there in (ones, whole)
    )
    digests = fake.runtime.empty((len(sources),), np.dtype(np.uint64))
    yield "copy_batch", whole, lambda: fake.resolve("copy_batch")(sources, digests=digests, out=targets)


def test_without_memory_in_mid_batch_nothing_is_written(fake, machine):
    for op, out, run in batches(fake):
        fake.runtime.check()
        before, refused = fetch(fake, out).tobytes(), 0
        for which in range(1, 50):
            machine.refuse_allocation(which)
            try:
                run()
                break
            except OutOfMemoryError as error:
                said = str(error)
            assert said == f"{op} was not launched: the driver has no memory left"
            refused += 1
            assert fetch(fake, out).tobytes() == before
        machine.refuse_allocation(0)
        assert refused > 0, op
        fake.runtime.check()
        run()
        assert fetch(fake, out).tobytes() != before


def test_a_failing_kernel_surfaces_at_the_next_wait_and_names_the_ops(fake, machine):
    stream = fake.runtime.stream()
    values, out = put(fake, np.ones((4, 8), np.float32), stream), fake.runtime.empty((4, 1), np.dtype(np.float32))
    fake.runtime.check(stream)
    fake.reduce_absmax(values, 1, out=out, stream=stream)
    fake.copy_batch([np.ones(8, np.uint8)], out=[fake.runtime.empty((8,), UINT8)], stream=stream)
    machine.fail_kernel(1)  # one of reduce_absmax that is still to come
    for wait in (stream.synchronize, stream.check):
        with pytest.raises(
            DeviceError, match=r"a kernel used memory that it has not; queued .*: reduce_absmax, copy_batch"
        ):
            wait()


def test_ops_on_a_failed_device_say_so_and_name_those_before(fake, machine):
    values, out = put(fake, np.ones((4, 8), np.float32)), fake.runtime.empty((4, 8), np.dtype(np.float32))
    fake.runtime.check()
    machine.fail_kernel(1)
    fake.reduce_absmax(values, 1)
    with pytest.raises(DeviceError, match="queued since the last check: reduce_absmax"):
        fake.runtime.synchronize()
    with pytest.raises(DeviceError, match=r"rotate was not launched: a kernel used .*check: reduce_absmax$"):
        fake.rotate(values, seed=1, block=8, out=out)


def test_data_that_are_wrong_are_named_by_ops_that_look_at_them(fake):
    bad = put(fake, np.full((4, 1), np.nan, np.float32))
    fake.reduce_absmax(bad, 1)
    with pytest.raises(QuantizationError, match=r"^reduce_absmax: element 0"):
        fake.runtime.check()
    fake.runtime.check()


# --- host memory


def test_pinned_memory_is_the_driver_s_until_it_is_freed(fake, machine):
    before = machine.registered()
    buffer = fake.runtime.alloc_host(10_000, pinned=True, shared_name=None)
    assert buffer.granted == {"pinned": "yes"}
    assert machine.registered() == before + 1
    stream = fake.runtime.stream()
    fake.copy_batch([put(fake, np.ones(100, np.uint8), stream)], out=[buffer.array[:100]], stream=stream)
    with pytest.raises(LeaseError, match="views of it are in use"):
        buffer.free()  # the copy is still to come
    assert machine.registered() == before + 1
    stream.synchronize()
    assert buffer.array[:100].all()
    buffer.free()
    assert machine.registered() == before
    dropped = fake.runtime.alloc_host(100, pinned=True)
    view = dropped.array[3:5]
    del dropped
    assert machine.registered() == before + 1
    del view
    assert machine.registered() == before


def test_a_pin_that_the_driver_refuses_is_answered(fake, monkeypatch):
    def refuse(name, *args):
        raise OutOfMemoryError(f"{name}: nothing can be pinned")

    monkeypatch.setattr(fake.runtime.library, "call", refuse)
    buffer = fake.runtime.alloc_host(100, pinned=True)
    assert buffer.granted == {"pinned": "no: host_register: nothing can be pinned"}
    buffer.free()


@pytest.mark.parametrize("kind", ["numpy", "torch", "mmap", "bytearray"])
def test_foreign_memory_is_registered_once_for_all_who_ask(fake, machine, kind):
    before = machine.registered()
    memory = {
        "numpy": lambda: np.zeros((10, 100), np.float32)[::2],
        "torch": lambda: torch.zeros(1000),
        "mmap": lambda: mmap.mmap(-1, 8192),
        "bytearray": lambda: bytearray(8192),
    }[kind]()
    first, second = fake.runtime.register_host(memory), fake.runtime.register_host(memory)
    assert machine.registered() == before + 1
    fake.runtime.unregister_host(first)
    assert machine.registered() == before + 1
    with pytest.raises(LeaseError, match="unregistered twice"):
        fake.runtime.unregister_host(first)
    del second  # which undoes it as well
    assert machine.registered() == before


def test_memory_that_cannot_be_registered(fake):
    array = np.zeros(1000, np.uint8)
    handle = fake.runtime.register_host(array)
    with pytest.raises(DeviceError, match="part of the memory is registered already"):
        fake.runtime.register_host(array[10:])
    fake.runtime.unregister_host(handle)
    for memory in (np.zeros((0, 3)), fake.runtime.empty((3,), UINT8), "text", 7):
        with pytest.raises(LayoutError):
            fake.runtime.register_host(memory)


# --- other processes

CHILD = """
import pickle, sys, numpy as np, fakevendor.ops, fakevendor.device
from fakevendor.runtime import Runtime
from kvcore.arrays import ArrayRef
from kvcore.codecs.tables import table_set
runtime = Runtime()
buffer, late = pickle.load(sys.stdin.buffer)
array = runtime.import_buffer(buffer)
again = runtime.import_buffer(buffer)
assert again.address == array.address
dll = runtime.library.dll
print(array.device, array.shape, array.strides, array.dtype, dll.fake_imported())
host = np.zeros(24, np.uint8)
flat = ArrayRef.at(array.address, (24,), "uint8", device=array.device, owner=array)
stream = runtime.stream()
event = runtime.import_event(late)
print(event.passed(), flush=True)
sys.stdin.buffer.readline()
runtime.wait(event, stream)
fakevendor.ops.kvcore_op_copy_batch([flat], out=[host], stream=stream)
del array, again, flat
print(dll.fake_imported())  # queued work still uses it
stream.synchronize()
print(host.tolist(), event.passed(), dll.fake_imported())
"""


def test_another_process_reads_the_memory_when_the_event_says_so(fake):
    there = put(fake, np.zeros((5, 6), np.float32))
    fake.runtime.synchronize()
    part = ArrayRef(there.address + 24, (2, 3), (24, 4), there.dtype, there.device, False, there)
    stream = fake.runtime.stream()
    row = ArrayRef.at(there.address + 24, (24,), "uint8", device=there.device, owner=there)
    fake.copy_batch([np.arange(24, dtype=np.uint8)], out=[row], stream=stream)
    event = fake.runtime.record(stream, shared=True)
    handles = pickle.dumps((fake.runtime.export_buffer(part), fake.runtime.export_event(event)))
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, stderr=-1, cwd=VENDOR)
    child.stdin.write(handles)
    child.stdin.flush()
    assert child.stdout.readline().decode().split(" (")[0] == "fake:0"
    assert child.stdout.readline() == b"False\n"
    fake.runtime.synchronize(stream)
    out, errors = child.communicate(b"\n", timeout=60)
    assert out.decode().splitlines() == ["1", f"{list(range(24))} True 0"], errors.decode()[-2000:]


def test_what_is_not_shared(fake):
    there = fake.runtime.empty((4,), UINT8)
    with pytest.raises(LeaseError, match="exported by this process"):
        fake.runtime.import_buffer(fake.runtime.export_buffer(there))
    with pytest.raises(UnsupportedOpError, match="record it with shared=True"):
        fake.runtime.export_event(fake.runtime.record())
    with pytest.raises(LayoutError, match="without elements"):
        fake.runtime.export_buffer(fake.runtime.empty((0,), UINT8))
    with pytest.raises(LayoutError, match="memory on cpu cannot be reached"):
        fake.runtime.export_buffer(np.zeros(3))


def test_handles_that_say_too_much_are_refused(fake):
    from dataclasses import replace

    handle = replace(fake.runtime.export_buffer(fake.runtime.empty((4,), UINT8)), process=0)
    with pytest.raises(LayoutError, match=r"bytes 0 \.\. 5 of 4, is outside"):
        fake.runtime.import_buffer(replace(handle, shape=(5,)))
    with pytest.raises(LayoutError, match="is outside"):
        fake.runtime.import_buffer(replace(handle, strides=(-1,)))
    with pytest.raises(ConfigError, match="there is no device 'fake:9'"):
        fake.runtime.import_buffer(replace(handle, device="fake:9"))
    with pytest.raises(LayoutError, match="has 64 B, this one 3 B"):
        fake.runtime.import_buffer(replace(handle, handle=b"abc"))


def test_host_buffers_are_shared_by_name_as_on_hosts(fake):
    from kvcore.runtime import unique_shared_name

    buffer = fake.runtime.alloc_host(100, pinned=True, shared_name=unique_shared_name())
    guest = fake.runtime.import_buffer(fake.runtime.export_buffer(buffer))
    buffer.array[7] = 5
    assert guest.array[7] == 5
    guest.free()
    buffer.free()
