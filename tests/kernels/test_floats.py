from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvcore.dtypes import finite_max, to_dtype

SMALL = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
ALL = {**SMALL, "f32": "float32"}
QUIET = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000, "e4m3": 0x7F, "e5m2": 0x7E}
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def uint(kind):
    return UINT[to_dtype(ALL[kind]).itemsize]


def patterns(kind):
    bits = uint(kind)
    return np.arange(1 << 8 * np.dtype(bits).itemsize, dtype=np.uint32).astype(bits)


def convert(numeric, name, source, target):
    result = np.empty(source.shape, target)
    getattr(numeric, name)(
        source.ctypes.data_as(ctypes.c_void_p), result.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(source.size)
    )
    return result


def wide(bits):
    return bits.view(np.float32)


def hard_bits(kind):
    """Float32 bits: every sign, exponent and leading mantissa with several endings, all ties of `kind`, a sample."""
    endings = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    everywhere = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | endings).ravel()
    with np.errstate(invalid="ignore"):
        exact = patterns(kind).view(to_dtype(SMALL[kind])).astype(np.float64)
    exact = np.unique(exact[np.isfinite(exact)])
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    ties = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    sample = np.random.default_rng(5).integers(0, 1 << 32, 1 << 18, np.uint32)
    return np.concatenate([everywhere, ties.view(np.uint32), sample])


@pytest.mark.parametrize("kind", SMALL)
def test_widening_is_exact(numeric, kind):
    codes = patterns(kind)
    got = convert(numeric, f"widen_{kind}", codes, np.uint32)
    with np.errstate(invalid="ignore"):
        wanted = codes.view(to_dtype(SMALL[kind])).astype(np.float32)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(got[~nan], wanted[~nan].view(np.uint32))
    assert np.isnan(wide(got)[nan]).all()
    np.testing.assert_array_equal(got >> 31, (codes >> (8 * codes.itemsize - 1)).astype(np.uint32))


@pytest.mark.parametrize("kind", SMALL)
def test_narrowing_undoes_widening(numeric, kind):
    codes = patterns(kind)
    bits = convert(numeric, f"widen_{kind}", codes, np.uint32)
    wanted = np.where(np.isnan(wide(bits)), QUIET[kind], codes).astype(codes.dtype)
    np.testing.assert_array_equal(convert(numeric, f"narrow_{kind}", bits, codes.dtype), wanted)


@pytest.mark.parametrize("kind", SMALL)
def test_narrowing_rounds_to_nearest_even_and_saturates(numeric, kind):
    bits = hard_bits(kind)
    dtype, values = to_dtype(SMALL[kind]), wide(bits)
    limit = np.float32(finite_max(dtype))
    held = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = held.astype(dtype).view(uint(kind))
    wanted[np.isnan(values)] = QUIET[kind]
    if kind == "e4m3":  # has no infinity
        wanted[np.isinf(values)] = QUIET[kind]
    np.testing.assert_array_equal(convert(numeric, f"narrow_{kind}", bits, uint(kind)), wanted)


def test_float32_stays_but_for_the_bits_of_nan(numeric):
    bits = hard_bits("bf16")
    np.testing.assert_array_equal(convert(numeric, "widen_f32", bits, np.uint32), bits)
    wanted = np.where(np.isnan(wide(bits)), np.uint32(QUIET["f32"]), bits)
    np.testing.assert_array_equal(convert(numeric, "narrow_f32", bits, np.uint32), wanted)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_saturating_reads_nan_as_zero_and_holds_infinities(numeric, kind):
    codes = hard_bits("bf16") if kind == "f32" else patterns(kind)
    dtype = to_dtype(ALL[kind])
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float32)
    limit = np.float32(finite_max(dtype))
    wanted = np.where(np.isnan(values), np.float32(0), np.clip(values, -limit, limit)).astype(np.float32)
    np.testing.assert_array_equal(convert(numeric, f"saturate_{kind}", codes, np.uint32), wanted.view(np.uint32))
