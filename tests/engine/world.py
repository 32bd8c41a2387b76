"""A small model, and the paged memory of an inference engine that runs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcore
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import Namespace
from kvcore.engine.kv import PagedKV
from kvcore.engine.parts import CachePart
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc, chunk_desc
from kvcore.tiers.config import open_tiers

CHUNK, BLOCK, LAYERS, HEADS, WIDTH = 8, 4, 2, 4, 3


@functools.cache
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


def namespace(**changes: Any) -> Namespace:
    return Namespace(**{"model": "m", "revision": "1", "chunk_tokens": CHUNK, "kv_dtype": "float32", **changes})


def value(tokens: Sequence[int], layer: int, heads: range, seed: int = 0) -> np.ndarray:
    """K and V ``[2, tokens, heads, WIDTH]`` that depend on all tokens up to each one, as a model's do."""
    state, rows = seed, []
    for token in tokens:
        state = (state * 31 + token + 1) % 9973
        rows.append(state)
    base = np.array(rows, np.float32)[None, :, None, None]
    grid = np.arange(2)[:, None, None, None] * 7 + np.array(heads)[None, None, :, None] * 11 + np.arange(WIDTH) * 13
    return (base + layer * 17 + grid).astype(np.float32)


class Pages:
    """Paged KV of one part: blocks of `BLOCK` tokens, ``L|BKNHD``."""

    def __init__(self, layers: tuple[int, ...], heads: tuple[int, int], blocks: int = 64) -> None:
        self.layers, self.heads = layers, range(*heads)
        shape = (blocks, 2, BLOCK, len(self.heads), WIDTH)
        self.tensors = [np.full(shape, -1, np.float32) for _ in layers]
        self.rows = Layout("L|BKNHD").bind(self.tensors)

    def part(self, **changes: Any) -> CachePart:
        desc = chunk_desc(self.rows, CHUNK)
        heads = self.heads.start, self.heads.stop
        return CachePart(**{"desc": desc, "layers": self.layers, "heads": heads, "all_heads": HEADS, **changes})

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], start: int = 0) -> None:
        """Do what the model does: fill the blocks of tokens from `start` on."""
        for tensor, layer in zip(self.tensors, self.layers, strict=True):
            kv = value(tokens, layer, self.heads)
            for t in range(start, len(tokens)):
                if blocks[t // BLOCK] >= 0:
                    tensor[blocks[t // BLOCK], :, t % BLOCK] = kv[:, t]

    def right(self, tokens: Sequence[int], blocks: Sequence[int], span: range) -> list[bool]:
        """Tell of each token of a span whether its KV is what the model would compute."""
        truth = [value(tokens, layer, self.heads) for layer in self.layers]
        return [
            all(
                np.array_equal(tensor[blocks[t // BLOCK], :, t % BLOCK], kv[:, t])
                for tensor, kv in zip(self.tensors, truth, strict=True)
            )
            for t in span
        ]


def dense_part(**changes: Any) -> CachePart:
    """The whole model."""
    desc = LayoutDesc(
        Layout("LKTHD", L=LAYERS, T=CHUNK, H=HEADS, D=WIDTH), {"K": np.dtype(np.float32), "V": np.dtype(np.float32)}
    )
    return CachePart(**{"desc": desc, "layers": (0, 1), "heads": (0, HEADS), "all_heads": HEADS, **changes})


def tiers(*stores: str, **changes: Any) -> Any:
    config = {"host_bytes": 1 << 20, "pinned": False, "tiers": [{"store": store} for store in stores], **changes}
    return open_tiers(config, backend())


def engine(parts: Sequence[CachePart], over: Any, **changes: Any) -> CacheEngine:
    names = changes.pop("namespace", {})
    return CacheEngine(
        namespace(**names), parts, over, backend=backend(), **{"model_layers": LAYERS, "block_tokens": BLOCK, **changes}
    )


def blocks_for(tokens: int, first: int = 0) -> list[int]:
    return [first + i for i in range(-(-tokens // BLOCK))]


def paged(pages: Sequence[Pages], blocks: Sequence[int]) -> PagedKV:
    return PagedKV.of_blocks(backend(), [one.rows for one in pages], [blocks] * len(pages), missing=-1)
