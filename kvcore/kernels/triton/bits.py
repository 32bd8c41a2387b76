"""pack_bits, as ``include/kvcore/pack_bits.hpp`` has it: a first kernel finds values that do not fit."""

from typing import Any

import triton.language as tl

from kvcore.kernels.triton.lang import at, elements, fits, kernel, read, report, rows_at, tile, unfailed, write
from kvcore.kernels.triton.queue import Queue, shape_of_tile, tiles_of
from kvcore.kernels.triton.views import Array, collapse

__all__ = ["pack_bits"]

RANGE = tl.constexpr(5)


@kernel
def check_fits(
    x: tl.int64,
    view: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    inner: tl.int64,
    bits: tl.constexpr,
    signed: tl.constexpr,
    access: tl.constexpr,
    dims: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Report values beyond so many bits; view: x."""
    row, column = tile(outer, inner, rows, columns)
    there = fits(row, column, outer, inner, even)
    value = read(x, elements(row, column, at(view, tl.int64), 0, 1, dims, 1, access), there, 1, access)
    position = row[:, None] * inner.to(tl.int64) + column[None, :]
    # A signed value fits if adding half of the range makes it an unsigned one that does.
    lifted = (value + (1 << (bits - 1))) & 0xFF if signed else value
    report(status, there & ((lifted >> bits) != 0), position, RANGE)


@kernel
def pack_bytes(
    x: tl.int64,
    out: tl.int64,
    view: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    nbytes: tl.int64,
    count: tl.int64,
    x_step: tl.int64,
    out_step: tl.int64,
    bits: tl.constexpr,
    dims: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Make each byte of the rows of `out` from the values that have bits in it; view: rows of x, rows of out."""
    row, column = tile(outer, nbytes, rows, columns)
    live = fits(row, column, outer, nbytes, False) & unfailed(status, row)[:, None]
    table = at(view, tl.int64)
    # The rows' view has its dims to itself: one more, which does not exist, stands for the values.
    source, target = rows_at(row, table, 0, 2, dims + 1), rows_at(row, table, 1, 2, dims + 1)
    first = column * 8 // bits
    packed = tl.full((1, columns), 0, tl.uint32)
    for n in tl.static_range(0, (8 + bits - 2) // bits + 1):
        index = first + n
        there = live & (index < count.to(tl.int64))[None, :]
        value = read(x, source[:, None] + (index * x_step)[None, :], there, 1, 0) & ((1 << bits) - 1)
        # Its lowest bit is bit `index * bits - column * 8` of the byte: from 1 - bits to 7.
        shift = (index * bits - column * 8 + 8).to(tl.uint32)[None, :]
        packed = packed | ((value << shift) >> 8)
    write(out, target[:, None] + (column * out_step)[None, :], packed, live, 1, 0)


def pack_bits(q: Queue, x: Any, bits: int, out: Any, *, signed: bool) -> None:
    """Launch pack_bits; x has elements."""
    source, target = Array.of(x), Array.of(out)
    checked = collapse(x.shape, (source,), vectors=1)
    rows = collapse(x.shape[:-1], [Array(a.address, a.strides[:-1], 1) for a in (source, target)])
    tables = q.upload(checked.table(), rows.table())
    shape = shape_of_tile(checked.outer, checked.inner, q.block)
    q.launch(
        check_fits, tiles_of(checked.outer, checked.inner, shape),
        source.address, tables[0], q.status, checked.outer, checked.inner,
        bits=bits, signed=signed, access=checked.access[0], dims=checked.dims, even=checked.even, **shape,
    )  # fmt: skip
    nbytes = out.shape[-1]
    shape = shape_of_tile(rows.size, nbytes, q.block)
    q.launch(
        pack_bytes, tiles_of(rows.size, nbytes, shape),
        source.address, target.address, tables[1], q.status, rows.size, nbytes, x.shape[-1], source.strides[-1],
        target.strides[-1],
        bits=bits, dims=rows.dims, **shape,
    )  # fmt: skip
