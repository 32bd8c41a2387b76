"""quantize and dequantize: every kind, every float type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend, Quantized, QuantSpec
from kvcore.dtypes import finite_max, to_dtype
from kvcore.errors import ConfigError, LayoutError
from kvcore_conformance.arena import clone, pattern, place
from kvcore_conformance.checks import Subject
from kvcore_conformance.profiles import active, explore
from kvcore_conformance.strategies import (
    FLOATS,
    byte_arrays,
    float_arrays,
    out_like,
    palette,
    placed,
    quant_specs,
    shapes,
)

QUANTIZE = pytest.mark.kvcore_op("quantize")
DEQUANTIZE = pytest.mark.kvcore_op("dequantize")
KINDS = ("int", "affine", "codebook", "float8_e4m3fn", "float8_e5m2")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_FLOAT = pytest.mark.parametrize("dtype", FLOATS)
FP8 = pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
HALVES = (-1.5, -0.5, 0.5, 1.5)


def _spec(kind: str, axes: tuple[int, ...], bits: int = 8) -> QuantSpec:
    if kind == "int":
        return QuantSpec.symmetric(bits, axes)
    if kind == "affine":
        return QuantSpec.affine(bits, axes)
    return QuantSpec.codebook(HALVES, axes) if kind == "codebook" else QuantSpec.fp8(kind, axes)


def _kept(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    return tuple(1 if i in spec.axes else n for i, n in enumerate(shape))


def _out(shape: tuple[int, ...], spec: QuantSpec) -> Quantized:
    codes = pattern(int(np.prod(shape))).view(spec.code_dtype).reshape(shape)
    kept = _kept(shape, spec)
    zero = place(np.full(kept, 99, np.int32)) if spec.kind == "affine" else None
    return Quantized(place(codes), place(np.full(kept, 99, np.float32)), zero)


@st.composite
def _outs(draw: st.DrawFn, shape: tuple[int, ...], spec: QuantSpec) -> Quantized:
    kept = _kept(shape, spec)
    zero = draw(out_like(kept, "int32")) if spec.kind == "affine" else None
    return Quantized(draw(out_like(shape, spec.code_dtype)), draw(out_like(kept, "float32")), zero)


@st.composite
def _scales(draw: st.DrawFn, shape: tuple[int, ...], *, bad: bool = False) -> Any:
    powers = draw(st.sampled_from(((-3, 3), (-100, -96), (120, 125), (0, 0))))
    rng = np.random.default_rng(draw(st.integers(0, 50)))
    scale = np.ldexp(np.float32(1), rng.integers(powers[0], powers[1] + 1, shape)).astype(np.float32)
    if powers[0] == -3:
        scale = scale * (1 + rng.random(shape).astype(np.float32))
    if bad and scale.size:
        at = draw(st.integers(0, scale.size - 1))
        scale.flat[at] = draw(st.sampled_from((0.0, -1.0, np.nan, np.inf, 2.0**-101, 2.0**126)))
    return draw(placed(scale.astype(np.float32)))


# --- quantize


@QUANTIZE
@EVERY_KIND
@EVERY_FLOAT
def test_quantize_each_hard_value_as_its_own_group(subject: Subject, kind: str, dtype: str) -> None:
    subject.require("quantize", dtype=dtype)
    spec = _spec(kind, (1,))
    x = place(palette(dtype, nonfinite=True).reshape(-1, 1))
    for nonfinite in ("saturate", "propagate") if spec.kind == "fp8" else ("saturate",):
        subject.check("quantize", x, spec, nonfinite=nonfinite, out=_out(x.shape, spec))


@QUANTIZE
@pytest.mark.parametrize("kind", ["int", "affine"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantize_ties_go_to_even(subject: Subject, kind: str, bits: int) -> None:
    subject.require("quantize", dtype="float32")
    spec = _spec(kind, (1,), bits)
    q = (1 << (bits - 1)) - 1 if kind == "int" else (1 << bits) - 1
    low = -q if kind == "int" else 0
    ties = np.clip(np.arange(low, q + 1) + 0.5, low, q)
    x = np.array([[low, q, *ties]], np.float32)
    for factor in (1.0, 4.0):
        subject.check("quantize", place(x * np.float32(factor)), spec, out=_out(x.shape, spec))
    if kind == "int":
        scale = place(np.ones((1, 1), np.float32))
        subject.check("quantize", place(x), spec, scale=scale, out=_out(x.shape, spec))
        subject.check("quantize", place(x * 9), spec, scale=scale, out=_out(x.shape, spec))


@QUANTIZE
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_affine_ranges_away_from_zero(subject: Subject, bits: int) -> None:
    subject.require("quantize", dtype="float32")
    spec = QuantSpec.affine(bits, (1,))
    rng = np.random.default_rng(bits)
    rows = [
        rng.uniform(low, high, 9) for low, high in ((5, 6), (-6, -5), (-1, 3), (1000, 1000.001), (-0.5, 0.5), (2, 2))
    ]
    x = np.array(rows, np.float32)
    subject.check("quantize", place(x), spec, out=_out(x.shape, spec))


@QUANTIZE
@EVERY_KIND
@EVERY_FLOAT
def test_many_groups(subject: Subject, kind: str, dtype: str) -> None:
    # Enough values for a reciprocal, a product or a rounding that is wrong once in a thousand.
    subject.require("quantize", dtype=dtype)
    x = np.random.default_rng(4).standard_normal((60, 24)).astype(np.float32).astype(to_dtype(dtype))
    spec = _spec(kind, (1,))
    subject.check("quantize", place(x), spec, out=_out(x.shape, spec))


@QUANTIZE
@EVERY_FLOAT
def test_codebook_ties_go_down(subject: Subject, dtype: str) -> None:
    subject.require("quantize", dtype=dtype)
    spec = QuantSpec.codebook(HALVES, (0,))
    x = place(np.array([-9, -1.5, -1, -0.5, -0.0, 0, 0.25, 0.5, 1, 1.5, 9], np.float32).astype(to_dtype(dtype)))
    subject.check("quantize", x, spec, scale=place(np.ones(1, np.float32)), out=_out(x.shape, spec))


@QUANTIZE
@FP8
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_as_fp8(subject: Subject, kind: str, dtype: str) -> None:
    subject.require("quantize", dtype=dtype)
    # All of them, save in the short profiles.
    step = 13 if active().name in ("tiny", "quick") else 1
    x = np.arange(0, 1 << 16, step, dtype=np.uint32).astype(np.uint16).view(to_dtype(dtype))
    spec = QuantSpec.fp8(kind, (0,))
    scale = place(np.ones(1, np.float32))
    for nonfinite in ("saturate", "propagate"):
        subject.check("quantize", place(x), spec, scale=scale, nonfinite=nonfinite, out=_out(x.shape, spec))


@QUANTIZE
@FP8
def test_fp8_ties_and_the_ends_of_its_range(subject: Subject, kind: str) -> None:
    subject.require("quantize", dtype="float32")
    codes = np.arange(256, dtype=np.uint8).view(to_dtype(kind)).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    top = finite_max(to_dtype(kind))
    x = np.concatenate(
        [codes, ties, np.nextafter(ties.astype(np.float32), np.float32(np.inf)), [top * 1.04, top * 1.2, -1e30]]
    )
    spec = QuantSpec.fp8(kind, (0,))
    scale = place(np.ones(1, np.float32))
    subject.check("quantize", place(x.astype(np.float32)), spec, scale=scale, out=_out(x.shape, spec))


@QUANTIZE
@EVERY_KIND
def test_quantize_without_out_and_planned(subject: Subject, kind: str) -> None:
    subject.require("quantize", dtype="bfloat16")
    x = place(np.linspace(-3, 4, 24, dtype=np.float32).astype(to_dtype("bfloat16")).reshape(2, 3, 4), order=(1, 0, 2))
    for axes in ((), (2,), (0, 1)):
        spec = _spec(kind, axes, 4)
        subject.check_fresh("quantize", x, spec, out=_out(x.shape, spec))
        subject.check_plan("quantize", x, spec, nonfinite="saturate", out=_out(x.shape, spec))
        if kind != "affine":
            scale = place(np.full(_kept(x.shape, spec), 0.37, np.float32))
            subject.check_plan("quantize", x, spec, scale=scale, out=_out(x.shape, spec))


@QUANTIZE
@EVERY_KIND
@EVERY_FLOAT
@explore(2.0, data=st.data(), shape=shapes())
def test_quantize(subject: Subject, kind: str, dtype: str, data: Any, shape: tuple[int, ...]) -> None:
    subject.require("quantize", dtype=dtype)
    spec = data.draw(quant_specs(kind, len(shape)))
    x = data.draw(float_arrays(dtype, shape))
    subject.check("quantize", x, spec, out=data.draw(_outs(shape, spec)))


@QUANTIZE
@EVERY_KIND
@EVERY_FLOAT
@explore(data=st.data(), shape=shapes())
def test_quantize_under_a_policy(subject: Subject, kind: str, dtype: str, data: Any, shape: tuple[int, ...]) -> None:
    subject.require("quantize", dtype=dtype)
    spec = data.draw(quant_specs(kind, len(shape)))
    policies = ("error", "saturate", "propagate") if spec.kind == "fp8" else ("error", "saturate")
    x = data.draw(float_arrays(dtype, shape, nonfinite=True))
    out = data.draw(_outs(shape, spec))
    subject.check("quantize", x, spec, nonfinite=data.draw(st.sampled_from(policies)), out=out)


@QUANTIZE
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "affine"])
@explore(2.0, data=st.data(), shape=shapes(), dtype=st.sampled_from(FLOATS), bad=st.sampled_from((False, False, True)))
def test_quantize_with_given_scales(
    subject: Subject, kind: str, data: Any, shape: tuple[int, ...], dtype: str, bad: bool
) -> None:
    subject.require("quantize", dtype=dtype)
    spec = data.draw(quant_specs(kind, len(shape)))
    x = data.draw(float_arrays(dtype, shape))
    scale = data.draw(_scales(_kept(shape, spec), bad=bad))
    subject.check("quantize", x, spec, scale=scale, out=data.draw(_outs(shape, spec)))


@QUANTIZE
@EVERY_KIND
@EVERY_FLOAT
@pytest.mark.parametrize("channels", [96, 128])
def test_larger_as_the_reference(subject: Subject, reference: Backend, kind: str, dtype: str, channels: int) -> None:
    subject.require("quantize", dtype=dtype)
    x = np.random.default_rng(1).standard_normal((257, 3, channels)).astype(np.float32).astype(to_dtype(dtype))
    for axes in ((0,), (2,), (0, 1)):
        spec = _spec(kind, axes)
        subject.check("quantize", place(x), spec, out=_out(x.shape, spec), reference=reference)


@QUANTIZE
def test_quantize_refuses_bad_arguments(subject: Subject) -> None:
    x = place(np.ones((2, 4), np.float32))
    spec, affine, fp8 = QuantSpec.symmetric(8, (1,)), QuantSpec.affine(8, (1,)), QuantSpec.fp8("e4m3fn", (1,))
    out, scale = _out((2, 4), spec), place(np.ones((2, 1), np.float32))
    subject.check_raises(ConfigError, "quantize", x, spec, nonfinite="propagate", out=out)
    subject.check_raises(ConfigError, "quantize", x, spec, nonfinite="ignore", out=out)
    subject.check_raises(ConfigError, "quantize", x, affine, scale=scale, out=_out((2, 4), affine))
    subject.check_raises(LayoutError, "quantize", x, spec, scale=place(np.ones((1, 4), np.float32)), out=out)
    subject.check_raises(LayoutError, "quantize", x, spec, scale=place(np.ones((2, 1), np.float64)), out=out)
    subject.check_raises(LayoutError, "quantize", x, QuantSpec.symmetric(8, (2,)), out=out)
    subject.check_raises(LayoutError, "quantize", place(np.ones((2, 4), np.float64)), spec, out=out)
    subject.check_raises(LayoutError, "quantize", place(np.ones((2, 0), np.float32)), spec, out=_out((2, 0), spec))
    subject.check_raises(LayoutError, "quantize", x, fp8, out=out)
    subject.check_raises(LayoutError, "quantize", x, spec, out=_out((2, 5), spec))
    frozen = clone(out)
    frozen.scale.flags.writeable = False
    subject.check_raises(LayoutError, "quantize", x, spec, out=frozen)


# --- dequantize


@st.composite
def _coded(draw: st.DrawFn, kind: str, *, bad: bool = False) -> tuple[Quantized, QuantSpec]:
    shape = draw(shapes())
    spec = draw(quant_specs(kind, len(shape)))
    kept = _kept(shape, spec)
    top = (
        len(spec.levels) - 1
        if spec.kind == "codebook"
        else int(spec.code_max)
        if spec.kind in ("int", "affine")
        else 255
    )
    low = -top if spec.kind == "int" else 0
    unknown = bad and spec.kind == "codebook" and draw(st.booleans())
    high = top + 1 if unknown else top
    codes = draw(byte_arrays("int8" if spec.kind == "int" else "uint8", shape, low, high))
    zero = None
    if spec.kind == "affine":
        zeros = np.random.default_rng(draw(st.integers(0, 50))).integers(-(2**20), 2**20, kept)
        zero = draw(placed((zeros if draw(st.booleans()) else zeros % 256).astype(np.int32)))
    scale = draw(_scales(kept, bad=bad and not unknown))
    return Quantized(codes.view(spec.code_dtype), scale, zero), spec


@DEQUANTIZE
@EVERY_KIND
@EVERY_FLOAT
@explore(2.0, data=st.data())
def test_dequantize(subject: Subject, kind: str, dtype: str, data: Any) -> None:
    subject.require("dequantize", dtype=dtype)
    q, spec = data.draw(_coded(kind))
    subject.check("dequantize", q, spec, out=data.draw(out_like(q.codes.shape, dtype)))


@DEQUANTIZE
@EVERY_KIND
@explore(data=st.data())
def test_dequantize_refuses_codes_and_scales_that_mean_nothing(subject: Subject, kind: str, data: Any) -> None:
    subject.require("dequantize", dtype="float32")
    q, spec = data.draw(_coded(kind, bad=True))
    subject.check("dequantize", q, spec, out=data.draw(out_like(q.codes.shape, "float32")))


@DEQUANTIZE
@EVERY_FLOAT
@FP8
@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-4, 2.0**-99, 2.0**120, 300.0])
def test_dequantize_every_fp8_code(subject: Subject, dtype: str, kind: str, scale: float) -> None:
    subject.require("dequantize", dtype=dtype)
    spec = QuantSpec.fp8(kind, (0,))
    q = Quantized(place(np.arange(256, dtype=np.uint8).view(to_dtype(kind))), place(np.full(1, scale, np.float32)))
    subject.check("dequantize", q, spec, out=place(np.zeros(256, to_dtype(dtype))))


@DEQUANTIZE
@EVERY_FLOAT
@pytest.mark.parametrize("bits", range(1, 9))
def test_dequantize_every_integer_code(subject: Subject, dtype: str, bits: int) -> None:
    subject.require("dequantize", dtype=dtype)
    scale = place(np.array([[0.1], [1 / 3], [1234.5], [600.0]], np.float32))
    affine = QuantSpec.affine(bits, (1,))
    codes = np.tile(np.arange(1 << bits, dtype=np.uint8), (4, 1))
    zero = place(np.array([[0], [-77], [300], [(1 << bits) - 1]], np.int32))
    out = place(np.zeros(codes.shape, to_dtype(dtype)))
    subject.check("dequantize", Quantized(place(codes), scale, zero), affine, out=out)
    if bits > 1:
        q = (1 << (bits - 1)) - 1
        signed = np.tile(np.arange(-q, q + 1).astype(np.int8), (4, 1))
        out = place(np.zeros(signed.shape, to_dtype(dtype)))
        subject.check("dequantize", Quantized(place(signed), scale), QuantSpec.symmetric(bits, (1,)), out=out)


@DEQUANTIZE
@EVERY_KIND
@EVERY_FLOAT
def test_dequantize_without_out_and_planned(subject: Subject, kind: str, dtype: str) -> None:
    subject.require("dequantize", dtype=dtype)
    spec = _spec(kind, (1,), 4)
    codes = place((np.arange(12) % 4).astype(np.uint8).view(spec.code_dtype).reshape(3, 4))
    zero = place(np.array([[1], [-2], [3]], np.int32)) if kind == "affine" else None
    q = Quantized(codes, place(np.array([[0.3], [2], [7]], np.float32)), zero)
    out = place(np.zeros((3, 4), to_dtype(dtype)))
    subject.check_fresh("dequantize", q, spec, out=out)
    subject.check_plan("dequantize", q, spec, out=out)


@DEQUANTIZE
@EVERY_KIND
@EVERY_FLOAT
def test_larger_codes_as_the_reference(subject: Subject, reference: Backend, kind: str, dtype: str) -> None:
    subject.require("dequantize", dtype=dtype)
    spec = _spec(kind, (2,))
    top = {"int": 127, "codebook": 4}.get(kind, 256)
    codes = (pattern(257 * 3 * 96).astype(np.int64) % top).astype(np.uint8).view(spec.code_dtype).reshape(257, 3, 96)
    rng = np.random.default_rng(1)
    zero = place(rng.integers(-500, 500, (257, 3, 1)).astype(np.int32)) if kind == "affine" else None
    q = Quantized(place(codes), place(rng.uniform(0.01, 3, (257, 3, 1)).astype(np.float32)), zero)
    out = place(np.zeros(codes.shape, to_dtype(dtype)))
    subject.check("dequantize", q, spec, out=out, reference=reference)


@DEQUANTIZE
def test_dequantize_refuses_bad_arguments(subject: Subject) -> None:
    spec = QuantSpec.symmetric(8, (1,))
    codes, scale = place(np.ones((2, 4), np.int8)), place(np.ones((2, 1), np.float32))
    out = place(np.zeros((2, 4), np.float32))
    q = Quantized(codes, scale)
    subject.check_raises(LayoutError, "dequantize", Quantized(codes, place(np.ones((1, 4), np.float32))), spec, out=out)
    subject.check_raises(LayoutError, "dequantize", Quantized(codes.view(np.uint8), scale), spec, out=out)
    subject.check_raises(LayoutError, "dequantize", q, spec, out=place(np.zeros((2, 5), np.float32)))
    subject.check_raises(LayoutError, "dequantize", q, spec, out=place(np.zeros((2, 4), np.float64)))
    subject.check_raises(LayoutError, "dequantize", q, spec, dtype="int8")
    out.flags.writeable = False
    subject.check_raises(LayoutError, "dequantize", q, spec, out=out)


@QUANTIZE
@DEQUANTIZE
def test_torch_tensors(subject: Subject) -> None:
    torch = pytest.importorskip("torch")
    for op in ("quantize", "dequantize"):
        subject.require(op, dtype="bfloat16")
    spec = QuantSpec.fp8("e4m3fn", (1,))
    values = np.linspace(-3, 4, 32, dtype=np.float32).reshape(2, 16).astype(to_dtype("bfloat16"))
    x = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    ours = subject.ops.quantize(place(values), spec)
    theirs = subject.ops.quantize(x, spec)
    back = torch.empty((2, 16), dtype=torch.bfloat16)
    assert subject.ops.dequantize(theirs, spec, out=back) is back
    again = subject.ops.dequantize(ours, spec, dtype="bfloat16")
    subject.backend.runtime.check()
    assert np.asarray(ours.codes).tobytes() == np.asarray(theirs.codes).tobytes(), "quantize: torch tensors differ"
    same = back.view(torch.int16).numpy().tobytes() == np.asarray(again).tobytes()
    assert same, "dequantize: torch tensors differ"
