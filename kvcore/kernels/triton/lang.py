"""What kernels share: addresses, tiles of a view, elements at any alignment, the status word.

Kernels take integers only, all of them int64: Triton then compiles one variant for each set of constants, and neither
compiled nor interpreted it wants to know whose memory an address is. Whatever a kernel needs of shapes and strides is
in tables (`kvcore.kernels.triton.views`).
"""

import inspect
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "OK",
    "at",
    "device",
    "elements",
    "fits",
    "kernel",
    "locate",
    "read",
    "report",
    "rows_at",
    "settle_status",
    "tile",
    "unfailed",
    "write",
]

OK = tl.constexpr(0xFFFFFFFFFFFFFFFF)


def kernel(function: Any) -> Any:
    """Make a kernel. No variants of it are made for values of arguments: what it should know are constants."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p.name for p in parameters if p.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=plain)


def device(function: Any) -> Any:
    """Make a function that kernels call. The interpreter has plain Python called, which is several times faster."""
    return function if triton.knobs.runtime.interpret else triton.jit(function)


@device
def at(address, kind: tl.constexpr):
    """Return an address as a pointer to elements of a type."""
    return address.to(tl.int64).to(tl.pointer_type(kind))


# --- tiles: neighbours along the innermost dim of a view, of some of its rows


@device
def tile(outer, inner, rows: tl.constexpr, columns: tl.constexpr):
    """Return this program's rows and columns of a view with `outer` rows of `inner` elements."""
    across = (inner.to(tl.int64) + columns - 1) // columns
    program = tl.program_id(0).to(tl.int64)
    row = program // across * rows + tl.arange(0, rows)
    column = program % across * columns + tl.arange(0, columns)
    return row, column


@device
def fits(row, column, outer, inner, even: tl.constexpr):
    """Return which elements of a tile there are. `even`: `inner` is a multiple of 16."""
    width = inner.to(tl.int64)
    if even:
        width = width // 16 * 16  # so that the compiler knows
    return (row[:, None] < outer.to(tl.int64)) & (column[None, :] < width)


@device
def locate(
    index,
    table,
    which: tl.constexpr,
    arrays: tl.constexpr,
    dims: tl.constexpr,
    unit: tl.constexpr = False,
    align: tl.constexpr = 1,
):
    """Return where elements of a view lie in array number `which` of it.

    `unit`: neighbours along the last dim are adjacent. `align`: how many elements a step of all other dims means. Both
    are worth knowing at compile time: they make vectors of what is read one by one otherwise.
    """
    rest = index
    found = index * 0
    for d in tl.static_range(0, dims):
        entry = table + (dims - 1 - d) * (arrays + 1)
        here = rest
        if d < dims - 1:
            extent = tl.load(entry)
            here = rest % extent
            rest = rest // extent
        if unit and d == 0:
            last = here
        else:
            found += here * tl.load(entry + 1 + which)
    if align > 1:
        found = found * align
    if unit:
        found += last
    return found


@device
def rows_at(row, table, which: tl.constexpr, arrays: tl.constexpr, dims: tl.constexpr, align: tl.constexpr = 1):
    """Return where rows of a view begin in array `which`; `align` as for `locate`."""
    if dims == 1:
        return row * 0
    else:
        return locate(row, table, which, arrays, dims - 1, False, align)


@device
def elements(
    row,
    column,
    table,
    which: tl.constexpr,
    arrays: tl.constexpr,
    dims: tl.constexpr,
    size: tl.constexpr,
    access: tl.constexpr,
):
    """Return where the elements of a tile lie in array `which`, for `read` and `write`.

    `access` (`kvcore.kernels.triton.views.access`) says how: -1 byte by byte, 0 by strides, 1 neighbours are adjacent,
    16 the same and rows are aligned to 16 bytes.
    """
    begin = rows_at(row, table, which, arrays, dims, 16 // size if access == 16 else 1)[:, None]
    if access >= 1:
        return begin + column[None, :]
    else:
        return begin + column[None, :] * tl.load(table + (dims - 1) * (arrays + 1) + 1 + which)


# --- elements, as the bits of uint32


@device
def base(address, size: tl.constexpr, access: tl.constexpr):
    """Return the pointer that offsets of an array count from."""
    kind: tl.constexpr = tl.uint8 if access == -1 or size == 1 else tl.uint16 if size == 2 else tl.uint32
    pointer = address.to(tl.int64).to(tl.pointer_type(kind))
    if access == 16:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@device
def read(address, offset, mask, size: tl.constexpr, access: tl.constexpr):
    """Return elements of 1, 2 or 4 bytes as uint32, zero where `mask` is not set."""
    pointer = base(address, size, access) + offset
    value = tl.load(pointer, mask=mask, other=0).to(tl.uint32)
    if access == -1:
        for byte in tl.static_range(1, size):
            value = value | (tl.load(pointer + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte))
    return value


@device
def write(address, offset, value, mask, size: tl.constexpr, access: tl.constexpr):
    """Store the low bytes of uint32 values as elements of 1, 2 or 4 bytes."""
    pointer = base(address, size, access) + offset
    if access == -1:
        for byte in tl.static_range(0, size):
            tl.store(pointer + byte, (value >> (8 * byte)).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


# --- the status word (abi.h)


@device
def unfailed(status, index):
    """Tell whether neither this op nor an earlier one of the stream has reported anything: alike for each index."""
    word = tl.full(index.shape, 0, tl.uint64) + tl.load(at(status, tl.uint64))
    return word == OK


@device
def report(status, wrong, position, code):
    """Report the least position at which something is wrong; its code is `code`, a number or one for each position."""
    word = (position.to(tl.uint64) << 8) | code
    least = tl.min(tl.where(wrong, word, OK))
    tl.atomic_min(at(status, tl.uint64), least, mask=least != OK, sem="relaxed")


@kernel
def settle_status(status: tl.int64):
    """End an op that reports: its findings become those of the stream, unless an earlier op left some."""
    word = at(status, tl.uint64)
    mine, earlier = tl.load(word), tl.load(word + 1)
    kept = tl.where(earlier == OK, mine, earlier)
    tl.store(word, kept)
    tl.store(word + 1, kept)
