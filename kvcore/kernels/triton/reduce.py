"""Ranges of groups, in any order: what reduce_absmax and quantize share, as ``include/kvcore/reduce.hpp`` has it.

Elements that differ only along the reduced axes are a group. A program folds some groups over a part of their elements,
in a tile; parts meet by atomic maxima. Magnitudes and the keys of values order as integers, so no order matters.
"""

from typing import Any, NamedTuple

import triton.language as tl

from kvcore.kernels.triton.floats import ERROR, F32, INFINITY, SIGN, admit, narrow, widen
from kvcore.kernels.triton.lang import at, device, elements, fits, kernel, locate, read, report, tile, unfailed, write
from kvcore.kernels.triton.queue import Queue, power_of_two, shape_of_tile, tiles_of
from kvcore.kernels.triton.views import ROW_BYTES, Array, View, collapse, numbering

__all__ = ["LIMITS", "Words", "fold_groups", "reduce_absmax", "value_of_key"]

LIMITS = {8: 0x477FE000, 9: 0x7F7F0000, 10: 0x7F7FFFFF}
"""Bits of the largest finite float32 of each format, by its code in abi.h."""

NONFINITE = tl.constexpr(3)
NO_VALUE = tl.constexpr(0xFFFFFFFF)


class Words(NamedTuple):
    """What came of folding: uint32 ``[1 or 2, groups]`` at an address."""

    address: int
    groups: int


@device
def key_of(bits):
    """Return a key that orders as the value does; zero has one sign."""
    return tl.where((bits == SIGN) | (bits < SIGN), bits | SIGN, ~bits)


@device
def value_of_key(key):
    """Return the bits that have a key; NaN where a NaN was let in."""
    return tl.where(key >= SIGN, key ^ SIGN, ~key)


@kernel
def clear_words(words: tl.int64, count: tl.int64, block: tl.constexpr):
    """Set words to zero, with which every fold begins."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(at(words, tl.uint32) + index, tl.full((block,), 0, tl.uint32), mask=index < count)


@kernel
def fold(
    x: tl.int64,
    kept: tl.int64,
    reduced: tl.int64,
    words: tl.int64,
    status: tl.int64,
    groups: tl.int64,
    count: tl.int64,
    parts: tl.int64,
    dtype: tl.constexpr,
    size: tl.constexpr,
    access: tl.constexpr,
    limit: tl.constexpr,
    policy: tl.constexpr,
    minmax: tl.constexpr,
    several: tl.constexpr,
    kept_dims: tl.constexpr,
    kept_unit: tl.constexpr,
    reduced_dims: tl.constexpr,
    reduced_unit: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Fold groups; views: x, numbering.

    Word 0 is the largest magnitude, or of minmax the complement of the least key, word 1 the greatest key. `even`:
    neighbours in memory are a multiple of 16 elements.
    """
    program = tl.program_id(0).to(tl.int64)
    group = program // parts * rows + tl.arange(0, rows)
    first = program % parts * columns
    kept_table, reduced_table = at(kept, tl.int64), at(reduced, tl.int64)
    align: tl.constexpr = 16 // size if access == 16 else 1
    begin = locate(group, kept_table, 0, 2, kept_dims, kept_unit, align)[:, None]
    if even:  # so that the compiler knows
        if kept_unit:
            groups = groups // 16 * 16
        else:
            count = count // 16 * 16
    one = tl.full((rows, columns), 0, tl.uint32)
    two = tl.full((rows, columns), 0, tl.uint32)
    step = parts * columns
    for start in range(first, count, step):
        item = start + tl.arange(0, columns).to(tl.int64)
        there = (group[:, None] < groups) & (item[None, :] < count)
        offset = begin + locate(item, reduced_table, 0, 2, reduced_dims, reduced_unit, align)[None, :]
        bits = admit(widen(read(x, offset, there, size, access), dtype), limit, policy)
        if minmax:
            key = key_of(bits)
            is_nan = (bits & 0x7FFFFFFF) > INFINITY
            one = tl.maximum(one, tl.where(there, tl.where(is_nan, NO_VALUE, ~key), 0))
            two = tl.maximum(two, tl.where(there, tl.where(is_nan, NO_VALUE, key), 0))
        else:
            one = tl.maximum(one, tl.where(there, bits & 0x7FFFFFFF, 0))
    if policy == ERROR:
        # The largest tells whether anything is not finite. Only then it is looked up where the first such thing is.
        least = tl.full((), INFINITY | SIGN if minmax else INFINITY, tl.uint32)
        if tl.max(tl.maximum(one, two)) >= least:
            number = locate(group, kept_table, 1, 2, kept_dims, False)[:, None]
            for start in range(first, count, step):
                item = start + tl.arange(0, columns).to(tl.int64)
                there = (group[:, None] < groups) & (item[None, :] < count)
                offset = begin + locate(item, reduced_table, 0, 2, reduced_dims, reduced_unit, align)[None, :]
                bits = widen(read(x, offset, there, size, access), dtype)
                position = number + locate(item, reduced_table, 1, 2, reduced_dims, False)[None, :]
                report(status, there & ((bits & 0x7FFFFFFF) >= INFINITY), position, NONFINITE)
    target = at(words, tl.uint32) + group
    if several:
        tl.atomic_max(target, tl.max(one, axis=1), mask=group < groups, sem="relaxed")
        if minmax:
            tl.atomic_max(target + groups, tl.max(two, axis=1), mask=group < groups, sem="relaxed")
    else:
        tl.store(target, tl.max(one, axis=1), mask=group < groups)
        if minmax:
            tl.store(target + groups, tl.max(two, axis=1), mask=group < groups)


@kernel
def write_absmax(
    words: tl.int64,
    out: tl.int64,
    view: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    inner: tl.int64,
    access: tl.constexpr,
    dims: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Write the largest magnitudes of all groups; view: out."""
    row, column = tile(outer, inner, rows, columns)
    live = fits(row, column, outer, inner, even) & unfailed(status, row)[:, None]
    group = row[:, None] * inner.to(tl.int64) + column[None, :]
    bits = tl.load(at(words, tl.uint32) + group, mask=live, other=0)
    where = elements(row, column, at(view, tl.int64), 0, 1, dims, 4, access)
    write(out, where, narrow(bits, F32), live, 4, access)


def fold_groups(q: Queue, x: Any, axes: tuple[int, ...], code: int, policy: int, *, minmax: bool) -> Words:
    """Launch the fold of an array with elements; `code` is that of its dtype, `policy` as in `floats`."""
    source = Array.of(x)
    arrays = (source, numbering(x.shape))
    kept = collapse(x.shape, arrays, lambda axis: axis not in axes)
    reduced = collapse(x.shape, arrays, lambda axis: axis in axes)
    groups, count = kept.size, reduced.size
    # Neighbouring threads take neighbours in memory: along the groups where those are closer together.
    along_groups = groups >= 32 and abs(kept.strides[0][-1]) < abs(reduced.strides[0][-1])
    if along_groups:
        shape = shape_of_tile(count, groups, q.block)
        rows, columns = shape["columns"], shape["rows"]
    else:
        shape = shape_of_tile(groups, count, q.block)
        rows, columns = shape["rows"], shape["columns"]
    blocks, parts = -(-groups // rows), 1
    while blocks * parts < q.programs and count > columns * parts:
        parts *= 2
    words = Words(q.scratch(4 * groups * (2 if minmax else 1)), groups)
    if parts > 1:
        each = min(power_of_two(groups * 2), q.block)
        q.launch(clear_words, -(-groups * 2 // each), words.address, groups * (2 if minmax else 1), block=each)
    units = [view.strides[0][-1] == source.size for view in (kept, reduced)]
    access = _access_of(source, kept, reduced)
    inner = groups if units[0] else count
    tables = q.upload(kept.table((access, 0)), reduced.table((access, 0)))
    q.launch(
        fold, blocks * parts,
        source.address, *tables, words.address, q.status, groups, count, parts,
        dtype=code, size=source.size, access=access, limit=LIMITS[code], policy=policy, minmax=minmax,
        several=parts > 1, kept_dims=kept.dims, kept_unit=units[0] and access >= 0, reduced_dims=reduced.dims,
        reduced_unit=units[1] and access >= 0, even=access == ROW_BYTES and inner % 16 == 0, rows=rows, columns=columns,
    )  # fmt: skip
    return words


def _access_of(source: Array, kept: View, reduced: View) -> int:
    """Return how an array is read through two views, of which one may have neighbours that are adjacent."""
    if not source.aligned:
        return -1
    steps = [source.address]
    for view in (kept, reduced):
        strides = view.strides[0]
        steps += strides[:-1] if strides[-1] == source.size else strides
    return 0 if any(step % ROW_BYTES for step in steps) else ROW_BYTES


def reduce_absmax(q: Queue, x: Any, axes: tuple[int, ...], code: int, policy: int, out: Any) -> None:
    """Launch reduce_absmax; x has elements."""
    words = fold_groups(q, x, axes, code, policy, minmax=False)
    target = Array.of(out)
    view = collapse(out.shape, (target,))
    shape = shape_of_tile(view.outer, view.inner, q.block)
    q.launch(
        write_absmax, tiles_of(view.outer, view.inner, shape),
        words.address, target.address, *q.upload(view.table()), q.status, view.outer, view.inner,
        access=view.access[0], dims=view.dims, even=view.even, **shape,
    )  # fmt: skip
