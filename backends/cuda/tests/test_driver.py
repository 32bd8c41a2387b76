"""The library over a simulated driver: copies, memory, failures, contexts, and what other processes import."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvcore.errors import DeviceError, LayoutError, OutOfMemoryError, UnsupportedOpError
from kvcore.ops import fetch

UINT8 = np.dtype(np.uint8)


def torch_stream(native, device=0):
    return SimpleNamespace(cuda_stream=native, device=SimpleNamespace(type="cuda", index=device))


def there_and_back(cuda, stream=None, count=5):
    """Copy arrays to the device and back in two batches, and return whether they are what they were."""
    sources = [np.full(100 + i, i, UINT8) for i in range(count)]
    devices = [cuda.runtime.empty((100 + i,), UINT8) for i in range(count)]
    targets = [np.zeros(100 + i, UINT8) for i in range(count)]
    cuda.copy_batch(sources, out=devices, stream=stream)
    cuda.copy_batch(devices, out=targets, stream=stream)
    cuda.runtime.synchronize(stream)
    return all(np.array_equal(a, b) for a, b in zip(sources, targets, strict=True))


# --- copies


def test_the_copies_of_a_call_cross_in_one_batch(driver, cuda):
    before = driver.count("batches"), driver.count("copies")
    assert there_and_back(cuda, cuda.runtime.stream())
    assert driver.count("batches") == before[0] + 2
    assert driver.count("copies") < before[1] + 5


def test_the_legacy_default_stream_takes_no_batches(driver, cuda):
    before = driver.count("batches"), driver.count("copies")
    assert there_and_back(cuda, torch_stream(0))
    assert driver.count("batches") == before[0]
    assert driver.count("copies") >= before[1] + 10


@pytest.mark.parametrize(("batch", "refused", "has_batches"), [(12, 0, True), (0, 0, False), (13, 1, False)])
def test_drivers_of_older_versions_and_those_that_refuse(simulated, in_a_process, batch, refused, has_batches):
    code = f"""
import ctypes
dll = ctypes.CDLL({str(simulated(batch))!r})
dll.simulated_set(b"refuse_batches", ctypes.c_int64({refused}))
cuda = kvcore.open_backend("cuda", fallback="error")
arrays = [np.full(9, i, np.uint8) for i in range(5)]
there = [cuda.runtime.empty((9,), np.dtype(np.uint8)) for _ in arrays]
before = [dll.simulated_count(b"batches"), dll.simulated_count(b"copies")]
cuda.copy_batch(arrays, out=there)
after = [dll.simulated_count(b"batches"), dll.simulated_count(b"copies")]
print(after[0] - before[0], after[1] - before[1])
from kvcore.ops import fetch
assert all(np.array_equal(fetch(cuda, t), a) for t, a in zip(there, arrays))
"""
    batches, copies = map(int, in_a_process(code, driver=simulated(batch)).split())
    assert (batches, copies >= 5) == (int(has_batches), not has_batches)


def test_a_stream_that_is_another_one_in_each_thread_is_refused(cuda):
    with pytest.raises(UnsupportedOpError, match="CU_STREAM_PER_THREAD"):
        cuda.runtime.synchronize(torch_stream(2))


# --- memory


def test_memory_that_was_let_go_serves_again_without_the_driver(driver, cuda):
    first = cuda.runtime.empty((5000,), UINT8)
    address = first.address
    del first
    before = driver.count("allocations")
    assert cuda.runtime.empty((5000,), UINT8).address == address
    assert driver.count("allocations") == before


def test_the_largest_blocks_are_given_back_first(driver, cuda):
    small, large = cuda.runtime.empty((5000,), UINT8), cuda.runtime.empty((513 << 20,), UINT8)
    address = small.address
    del small, large
    before = driver.count("allocations")
    assert cuda.runtime.empty((5000,), UINT8).address == address
    assert driver.count("allocations") == before


def test_memory_that_is_kept_is_given_back_when_there_is_no_other(in_a_process):
    code = """
cuda = kvcore.open_backend("cuda", fallback="error")
first = cuda.runtime.empty((40 << 20,), np.dtype(np.uint8))
del first
second = cuda.runtime.empty((10 << 20,), np.dtype(np.uint8))
third = cuda.runtime.empty((40 << 20,), np.dtype(np.uint8))
try:
    cuda.runtime.empty((40 << 20,), np.dtype(np.uint8))
except kvcore.OutOfMemoryError as error:
    print(error)
"""
    said = in_a_process(code, SIMULATED_CUDA_BYTES=str(64 << 20))
    assert f"cuda:0 has no {40 << 20} B; it has {64 << 20} B in all" in said


def test_no_memory_in_the_middle_of_an_op_leaves_everything_as_it_was(driver, cuda):
    array = cuda.runtime.empty((1 << 16,), np.dtype(np.float32))
    out = cuda.runtime.empty((1,), np.dtype(np.float32))
    before = fetch(cuda, out)
    stream = cuda.runtime.stream()  # which has no memory kept
    driver.set("no_memory", 1)
    with pytest.raises(OutOfMemoryError, match=r"reduce_absmax was not launched: the device has no \d+ B"):
        cuda.reduce_absmax(array, axes=(0,), nonfinite="propagate", out=out, stream=stream)
    driver.set("no_memory", 0)
    cuda.runtime.synchronize(stream)
    assert np.array_equal(fetch(cuda, out).view(UINT8), before.view(UINT8))
    cuda.reduce_absmax(array, axes=(0,), nonfinite="propagate", out=out, stream=stream)
    cuda.runtime.check(stream)
    assert not np.array_equal(fetch(cuda, out).view(UINT8), before.view(UINT8))


def test_memory_of_the_host_is_refused_before_a_kernel_reads_it(cuda):
    with pytest.raises(LayoutError, match=r"cannot be reached|memory of cpu"):
        cuda.digest([np.zeros(8, UINT8)])


def test_memory_of_the_host_is_registered_once(cuda):
    array = np.zeros(1 << 16, UINT8)
    first = cuda.runtime.register_host(array)
    with pytest.raises(DeviceError, match="ALREADY_REGISTERED"):
        cuda.runtime.register_host(array[16:])
    cuda.runtime.unregister_host(first)


# --- failures


def test_a_kernel_that_failed_is_reported_when_somebody_waits(driver, cuda):
    array = cuda.runtime.empty((256,), UINT8)
    stream = cuda.runtime.stream()
    driver.set("fail_kernel", 1)
    cuda.digest([array], stream=stream)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_LAUNCH_FAILED.*: digest"):
        cuda.runtime.synchronize(stream)


def test_a_launch_that_is_refused_raises_at_once(driver, cuda):
    array = cuda.runtime.empty((256,), UINT8)
    driver.set("fail_launch", 1)
    with pytest.raises(DeviceError, match=r"digest was not launched: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"):
        cuda.digest([array])


# --- contexts, devices


def test_the_context_of_the_thread_stays_what_it_was(driver, cuda):
    with cuda.runtime.on(1):
        array = cuda.runtime.empty((256,), UINT8)
        cuda.digest([array])
        cuda.runtime.synchronize()
    assert array.device == "cuda:1"
    assert driver.context() is None


@pytest.mark.parametrize(("initialized", "version", "device"), [(True, "13.0", 1), (False, "13.0", 0), (True, None, 0)])
def test_torch_decides_about_device_and_stream_once_it_uses_cuda(cuda, monkeypatch, initialized, version, device):
    current = SimpleNamespace(device_index=1, cuda_stream=0)
    used = SimpleNamespace(is_initialized=lambda: initialized, current_stream=lambda: current)
    torch = SimpleNamespace(version=SimpleNamespace(cuda=version, hip=None), cuda=used)
    monkeypatch.setitem(sys.modules, "torch", torch)
    array = cuda.runtime.empty((64,), UINT8)
    assert array.device == f"cuda:{device}"
    before = cuda.digest([array])
    cuda.runtime.synchronize(torch_stream(0, device) if device else None)
    assert before.device == array.device


def test_opening_wakes_the_device_of_torch_and_no_other(in_a_process):
    code = """
from types import SimpleNamespace
from kvcore.kernels.vendor import VendorLibrary
current = SimpleNamespace(device_index=1, cuda_stream=0)
used = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: current)
version = SimpleNamespace(cuda="13.0", hip=None)
sys.modules["torch"] = SimpleNamespace(version=version, cuda=used, __spec__=None)
woken, call = set(), VendorLibrary.call
def noted(library, name, *args):
    if name in ("device_info", "device_load", "stream_create"):
        woken.add(args[0])
    return call(library, name, *args)
VendorLibrary.call = noted
kvcore.open_backend("cuda", fallback="error")
print(woken)
"""
    assert in_a_process(code, SIMULATED_CUDA_DEVICES="2") == "{1}\n"


_ON_THE_SECOND = """
from kvcore_cuda.runtime import Runtime
dll = ctypes.CDLL(os.environ["KVCORE_CUDA_DRIVER"])
found = device.device()
with found.on(1):
    runtime = Runtime()
    array = runtime.empty((64,), np.dtype(np.uint8))
"""


def test_sharing_and_pinning_memory_make_no_context_on_another_device(in_a_process):
    code = """
runtime.export_buffer(array)
runtime.unregister_host(runtime.register_host(np.zeros(1 << 16, np.uint8)))
print(dll.simulated_count(b"contexts"))
"""
    assert in_a_process(_ON_THE_SECOND + code, SIMULATED_CUDA_DEVICES="2") == "1\n"


def test_a_forked_process_is_told_to_be_spawned(in_a_process):
    code = """
if os.fork() == 0:
    try:
        runtime.empty((64,), np.dtype(np.uint8))
    except kvcore.DeviceError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    said = in_a_process(_ON_THE_SECOND + code, SIMULATED_CUDA_DEVICES="2")
    assert "CUDA_ERROR_NOT_INITIALIZED" in said
    assert "spawn it instead" in said


def test_nobody_takes_the_device_for_a_gpu(cuda):
    assert "simulated" in cuda.runtime.arch
    assert "simulated" in cuda.runtime.library.info(0).name


# --- other processes


def test_another_process_reads_what_was_exported(driver, cuda, in_a_process):
    array = cuda.runtime.empty((1000,), UINT8)
    cuda.copy_batch([np.arange(1000).astype(UINT8)], out=[array])
    cuda.runtime.synchronize()
    handle = cuda.runtime.export_buffer(array)
    code = f"""
from kvcore.kernels.device_runtime import DeviceBuffer
from kvcore.ops import fetch
cuda = kvcore.open_backend("cuda", fallback="error")
print(int(fetch(cuda, cuda.runtime.import_buffer({handle!r})).sum()))
"""
    assert int(in_a_process(code)) == np.arange(1000).astype(UINT8).sum(dtype=np.int64)


def test_memory_that_the_driver_does_not_share_is_named(driver, cuda):
    array = cuda.runtime.empty((1000,), UINT8)
    driver.set("refuse_ipc", 1)
    with pytest.raises(UnsupportedOpError, match=r"expandable segments.*runtime\.empty"):
        cuda.runtime.export_buffer(array)
