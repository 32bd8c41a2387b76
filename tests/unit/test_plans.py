"""Plans: everything static is checked once; a launch is a plain call."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import kvcore
from kvcore import ConfigError, Layout, Plan, QuantizationError, QuantSpec, UnsupportedOpError
from kvcore.codecs.tables import table_set
from kvcore.hookspecs import op_specs
from kvcore.plugins.discover import Candidate
from kvcore_cpu_ref import backend as reference


@pytest.fixture(scope="module")
def backend():
    return kvcore.open_backend("cpu_ref", found=[Candidate("cpu_ref", "usable", "", reference())])


STATIC = {
    "gather_paged": {"unit": "block", "skip_tokens": 1},
    "scatter_paged": {"check_duplicates": False},
    "reduce_absmax": {"axes": (0,)},
    "reduce_minmax": {"axes": (0, 1), "nonfinite": "saturate"},
    "reduce_moments": {"axes": (1,)},
    "reduce_norm": {"axes": (0,)},
    "quantize": {"spec": QuantSpec.symmetric(4, (0,))},
    "dequantize": {"spec": QuantSpec.affine(4, (0,))},
    "rotate": {"seed": 1, "block": 8},
    "pack_bits": {"bits": 3},
    "unpack_bits": {"bits": 3},
    "choose_classes": {"tables": table_set("gauss"), "use_offsets": True},
    "encode_symbols": {"tables": table_set("exponent"), "use_offsets": False},
    "decode_symbols": {"tables": table_set("e4m3fn"), "use_offsets": False},
    "shift_rope": {"interleaved": True},
}


@pytest.mark.parametrize("op", op_specs())
def test_every_op_can_be_planned(backend, op):
    plan = backend.plan(op, **STATIC.get(op, {}))
    assert isinstance(plan, Plan)
    assert (plan.op, plan.backend, plan.implementation, plan.workspace_bytes) == (op, "cpu_ref", "numpy", 0)
    assert plan.func is backend.bindings[op].function
    assert plan.keywords == STATIC.get(op, {})
    assert repr(plan).startswith(f"Plan({op} on cpu_ref/numpy")
    launch = inspect.signature(plan).parameters
    assert {"out", "stream", "workspace"} <= set(launch)


def test_a_plan_gives_what_the_checked_call_gives(backend):
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    spec = QuantSpec.symmetric(4, (1,))
    plan = backend.plan("quantize", dtype="float32", spec=spec)
    out = kvcore.Quantized(np.empty((5, 16), np.int8), np.empty((5, 1), np.float32))
    assert plan(x, out=out) is out
    checked = backend.quantize(x, spec)
    np.testing.assert_array_equal(out.codes, checked.codes)
    np.testing.assert_array_equal(out.scale, checked.scale)


def test_a_plan_of_a_cache_takes_its_layout_from_it(backend):
    cache = np.arange(2 * 3 * 4 * 2, dtype=np.float16).reshape(2, 3, 4, 2)
    rows = Layout("KBND").bind(cache)
    plan = backend.plan("gather_paged", layout=rows, unit="slot")
    chunk = np.zeros((2, 2, 2), np.float16)
    plan(rows, np.array([11, 4], np.int64), out=[Layout("KTD").bind(chunk)])
    np.testing.assert_array_equal(chunk[:, 0], cache[:, 2, 3])
    np.testing.assert_array_equal(chunk[:, 1], cache[:, 1, 0])


def test_what_only_the_data_can_tell_is_still_told_at_launch(backend):
    plan = backend.plan("reduce_absmax", axes=(0,))
    out = np.full(1, 7, np.float32)
    with pytest.raises(QuantizationError):
        plan(np.float32([1, np.nan]), out=out)
    assert out[0] == 7


@pytest.mark.parametrize(
    ("op", "static", "message"),
    [
        ("pack_bits", {"bits": 9}, "bits must be 1 to 8, got 9"),
        ("pack_bits", {"bits": 2.0}, "bits must be 1 to 8, got 2.0"),
        ("pack_bits", {}, "a plan of pack_bits needs bits"),
        ("rotate", {"seed": 1}, "a plan of rotate needs block"),
        ("rotate", {"seed": -1, "block": 8}, "seed must be 0"),
        ("rotate", {"seed": 1, "block": 12}, "block must be a power of two"),
        ("quantize", {"spec": "int8"}, "spec is a kvcore.QuantSpec, got a str"),
        ("reduce_norm", {"axes": (-1,)}, "ascending and not negative"),
        ("reduce_norm", {"axes": (1, 0)}, "ascending and not negative"),
        ("reduce_norm", {"axes": ()}, "ascending and not negative"),
        ("reduce_norm", {"axes": (0,), "nonfinite": "ignore"}, "nonfinite='ignore' is no policy"),
        ("gather_paged", {"unit": "page"}, "unit='page'"),
        ("gather_paged", {"skip_tokens": -1}, "skip_tokens must not be negative"),
        ("scatter_paged", {"check_duplicates": 1}, "True or False is expected, got 1"),
        ("digest", {"nonfinite": "error"}, "digest has no static argument 'nonfinite'; it has none"),
        ("reduce_norm", {"axes": (0,), "axis": 0}, "reduce_norm has no static argument 'axis'; it has axes, nonfinite"),
        ("reduce_norm", {"axes": (0,), "out": np.zeros(1)}, "no static argument 'out'"),
    ],
)
def test_static_arguments_that_mean_nothing_are_refused(backend, op, static, message):
    with pytest.raises(ConfigError, match=message):
        backend.plan(op, **static)


def test_an_op_that_does_not_exist_is_refused(backend):
    with pytest.raises(UnsupportedOpError, match="there is no op 'gather'; ops are gather_paged"):
        backend.plan("gather")
