"""Numeric ops on arrays that several threads share, against the reference: beyond the conformance suite's sizes."""

from __future__ import annotations

import functools
import re

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore import QuantSpec, RopeParams
from kvcore.errors import QuantizationError
from kvcore.rope import rope_table

THREADS = pytest.mark.parametrize("threads", ["1", "3"])
# A thread is worth a MiB: each of these, of 2 bytes an element, is worth three.
SHAPES = {"odd rows": (3, 1100, 515), "short rows": (2, 40000, 20), "one row": (1, 1, 3 << 19)}
AXES = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]


@functools.cache
def numbers(shape, dtype=ml_dtypes.bfloat16):
    """Return ordinary numbers, the same every time; nothing may change them."""
    x = np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(dtype)
    x.flags.writeable = False
    return x


def reductions(backend, x, axes):
    exponent = np.full((1,) * x.ndim, 11, np.int32)
    plain = [op(x, axes) for op in (backend.reduce_absmax, backend.reduce_minmax, backend.reduce_norm)]
    return [*plain, backend.reduce_moments(x, exponent, axes)]


def quantisers(backend, x, axes):
    results = []
    for spec in (QuantSpec.symmetric(8, axes), QuantSpec.affine(4, axes), QuantSpec.fp8("float8_e4m3fn", axes)):
        coded = backend.quantize(x, spec)
        results += [*(part for part in coded if part is not None), backend.dequantize(coded, spec, dtype="bfloat16")]
    return results


def bits(backend, x):
    values = (x.view(np.uint16) & 31).astype(np.uint8)
    packed = backend.pack_bits(values, 5)
    return [packed, backend.unpack_bits(packed, 5, x.shape[-1]), backend.count_symbols(values[..., :600])]


def positions(backend, x):
    heads = x[:, :, None, : x.shape[-1] // 4 * 4]
    shifts = np.arange(x.shape[1], dtype=np.int64) % 5 - 2  # rows that stay among them
    tables = rope_table(RopeParams(16, theta=100.0), shifts)
    turned = [backend.shift_rope(heads, *tables, interleaved=interleaved) for interleaved in (False, True)]
    in_place = heads.copy()
    backend.shift_rope(in_place, *tables, out=in_place)
    return [*turned, in_place, backend.rotate(heads, seed=9, block=4)]


OPS = {
    **{f"reductions over {axes}": functools.partial(reductions, axes=axes) for axes in AXES},
    **{f"quantisers over {axes}": functools.partial(quantisers, axes=axes) for axes in AXES},
    "bits": bits,
    "positions": positions,
}


@functools.cache
def expected(ops, shape):
    """Return what the reference gives, for both numbers of threads and all instruction sets."""
    return OPS[ops](kvcore.open_backend("cpu_ref", fallback="error"), numbers(SHAPES[shape]))


@THREADS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ops", OPS)
def test_large_arrays(ops, shape, threads, isa, monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", threads)
    for got, wanted in zip(OPS[ops](open_cpu(), numbers(SHAPES[shape])), expected(ops, shape), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes()


@THREADS
@pytest.mark.parametrize("axes", AXES)
def test_of_bad_values_the_first_is_named_and_nothing_is_written(axes, threads, isa, monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", threads)
    cpu, shape = open_cpu(), SHAPES["odd rows"]
    x = numbers(shape).copy()
    at = (0, shape[1] // 2, shape[2] // 2)
    x[at], x[-1, -1, -1] = np.inf, np.nan
    out = np.full([1 if axis in axes else n for axis, n in enumerate(shape)], 7, np.float32)
    for op in (cpu.reduce_absmax, cpu.reduce_norm):
        with pytest.raises(QuantizationError, match=re.escape(f"element {list(at)},")):
            op(x, axes, out=out)
        assert (out == 7).all()
