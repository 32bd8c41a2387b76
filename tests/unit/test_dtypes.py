"""Element types by their canonical names."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.dtypes import BFLOAT16, DTYPES, dtype_name, finite_max, is_float, to_dtype
from kvcore.errors import ConfigError

TORCH = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.parametrize("name", DTYPES)
def test_a_name_and_its_dtype_stand_for_one_another(name):
    assert dtype_name(to_dtype(name)) == name
    assert to_dtype(to_dtype(name)) is to_dtype(name)
    assert to_dtype(to_dtype(name).type) == to_dtype(name)


@pytest.mark.parametrize("name", TORCH)
def test_torch_dtypes_are_known_by_their_names(name):
    assert to_dtype(getattr(torch, name)) == to_dtype(name)
    assert to_dtype(name).itemsize == getattr(torch, name).itemsize


def test_torch_has_the_types_that_caches_are_made_of():
    assert {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"} <= set(TORCH)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bf16", "bfloat16"), ("half", "float16"), ("FP32", "float32"), ("fp8", "float8_e4m3fn"), ("e5m2", "float8_e5m2")],
)
def test_aliases(alias, name):
    assert dtype_name(to_dtype(alias)) == name


@pytest.mark.parametrize("value", ["int4", "", None, 7, complex, object, np.dtype("complex64"), str, "<f4"])
def test_what_is_no_element_type_is_refused_and_the_known_ones_are_listed(value):
    with pytest.raises(ConfigError, match=r"unknown element type .*bfloat16.*float8_e4m3fn"):
        to_dtype(value)


@given(st.text(max_size=12).filter(lambda s: s.lower() not in DTYPES))
def test_any_text_is_an_element_type_or_a_config_error(text):
    try:
        assert to_dtype(text) in DTYPES.values()
    except ConfigError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right, and each has its own check


def test_a_dtype_without_a_name_has_none():
    with pytest.raises(ConfigError, match="complex128"):
        dtype_name(np.dtype("complex128"))
    with pytest.raises(ConfigError, match="int4"):
        dtype_name(np.dtype(ml_dtypes.int4))


def test_floats_are_told_from_integers():
    floats = {name for name, dtype in DTYPES.items() if is_float(dtype)}
    assert floats == {"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("float8_e4m3fn", 448.0),
        ("float8_e5m2", 57344.0),
        ("float16", 65504.0),
        ("bfloat16", 255 * 2.0**120),
        ("float32", (2 - 2.0**-23) * 2.0**127),
    ],
)
def test_the_largest_finite_value(name, largest):
    assert finite_max(to_dtype(name)) == largest
    assert np.isfinite(np.array(largest).astype(to_dtype(name)).astype(np.float64))


def test_bfloat16_is_the_upper_half_of_float32():
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(
        bits.view(BFLOAT16).astype(np.float32).view(np.uint32)[:0x7F81], wide.view(np.uint32)[:0x7F81]
    )
