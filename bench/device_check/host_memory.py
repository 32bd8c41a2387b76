"""Host memory of every kind: what the machine grants, and that copies to and from the device are right in each."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Forbidden, Recorder, same
from kvcore import Backend
from kvcore.errors import KVCoreError
from kvcore.runtime import unique_shared_name

_UINT8 = np.dtype(np.uint8)
_WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pinned": {"pinned": True},
    "hugepages": {"hugepages": True},
    "NUMA node 0": {"numa_node": 0},
    "pinned hugepages on node 0": {"pinned": True, "hugepages": True, "numa_node": 0},
    "pinned and shared": {"pinned": True, "shared_name": ""},
}


def run(given: Given, recorder: Recorder) -> None:
    """Run all checks."""
    backend, nbytes = given.open(), 100_000 if given.small else 64 << 20
    for name, wishes in _WISHES.items():
        recorder.check(name, partial(_granted, backend, nbytes, dict(wishes)))
    recorder.check("foreign memory, registered", partial(_registered, backend, nbytes))
    recorder.check("a mapped file's memory, registered", partial(_mapped, backend, nbytes))


def _granted(backend: Backend, nbytes: int, wishes: dict[str, Any]) -> str:
    if "shared_name" in wishes:
        wishes["shared_name"] = unique_shared_name("kvcore-check")
    try:
        buffer = backend.runtime.alloc_host(nbytes, **wishes)
    except KVCoreError as error:
        if "shared_name" not in wishes:
            raise
        raise Forbidden(f"no shared memory here: {error}") from error  # containers have little of it, or none
    same(set(buffer.granted), set(wishes), "wishes that are answered")
    _there_and_back(backend, buffer.array)
    granted = {name: answer for name, answer in buffer.granted.items() if name != "shared_name"}
    said = ", ".join(f"{name}: {answer}" for name, answer in granted.items())
    buffer.free()
    if granted and all(answer.startswith("no: ") for answer in granted.values()):
        raise Forbidden(said)
    return said


def _registered(backend: Backend, nbytes: int) -> str:
    return _with_registered(backend, np.zeros(nbytes, np.uint8))


def _mapped(backend: Backend, nbytes: int) -> str:
    with mmap.mmap(-1, nbytes) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        try:
            return _with_registered(backend, array)
        finally:
            del array  # the mapping closes only when nobody looks at it


def _with_registered(backend: Backend, array: Any) -> str:
    try:
        handle = backend.runtime.register_host(array)
    except KVCoreError as error:
        raise Forbidden(f"cannot be registered here: {error}") from error
    try:
        _there_and_back(backend, array)
    finally:
        backend.runtime.unregister_host(handle)
    del handle
    return ""


def _there_and_back(backend: Backend, array: Any) -> None:
    pattern = np.random.default_rng(1).integers(0, 256, array.shape, np.uint8)
    array[:] = pattern
    there = backend.runtime.empty(array.shape, _UINT8)
    backend.copy_batch([array], out=[there])
    backend.runtime.check()
    array[:] = 0
    backend.copy_batch([there], out=[array])
    backend.runtime.check()
    same(array.tobytes() == pattern.tobytes(), True, "copies to the device and back bring what was sent")
