"""gather_paged and scatter_paged, as ``include/kvcore/paged.hpp`` has them.

Duplicate targets are found without sorting, in three passes over the index: the cell of every target in a scratch table
is set to "nobody", then to the least position that names it, and whoever finds another position there comes second.
Then tiles move: a row of words for each token, layer and row that a token has in a plane.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from kvcore.kernels.abi import address
from kvcore.kernels.triton.lang import OK, at, kernel, report, unfailed
from kvcore.kernels.triton.queue import Queue, power_of_two
from kvcore.rows import NativeRows, RowLayout

__all__ = ["Rows", "move_paged", "row_shape"]

NO_SLOT = tl.constexpr(1)
SAME_SLOT = tl.constexpr(2)


@kernel
def check_range(
    index: tl.int64,
    least: tl.int64,
    status: tl.int64,
    first: tl.int64,
    count: tl.int64,
    limit: tl.int64,
    duplicates: tl.constexpr,
    block: tl.constexpr,
):
    """Report entries outside -1 .. limit - 1; set the cell of every target to "nobody"."""
    entry = first.to(tl.int64) + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = entry < count
    target = tl.load(at(index, tl.int64) + entry, mask=there, other=-1)
    report(status, there & ((target < -1) | (target >= limit)), entry, NO_SLOT)
    if duplicates:
        nobody = tl.full((block,), OK, tl.uint64)
        tl.store(at(least, tl.uint64) + target, nobody, mask=there & (target >= 0) & (target < limit))


@kernel
def find_first(
    index: tl.int64, least: tl.int64, first: tl.int64, count: tl.int64, limit: tl.int64, block: tl.constexpr
):
    """Make the cell of every target the least position that names it."""
    entry = first.to(tl.int64) + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    target = tl.load(at(index, tl.int64) + entry, mask=entry < count, other=-1)
    named = (target >= 0) & (target < limit)
    tl.atomic_min(at(least, tl.uint64) + target, entry.to(tl.uint64), mask=named, sem="relaxed")


@kernel
def check_duplicates(
    index: tl.int64,
    least: tl.int64,
    status: tl.int64,
    first: tl.int64,
    count: tl.int64,
    limit: tl.int64,
    block: tl.constexpr,
):
    """Report entries whose target an earlier one has."""
    entry = first.to(tl.int64) + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    target = tl.load(at(index, tl.int64) + entry, mask=entry < count, other=-1)
    named = (target >= 0) & (target < limit)
    earliest = tl.load(at(least, tl.uint64) + target, mask=named, other=0)
    report(status, named & (earliest != entry.to(tl.uint64)), entry, SAME_SLOT)


@kernel
def move_rows(
    index: tl.int64,
    paged: tl.int64,
    chunks: tl.int64,
    first_token: tl.int64,
    status: tl.int64,
    items: tl.int64,
    layers: tl.int64,
    tokens: tl.int64,
    skip_tokens: tl.int64,
    block_tokens: tl.int64,
    entry_tokens: tl.int64,
    chunk_count: tl.int64,
    chunk_pitch: tl.int64,
    gather: tl.constexpr,
    rounds: tl.constexpr,
    row_count: tl.constexpr,
    split: tl.constexpr,
    words: tl.constexpr,
    nbytes: tl.constexpr,
    align: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Move the rows of one part.

    `paged`, `chunks`: tables of planes, five int64 each. `rounds`: of the search for a token's chunk. A token has
    `row_count` rows, `split` for each head, of `words` words of `nbytes`; rows are aligned to `align` bytes.
    """
    across: tl.constexpr = (words + columns - 1) // columns
    program = tl.program_id(0).to(tl.int64)
    item = program // across * rows + tl.arange(0, rows)
    word = (program % across).to(tl.int32) * columns + tl.arange(0, columns)
    there = (item < items) & unfailed(status, item)

    row = item % row_count
    head, element = row // split, row % split
    token = item // row_count % (tokens - skip_tokens) + skip_tokens
    layer = item // row_count // (tokens - skip_tokens)
    entry, within = token // entry_tokens, token % entry_tokens
    target = tl.load(at(index, tl.int64) + entry, mask=there, other=-1)
    there = there & (target >= 0)
    slot = target * entry_tokens + within

    chunk = token * 0
    if rounds > 0:  # the last chunk that begins at or before the token and is not empty
        above = chunk + chunk_count
        for _ in tl.static_range(0, rounds):
            middle = (chunk + above) // 2
            begins = tl.load(at(first_token, tl.int64) + middle) <= token
            chunk = tl.where(begins, middle, chunk)
            above = tl.where(begins, above, middle)
    begin = tl.load(at(first_token, tl.int64) + chunk)

    cache = at(paged, tl.int64) + layer * 5
    in_cache = tl.load(cache, mask=there, other=0)
    in_cache += slot // block_tokens * tl.load(cache + 1, mask=there, other=0)
    in_cache += slot % block_tokens * tl.load(cache + 2, mask=there, other=0)
    in_cache += head * tl.load(cache + 3, mask=there, other=0) + element * tl.load(cache + 4, mask=there, other=0)
    dense = at(chunks, tl.int64) + (chunk * chunk_pitch + layer) * 5
    in_chunk = tl.load(dense, mask=there, other=0) + (token - begin) * tl.load(dense + 2, mask=there, other=0)
    in_chunk += head * tl.load(dense + 3, mask=there, other=0) + element * tl.load(dense + 4, mask=there, other=0)

    kind: tl.constexpr = (
        tl.uint64 if nbytes == 8 else tl.uint32 if nbytes == 4 else tl.uint16 if nbytes == 2 else tl.uint8
    )
    cache_row = tl.multiple_of(in_cache.to(tl.pointer_type(kind)), align)[:, None]
    chunk_row = tl.multiple_of(in_chunk.to(tl.pointer_type(kind)), align)[:, None]
    moved = there[:, None] & (word < words)[None, :]
    if gather:
        tl.store(chunk_row + word[None, :], tl.load(cache_row + word[None, :], mask=moved), mask=moved)
    else:
        tl.store(cache_row + word[None, :], tl.load(chunk_row + word[None, :], mask=moved), mask=moved)


# --- launching


class Rows(NamedTuple):
    """How the bytes that a token has in a plane are cut into rows of words (``include/kvcore/rows.hpp``).

    Parameters
    ----------
    row_count, split : int
        Rows of a token, and of a head: 1, or its width where each element is a row.
    words, nbytes : int
        Words of a row, and bytes of a word: at most 8.
    align : int
        What every row is aligned to on both sides: at most 16.
    """

    row_count: int
    split: int
    words: int
    nbytes: int
    align: int


def row_shape(part: Sequence[int], paged: np.ndarray[Any, Any], chunks: np.ndarray[Any, Any]) -> Rows:
    """Find the rows that serve all planes of a part: int64 ``[planes, 5]`` of both sides, as `NativeRows` has them."""
    heads, width, item = part[0], part[1], part[2]
    steps = np.concatenate([paged, chunks])
    channels = width == 1 or bool((steps[:, 4] == item).all())
    whole = channels and (heads == 1 or bool((steps[:, 3] == width * item).all()))
    nbytes = width * item * heads if whole else width * item if channels else item
    used = [nbytes, *steps[:, 0].tolist(), *paged[:, 1].tolist(), *steps[:, 2].tolist()]
    if not whole and heads > 1:
        used += steps[:, 3].tolist()
    if not channels:
        used += steps[:, 4].tolist()
    align = 16
    while any(step % align for step in used):
        align //= 2
    row_count = 1 if whole else heads if channels else heads * width
    word = min(align, 8)
    return Rows(row_count, 1 if channels else width, nbytes // word, word, align)


def move_paged(
    q: Queue,
    paged: RowLayout,
    chunks: Sequence[RowLayout],
    index: Any,
    *,
    unit: str,
    skip_tokens: int,
    gather: bool,
    check: bool = False,
) -> None:
    """Launch gather_paged, or scatter_paged with or without a `check` for duplicates."""
    first_token = np.cumsum([0, *(chunk.block_tokens for chunk in chunks)], dtype=np.int64)
    tokens, slots = int(first_token[-1]), paged.tokens
    entry_tokens = paged.block_tokens if unit == "block" and slots else 1
    if tokens <= skip_tokens:
        return
    first, count, limit = skip_tokens // entry_tokens, index.shape[0], slots // entry_tokens
    entries, least = address(index), q.scratch(8 * limit) if check else 0
    block = min(power_of_two(count - first), q.block)
    programs = -(-(count - first) // block)
    q.launch(check_range, programs, entries, least, q.status, first, count, limit, duplicates=check, block=block)
    if check:
        q.launch(find_first, programs, entries, least, first, count, limit, block=block)
        q.launch(check_duplicates, programs, entries, least, q.status, first, count, limit, block=block)
    if not slots:
        return
    cache, filled = paged.native(), [c.block_tokens > 0 for c in chunks]
    dense = [chunk.native() for chunk in chunks]
    tables = q.upload(first_token, cache.planes, np.concatenate([d.planes for d in dense]))
    planes = len(cache.planes)
    for number, part in enumerate(cache.parts.tolist()):
        mine = slice(number * paged.layers, (number + 1) * paged.layers)
        rows = row_shape(part, cache.planes[mine], _of(dense, filled, mine))
        if rows.words == 0 or rows.row_count == 0 or paged.layers == 0:
            continue
        items = paged.layers * (tokens - skip_tokens) * rows.row_count
        columns = min(power_of_two(rows.words), q.block)
        height = min(q.block // columns, power_of_two(items))
        offset = number * paged.layers * cache.planes.strides[0]
        q.launch(
            move_rows, -(-items // height) * -(-rows.words // columns),
            entries, tables[1] + offset, tables[2] + offset, tables[0], q.status, items, paged.layers, tokens,
            skip_tokens, paged.block_tokens, entry_tokens, len(chunks), planes,
            gather=gather, rounds=(len(chunks) - 1).bit_length(), **rows._asdict(), rows=height, columns=columns,
        )  # fmt: skip


def _of(dense: Sequence[NativeRows], filled: Sequence[bool], planes: slice) -> np.ndarray[Any, Any]:
    """Return the planes of those chunks that have tokens."""
    return np.concatenate([d.planes[planes] for d, some in zip(dense, filled, strict=True) if some])
