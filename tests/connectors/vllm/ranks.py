"""A rank of a small engine: vLLM's caches, a model that fills them, and a worker side over an engine of kvcore."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcore
from kvcore.connectors.vllm.layouts import BoundPart, CacheGeometry, bind_caches, layer_number
from kvcore.connectors.vllm.metadata import Load, Save, StepMetadata
from kvcore.connectors.vllm.worker import WorkerSide
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import ChunkKey, Namespace, chunk_keys
from kvcore.tiers.config import open_tiers

from .caches import Caches, FullAttentionSpec, Group, attention_name

CHUNK, BLOCK, BLOCKS = 32, 16, 24


@functools.cache
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


def attention(numbers: Sequence[int] = (0, 1), **changes: Any) -> Group:
    return Group([attention_name(n) for n in numbers], FullAttentionSpec(**{"block_size": BLOCK, **changes}))


class Rank:
    """One worker."""

    def __init__(
        self,
        store: str,
        groups: Sequence[Group] | None = None,
        *,
        rank: int = 0,
        degree: int = 1,
        kv_heads: int = 2,
        cache: dict[str, Any] | None = None,
        tiers: dict[str, Any] | None = None,
        **side: Any,
    ) -> None:
        groups = [attention()] if groups is None else list(groups)
        self.caches = Caches(groups, **{"blocks": BLOCKS, **(cache or {})})
        layers = 1 + max(n for group in groups for n in map(layer_number, group.layer_names))
        geometry = CacheGeometry(
            model_layers=layers, kv_heads=kv_heads, rank=rank, degree=degree, kv_dtype=("float32", "float32")
        )
        self.bound: tuple[BoundPart, ...] = bind_caches(
            groups, self.caches.tensors, self.caches.modules, geometry, chunk_tokens=CHUNK, num_blocks=BLOCKS
        )
        namespace = Namespace("m", "1", kv_dtype="float32", chunk_tokens=CHUNK)
        self.namespace = namespace
        over = open_tiers(
            {"host_bytes": 4 << 20, "pinned": False, "tiers": [{"store": store}], **(tiers or {})}, backend()
        )
        engine = CacheEngine(
            namespace,
            [one.part for one in self.bound],
            over,
            backend=backend(),
            model_layers=layers,
            block_tokens=max(group.kv_cache_spec.block_size for group in groups),
            own=True,
        )
        self.side = WorkerSide(engine, self.bound, groups=len(groups), **side)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.close()

    def keys(self, tokens: Sequence[int]) -> tuple[ChunkKey, ...]:
        return tuple(chunk_keys(self.namespace, tokens))

    def hit(self, tokens: Sequence[int]) -> int:
        return self.side.engine.lookup_keys(self.keys(tokens), len(tokens))

    def compute(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], start: int = 0) -> None:
        """Do what the model does: fill the blocks of tokens from `start` on; and of states, the one of the end."""
        for one in self.bound:
            table = blocks[one.group]
            if one.part.recurrent:
                last = table[(len(tokens) - 1) // one.block_tokens]
                for index, number in enumerate(one.part.layers):
                    one.rows.array("page", index)[last, 0, 0] = state(tokens, number, one.rows.segments[0].width)
                continue
            for index, number in enumerate(one.part.layers):
                for part in one.rows.parts:
                    kv, size = one.rows.array(part, index), one.rows.block_tokens
                    truth = values(tokens, number, part, one)
                    for t in range(start, len(tokens)):
                        slot = slot_of(one, table, t)
                        kv[slot // size, slot % size] = truth[t]

    def right(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], upto: int, start: int = 0) -> bool:
        """Whether the KV of tokens, and the state at the end of them, is what the model would compute."""
        for one in self.bound:
            table = blocks[one.group]
            for index, number in enumerate(one.part.layers):
                if one.part.recurrent:
                    page = one.rows.array("page", index)[table[(upto - 1) // one.block_tokens], 0, 0]
                    if not np.array_equal(page, state(tokens[:upto], number, len(page))):
                        return False
                    continue
                first = start if one.part.window is None else max(start, upto - one.part.window + 1)
                for part in one.rows.parts:
                    kv, size = one.rows.array(part, index), one.rows.block_tokens
                    truth = values(tokens, number, part, one)
                    slots = [slot_of(one, table, t) for t in range(first, upto)]
                    found = [kv[slot // size, slot % size] for slot in slots]
                    if not np.array_equal(found, truth[first:upto]):
                        return False
        return True

    def spoil(self) -> None:
        """Overwrite all caches."""
        for tensor in self.caches.tensors.values():
            tensor[...] = -1

    def save(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], computed: int = 0, **changes: Any) -> Save:
        """Compute and save in one step; return what was asked of the worker."""
        keys = tuple(key for key in self.keys(tokens) if key.stop > computed // CHUNK * CHUNK)
        tables = tuple(list(table) for table in blocks)
        save = Save(
            **{"request": "r", "keys": keys, "blocks": tables, "computed": computed, "total": len(tokens)} | changes
        )
        self.side.start_loads(StepMetadata())
        self.compute(tokens, blocks, computed)
        self.side.save(StepMetadata(saves=(save,)))
        self.side.engine.flush()
        return save

    def load(
        self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], stop: int, start: int = 0, **changes: Any
    ) -> Load:
        """Return a load of a request's tokens."""
        keys = tuple(key for key in self.keys(tokens) if key.start < stop)
        tables = tuple(list(table) for table in blocks)
        known = {"request": "r", "keys": keys, "start": start, "stop": stop, "blocks": tables}
        return Load(**{**known, "num_tokens": len(tokens), "asynchronous": False, **changes})


def slot_of(one: BoundPart, table: Sequence[int], token: int) -> int:
    return table[token // one.block_tokens] * one.block_tokens + token % one.block_tokens


def values(tokens: Sequence[int], layer: int, part: str, one: BoundPart) -> np.ndarray:
    """``[tokens, heads, width]``: depends on all tokens up to each one, on layer, part, head and channel."""
    low, high = one.part.heads or (0, 1)
    width = one.rows.segment(part)[0].width
    seen, base = 0, []
    for token in tokens:
        seen = (seen * 31 + int(token) + 1) % 997
        base.append(seen)
    grid = np.arange(low, high)[:, None] * 5 + np.arange(width) * 0.25
    return (np.array(base)[:, None, None] + grid + layer * 17 + ord(part[0])).astype(np.float32)


def state(tokens: Sequence[int], layer: int, nbytes: int) -> np.ndarray:
    """A page ``[nbytes]`` that depends on all tokens."""
    seed = zlib.crc32(np.array([*tokens, layer], np.int64).tobytes())
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
