"""Engines for one model whose layers are alike, and arrays that they store and fill."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import kvcore
from kvcore.dtypes import to_dtype
from kvcore.engine import Namespace
from kvcore.engine.engine import CacheEngine
from kvcore.engine.plain import plain_engine

CHUNK, LAYERS, HEADS, WIDTH = 8, 2, 3, 5
TOKENS = list(range(100, 100 + 3 * CHUNK + 2))

Arrays = list[list[np.ndarray]]
"""K and V of every layer, ``[1, heads, tokens, width]``, as an inference engine keeps them."""


@functools.cache
def reference() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


def namespace(**changes: Any) -> Namespace:
    return Namespace(**{"model": "m", "revision": "1", "chunk_tokens": CHUNK, **changes})


def opened(backend: kvcore.Backend, store: Any, **changes: Any) -> CacheEngine:
    extents = {n: changes.pop(n, default) for n, default in (("layers", LAYERS), ("heads", HEADS), ("width", WIDTH))}
    codec = {name: changes.pop(name) for name in ("codec", "codecs") if name in changes}
    return plain_engine(store, namespace(**changes), **extents, backend=backend, **codec)


def random_bytes(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """An array of any bit patterns, NaNs among them."""
    item = to_dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * item.itemsize), np.uint8)
    return raw.view(item)


def arrays(tokens: int, dtypes: tuple[str, str] = ("bfloat16", "bfloat16"), **extents: int) -> Arrays:
    shape = (1, extents.get("heads", HEADS), tokens, extents.get("width", WIDTH))
    layers = range(extents.get("layers", LAYERS))
    return [[random_bytes(shape, dtype, 2 * i + j) for j, dtype in enumerate(dtypes)] for i in layers]


def rows_of(kv: Arrays) -> kvcore.RowLayout:
    return kvcore.Layout("LK|1HTD").bind(kv)


def loaded(engine: CacheEngine, tokens: list[int]) -> tuple[int, list[list[bytes]]]:
    """Retrieve a prefix; return its length, and the bytes of K and V by layer, ``[tokens, heads, width]``.

    Checks that what lies behind the prefix is as it was, as far as nothing went wrong.
    """
    desc = engine.parts[0].desc
    extents, dtypes = desc.layout.extents, [desc.dtypes[part] for part in "KV"]
    shape = 1, extents["H"], len(tokens), extents["D"]
    room = [
        [np.full((*shape[:-1], shape[-1] * d.itemsize), 0xA5, np.uint8).view(d) for d in dtypes]
        for _ in range(extents["L"])
    ]
    misses = sum(engine.misses.values())
    mask = engine.retrieve(tokens, rows_of(room)) if tokens else np.zeros(0, np.bool_)
    hit = int(mask.sum())
    assert mask[:hit].all()
    if sum(engine.misses.values()) == misses:
        assert all((part[0, :, hit:].view(np.uint8) == 0xA5).all() for layer in room for part in layer)
    return hit, expected(room, hit)


def expected(kv: Arrays, tokens: int) -> list[list[bytes]]:
    """What `loaded` returns of arrays."""
    if not tokens:
        return []
    return [[part[0, :, :tokens].transpose(1, 0, 2).tobytes() for part in layer] for layer in kv]
