"""Defects of moving bytes."""

# ruff: noqa: D103 -- a defect says in its name what is wrong
from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np

from kvcore import RowLayout
from kvcore.errors import SlotError
from kvcore_conformance.mutants.catalogue import Call, mutant


def _cache(call: Call) -> Any:
    """The paged side of a gather or scatter."""
    source = call.args[0]
    return source if isinstance(source, RowLayout) else call.kwargs["out"]


def _limit(call: Call) -> int:
    cache = _cache(call)
    return int(cache.tokens if call.kwargs.get("unit", "slot") == "slot" else cache.blocks)


def _with_segments(rows: RowLayout, segments: tuple[Any, ...]) -> RowLayout:
    return RowLayout(
        rows.text,
        segments,
        rows.blocks,
        rows.block_tokens,
        rows.layers,
        rows.device,
        rows.readonly,
        rows.owner,
        rows.paged,
    )


def _set_cache(call: Call, rows: RowLayout) -> Any:
    """Run with another paged side; return the `out` that was given."""
    out = call.kwargs["out"]
    if isinstance(call.args[0], RowLayout):
        call.args[0] = rows
    else:
        call.kwargs["out"] = rows
    call.run()
    return out


@mutant("gather_paged", "scatter_paged")
def slot_off_by_one(call: Call) -> Any:
    index, limit = call.args[1], _limit(call)
    call.args[1] = np.where((index >= 0) & (index + 1 < limit), index + 1, index)
    return call.run()


@mutant("gather_paged", "scatter_paged")
def tail_token_dropped(call: Call) -> Any:
    if call.kwargs.get("unit", "slot") == "slot" and call.args[1].size:
        call.args[1] = call.args[1].copy()
        call.args[1][-1] = -1
    return call.run()


@mutant("gather_paged")
def k_and_v_swapped(call: Call) -> Any:
    rows = call.args[0]
    segments = tuple(replace(s, bases=s.bases[::-1]) if len(s.parts) == 2 else s for s in rows.segments)
    return _set_cache(call, _with_segments(rows, segments))


@mutant("gather_paged", "scatter_paged")
def second_segment_has_the_strides_of_the_first(call: Call) -> Any:
    rows = _cache(call)
    first, *others = rows.segments
    wrong = [
        replace(s, token_stride=s.dim_stride, dim_stride=s.dtype.itemsize * rows.block_tokens)
        if (s.heads, s.width, s.dtype) == (first.heads, first.width, first.dtype) and s.dim_stride == s.dtype.itemsize
        else s
        for s in others
    ]
    return _set_cache(call, _with_segments(rows, (first, *wrong)))


@mutant("gather_paged", "scatter_paged")
def layer_off_by_one(call: Call) -> Any:
    rows = _cache(call)
    segments = tuple(replace(s, bases=tuple((*b[1:], b[0]) for b in s.bases)) for s in rows.segments)
    return _set_cache(call, _with_segments(rows, segments))


@mutant("gather_paged", "scatter_paged")
def skip_tokens_ignored(call: Call) -> Any:
    call.kwargs["skip_tokens"] = 0
    return call.run()


@mutant("gather_paged", "scatter_paged")
def skipped_tokens_still_checked(call: Call) -> Any:
    if call.args[1].size and (call.args[1] >= _limit(call)).any():
        raise SlotError("an index is out of range, if only of a token that is skipped")
    return call.run()


@mutant("gather_paged", "scatter_paged")
def minus_one_is_the_last_slot(call: Call) -> Any:
    call.args[1] = np.where(call.args[1] == -1, _limit(call) - 1, call.args[1])
    return call.run()


@mutant("gather_paged", "scatter_paged")
def index_out_of_range_skipped(call: Call) -> Any:
    index = call.args[1]
    call.args[1] = np.where((index < 0) | (index >= _limit(call)), -1, index)
    return call.run()


@mutant("gather_paged")
def blocks_without_their_offset(call: Call) -> Any:
    if call.kwargs.get("unit") == "block":
        size = _cache(call).block_tokens
        tokens = sum(chunk.tokens for chunk in call.kwargs["out"])
        blocks = np.repeat(call.args[1], size)[:tokens]
        call.args[1] = np.where(blocks >= 0, blocks * size, blocks)
        call.kwargs["unit"] = "slot"
    return call.run()


@mutant("gather_paged")
def second_chunk_starts_over(call: Call) -> Any:
    start = 0
    for chunk in call.kwargs["out"]:
        if call.kwargs.get("unit") == "block":
            return call.run()
        tokens = call.args[1][: chunk.tokens]
        skip = min(max(call.kwargs.get("skip_tokens", 0) - start, 0), chunk.tokens)
        call.original(call.args[0], tokens, unit="slot", skip_tokens=skip, out=(chunk,))
        start += chunk.tokens
    return call.kwargs["out"]


@mutant("scatter_paged")
def padding_behind_rows_written(call: Call) -> Any:
    out = call.run()
    for part, layer in out.planes():
        segment, i = out.segment(part)
        row = segment.width * segment.dim_stride
        padded = segment.head_stride > row if segment.heads > 1 else segment.token_stride > row
        if padded and segment.contiguous_rows and out.tokens:
            ctypes.memset(segment.bases[i][layer] + row, 0xEE, 1)
    return out


@mutant("scatter_paged")
def duplicates_unchecked(call: Call) -> Any:
    call.kwargs["check_duplicates"] = False
    return call.run()


@mutant("scatter_paged")
def written_before_it_raises(call: Call) -> Any:
    try:
        return call.run()
    except SlotError:
        for part, layer in call.kwargs["out"].planes():
            call.kwargs["out"].bytes_view(part, layer)[0] ^= 0xFF
        raise


@mutant("convert_layout")
def only_the_first_layer(call: Call) -> Any:
    call.args[0], out = call.args[0].select(layers=(0, 1)), call.kwargs["out"]
    call.kwargs["out"] = out.select(layers=(0, 1))
    call.run()
    return out


@mutant("convert_layout")
def last_head_dropped(call: Call) -> Any:
    out, heads = call.kwargs["out"], min(s.heads for s in call.args[0].segments)
    if heads > 1:
        call.args[0] = call.args[0].select(heads=(0, heads - 1))
        call.kwargs["out"] = out.select(heads=(0, heads - 1))
    call.run()
    return out


@mutant("copy_batch")
def short_by_one(call: Call) -> Any:
    out = call.kwargs["out"]
    kept = [x[-1:].copy() for x in out]
    call.run()
    for target, last in zip(out, kept, strict=True):
        target[-1:] = last
    return out


@mutant("copy_batch")
def digests_in_reverse(call: Call) -> Any:
    out = call.run()
    if call.kwargs.get("digests") is not None:
        call.kwargs["digests"][:] = call.kwargs["digests"][::-1].copy()
    return out


@mutant("copy_batch")
def digests_forgotten(call: Call) -> Any:
    call.kwargs["digests"] = None
    return call.run()


@mutant("digest")
def length_ignored(call: Call) -> Any:
    call.args[0] = [np.concatenate([x, np.zeros(-x.size % 16, np.uint8)]) for x in call.args[0]]
    return call.run()


@mutant("digest")
def order_of_blocks_ignored(call: Call) -> Any:
    out = call.run()
    for i, buffer in enumerate(call.args[0]):
        whole = buffer[: buffer.size // 16 * 16].reshape(-1, 16)
        ordered = np.concatenate([whole[np.lexsort(whole.T)].reshape(-1), buffer[whole.size :]])
        call.original([ordered], out=out[i : i + 1])
    return out


@mutant("digest")
def only_full_blocks(call: Call) -> Any:
    call.args[0] = [x[: x.size // 16 * 16] for x in call.args[0]]
    return call.run()


@mutant("gather_paged", "digest", "quantize", "pack_bits")
def out_not_returned(call: Call) -> Any:
    call.run()
