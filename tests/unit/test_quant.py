"""Descriptions of quantisers: what may be asked for, and what a code can stand for."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import ConfigError, QuantSpec
from kvcore.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2
from kvcore.quant import SCALE_MAX, SCALE_MIN


@pytest.mark.parametrize(
    ("spec", "kind", "bits", "dtype", "largest"),
    [
        (QuantSpec.symmetric(8, (0,)), "int", 8, np.int8, 127),
        (QuantSpec.symmetric(2, (0,)), "int", 2, np.int8, 1),
        (QuantSpec.affine(8, (0,)), "affine", 8, np.uint8, 255),
        (QuantSpec.affine(1, (0,)), "affine", 1, np.uint8, 1),
        (QuantSpec.fp8("fp8", (0,)), "fp8", 8, FLOAT8_E4M3FN, 448),
        (QuantSpec.fp8("float8_e5m2", (0,)), "fp8", 8, FLOAT8_E5M2, 57344),
        (QuantSpec.codebook((-2.0, 0.5, 1.0), (0,)), "codebook", 2, np.uint8, 2),
        (QuantSpec.codebook((0.0, 1.0), (0,)), "codebook", 1, np.uint8, 1),
        (QuantSpec.codebook(tuple(float(i) for i in range(256)), (0,)), "codebook", 8, np.uint8, 255),
    ],
)
def test_constructors(spec, kind, bits, dtype, largest):
    assert (spec.kind, spec.bits, spec.code_dtype, spec.code_max) == (kind, bits, dtype, largest)
    assert spec.axes == (0,)


def test_specs_are_values():
    assert QuantSpec.symmetric(4, (1,)) == QuantSpec.symmetric(4, (1,))
    assert len({QuantSpec.symmetric(4, (1,)), QuantSpec.symmetric(4, (1,)), QuantSpec.affine(4, (1,))}) == 2
    with pytest.raises(AttributeError):
        QuantSpec.symmetric(4, (1,)).bits = 5


def test_levels_are_kept_as_float32_has_them():
    assert QuantSpec.codebook((0.1, 0.7), ()).levels == (float(np.float32(0.1)), float(np.float32(0.7)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantSpec.symmetric(1, (0,)), "bits must be 2 to 8, got 1"),
        (lambda: QuantSpec.symmetric(9, (0,)), "bits must be 2 to 8, got 9"),
        (lambda: QuantSpec.affine(0, (0,)), "bits must be 1 to 8, got 0"),
        (lambda: QuantSpec.fp8("bfloat16", (0,)), "fp8 means float8_e4m3fn or float8_e5m2, got 'bfloat16'"),
        (lambda: QuantSpec.fp8("float9", (0,)), "unknown element type"),
        (lambda: QuantSpec.symmetric(4, (1, 0)), r"ascending, distinct and not negative, got \(1, 0\)"),
        (lambda: QuantSpec.symmetric(4, (1, 1)), "ascending, distinct and not negative"),
        (lambda: QuantSpec.symmetric(4, (-1,)), "ascending, distinct and not negative"),
        (lambda: QuantSpec.codebook((1.0,), ()), "2 to 256 levels, got 1"),
        (lambda: QuantSpec.codebook(tuple(map(float, range(257))), ()), "2 to 256 levels, got 257"),
        (lambda: QuantSpec.codebook((1.0, 0.5), ()), "finite and strictly ascending in float32"),
        (lambda: QuantSpec.codebook((1.0, 1.0 + 2.0**-30), ()), "finite and strictly ascending in float32"),
        (lambda: QuantSpec.codebook((0.0, float("inf")), ()), "finite and strictly ascending"),
        (lambda: QuantSpec.codebook((float("nan"), 1.0), ()), "finite and strictly ascending"),
        (lambda: QuantSpec.codebook((0.0, 2.0**-21, 1.0), ()), r"0 or at least 2\*\*-20 in magnitude"),
        (lambda: QuantSpec.codebook((1.0, 1.0 + 2.0**-21), ()), r"at least 2\*\*-20 in magnitude, and as far"),
    ],
)
def test_what_means_nothing_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_range_of_scales_keeps_reciprocals_normal():
    smallest_normal = np.finfo(np.float32).tiny
    assert np.float32(1) / np.float32(SCALE_MAX) >= smallest_normal
    assert np.isfinite(np.float32(1) / np.float32(SCALE_MIN))
    smallest_code = min(2.0**-9, 2.0**-16, 2.0**-20)  # e4m3fn, e5m2, a level of a codebook
    assert np.float32(SCALE_MIN * smallest_code) >= smallest_normal
