"""Memory and streams of the emulated device: what is not allowed is seen, what is late is late."""

from __future__ import annotations

import gc
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.arrays import ArrayRef
from kvcore.errors import KVCoreError, LayoutError, OutOfMemoryError, QuantizationError, SlotError
from kvcore.ops import fetch, on_host
from kvcore_emu.device import device

UINT8 = np.dtype(np.uint8)
POISON = 0xDB


def put(backend, array, stream=None):
    there = backend.runtime.empty(array.shape, array.dtype)
    flat = ArrayRef.at(there.address, (array.nbytes,), "uint8", device=there.device, owner=there.owner)
    backend.copy_batch([array.reshape(-1).view(np.uint8)], out=[flat], stream=stream)
    return there


# --- memory


def test_memory_is_fresh_and_out_of_the_hosts_reach(emu):
    array = emu.runtime.empty((3, 5), np.dtype(np.float32))
    assert array.device == "emu:0"
    assert array.address >> 60 == 1
    assert set(fetch(emu, array).tobytes()) == {0xA5}
    with pytest.raises(LayoutError, match="copy it over with copy_batch"):
        array.numpy()


def test_a_host_that_dereferences_a_device_address_ends():
    source = (
        "import ctypes, kvcore, numpy as np\n"
        "array = kvcore.open_backend('emu').runtime.empty((3,), np.dtype(np.uint8))\n"
        "print('reads', flush=True)\n"
        "ctypes.string_at(array.address, 1)\n"
    )
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120)
    assert (child.stdout, child.returncode) == ("reads\n", -signal.SIGSEGV)


def test_kernels_get_no_address_that_is_not_the_devices(emu):
    host = np.zeros(100, np.uint8)
    out = emu.runtime.empty((1,), np.dtype(np.uint64))
    with pytest.raises(LayoutError, match="copy it over with copy_batch"):
        emu.digest([host], out=out)
    disguised = ArrayRef.at(host.ctypes.data, (100,), "uint8", device="emu:0", owner=host)
    with pytest.raises(LayoutError, match=f"0x{host.ctypes.data:x} is memory of the host"):
        emu.digest([disguised], out=out)
    there = emu.runtime.empty((100,), UINT8)
    beyond = ArrayRef.at(there.address + (1 << 40), (100,), "uint8", device="emu:0", owner=there)
    with pytest.raises(LayoutError, match="is in no allocation of emu:0"):
        emu.digest([beyond], out=out)
    long = ArrayRef.at(there.address, (101,), "uint8", device="emu:0", owner=there)
    with pytest.raises(LayoutError, match=f"the nearest has 100 B at 0x{there.address:x}"):
        emu.copy_batch([long], out=[np.zeros(101, np.uint8)])
    emu.runtime.check()


def test_freed_memory_is_gone(emu):
    there = emu.runtime.empty((100,), UINT8)
    dangling = ArrayRef.at(there.address, (100,), "uint8", device="emu:0")
    del there
    with pytest.raises(LayoutError, match="is in no allocation"):
        emu.digest([dangling])


@pytest.mark.parametrize(
    ("shape", "error"),
    [((2**61,), OutOfMemoryError), ((2**31, 2**31), OutOfMemoryError), ((-1,), LayoutError), ((-1, -2), LayoutError)],
)
def test_a_size_that_cannot_be_is_refused(emu, shape, error):
    with pytest.raises(error, match=r"has no \d+ B|cannot be negative"):
        emu.runtime.empty(shape, np.dtype(np.float64))


@pytest.mark.parametrize(("planes", "error"), [(2**25, OutOfMemoryError), (2**31 - 1, KVCoreError)])
def test_what_a_launcher_throws_is_an_error(emu, planes, error):
    """Tables of so many planes are more than there can be memory for, or more than a vector takes."""
    stream, first_token = emu.runtime.stream(), np.array([0, 4])
    index = put(emu, np.arange(4), stream)
    emu.runtime.check(stream)
    queued = stream.mark()
    sizes = (4, 1, 4, 0)  # entries, blocks, tokens of a block, tokens to skip
    args = struct.pack("=5Q4q6i", 0, 0, 0, first_token.ctypes.data, index.address, *sizes, 1, planes, planes, 0, 0, 0)
    with pytest.raises(error, match=r"gather_paged was not launched: (the host has no memory|.*vector)"):
        device().launch("gather_paged", args, stream.handle, stream.status)
    assert stream.mark() == queued
    emu.runtime.check(stream)


# --- streams


@pytest.mark.parametrize("into_host", [True, False])
def test_copies_are_late(emu, into_host):
    """A host that does not wait reads nonsense, or writes over what is still to be read."""
    emu.runtime.reseed(0)
    host, stream = np.arange(100, dtype=np.uint8), emu.runtime.stream()
    there = put(emu, np.full(100, 7, np.uint8))
    emu.runtime.check()
    if into_host:
        emu.copy_batch([there], out=[host], stream=stream)
        assert set(host.tolist()) == {POISON}
        emu.runtime.synchronize(stream)
        assert set(host.tolist()) == {7}
    else:
        emu.copy_batch([host], out=[there], stream=stream)
        host[:] = 9
        emu.runtime.synchronize(stream)
        assert set(fetch(emu, there).tolist()) == {9}


def test_a_target_that_is_still_to_be_read_is_not_spoiled(emu):
    emu.runtime.reseed(0)
    host, stream = np.arange(100, dtype=np.uint8), emu.runtime.stream()
    first, second = (emu.runtime.empty((100,), UINT8) for _ in range(2))
    emu.copy_batch([host], out=[first], stream=stream)
    emu.copy_batch([second], out=[host], stream=stream)
    emu.runtime.synchronize(stream)
    assert fetch(emu, first).tolist() == list(range(100))
    assert set(host.tolist()) == {0xA5}


def test_a_copy_that_is_refused_leaves_the_host_as_it_was(emu):
    emu.runtime.reseed(0)
    there, gone = put(emu, np.zeros(10, np.uint8)), emu.runtime.empty((10,), UINT8)
    emu.runtime.check()
    dangling = ArrayRef.at(gone.address, (10,), "uint8", device="emu:0")
    del gone
    host, other = np.arange(10, dtype=np.uint8), np.ones(10, np.uint8)
    with pytest.raises(LayoutError, match="is in no allocation"):
        emu.copy_batch([there, dangling], out=[host, other])
    assert host.tolist() == list(range(10))
    with pytest.raises(LayoutError, match="is in no allocation"):
        emu.copy_batch([host, other], out=[there, dangling])
    assert not fetch(emu, there).any()
    emu.copy_batch([there], out=[host])  # nobody is to read it any more
    assert set(host.tolist()) == {POISON}
    emu.runtime.check()


def race(backend, seed, *, waits):
    """Fill a buffer on one stream, read it on another; return whether the reader was the later one."""
    backend.runtime.reseed(seed)
    first, second = backend.runtime.stream(), backend.runtime.stream()
    there, back = put(backend, np.zeros(64, np.uint8), first), np.empty(64, np.uint8)
    backend.runtime.synchronize(first)
    backend.copy_batch([np.ones(64, np.uint8)], out=[there], stream=first)
    if waits:
        backend.runtime.wait(backend.runtime.record(first), second)
    backend.copy_batch([there], out=[back], stream=second)
    backend.runtime.synchronize(second)
    backend.runtime.synchronize(first)
    return back.all()


def test_streams_take_turns_by_the_seed_unless_events_order_them(emu):
    assert all(race(emu, seed, waits=True) for seed in range(20))
    found = [bool(race(emu, seed, waits=False)) for seed in range(20)]
    assert set(found) == {True, False}
    assert found == [bool(race(emu, seed, waits=False)) for seed in range(20)]


def test_a_dropped_stream_finishes_its_work(emu):
    emu.runtime.reseed(0)
    stream, back = emu.runtime.stream(), np.zeros(10, np.uint8)
    there = put(emu, np.arange(10, dtype=np.uint8), stream)
    emu.copy_batch([there], out=[back], stream=stream)
    del stream
    gc.collect()
    assert back.tolist() == list(range(10))


def test_what_an_op_uses_is_kept_until_it_is_done_and_no_longer(emu):
    emu.runtime.reseed(0)
    stream = emu.runtime.stream()
    there = emu.runtime.empty((10,), UINT8)
    address = there.address
    emu.copy_batch([there], out=[np.zeros(10, np.uint8)], stream=stream)
    del there
    gc.collect()
    again = ArrayRef.at(address, (10,), "uint8", device="emu:0")
    emu.digest([again], stream=stream)  # still there
    emu.runtime.check(stream)
    with pytest.raises(LayoutError):
        emu.digest([again], stream=stream)


def test_an_error_names_the_ops_that_it_may_come_from(emu):
    cache = kvcore.Layout("BNHD").bind(put(emu, np.zeros((2, 4, 1, 8), np.float16)))
    chunk = kvcore.Layout("THD").bind(put(emu, np.ones((1, 1, 8), np.float16)))
    stream = emu.runtime.stream()
    emu.runtime.check()
    emu.gather_paged(cache, put(emu, np.array([8])), out=chunk)
    with pytest.raises(SlotError, match=r"gather_paged: entry 0 .* the cache.*; nothing was written"):
        emu.runtime.check()
    emu.quantize(
        put(emu, np.full((4,), np.nan, np.float32), stream), kvcore.QuantSpec.symmetric(8, (0,)), stream=stream
    )
    with pytest.raises(QuantizationError, match=r"quantize: element 0 .*is not finite"):
        emu.runtime.check(stream)
    emu.runtime.check(stream)
    assert set(fetch(emu, ArrayRef.at(chunk.segments[0].bases[0][0], (8,), "float16", device="emu:0")).tolist()) == {1}


@given(seed=st.integers(0, 1000), positions=st.lists(st.integers(0, 299), min_size=2, max_size=4))
def test_of_ops_that_failed_the_first_is_reported(seed, positions):
    emu = kvcore.open_backend("emu", fallback="error")
    emu.runtime.reseed(seed)
    stream, results = emu.runtime.stream(), []
    for position in positions:
        values = np.zeros((300, 1), np.float32)
        values[position:] = np.nan
        out = put(emu, np.full((300, 1), 7, np.float32), stream)
        results.append(emu.reduce_absmax(put(emu, values, stream), 1, out=out, stream=stream))
    with pytest.raises(QuantizationError, match=f"element {positions[0]} "):
        emu.runtime.check(stream)
    emu.runtime.check(stream)
    assert all((fetch(emu, result) == 7).all() for result in results)


def test_an_op_does_not_hide_the_error_of_another_before_it(emu):
    cache = kvcore.Layout("BNHD").bind(put(emu, np.zeros((2, 4, 1, 8), np.float16)))
    chunk = kvcore.Layout("THD").bind(put(emu, np.ones((4, 1, 8), np.float16)))
    bad = put(emu, np.full((4, 1), np.nan, np.float32))
    emu.gather_paged(cache, put(emu, np.array([0, 1, 2, 8])), out=chunk)
    emu.reduce_absmax(bad, 1)
    emu.reduce_absmax(put(emu, np.ones((4, 1), np.float32)), 1)
    with pytest.raises(SlotError, match="entry 3 "):
        emu.runtime.check()
    emu.reduce_absmax(bad, 1)
    emu.gather_paged(cache, put(emu, np.array([0, 1, 2, 8])), out=chunk)
    with pytest.raises(QuantizationError, match="element 0 "):
        emu.runtime.check()


def test_threads_share_the_device(emu):
    failed = []

    def work(number):
        stream = emu.runtime.stream()
        for turn in range(20):
            values = np.random.default_rng(100 * number + turn).integers(0, 256, 3000, np.uint8)
            there = put(emu, values, stream)
            copy, back = emu.runtime.empty((3000,), UINT8), np.empty(3000, np.uint8)
            emu.copy_batch([there], out=[copy], stream=stream)
            del there
            emu.copy_batch([copy], out=[back], stream=stream)
            emu.runtime.check(stream)
            if (back != values).any():
                failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --- host arrays through the device


def test_a_backend_for_host_arrays_takes_those_of_torch_too(emu, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("KVCORE_BACKEND", "emu")  # which the staged backend must not take for the host's
    x = torch.arange(24, dtype=torch.float32).reshape(2, 12)
    out = torch.zeros((2, 1))
    assert on_host(emu).reduce_absmax(x, 1, out=out) is out
    assert out.tolist() == [[11.0], [23.0]]
    rows = kvcore.Layout("BNHD").bind(torch.arange(32.0).reshape(2, 2, 2, 4))
    chunk = on_host(emu).gather_paged(rows, np.array([3, 0]))
    assert chunk.array("X", 0)[0, :, 0, 0].tolist() == [24.0, 0.0]
    assert on_host(emu) is on_host(emu)
