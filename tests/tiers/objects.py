"""Small memory objects, and what the tests of tiers do with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvcore.keys import Key
from kvcore.layout import Layout
from kvcore.memory import BufferPool, LayoutDesc, MemoryObj, MemoryPlan
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.processor import AsyncSerdeProcessor

DESC = LayoutDesc(Layout("LKTHD", L=2, T=4, H=1, D=8), {"K": np.dtype(np.float32), "V": np.dtype(np.float32)})
PLAN = MemoryPlan.of([DESC])


class ChainKey:
    """A key of a prefix chain: the digest of a name, and of the one before it."""

    def __init__(self, name: str, parent: str | None = None, tenant: str = "") -> None:
        self.namespace = hashlib.sha256(tenant.encode()).digest()
        self.digest = hashlib.sha256(name.encode()).digest()
        self.parent = None if parent is None else hashlib.sha256(parent.encode()).digest()
        self.tenant = tenant


def chain(count: int, name: str = "chunk", tenant: str = "") -> list[ChainKey]:
    """The keys of a prefix of `count` chunks."""
    return [ChainKey(f"{name} {i}", f"{name} {i - 1}" if i else None, tenant) for i in range(count)]


def content(key: Key) -> np.ndarray:
    """What an object of a key holds: bytes that no other key has."""
    seed = int.from_bytes(key.digest[:8], "little")
    return np.random.default_rng(seed).standard_normal(PLAN.nbytes // 4, np.float32).view(np.uint8)


def fill(memory: MemoryObj, key: Key) -> None:
    """Write an object's content."""
    memory.bytes()[:] = content(key)


def holds(memory: MemoryObj, key: Key) -> bool:
    """Whether an object has its content, to the bit."""
    return bool((memory.bytes() == content(key)).all())


def filled(pool: BufferPool, keys: Sequence[Key]) -> list[MemoryObj]:
    """New objects with the content of keys."""
    objs = [pool.allocate([DESC]) for _ in keys]
    for obj, key in zip(objs, keys, strict=True):
        fill(obj, key)
    return objs


def raw_serde(codec: str = "raw") -> AsyncSerdeProcessor:
    """A serde of one codec."""
    return AsyncSerdeProcessor(FrameSerializer(codec), FrameDeserializer())
