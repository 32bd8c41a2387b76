"""What the tests of serdes share: memory objects of small chunks, of any layout and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcore import Layout, LayoutDesc, MemoryObj
from kvcore.keys import StoreKey

NAMESPACE = b"\xaa" * 32


def key(number: int = 1, namespace: bytes = NAMESPACE) -> StoreKey:
    return StoreKey(namespace, number.to_bytes(32, "big"))


def kv_desc(layers: int = 2, tokens: int = 20, heads: int = 2, width: int = 8, dtype: str = "bfloat16") -> LayoutDesc:
    return LayoutDesc(Layout("LKTHD", L=layers, T=tokens, H=heads, D=width), {"K": dtype, "V": dtype})


def fill(obj: MemoryObj, seed: int = 0, scale: float = 1.0) -> MemoryObj:
    """Fill an object with normal values of its dtypes; 8-bit integers with any bytes."""
    rng = np.random.default_rng(seed)
    for group in range(len(obj.descs)):
        rows = obj.rows(group)
        for part, layer in rows.planes():
            x = rows.array(part, layer)
            if x.dtype == np.uint8:
                x[...] = rng.integers(0, 256, x.shape, np.uint8)
            else:
                x[...] = (scale * rng.normal(size=x.shape)).astype(x.dtype)
    return obj


def values(obj: MemoryObj) -> np.ndarray:
    """All values of an object of one dtype, float32."""
    return obj.bytes().view(next(iter(obj.descs[0].dtypes.values()))).astype(np.float32)


Make = Callable[..., MemoryObj]
"""The fixture `make`."""
