"""`KVMemory`: where an engine keeps the KV of one request, in blocks, in slots or in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvcore.arrays import ArrayRef
from kvcore.errors import ConfigError, LayoutError
from kvcore.memory import chunk_desc
from kvcore.ops import Backend
from kvcore.ops.backend import open_host
from kvcore.ops.staging import fetch, send
from kvcore.rows import RowLayout

__all__ = ["DenseKV", "KVMemory", "PagedKV", "as_memory"]

Slots = np.ndarray[Any, np.dtype[np.int64]]


class KVMemory(Protocol):
    """The KV of one request in an engine's memory, by part and by token of the sequence.

    Chunks are dense rows in host memory. An implementation has done what it was asked for when it returns.
    """

    def read(self, part: int, start: int, stop: int, out: RowLayout, *, layers: tuple[int, int] | None = None) -> bool:
        """Copy tokens ``[start, stop)`` of a part into a dense chunk of as many tokens.

        Of a recurrent part, copy the state after token ``stop - 1`` into a chunk of one page.

        Parameters
        ----------
        part : int
            Which of the engine's parts.
        start, stop : int
        out : RowLayout
            With all layers of the part, or those of `layers`.
        layers : (int, int), optional
            Half-open range of the part's layers, counted within the part.

        Returns
        -------
        bool
            Whether they are there: a window may have slid past them. If not, `out` holds anything.
        """

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
        """Copy a dense chunk to tokens ``[start, stop)`` of a part; those that the engine does not want are left out.

        Parameters
        ----------
        part, start, stop, layers
            As in `read`.
        chunk : RowLayout
        heads : (int, int), optional
            Half-open range of the part's heads, counted within the part, where the chunk has not all.
        """


class PagedKV:
    """A request's tokens in paged caches, one for each part.

    Parameters
    ----------
    backend : Backend
        Of the caches' memory.
    rows : sequence of RowLayout
        The cache of each part, bound.
    slots : sequence of int64 array ``[num_tokens]``
        For each part the slot of each token of the sequence, ``slot = block_id * block_size + offset``; -1 for tokens
        that are not there, or not wanted.

    Notes
    -----
    Memory of a device is reached through a buffer there; each call waits until its copies are done.
    """

    def __init__(self, backend: Backend, rows: Sequence[RowLayout], slots: Sequence[Slots]) -> None:
        if len(rows) != len(slots):
            raise LayoutError(f"{len(rows)} parts need as many slot mappings, got {len(slots)}")
        self._backend, self._rows = backend, list(rows)
        self._slots = [_slots(one, part) for part, one in enumerate(slots)]
        self._blocks: list[Slots | None] = [None] * len(rows)
        self._page_tokens = [0] * len(rows)  # where a block is a page: tokens of the sequence that it stands for

    @classmethod
    def of_blocks(
        cls,
        backend: Backend,
        rows: Sequence[RowLayout],
        blocks: Sequence[Sequence[int]],
        *,
        missing: int | None = None,
        block_tokens: Sequence[int] | None = None,
    ) -> PagedKV:
        """Take block tables: the blocks of the sequence's tokens, in order, for each part.

        Parameters
        ----------
        backend, rows
        blocks : sequence of sequences of int
        missing : int, optional
            The block id that stands for blocks that are not there.
        block_tokens : sequence of int, optional
            Tokens of the sequence that a block stands for, where a block is a page without tokens of its own.
        """
        made = cls(backend, rows, [np.empty(0, np.int64)] * len(rows))
        for part, (cache, table) in enumerate(zip(rows, blocks, strict=True)):
            ids = np.asarray(table, np.int64)
            if missing is not None:
                ids = np.where(ids == missing, -1, ids)
            made._blocks[part] = ids
            if cache.text.endswith("*"):
                given = None if block_tokens is None else block_tokens[part]
                if not given:
                    raise LayoutError(f"{cache.text} has pages: say how many tokens of the sequence each stands for")
                made._page_tokens[part] = given
                continue
            size = cache.block_tokens
            slots = ids[:, None] * size + np.arange(size)
            made._slots[part] = np.where(ids[:, None] < 0, -1, slots).reshape(-1)
        return made

    def read(self, part: int, start: int, stop: int, out: RowLayout, *, layers: tuple[int, int] | None = None) -> bool:
        """See `KVMemory.read`."""
        index, unit = self._index(part, start, stop)
        if len(index) == 0 or (index < 0).any():
            return False
        rows = self._rows[part].select(layers=layers)
        if rows.device == "cpu":
            self._backend.gather_paged(rows, index, unit=unit, out=[out])
            return True
        desc = chunk_desc(rows, out.tokens)
        buffer = self._backend.runtime.empty((desc.nbytes,), np.dtype(np.uint8))
        self._backend.gather_paged(rows, send(self._backend, index), unit=unit, out=[desc.bind(ArrayRef.of(buffer))])
        open_host().convert_layout(desc.bind(fetch(self._backend, buffer)), out=out)
        return True

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
        """See `KVMemory.write`."""
        index, unit = self._index(part, start, stop)
        rows = self._rows[part].select(layers=layers, heads=heads)
        if rows.device == "cpu":
            self._backend.scatter_paged([chunk], index, unit=unit, check_duplicates=False, out=rows)
            return
        desc = chunk_desc(rows, chunk.tokens)
        host = np.empty(desc.nbytes, np.uint8)
        open_host().convert_layout(chunk, out=desc.bind(host))
        placed = desc.bind(ArrayRef.of(send(self._backend, host)))
        device_index = send(self._backend, index)
        self._backend.scatter_paged([placed], device_index, unit=unit, check_duplicates=False, out=rows)
        self._backend.runtime.check()

    def _index(self, part: int, start: int, stop: int) -> tuple[Slots, str]:
        """Return where tokens are: block ids where they fill blocks, else slots."""
        table, size, page = self._blocks[part], self._rows[part].block_tokens, self._page_tokens[part]
        if page and table is not None:
            at = (stop - 1) // page
            found, wanted, unit = table[at : at + 1], 1, "block"
        elif (
            table is not None
            and not start % size
            and not stop % size
            and (table[start // size : stop // size] >= 0).all()
        ):
            found, wanted, unit = table[start // size : stop // size], (stop - start) // size, "block"
        else:
            found, wanted, unit = self._slots[part][start:stop], stop - start, "slot"
        if len(found) != wanted:
            raise LayoutError(
                f"tokens {start}:{stop} of part {part} are wanted, and the request has {len(found)} of {wanted} {unit}s"
            )
        return np.ascontiguousarray(found), unit


class DenseKV:
    """A request's tokens in one piece, of an engine with one part.

    Parameters
    ----------
    backend : Backend
        Computes on the host.
    rows : RowLayout
        Dense, with at least the tokens that are asked for.
    """

    def __init__(self, backend: Backend, rows: RowLayout) -> None:
        self._backend, self._rows = backend, rows

    def read(self, part: int, start: int, stop: int, out: RowLayout, *, layers: tuple[int, int] | None = None) -> bool:
        """See `KVMemory.read`."""
        self._backend.convert_layout(self._rows.select(layers=layers, tokens=(start, stop)), out=out)
        return True

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
        """See `KVMemory.write`."""
        target = self._rows.select(layers=layers, heads=heads, tokens=(start, stop))
        self._backend.convert_layout(chunk, out=target)


def as_memory(
    backend: Backend,
    kv: KVMemory | RowLayout | Sequence[RowLayout],
    slot_mapping: Any = None,
    *,
    parts: int = 1,
) -> KVMemory:
    """Return the KV of an engine with some parts as a `KVMemory`: bound caches with slots, dense rows, or one already.

    Raises
    ------
    ConfigError
        Caches in blocks without a slot mapping.
    LayoutError
        There are not as many caches, or slot mappings, as parts; or slots are not whole numbers in one dimension.
    """
    if isinstance(kv, RowLayout):
        kv = [kv]
    if not isinstance(kv, Sequence):
        return kv
    if len(kv) != parts:
        raise LayoutError(f"an engine with {parts} parts needs the KV of each, got {len(kv)} RowLayouts")
    if slot_mapping is None:
        if len(kv) != 1 or kv[0].paged:
            raise ConfigError("KV in blocks needs a slot_mapping: int64 [num_tokens], for each part")
        return DenseKV(backend, kv[0])
    if isinstance(slot_mapping, np.ndarray) or len(slot_mapping) != len(kv):
        slot_mapping = [slot_mapping] * len(kv)
    return PagedKV(backend, kv, [np.asarray(one) for one in slot_mapping])


def _slots(slots: Any, part: int) -> Slots:
    array = np.asarray(slots)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise LayoutError(
            f"the slot mapping of part {part} is int64 [num_tokens], got {array.dtype} of shape {list(array.shape)}"
        )
    return np.ascontiguousarray(array, np.int64)
