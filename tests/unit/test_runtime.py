"""The host runtime: memory, what was granted of what was asked, and memory shared between processes."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcore import LayoutError
from kvcore.errors import LeaseError, OutOfMemoryError, UnsupportedOpError
from kvcore.pages import HUGEPAGE_BYTES
from kvcore.runtime import HostRuntime, SharedName, unique_shared_name

SHARED = Path("/dev/shm")


@pytest.fixture
def runtime():
    return HostRuntime()


def test_plain_memory(runtime):
    buffer = runtime.alloc_host(1000)
    assert (buffer.nbytes, buffer.array.dtype, dict(buffer.granted)) == (1000, np.uint8, {})
    assert buffer.array.ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0
    assert buffer.array.flags.writeable
    buffer.array[:] = 7
    buffer.free()
    assert buffer.nbytes == 0


def test_freeing_twice_raises(runtime):
    buffer = runtime.alloc_host(64)
    buffer.free()
    with pytest.raises(LeaseError, match="freed twice"):
        buffer.free()


def test_memory_with_views_is_not_freed_under_them(runtime):
    buffer = runtime.alloc_host(64)
    view = buffer.array[10:20]
    view[:] = 5
    with pytest.raises(LeaseError, match="views of it are in use; drop them first"):
        buffer.free()
    assert (view == 5).all()
    assert (buffer.array[10:20] == 5).all()
    del view
    gc.collect()
    buffer.free()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_has_at_least_a_byte(runtime, nbytes):
    with pytest.raises(OutOfMemoryError, match=f"at least 1 byte, got {nbytes}"):
        runtime.alloc_host(nbytes)


def test_more_than_the_machine_has_is_refused(runtime):
    with pytest.raises(OutOfMemoryError, match=f"the machine refused {1 << 62} B of host memory"):
        runtime.alloc_host(1 << 62)


def test_each_wish_is_answered(runtime):
    buffer = runtime.alloc_host(5000, pinned=True, hugepages=True, numa_node=0)
    assert set(buffer.granted) == {"pinned", "hugepages", "numa_node"}
    assert buffer.granted["numa_node"] == "0" or buffer.granted["numa_node"].startswith("no: ")
    for wish in ("pinned", "hugepages"):
        assert buffer.granted[wish] == "yes" or buffer.granted[wish].startswith("no: ")
    assert buffer.nbytes == 5000
    if buffer.granted["hugepages"] == "yes":
        assert buffer.array.ctypes.data % HUGEPAGE_BYTES == 0
    buffer.free()


def policy_of(array):
    """What Linux says about the pages of an array: the second word of their line, as in ``bind:0``."""
    where = f"{array.ctypes.data:x}"
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        pytest.skip("this machine does not show where pages are")
    return next(line.split()[1] for line in lines if line.split()[0] == where)


@pytest.mark.parametrize("shared", [False, True])
def test_pages_are_bound_to_the_node_that_was_granted(runtime, shared):
    buffer = runtime.alloc_host(1 << 20, numa_node=0, shared_name=unique_shared_name() if shared else None)
    if buffer.granted["numa_node"].startswith("no: mbind to node 0: "):
        pytest.skip(buffer.granted["numa_node"])
    assert buffer.granted["numa_node"] == "0"
    assert policy_of(buffer.array) == "bind:0"
    buffer.array[:] = 1
    buffer.free()


@pytest.mark.parametrize("node", [-1, 1000, 2000])
def test_a_node_that_is_not_there_is_not_granted(runtime, node):
    buffer = runtime.alloc_host(4096, numa_node=node)
    assert buffer.granted["numa_node"].startswith("no: ")
    assert f"node {node}" in buffer.granted["numa_node"]
    buffer.array[:] = 1
    buffer.free()


def test_a_refused_pin_says_what_the_limit_is(runtime):
    # In a process of its own: a limit once lowered cannot be raised again.
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "import os\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "from kvcore.runtime import HostRuntime\n"
        "print(HostRuntime().alloc_host(1 << 20, pinned=True).granted['pinned'])"
    )
    # The package is imported before the process gives up its rights: the checkout may be closed to others.
    code = "import kvcore.runtime\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no: mlock of 1048576 B: ")
    assert "RLIMIT_MEMLOCK is 0 B" in done.stdout


# --- memory of several processes


@pytest.fixture
def shared(runtime):
    buffer = runtime.alloc_host(4096, shared_name=unique_shared_name())
    yield buffer
    gc.collect()
    if buffer.nbytes:
        buffer.free()


def test_another_process_reads_and_writes_the_same_bytes(runtime, shared):
    shared.array[:4] = [1, 2, 3, 4]
    handle = runtime.export_buffer(shared)
    assert handle == SharedName(shared.granted["shared_name"], 4096)
    code = (
        "import sys\n"
        "from kvcore.runtime import HostRuntime, SharedName\n"
        "buffer = HostRuntime().import_buffer(SharedName(sys.argv[1], int(sys.argv[2])))\n"
        "print(buffer.array[:4].tolist())\n"
        "buffer.array[100] = 42\n"
        "buffer.free()\n"
    )
    command = [sys.executable, "-c", code, handle.name, str(handle.nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[1,", "2,", "3,", "4]"]
    assert shared.array[100] == 42


def test_the_name_vanishes_with_its_owner_and_not_with_a_guest(runtime, shared):
    handle = runtime.export_buffer(shared)
    guest = runtime.import_buffer(handle)
    guest.array[0] = 9
    guest.free()
    assert shared.array[0] == 9
    again = runtime.import_buffer(handle)
    shared.free()
    assert not (SHARED / handle.name).exists()
    assert again.array[0] == 9  # who has it mapped keeps it
    again.free()


def test_a_taken_name_is_refused_and_the_owner_unharmed(runtime, shared):
    shared.array[:] = 3
    with pytest.raises(FileExistsError):
        runtime.alloc_host(64, shared_name=shared.granted["shared_name"])
    assert (shared.array == 3).all()


def test_a_handle_that_says_too_much_is_refused(runtime, shared):
    name = shared.granted["shared_name"]
    with pytest.raises(OutOfMemoryError, match=rf"shared buffer '{name}' has 4096 B, its handle says 1000000 B"):
        runtime.import_buffer(SharedName(name, 1_000_000))


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden"])
def test_names_that_are_paths_are_refused(runtime, name):
    with pytest.raises(UnsupportedOpError, match="a plain name without '/' is needed"):
        runtime.alloc_host(64, shared_name=name)
    with pytest.raises(UnsupportedOpError, match="a plain name without '/' is needed"):
        runtime.import_buffer(SharedName(name, 64))


def test_private_memory_cannot_be_exported(runtime):
    buffer = runtime.alloc_host(64)
    with pytest.raises(UnsupportedOpError, match="only buffers allocated with shared_name"):
        runtime.export_buffer(buffer)
    buffer.free()


def test_a_shared_buffer_that_does_not_fit_leaves_no_name(runtime):
    name = unique_shared_name()
    with pytest.raises(OutOfMemoryError, match="refused"):
        runtime.alloc_host(1 << 62, shared_name=name)
    assert not (SHARED / name).exists()


def test_names_are_unique():
    assert len({unique_shared_name() for _ in range(100)}) == 100
    assert unique_shared_name("acme").startswith("acme-")


# --- arrays, streams


def test_arrays_are_viewed_in_place(runtime):
    tensor = torch.arange(6, dtype=torch.bfloat16)
    array = runtime.array(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    with pytest.raises(LayoutError, match="memory on meta cannot be read"):
        runtime.array(torch.empty(3, device="meta"))
    fresh = runtime.empty((2, 3), np.dtype(np.int16))
    assert (fresh.shape, fresh.dtype, fresh.flags.c_contiguous) == ((2, 3), np.int16, True)


def test_everything_is_done_when_a_call_returns(runtime):
    stream = runtime.stream()
    event = runtime.record(stream)
    runtime.wait(event, stream)
    runtime.synchronize(stream)
    runtime.check(stream)
    assert runtime.arch == os.uname().machine


def test_registering_keeps_the_memory(runtime):
    array = np.arange(10)
    handle = runtime.register_host(array)
    assert np.shares_memory(handle, array)
    runtime.unregister_host(handle)


@pytest.mark.parametrize("kind", ["mmap", "bytearray", "torch"])
def test_foreign_memory_is_registered_in_place(runtime, kind):
    memory = {"mmap": lambda: mmap.mmap(-1, 4096), "bytearray": lambda: bytearray(64), "torch": lambda: torch.zeros(8)}[
        kind
    ]()
    handle = runtime.register_host(memory)
    handle.reshape(-1).view(np.uint8)[:4] = [0, 0, 128, 63]  # 1.0 in float32
    assert memory[0] == (1 if kind == "torch" else 0)
    assert kind == "torch" or memory[2] == 128
    runtime.unregister_host(handle)


@pytest.mark.parametrize("memory", ["text", 5, None])
def test_what_is_no_memory_is_not_registered(runtime, memory):
    with pytest.raises(LayoutError, match="is no memory of the host"):
        runtime.register_host(memory)


def test_events_are_shared_as_they_are(runtime):
    event = runtime.record(shared=True)
    runtime.wait(runtime.import_event(runtime.export_event(event)))
