"""quantize and dequantize, as ``include/kvcore/quantize.hpp`` and ``dequantize.hpp`` have them.

Nothing divides but one kernel that turns scales into reciprocals, in integers; an element costs one multiply.
"""

from typing import Any

import numpy as np
import triton.language as tl

from kvcore.kernels.triton.floats import (
    ERROR,
    IGNORE,
    INFINITY,
    PROPAGATE,
    admit,
    as_bits,
    as_float,
    hold_overflow,
    narrow,
    reciprocal,
    rounded,
    widen,
)
from kvcore.kernels.triton.lang import (
    at,
    device,
    elements,
    fits,
    kernel,
    locate,
    read,
    report,
    rows_at,
    tile,
    unfailed,
    write,
)
from kvcore.kernels.triton.queue import Queue, power_of_two, shape_of_tile, tiles_of
from kvcore.kernels.triton.reduce import LIMITS, fold_groups, value_of_key
from kvcore.kernels.triton.views import Array, collapse, numbering
from kvcore.quant import Quantized, QuantSpec

__all__ = ["dequantize", "quantize"]

INT = tl.constexpr(0)
AFFINE = tl.constexpr(1)
FP8 = tl.constexpr(2)
CODEBOOK = tl.constexpr(3)
KINDS = {"int": 0, "affine": 1, "fp8": 2, "codebook": 3}

SCALE = tl.constexpr(4)
LEVEL = tl.constexpr(6)
SCALE_MIN = tl.constexpr(2.0**-100)
SCALE_MAX = tl.constexpr(2.0**125)
TINY = tl.constexpr(0x30800000)  # 2**-30


@kernel
def check_scales(
    scale: tl.int64,
    view: tl.int64,
    status: tl.int64,
    count: tl.int64,
    access: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
):
    """Report scales out of range; view: scale."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = index < count
    where = locate(index, at(view, tl.int64), 0, 1, dims)
    value = as_float(read(scale, where, there, 4, access))
    report(status, there & ~((value >= SCALE_MIN) & (value <= SCALE_MAX)), index, SCALE)


@kernel
def quantize_groups(
    words: tl.int64,
    given: tl.int64,
    scale: tl.int64,
    zero: tl.int64,
    view: tl.int64,
    inverses: tl.int64,
    zeros: tl.int64,
    status: tl.int64,
    count: tl.int64,
    by_code_max: tl.int64,
    kind: tl.constexpr,
    has_given: tl.constexpr,
    given_access: tl.constexpr,
    scale_access: tl.constexpr,
    zero_access: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
):
    """Find scale and zero point of each group; view: scale, zero, given. `by_code_max`: bits of 1 / (largest code)."""
    group = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    live = (group < count) & unfailed(status, group)
    table = at(view, tl.int64)
    if has_given:
        bits = read(given, locate(group, table, 2, 3, dims), live, 4, given_access)
    else:
        lows = tl.load(at(words, tl.uint32) + group, mask=live, other=0)
        highs = tl.load(at(words, tl.uint32) + count.to(tl.int64) + group, mask=live, other=0)
        low, high = value_of_key(~lows), value_of_key(highs)
        by_largest = as_float(by_code_max.to(tl.uint32))
        largest = as_float(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF))
        value = largest * by_largest
        if kind == AFFINE:
            span = as_float(high) * by_largest - as_float(low) * by_largest
            least = largest * 0.00000095367431640625  # 2**-20
            value = tl.where(span > least, span, least)
        value = tl.where(value < SCALE_MIN, 1.0, tl.where(value < SCALE_MAX, value, SCALE_MAX))
        bits = as_bits(value)
    inverse = reciprocal(bits)
    write(scale, locate(group, table, 0, 3, dims), bits, live, 4, scale_access)
    tl.store(at(inverses, tl.uint32) + group, inverse, mask=live)
    if kind == AFFINE:
        offset = -rounded(as_bits(as_float(low) * as_float(inverse)))
        write(zero, locate(group, table, 1, 3, dims), offset.to(tl.uint32, bitcast=True), live, 4, zero_access)
        tl.store(at(zeros, tl.int32) + group, offset, mask=live)


@device
def nearest_level(value, middles):
    """Return how many middles are below a value; there are 255, ascending, the last ones infinite."""
    code = tl.full(value.shape, 0, tl.int32)
    for power in tl.static_range(0, 8):
        middle = tl.load(at(middles, tl.float32) + (code + ((128 >> power) - 1)))
        code = tl.where(middle < value, code + (128 >> power), code)
    return code


@kernel
def quantize_elements(
    x: tl.int64,
    codes: tl.int64,
    inverses: tl.int64,
    zeros: tl.int64,
    view: tl.int64,
    middles: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    inner: tl.int64,
    code_max: tl.int64,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    size: tl.constexpr,
    access: tl.constexpr,
    code_type: tl.constexpr,
    code_size: tl.constexpr,
    code_access: tl.constexpr,
    limit: tl.constexpr,
    policy: tl.constexpr,
    shared: tl.constexpr,
    dims: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Turn values into codes; view: x, codes, numbers of groups. `shared`: a row has one scale."""
    row, column = tile(outer, inner, rows, columns)
    live = fits(row, column, outer, inner, even) & unfailed(status, row)[:, None]
    table = at(view, tl.int64)
    bits = admit(widen(read(x, elements(row, column, table, 0, 3, dims, size, access), live, size, access), dtype),
                 limit, policy)  # fmt: skip
    if shared:
        group = rows_at(row, table, 2, 3, dims)[:, None]
        there = (row < outer)[:, None]
    else:
        group = elements(row, column, table, 2, 3, dims, 1, 0)
        there = live
    inverse = tl.load(at(inverses, tl.float32) + group, mask=there, other=0.0)
    product = as_bits(as_float(bits) * inverse)
    if kind == INT:
        top = code_max.to(tl.int32)
        code = tl.minimum(tl.maximum(rounded(product), -top), top)
    elif kind == AFFINE:
        zero = tl.load(at(zeros, tl.int32) + group, mask=there, other=0)
        code = tl.minimum(tl.maximum(rounded(product) + zero, 0), code_max.to(tl.int32))
    elif kind == FP8:
        finite = (bits & 0x7FFFFFFF) < INFINITY
        code = narrow(tl.where(finite, hold_overflow(product), bits), code_type)
    else:
        held = tl.where((product & 0x7FFFFFFF) < TINY, 0, hold_overflow(product))
        code = nearest_level(as_float(held), middles)
    where = elements(row, column, table, 1, 3, dims, code_size, code_access)
    write(codes, where, code.to(tl.uint32), live, code_size, code_access)


@kernel
def check_codes(
    codes: tl.int64,
    view: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    inner: tl.int64,
    levels: tl.int64,
    access: tl.constexpr,
    dims: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Report codes without a level; view: codes."""
    row, column = tile(outer, inner, rows, columns)
    there = fits(row, column, outer, inner, even)
    code = read(codes, elements(row, column, at(view, tl.int64), 0, 1, dims, 1, access), there, 1, access)
    position = row[:, None] * inner.to(tl.int64) + column[None, :]
    report(status, there & (code.to(tl.int64) >= levels.to(tl.int64)), position, LEVEL)


@kernel
def dequantize_elements(
    codes: tl.int64,
    x: tl.int64,
    scale: tl.int64,
    zero: tl.int64,
    view: tl.int64,
    levels: tl.int64,
    status: tl.int64,
    outer: tl.int64,
    inner: tl.int64,
    kind: tl.constexpr,
    code_type: tl.constexpr,
    code_size: tl.constexpr,
    code_access: tl.constexpr,
    dtype: tl.constexpr,
    size: tl.constexpr,
    access: tl.constexpr,
    scale_access: tl.constexpr,
    zero_access: tl.constexpr,
    shared: tl.constexpr,
    dims: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Turn codes into values; view: codes, x, scale, zero. `shared`: a row has one scale and zero point."""
    row, column = tile(outer, inner, rows, columns)
    live = fits(row, column, outer, inner, even) & unfailed(status, row)[:, None]
    table = at(view, tl.int64)
    code = read(codes, elements(row, column, table, 0, 4, dims, code_size, code_access), live, code_size, code_access)
    if shared:
        scale_at, zero_at = rows_at(row, table, 2, 4, dims)[:, None], rows_at(row, table, 3, 4, dims)[:, None]
        there = (row < outer)[:, None]
    else:
        scale_at = elements(row, column, table, 2, 4, dims, 4, scale_access)
        zero_at = elements(row, column, table, 3, 4, dims, 4, zero_access)
        there = live
    if kind == INT:
        signed = code.to(tl.int16) if code_size == 2 else code.to(tl.int8)
        value = as_bits(signed.to(tl.float32))
    elif kind == AFFINE:
        offset = read(zero, zero_at, there, 4, zero_access).to(tl.int32, bitcast=True)
        value = as_bits((code.to(tl.int64) - offset.to(tl.int64)).to(tl.float32))
    elif kind == FP8:
        value = widen(code, code_type)
    else:
        value = tl.load(at(levels, tl.uint32) + code, mask=live, other=0)
    factor = as_float(read(scale, scale_at, there, 4, scale_access))
    product = as_bits(as_float(value) * factor)
    result = tl.where((value & 0x7FFFFFFF) < INFINITY, hold_overflow(product), value)
    write(x, elements(row, column, table, 1, 4, dims, size, access), narrow(result, dtype), live, size, access)


# --- launching


def launch_check_scales(q: Queue, scale: Any) -> None:
    """Report what scales are out of range."""
    source = Array.of(scale)
    view = collapse(scale.shape, (source,))
    block = min(power_of_two(view.size), q.block)
    q.launch(
        check_scales, -(-view.size // block),
        source.address, *q.upload(view.table()), q.status, view.size,
        access=min(view.access[0], 0), dims=view.dims, block=block,
    )  # fmt: skip


def quantize(
    q: Queue, x: Any, out: Quantized, given: Any, spec: QuantSpec, policy: int, codes: tuple[int, int]
) -> None:
    """Launch quantize; x has elements. `codes`: of the dtypes of x and of the codes."""
    kind, dtype = KINDS[spec.kind], codes[0]
    source, target, scale = Array.of(x), Array.of(out.codes), Array.of(out.scale)
    kept = out.scale.shape
    zero = Array.of(out.zero) if out.zero is not None else numbering(kept)
    wanted = Array.of(given) if given is not None else numbering(kept)
    groups = collapse(kept, (scale, zero, wanted))
    words = 0
    if given is None or policy == ERROR.value:
        folding = IGNORE.value if policy == PROPAGATE.value else policy
        words = fold_groups(q, x, spec.axes, dtype, folding, minmax=True).address
    if given is not None:
        launch_check_scales(q, given)

    by_code_max = int((np.float32(1) / np.float32(spec.code_max)).view(np.uint32))
    inverses, zeros = q.scratch(4 * groups.size), q.scratch(4 * groups.size) if out.zero is not None else 0
    block = min(power_of_two(groups.size), q.block)
    q.launch(
        quantize_groups, -(-groups.size // block),
        words, wanted.address, scale.address, zero.address, *q.upload(groups.table()), inverses, zeros, q.status,
        groups.size, by_code_max,
        kind=kind, has_given=given is not None, given_access=min(groups.access[2], 0),
        scale_access=min(groups.access[0], 0), zero_access=min(groups.access[1], 0), dims=groups.dims, block=block,
    )  # fmt: skip

    view = collapse(x.shape, (source, target, numbering(x.shape, kept)), vectors=2)
    shape = shape_of_tile(view.outer, view.inner, q.block)
    levels = np.array(spec.levels, np.float32)
    middles = np.full(256, np.inf, np.float32)
    middles[: max(len(levels) - 1, 0)] = (levels[:-1] + levels[1:]) * np.float32(0.5)
    tables = q.upload(view.table(), *([middles] if kind == CODEBOOK.value else []))
    q.launch(
        quantize_elements, tiles_of(view.outer, view.inner, shape),
        source.address, target.address, inverses, zeros, tables[0], tables[-1], q.status, view.outer, view.inner,
        int(spec.code_max),
        kind=kind, dtype=dtype, size=source.size, access=view.access[0], code_type=codes[1], code_size=target.size,
        code_access=view.access[1], limit=LIMITS[dtype], policy=policy, shared=view.shared(2), dims=view.dims,
        even=view.even, **shape,
    )  # fmt: skip


def dequantize(q: Queue, codes: Quantized, spec: QuantSpec, out: Any, types: tuple[int, int]) -> None:
    """Launch dequantize; there are codes. `types`: of the dtypes of the output and of the codes."""
    kind = KINDS[spec.kind]
    source, target, scale = Array.of(codes.codes), Array.of(out), Array.of(codes.scale)
    zero = Array.of(codes.zero) if codes.zero is not None else numbering(codes.scale.shape)
    launch_check_scales(q, codes.scale)
    if kind == CODEBOOK.value and len(spec.levels) < 256:
        checked = collapse(out.shape, (source,), vectors=1)
        shape = shape_of_tile(checked.outer, checked.inner, q.block)
        q.launch(
            check_codes, tiles_of(checked.outer, checked.inner, shape),
            source.address, *q.upload(checked.table()), q.status, checked.outer, checked.inner, len(spec.levels),
            access=checked.access[0], dims=checked.dims, even=checked.even, **shape,
        )  # fmt: skip
    view = collapse(out.shape, (source, target, scale, zero), vectors=2)
    shape = shape_of_tile(view.outer, view.inner, q.block)
    levels = np.zeros(256, np.float32)
    levels[: len(spec.levels)] = spec.levels
    tables = q.upload(view.table(), *([levels] if kind == CODEBOOK.value else []))
    q.launch(
        dequantize_elements, tiles_of(view.outer, view.inner, shape),
        source.address, target.address, scale.address, zero.address, tables[0], tables[-1], q.status, view.outer,
        view.inner,
        kind=kind, code_type=types[1], code_size=source.size, code_access=view.access[0], dtype=types[0],
        size=target.size, access=view.access[1], scale_access=min(view.access[2], 0),
        zero_access=min(view.access[3], 0), shared=view.shared(2, 3), dims=view.dims, even=view.even, **shape,
    )  # fmt: skip
