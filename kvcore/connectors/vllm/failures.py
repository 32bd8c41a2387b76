"""`FailedBlocks`: which of vLLM's blocks hold no KV though they were to be loaded, so that nothing of it is saved."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FailedBlocks"]


class FailedBlocks:
    """Slots that a load should have filled and did not, until the model fills them.

    vLLM learns of a failed load when a step ends. Until then, and in every step that was scheduled meanwhile, requests
    compute with what the blocks hold, and whatever they save would be poison for all who load it later.

    Parameters
    ----------
    block_tokens : int
        Tokens of a block.

    Notes
    -----
    Thread-safe: loads fail on threads of their own.
    """

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._lock = threading.Lock()
        self._empty: dict[int, npt.NDArray[np.bool_]] = {}  # by block, which of its slots hold nothing
        self._told: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there are such blocks."""
        return bool(self._empty)

    def add(self, blocks: Iterable[int]) -> None:
        """Note blocks that hold nothing, for `take` too."""
        with self._lock:
            for block in blocks:
                self._empty[block] = np.ones(self._size, np.bool_)
                self._told.add(block)

    def take(self) -> set[int]:
        """Return the blocks that were added since it was last called."""
        with self._lock:
            told, self._told = self._told, set()
            return told

    def written(self, slots: npt.NDArray[np.integer[Any]]) -> None:
        """Note slots ``[n]`` that are filled, ``block * block_tokens + offset``; negative ones are padding."""
        if self._empty:
            slots = slots[slots >= 0]
            with self._lock:
                for block in np.unique(slots // self._size).tolist():
                    self._fill(block, slots[slots // self._size == block] % self._size)

    def computed(self, table: Sequence[int], start: int, stop: int) -> None:
        """Note that tokens ``[start, stop)`` of a request with these blocks are filled."""
        if self._empty and stop > start:
            size = self._size
            with self._lock:
                for at in range(start // size, min(-(-stop // size), len(table))):
                    self._fill(table[at], slice(max(start - at * size, 0), stop - at * size))

    def touch(self, table: Sequence[int], tokens: int) -> bool:
        """Whether one of the first `tokens` tokens of a request with these blocks has no KV."""
        if not self._empty:
            return False
        with self._lock:
            tables = enumerate(table[: -(-tokens // self._size)])
            return any(block in self._empty and self._lacks(block, tokens - at * self._size) for at, block in tables)

    def _lacks(self, block: int, tokens: int) -> bool:
        return bool(self._empty[block][:tokens].any())

    def _fill(self, block: int, offsets: Any) -> None:
        empty = self._empty.get(block)
        if empty is not None:
            empty[offsets] = False
            if not empty.any():
                del self._empty[block]
