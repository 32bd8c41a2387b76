"""Fixtures of the tests of serdes; `objects` has what they work on."""

from __future__ import annotations

from typing import Any

import pytest

import kvcore
from kvcore import BufferPool, KVMeta, LayoutDesc, MemoryObj

from .objects import Make, fill


@pytest.fixture(scope="session")
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(1 << 28)


@pytest.fixture
def make(pool: BufferPool) -> Make:
    """Make an object of layouts, or of so many bytes."""

    def made(what: Any, *, seed: int | None = None, scale: float = 1.0, **meta: Any) -> MemoryObj:
        if isinstance(what, int):
            obj = pool.allocate_bytes(what)
            obj.bytes()[:] = 0xA5
            return obj
        descs = [what] if isinstance(what, LayoutDesc) else list(what)
        obj = pool.allocate(descs, KVMeta(**meta))
        obj.bytes()[:] = 0xA5
        return obj if seed is None else fill(obj, seed, scale)

    return made
