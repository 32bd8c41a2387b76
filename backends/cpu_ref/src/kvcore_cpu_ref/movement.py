"""Gather, scatter, convert, copy: bytes move, nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import RowLayout, hookimpl
from kvcore.errors import SlotError
from kvcore_cpu_ref.digest import digest_bytes

__all__ = [
    "kvcore_op_convert_layout",
    "kvcore_op_copy_batch",
    "kvcore_op_gather_paged",
    "kvcore_op_scatter_paged",
]

Index = npt.NDArray[np.int64]


@hookimpl
def kvcore_op_gather_paged(
    src: RowLayout,
    index: Index,
    *,
    unit: str = "slot",
    skip_tokens: int = 0,
    out: Sequence[RowLayout],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    slots = _slots(src, index, unit, skip_tokens, sum(chunk.tokens for chunk in out))
    for chunk, tokens, block, offset in _moves(src, slots, out):
        for part, layer in src.planes():
            chunk.bytes_view(part, layer)[0, tokens] = src.bytes_view(part, layer)[block, offset]
    return out


@hookimpl
def kvcore_op_scatter_paged(
    src: Sequence[RowLayout],
    index: Index,
    *,
    unit: str = "slot",
    skip_tokens: int = 0,
    check_duplicates: bool = True,
    out: RowLayout,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    slots = _slots(out, index, unit, skip_tokens, sum(chunk.tokens for chunk in src))
    if check_duplicates:
        _refuse_duplicates(slots)
    for chunk, tokens, block, offset in _moves(out, slots, src):
        for part, layer in out.planes():
            out.bytes_view(part, layer)[block, offset] = chunk.bytes_view(part, layer)[0, tokens]
    return out


@hookimpl
def kvcore_op_convert_layout(src: RowLayout, *, out: RowLayout, stream: Any = None, workspace: Any = None) -> Any:
    for part, layer in src.planes():
        out.bytes_view(part, layer)[...] = src.bytes_view(part, layer)
    return out


@hookimpl
def kvcore_op_copy_batch(
    src: Sequence[npt.NDArray[np.uint8]],
    *,
    digests: npt.NDArray[np.uint64] | None = None,
    out: Sequence[npt.NDArray[np.uint8]],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    for i, (source, target) in enumerate(zip(src, out, strict=True)):
        target[:] = source
        if digests is not None:
            digests[i] = digest_bytes(source)
    return out


def _slots(paged: RowLayout, index: Index, unit: str, skip_tokens: int, tokens: int) -> Index:
    """Return the slot of each token of the request, -1 where it is skipped; every other one is in range."""
    limit = paged.tokens if unit == "slot" else paged.blocks
    per_token = index if unit == "slot" else np.repeat(index, paged.block_tokens)[:tokens]
    bad = np.flatnonzero((per_token < -1) | (per_token >= limit))
    bad = bad[bad >= skip_tokens]
    if bad.size:
        t = int(bad[0])
        raise SlotError(
            f"token {t} has {unit} {int(per_token[t])}, outside -1 .. {limit - 1} of {paged!r} (-1 skips a token)"
        )
    slots = per_token
    if unit == "block":
        slots = np.where(per_token < 0, -1, per_token * paged.block_tokens + np.arange(tokens) % paged.block_tokens)
    slots = slots.copy()
    slots[:skip_tokens] = -1
    return slots


def _refuse_duplicates(slots: Index) -> None:
    order = np.argsort(slots, kind="stable")
    same = np.flatnonzero((np.diff(slots[order]) == 0) & (slots[order][1:] >= 0))
    if same.size:
        first, second = int(order[same[0]]), int(order[same[0] + 1])
        raise SlotError(
            f"tokens {first} and {second} have one target, slot {int(slots[first])}; each slot takes one token"
        )


def _moves(
    paged: RowLayout, slots: Index, chunks: Sequence[RowLayout]
) -> Iterator[tuple[RowLayout, Index, Index, Index]]:
    """Yield for each chunk the tokens that move, and the block and offset of each in the cache."""
    start = 0
    for chunk in chunks:
        part = slots[start : start + chunk.tokens]
        start += chunk.tokens
        tokens = np.flatnonzero(part >= 0)
        block, offset = np.divmod(part[tokens], paged.block_tokens)
        yield chunk, tokens, block, offset
