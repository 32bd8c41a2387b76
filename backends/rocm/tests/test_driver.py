"""The library over a simulated HIP runtime: memory, failures, devices, and what other processes import."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvcore.errors import DeviceError, LayoutError, OutOfMemoryError, UnsupportedOpError
from kvcore.ops import fetch

UINT8 = np.dtype(np.uint8)


def put(rocm, array, stream=None):
    there = rocm.runtime.empty(array.shape, array.dtype)
    rocm.copy_batch([array], out=[there], stream=stream)
    return there


# --- copies and streams


def test_nothing_is_done_before_somebody_waits(rocm):
    stream, back = rocm.runtime.stream(), np.zeros(100, UINT8)
    there = put(rocm, np.full(100, 7, UINT8), stream)
    rocm.copy_batch([there], out=[back], stream=stream)
    assert not back.any()
    rocm.runtime.synchronize(stream)
    assert set(back.tolist()) == {7}


def test_the_default_stream_of_torch_and_its_others_are_taken(rocm):
    native = SimpleNamespace(cuda_stream=0, device=SimpleNamespace(type="cuda", index=1))
    back = np.zeros(10, UINT8)
    with rocm.runtime.on(1):
        there = put(rocm, np.arange(10, dtype=UINT8), native)
    rocm.copy_batch([there], out=[back], stream=native)
    rocm.runtime.synchronize(native)
    assert back.tolist() == list(range(10))


def test_a_stream_that_is_another_one_in_each_thread_is_refused(rocm):
    native = SimpleNamespace(cuda_stream=2, device=SimpleNamespace(type="cuda", index=0))
    with pytest.raises(UnsupportedOpError, match="hipStreamPerThread"):
        rocm.runtime.synchronize(native)


def test_an_event_orders_two_streams(rocm):
    first, second, back = rocm.runtime.stream(), rocm.runtime.stream(), np.zeros(10, UINT8)
    there = put(rocm, np.arange(10, dtype=UINT8), first)
    rocm.runtime.wait(rocm.runtime.record(first), second)
    rocm.copy_batch([there], out=[back], stream=second)
    rocm.runtime.synchronize(second)
    assert back.tolist() == list(range(10))


# --- torch, which shares the runtime


def test_torch_is_not_told_of_errors_that_are_none_or_are_ours(driver, rocm):
    """It asks for the thread's last error behind each launch of its own."""
    array = rocm.runtime.empty((8,), UINT8)
    rocm.digest([array])  # asks for where the host's tables are
    rocm.copy_batch([np.zeros(8, UINT8)], out=[array])
    rocm.runtime.record().passed()  # not yet
    assert driver.last_error() == 0
    driver.set("no_memory", 1)
    with pytest.raises(OutOfMemoryError):
        rocm.runtime.empty((100 << 20,), UINT8)
    assert driver.last_error() == 0


def test_the_device_of_the_thread_stays_what_it_was(driver, rocm):
    with rocm.runtime.on(1):
        array = rocm.runtime.empty((256,), UINT8)
        rocm.digest([array])
        rocm.runtime.synchronize()
    assert array.device == "cuda:1"
    assert driver.device() == 0


def test_nobody_takes_the_device_for_a_gpu(rocm):
    assert rocm.runtime.arch == "gfx90a-simulated"
    assert "simulated" in rocm.runtime.library.info(0).name


def test_opening_wakes_the_device_of_torch_and_no_other(in_a_process):
    code = """
from types import SimpleNamespace
from kvcore.kernels.vendor import VendorLibrary
current = SimpleNamespace(device_index=1, cuda_stream=0)
used = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: current)
version = SimpleNamespace(cuda=None, hip="7.0")
sys.modules["torch"] = SimpleNamespace(version=version, cuda=used, __spec__=None)
woken, call = set(), VendorLibrary.call
def noted(library, name, *args):
    if name in ("device_info", "device_load", "stream_create"):
        woken.add(args[0])
    return call(library, name, *args)
VendorLibrary.call = noted
kvcore.open_backend("rocm", fallback="error")
print(woken)
"""
    assert in_a_process(code, SIMULATED_HIP_DEVICES="2") == "{1}\n"


# --- memory


def test_memory_that_was_let_go_serves_again_without_the_driver(driver, rocm):
    first = rocm.runtime.empty((5000,), UINT8)
    address = first.address
    del first
    driver.set("no_memory", 1)
    assert rocm.runtime.empty((5000,), UINT8).address == address


def test_memory_that_is_kept_is_given_back_when_there_is_no_other(in_a_process):
    code = """
rocm = kvcore.open_backend("rocm", fallback="error")
first = rocm.runtime.empty((40 << 20,), np.dtype(np.uint8))
del first
second = rocm.runtime.empty((10 << 20,), np.dtype(np.uint8))
third = rocm.runtime.empty((40 << 20,), np.dtype(np.uint8))
try:
    rocm.runtime.empty((40 << 20,), np.dtype(np.uint8))
except kvcore.OutOfMemoryError as error:
    print(error)
"""
    said = in_a_process(code, SIMULATED_HIP_BYTES=str(64 << 20))
    assert f"cuda:0 has no {40 << 20} B; it has {64 << 20} B in all" in said


def test_no_memory_in_the_middle_of_an_op_leaves_everything_as_it_was(driver, rocm):
    array = rocm.runtime.empty((1 << 16,), np.dtype(np.float32))
    out = rocm.runtime.empty((1,), np.dtype(np.float32))
    before = fetch(rocm, out)
    stream = rocm.runtime.stream()  # which has no memory kept
    driver.set("no_memory", 1)
    with pytest.raises(OutOfMemoryError, match=r"reduce_absmax was not launched: device 0 has no \d+ B"):
        rocm.reduce_absmax(array, axes=(0,), nonfinite="propagate", out=out, stream=stream)
    driver.set("no_memory", 0)
    rocm.runtime.synchronize(stream)
    assert np.array_equal(fetch(rocm, out).view(UINT8), before.view(UINT8))
    rocm.reduce_absmax(array, axes=(0,), nonfinite="propagate", out=out, stream=stream)
    rocm.runtime.check(stream)
    assert not np.array_equal(fetch(rocm, out).view(UINT8), before.view(UINT8))


def test_memory_of_the_host_is_refused_before_a_kernel_reads_it(rocm):
    with pytest.raises(LayoutError, match=r"cannot be reached|memory of cpu"):
        rocm.digest([np.zeros(8, UINT8)])


def test_registered_memory_is_still_the_hosts(rocm):
    array = np.arange(1 << 16).astype(UINT8)
    first = rocm.runtime.register_host(array)
    with pytest.raises(DeviceError, match="hipErrorHostMemoryAlreadyRegistered"):
        rocm.runtime.register_host(array[16:])
    there = put(rocm, array)
    assert np.array_equal(fetch(rocm, there), array)
    rocm.runtime.unregister_host(first)


# --- failures


def test_a_kernel_that_failed_is_reported_when_somebody_waits(driver, rocm):
    array = rocm.runtime.empty((256,), UINT8)
    stream = rocm.runtime.stream()
    driver.set("fail_kernel", 1)
    rocm.digest([array], stream=stream)
    with pytest.raises(DeviceError, match=r"hipErrorLaunchFailure.*: digest"):
        rocm.runtime.synchronize(stream)
    assert driver.last_error() == 0


def test_a_launch_that_is_refused_raises_at_once(driver, rocm):
    array = rocm.runtime.empty((256,), UINT8)
    driver.set("fail_launch", 1)
    with pytest.raises(DeviceError, match=r"digest was not launched: hipModuleLaunchKernel: hipErrorLaunchFailure"):
        rocm.digest([array])


# --- other processes


@pytest.mark.parametrize("lazy_flag", [1, 0], ids=["ROCm 6", "ROCm 5"])
def test_another_process_reads_what_was_exported(rocm, simulated, in_a_process, lazy_flag):
    array = put(rocm, np.arange(1000).astype(UINT8))
    rocm.runtime.synchronize()
    handle = rocm.runtime.export_buffer(array[100:])
    code = f"""
import ctypes
ctypes.CDLL({str(simulated)!r}).simulated_set(b"lazy_flag", ctypes.c_int64({lazy_flag}))
from kvcore.kernels.device_runtime import DeviceBuffer
from kvcore.ops import fetch
rocm = kvcore.open_backend("rocm", fallback="error")
print(fetch(rocm, rocm.runtime.import_buffer({handle!r}))[:3].tolist())
"""
    assert in_a_process(code).strip() == "[100, 101, 102]"


def test_an_event_of_another_process_is_waited_for(rocm, in_a_process):
    stream = rocm.runtime.stream()
    there = put(rocm, np.arange(100).astype(UINT8), stream)
    event = rocm.runtime.record(stream, shared=True)
    memory, passed = rocm.runtime.export_buffer(there), rocm.runtime.export_event(event)
    rocm.runtime.synchronize(stream)
    code = f"""
from kvcore.kernels.device_runtime import DeviceBuffer, SharedEvent
rocm = kvcore.open_backend("rocm", fallback="error")
stream, back = rocm.runtime.stream(), np.zeros(100, np.uint8)
rocm.runtime.wait(rocm.runtime.import_event({passed!r}), stream)
rocm.copy_batch([rocm.runtime.import_buffer({memory!r})], out=[back], stream=stream)
rocm.runtime.synchronize(stream)
print(back[:3].tolist())
"""
    assert in_a_process(code).strip() == "[0, 1, 2]"
