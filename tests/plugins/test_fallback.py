"""What a backend lacks runs on the reference: seen, counted, and only where that is allowed."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch

import kvcore
from kvcore import Layout, QuantSpec, UnsupportedOpError

LIMITED = """
import kvcore
from kvcore import hookimpl

@kvcore.supports(dtypes=("bfloat16", "float16"))
@hookimpl
def kvcore_op_reduce_absmax(x, *, axes, nonfinite="error", out, stream=None, workspace=None):
    out[...] = 99
    return out

@hookimpl
@kvcore.supports(layouts=("L|KBNHD",), workspace_bytes=lambda static: 4096 if static.get("unit") == "block" else 64)
def kvcore_op_gather_paged(src, index, *, unit="slot", skip_tokens=0, out, stream=None, workspace=None):
    return out

@hookimpl
@kvcore.supports(arch=("sm_90",))
def kvcore_op_digest(src, *, out, stream=None, workspace=None):
    return out

@hookimpl
@kvcore.supports(dtypes=("bfloat16", "float8_e4m3fn"))
def kvcore_op_scatter_paged(
    src, index, *, unit="slot", skip_tokens=0, check_duplicates=True, out, stream=None, workspace=None
):
    return out
"""


@pytest.fixture
def partial(shelf):
    shelf.add("partial", modules={"native": LIMITED})
    return kvcore.open_backend("partial")


def absmax(backend, dtype=np.float32):
    return float(backend.reduce_absmax(np.array([1, -5], dtype), 0)[0])


def test_an_op_that_is_lacking_runs_on_the_reference(partial):
    np.testing.assert_array_equal(partial.pack_bits(np.uint8([[1, 2, 3, 0]]), 2), [[0b00111001]])
    assert partial.fallback_calls == {"pack_bits": 1}


def test_a_dtype_that_is_lacking_runs_on_the_reference(partial):
    assert absmax(partial, np.float16) == 99
    assert absmax(partial, np.float32) == 5
    assert partial.fallback_calls == {"reduce_absmax": 1}


def test_each_fallback_is_logged_once_and_counted_every_time(partial, caplog):
    with caplog.at_level(logging.WARNING, "kvcore"):
        for _ in range(3):
            absmax(partial)
    assert partial.fallback_calls["reduce_absmax"] == 3
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        "reduce_absmax of backend partial (native): dtype float32 is not among those it supports: bfloat16, float16"
        in text
    )
    assert "it runs on cpu_ref instead (KVCORE_STRICT=1 forbids that)" in text


def test_a_backend_that_has_every_op_still_falls_back_where_it_is_limited(shelf, monkeypatch):
    text = (
        "import importlib, functools\nimport kvcore_cpu_ref.ops as ref\n"
        "from kvcore import hookimpl, supports\n"
        "for name in ref.__all__:\n"
        "    if name != 'kvcore_op_reduce_absmax': globals()[name] = getattr(ref, name)\n"
        "@hookimpl\n@supports(dtypes=('float16',))\n"
        "def kvcore_op_reduce_absmax(x, *, axes, nonfinite='error', out, stream=None, workspace=None):\n"
        "    out[...] = 99\n    return out\n"
    )
    shelf.add("whole", modules={"native": text})
    backend = kvcore.open_backend("whole")
    assert absmax(backend) == 5
    assert absmax(backend, np.float16) == 99


def test_strict_forbids_it(shelf, monkeypatch):
    shelf.add("partial", modules={"native": LIMITED})
    monkeypatch.setenv("KVCORE_STRICT", "1")
    backend = kvcore.open_backend("partial")
    with pytest.raises(UnsupportedOpError, match=r"backend partial has no pack_bits.*KVCORE_STRICT=1 forbids"):
        backend.pack_bits(np.uint8([[1]]), 2)
    with pytest.raises(UnsupportedOpError, match="dtype float32 is not among"):
        absmax(backend)
    assert absmax(backend, np.float16) == 99
    assert backend.fallback_calls == {}


def test_fallback_error_raises_with_the_table(shelf):
    shelf.add("partial", modules={"native": LIMITED})
    backend = kvcore.open_backend("partial", fallback="error")
    with pytest.raises(UnsupportedOpError, match="backend partial has no count_symbols") as caught:
        backend.count_symbols(np.zeros((2, 3), np.uint8))
    assert "* partial" in str(caught.value)
    with pytest.raises(UnsupportedOpError):
        backend.plan("count_symbols")


def test_a_fallback_that_is_not_there_is_said_to_be_missing(shelf, monkeypatch):
    shelf.add("partial", modules={"native": LIMITED})
    monkeypatch.setenv("KVCORE_PLUGINS", "partial")
    backend = kvcore.open_backend()
    with pytest.raises(
        UnsupportedOpError, match=r"has no pack_bits.*cpu_ref is blocked: not in KVCORE_PLUGINS=partial"
    ):
        backend.pack_bits(np.uint8([[1]]), 2)


@pytest.mark.parametrize("value", ["cpu", "", "warn"])
def test_other_fallbacks_there_are_not(value):
    with pytest.raises(kvcore.ConfigError, match="it is 'cpu_ref' or 'error'"):
        kvcore.open_backend("cpu_ref", fallback=value)


def test_memory_that_the_reference_cannot_reach_is_not_staged_in_silence(shelf):
    shelf.add("far", device_types="('meta',)", modules={"native": LIMITED})
    backend = kvcore.open_backend("far")
    with pytest.raises(
        UnsupportedOpError, match=r"cpu_ref cannot reach its meta memory: copy to the host with copy_batch"
    ):
        backend.plan("pack_bits", bits=2)


# --- capabilities answer before a call


@pytest.mark.parametrize(
    ("op", "query", "expected"),
    [
        ("reduce_absmax", {"dtype": "bfloat16"}, None),
        ("reduce_absmax", {"dtype": "bf16"}, None),
        ("reduce_absmax", {"dtype": torch.bfloat16}, None),
        ("reduce_absmax", {"dtype": np.float16}, None),
        ("reduce_absmax", {"dtype": np.dtype("float32")}, "dtype float32 is not among those it supports"),
        ("reduce_absmax", {}, None),
        ("gather_paged", {"layout": "L|KBNHD"}, None),
        ("gather_paged", {"layout": "L|KBHND", "dtype": "float32"}, r"layout L\|KBHND is not among"),
        ("scatter_paged", {"dtype": "bfloat16/float8_e4m3fn"}, None),
        ("scatter_paged", {"dtype": "bfloat16/int8"}, "dtype int8 is not among"),
        ("digest", {}, "architecture .* is not among those it supports: sm_90"),
        ("pack_bits", {}, "backend partial has no pack_bits"),
    ],
)
def test_queries(partial, op, query, expected):
    why = partial.refusal(op, **query)
    assert partial.supports(op, **query) == (expected is None)
    assert why is None if expected is None else re.search(expected, why)
    assert partial.fallback_calls == {}


def test_queries_for_what_does_not_exist(partial):
    with pytest.raises(UnsupportedOpError, match="there is no op 'digets'; ops are"):
        partial.supports("digets")
    with pytest.raises(kvcore.ConfigError, match="unknown element type 'float7'"):
        partial.supports("reduce_absmax", dtype="float7")


def test_a_plan_knows_who_runs_it_and_what_it_needs(partial):
    own = partial.plan("gather_paged", layout="L|KBNHD", unit="block")
    assert (own.backend, own.implementation, own.workspace_bytes) == ("partial", "native", 4096)
    assert partial.plan("gather_paged", layout=Layout("L|KBNHD")).workspace_bytes == 64
    other = partial.plan("gather_paged", layout="L|BKNHD")
    assert (other.backend, other.implementation, other.workspace_bytes) == ("cpu_ref", "fallback", 0)
    spec = QuantSpec.symmetric(8, (0,))
    assert partial.plan("quantize", spec=spec).backend == "cpu_ref"
    out = partial.quantize(np.float32([1, 2]), spec)
    np.testing.assert_array_equal(out.codes, [64, 127])
