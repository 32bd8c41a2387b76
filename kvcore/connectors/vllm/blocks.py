"""vLLM's block tables as the KV memory of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.connectors.vllm.layouts import BoundPart
from kvcore.engine.kv import PagedKV
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["NULL_BLOCK", "SavedKV", "request_kv"]

NULL_BLOCK = 0
"""The block that stands in tables for blocks that are not there any more: vLLM's pool takes its first one for it."""


def request_kv(backend: Backend, bound: Sequence[BoundPart], blocks: Sequence[Sequence[int]]) -> PagedKV:
    """Return the KV of a request.

    Parameters
    ----------
    backend : Backend
    bound : sequence of BoundPart
    blocks : sequence of sequences of int
        The block table of each cache group.
    """
    tables = []
    for one in bound:
        table = np.asarray(blocks[one.group], np.int64)
        table = np.where(table == NULL_BLOCK, -1, table)
        smaller = 1 if one.part.recurrent else one.block_tokens // one.rows.block_tokens
        if smaller > 1:  # blocks of the attention kernel are pieces of the table's
            pieces = table[:, None] * smaller + np.arange(smaller)
            table = np.where(table[:, None] < 0, -1, pieces).reshape(-1)
        tables.append(table.tolist())
    rows = [one.rows for one in bound]
    return PagedKV.of_blocks(backend, rows, tables, block_tokens=[one.block_tokens for one in bound])


class SavedKV:
    """The KV of a request whose step has just ended, for saving.

    Of recurrent states a block holds the one of its end. Where vLLM keeps only the state that a step ends with, all
    other blocks that the step passed have been left as they were.

    Parameters
    ----------
    kv : PagedKV
    bound : sequence of BoundPart
    total : int
        Tokens that have their KV now.
    """

    def __init__(self, kv: PagedKV, bound: Sequence[BoundPart], total: int) -> None:
        self._kv, self._bound, self._total = kv, bound, total

    def read(self, part: int, start: int, stop: int, out: RowLayout, *, layers: tuple[int, int] | None = None) -> bool:
        """See `kvcore.engine.kv.KVMemory.read`."""
        one = self._bound[part]
        if one.part.recurrent and (stop % one.block_tokens or (one.aligned_states and stop != self._total)):
            return False
        return self._kv.read(part, start, stop, out, layers=layers)

    def write(
        self,
        part: int,
        start: int,
        stop: int,
        chunk: RowLayout,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """See `kvcore.engine.kv.KVMemory.write`."""
        self._kv.write(part, start, stop, chunk, layers=layers, heads=heads)
