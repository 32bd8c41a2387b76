"""Streams, events, memory and errors of the processor as a device; run by test_on_the_processor.py in a child process,
since SYCL's run-time compiler is one that may take its process with it."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import math
import subprocess
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.arrays import ArrayRef
from kvcore.errors import ConfigError, OutOfMemoryError, QuantizationError, SlotError, UnsupportedOpError
from kvcore.ops import fetch
from kvcore_conformance.run import open_named

UINT8 = np.dtype(np.uint8)

_QUEUES = """
#include <sycl/sycl.hpp>
extern "C" void *make(int in_order) {
    sycl::property_list properties;
    if (in_order) properties = {sycl::property::queue::in_order()};
    return new sycl::queue(sycl::device(sycl::cpu_selector_v), properties);
}
"""


@pytest.fixture(scope="module")
def cpu():
    return open_named("kvcore_xpu:cpu_device")


def flat(array):
    return ArrayRef.at(
        array.address, (math.prod(array.shape) * array.dtype.itemsize,), "uint8", device=array.device, owner=array.owner
    )


def put(backend, array, stream=None):
    there = backend.runtime.empty(array.shape, array.dtype)
    backend.copy_batch([array.reshape(-1).view(np.uint8)], out=[flat(there)], stream=stream)
    return there


def test_the_device_says_what_it_is(cpu):
    info = cpu.runtime.library.info(0)
    assert (info.arch, info.warp_width) == ("opencl-cpu", 32)
    assert info.name
    assert min(info.memory_bytes, info.units) > 0
    assert info.driver_version > 2000 * 1000


# --- order


def test_what_is_queued_on_a_stream_runs_in_order(cpu):
    stream = cpu.runtime.stream()
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    at = put(cpu, values, stream)
    for _ in range(20):
        then = cpu.runtime.empty(values.shape, UINT8)
        cpu.copy_batch([at], out=[then], stream=stream)
        at = then  # the last one is let go of while it is still read
    back = np.empty_like(values)
    cpu.copy_batch([at], out=[back], stream=stream)
    cpu.runtime.check(stream)
    assert (back == values).all()


def test_a_stream_waits_for_another_ones_event(cpu):
    writer, reader = cpu.runtime.stream(), cpu.runtime.stream()
    for turn in range(10):
        values = np.full(1 << 22, turn, np.uint8)
        there, back = cpu.runtime.empty(values.shape, UINT8), np.empty_like(values)
        cpu.copy_batch([put(cpu, values, writer)], out=[there], stream=writer)
        cpu.runtime.wait(cpu.runtime.record(writer), reader)
        cpu.copy_batch([there], out=[back], stream=reader)
        cpu.runtime.check(reader)
        assert (back == turn).all()


def test_threads_share_the_device(cpu):
    failed = []

    def work(number):
        stream = cpu.runtime.stream()
        for turn in range(10):
            values = np.random.default_rng(100 * number + turn).integers(0, 256, 30000, np.uint8)
            back = np.empty_like(values)
            cpu.copy_batch([put(cpu, values, stream)], out=[back], stream=stream)
            cpu.runtime.check(stream)
            if (back != values).any():
                failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --- memory


def test_what_queued_work_uses_outlives_its_last_name(cpu):
    stream, other = cpu.runtime.stream(), cpu.runtime.stream()
    values = np.arange(1 << 22, dtype=np.uint32)
    back = np.empty_like(values)
    there = put(cpu, values, stream)
    cpu.copy_batch([flat(there)], out=[back.view(np.uint8)], stream=stream)
    del there
    gc.collect()
    put(cpu, np.zeros_like(values), other)  # would be given the same memory
    cpu.runtime.check(stream)
    assert (back == values).all()


def test_memory_that_is_let_go_of_is_free_again(cpu):
    total = cpu.runtime.library.info(0).memory_bytes
    for _ in range(30):
        cpu.runtime.empty((total // 10,), UINT8)


def test_more_memory_than_there_is_is_refused(cpu):
    total = cpu.runtime.library.info(0).memory_bytes
    with pytest.raises(OutOfMemoryError, match=f"has no {16 * total} B"):
        cpu.runtime.empty((16 * total,), UINT8)
    assert fetch(cpu, put(cpu, np.arange(8, dtype=np.uint8))).tolist() == list(range(8))


def test_memory_and_events_are_not_for_other_processes(cpu):
    with pytest.raises(UnsupportedOpError, match="share a host buffer by name"):
        cpu.runtime.export_buffer(put(cpu, np.zeros(4, np.uint8)))
    with pytest.raises(UnsupportedOpError, match="share a host buffer by name"):
        cpu.runtime.record(shared=True)


def test_registered_memory_is_locked_and_let_go(cpu):
    def locked():
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck"))

    before = locked()
    memory = np.zeros(64 << 10, np.uint8)
    handle = cpu.runtime.register_host(memory)
    assert locked() >= before + 64
    cpu.runtime.unregister_host(handle)
    assert locked() == before


# --- errors


def test_an_error_names_its_op_and_is_told_once(cpu):
    cache = kvcore.Layout("BNHD").bind(put(cpu, np.zeros((2, 4, 1, 8), np.float16)))
    chunk = kvcore.Layout("THD").bind(put(cpu, np.ones((1, 1, 8), np.float16)))
    stream = cpu.runtime.stream()
    cpu.runtime.check()
    cpu.gather_paged(cache, put(cpu, np.array([8])), out=chunk)
    with pytest.raises(SlotError, match=r"gather_paged: entry 0 .*; nothing was written"):
        cpu.runtime.check()
    bad = put(cpu, np.full((4,), np.nan, np.float32), stream)
    cpu.quantize(bad, kvcore.QuantSpec.symmetric(8, (0,)), stream=stream)
    cpu.runtime.check()
    with pytest.raises(QuantizationError, match=r"quantize: element 0 .*is not finite"):
        cpu.runtime.check(stream)
    cpu.runtime.check(stream)


# --- queues of others, as torch has them


@pytest.fixture(scope="module")
def queues(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queues")
    (folder / "queues.cpp").write_text(_QUEUES)
    found = importlib.metadata.distribution("intel-sycl-rt")
    header = next(f for f in found.files if f.as_posix().endswith("include/sycl/sycl.hpp"))
    prefix = Path(found.locate_file(header)).resolve().parents[2]
    command = ["g++", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{prefix}/include", str(folder / "queues.cpp")]
    subprocess.run([*command, "-o", str(folder / "queues.so"), f"-L{prefix}/lib", "-lsycl"], check=True)
    library = ctypes.CDLL(str(folder / "queues.so"))
    library.make.restype = ctypes.c_void_p
    return lambda in_order: types.SimpleNamespace(
        sycl_queue=library.make(in_order), device=types.SimpleNamespace(type="xpu_cpu", index=0)
    )


def test_a_queue_of_somebody_else_is_a_stream(cpu, queues):
    stream = queues(True)
    values = np.arange(5000, dtype=np.float32).reshape(50, 100)
    found = cpu.reduce_absmax(put(cpu, values, stream), 1, stream=stream)
    cpu.runtime.synchronize(stream)
    assert (fetch(cpu, found) == values[:, -1:]).all()


def test_a_queue_without_order_is_refused(cpu, queues):
    with pytest.raises(UnsupportedOpError, match="out of order"):
        cpu.runtime.synchronize(queues(False))


def test_what_is_no_stream_is_refused(cpu):
    with pytest.raises(ConfigError, match=r"runtime\.stream\(\)"):
        cpu.runtime.synchronize(7)
