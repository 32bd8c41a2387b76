"""Defects of reductions, quantisers and rotations."""

# ruff: noqa: D103 -- a defect says in its name what is wrong
from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.errors import QuantizationError
from kvcore_conformance.mutants.catalogue import Call, mutant
from kvcore_cpu_ref.floats import narrow
from kvcore_cpu_ref.quantization import ONE, rotation_signs

REDUCTIONS = ("reduce_absmax", "reduce_minmax", "reduce_norm")


def _float64(array: Any) -> Any:
    return np.asarray(array).astype(np.float32).astype(np.float64)


def _finite(array: Any) -> bool:
    return bool(np.isfinite(np.asarray(array).astype(np.float32)).all())


# --- reductions


@mutant("reduce_absmax", "reduce_norm", "reduce_moments")
def last_element_ignored(call: Call) -> Any:
    x, axis = call.args[0], call.kwargs["axes"][-1]
    if x.shape[axis] > 1:
        call.args[0] = x[(slice(None),) * axis + (slice(0, -1),)]
        if call.original.__name__.endswith("moments") and call.args[1].shape[axis] > 1:
            call.args[1] = call.args[1][(slice(None),) * axis + (slice(0, -1),)]
    return call.run()


@mutant(*REDUCTIONS, "quantize")
def nan_swallowed_under_error(call: Call) -> Any:
    if call.kwargs.get("nonfinite", "error") == "error":
        call.kwargs["nonfinite"] = "saturate"
    return call.run()


@mutant("reduce_absmax")
def sign_kept(call: Call) -> Any:
    out = call.run()
    x = call.args[0].astype(np.float32)
    if np.isfinite(x).all():
        out[...] = x.max(axis=call.kwargs["axes"], keepdims=True)
    return out


@mutant("reduce_minmax")
def zero_with_a_sign(call: Call) -> Any:
    out = call.run()
    out[out == 0] = -0.0
    return out


@mutant("reduce_minmax")
def nan_passed_over(call: Call) -> Any:
    x = call.args[0].astype(np.float32)
    if call.kwargs.get("nonfinite") == "propagate" and np.isnan(x).any():
        call.args[0] = np.where(np.isnan(x), np.float32(0), x)
    return call.run()


@mutant("reduce_minmax")
def min_and_max_swapped(call: Call) -> Any:
    out = call.run()
    out[...] = out[::-1].copy()
    return out


@mutant("reduce_moments")
def rounded_half_up(call: Call) -> Any:
    out = call.run()
    q = np.floor(np.ldexp(_float64(call.args[0]), call.args[1]) + 0.5)
    out[0] = q.sum(axis=call.kwargs["axes"], keepdims=True)
    out[1] = (q * q).sum(axis=call.kwargs["axes"], keepdims=True)
    return out


@mutant("reduce_moments")
def range_unchecked(call: Call) -> Any:
    try:
        return call.run()
    except QuantizationError:
        return call.kwargs["out"]


@mutant("reduce_norm")
def summed_one_after_another(call: Call) -> Any:
    out = call.run()
    if _finite(call.args[0]):
        x = call.args[0].astype(np.float32)
        others = [i for i in range(x.ndim) if i not in call.kwargs["axes"]]
        rows = x.transpose(*others, *call.kwargs["axes"]).reshape(out.size, -1)
        total = np.zeros(out.size, np.float32)
        with np.errstate(over="ignore"):
            for column in rows.T:
                total = total + column * column
            out[...] = np.sqrt(total).reshape(out.shape)
    return out


@mutant("reduce_norm")
def summed_in_double(call: Call) -> Any:
    out = call.run()
    if _finite(call.args[0]):
        with np.errstate(over="ignore"):
            x = _float64(call.args[0])
            out[...] = np.sqrt((x * x).sum(axis=call.kwargs["axes"], keepdims=True)).astype(np.float32)
    return out


# --- quantize


def _requantize(call: Call, rounding: Any) -> Any:
    """Run the original, then make the codes anew from its scales."""
    out, spec = call.run(), call.kwargs["spec"]
    x = call.args[0].astype(np.float32)
    if np.isfinite(x).all():
        with np.errstate(over="ignore"):
            rounding(x, ONE / out.scale.astype(np.float32), out, spec)
    return out


@mutant("quantize")
def codes_rounded_half_up(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "int":
            limit = spec.code_max
            out.codes[...] = np.clip(np.floor(x.astype(np.float64) * inverse + 0.5), -limit, limit)

    return _requantize(call, rounding)


@mutant("quantize")
def clamped_at_minus_128(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "int":
            out.codes[...] = np.clip(np.rint(x * inverse), -spec.code_max - 1, spec.code_max)

    return _requantize(call, rounding)


@mutant("quantize")
def divided_instead_of_multiplied(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "int":
            out.codes[...] = np.clip(np.rint(x / out.scale.astype(np.float32)), -spec.code_max, spec.code_max)
        elif spec.kind == "fp8":
            limit = np.float32(spec.code_max)
            scaled = np.clip(x / out.scale.astype(np.float32), -limit, limit)
            out.codes[...] = scaled.astype(spec.code_dtype)

    return _requantize(call, rounding)


@mutant("quantize")
def zero_point_off_by_one(call: Call) -> Any:
    out = call.run()
    if out.zero is not None:
        out.zero[...] = out.zero + 1
    return out


@mutant("quantize")
def zero_point_added_before_rounding(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "affine":
            out.codes[...] = np.clip(np.rint(x * inverse + out.zero.astype(np.float32)), 0, spec.code_max)

    return _requantize(call, rounding)


@mutant("quantize")
def ties_in_a_codebook_go_up(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "codebook":
            levels = np.array(spec.levels, np.float32)
            out.codes[...] = np.searchsorted((levels[:-1] + levels[1:]) * np.float32(0.5), x * inverse, side="right")

    return _requantize(call, rounding)


@mutant("quantize")
def fp8_does_not_saturate(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "fp8":
            out.codes[...] = (x * inverse).astype(spec.code_dtype)

    return _requantize(call, rounding)


@mutant("quantize")
def fp8_rounded_twice(call: Call) -> Any:
    def rounding(x: Any, inverse: Any, out: Any, spec: Any) -> None:
        if spec.kind == "fp8":
            limit = np.float32(spec.code_max)
            out.codes[...] = np.clip(x * inverse, -limit, limit).astype(np.float16).astype(spec.code_dtype)

    return _requantize(call, rounding)


@mutant("quantize")
def given_scale_ignored(call: Call) -> Any:
    call.kwargs["scale"] = None
    return call.run()


@mutant("quantize")
def scale_written_before_it_raises(call: Call) -> Any:
    try:
        return call.run()
    except QuantizationError:
        call.kwargs["out"].scale[...] = 1
        raise


@mutant("quantize")
def tiny_groups_not_zeroed(call: Call) -> Any:
    out = call.run()
    x = call.args[0].astype(np.float32)
    if call.kwargs["spec"].kind == "int" and (np.abs(x)[x != 0] < 2.0**-110).any():
        out.codes[...] = np.sign(x)
    return out


# --- dequantize


@mutant("dequantize")
def product_and_conversion_rounded_once(call: Call) -> Any:
    out, q, spec = call.run(), call.args[0], call.kwargs["spec"]
    if spec.kind == "affine" and out.dtype != np.float32:
        exact = (q.codes.astype(np.float64) - q.zero) * q.scale
        limit = float(np.finfo(np.float16).max) if out.dtype == np.float16 else 3.3e38
        out[...] = np.clip(exact, -limit, limit).astype(out.dtype)
    return out


@mutant("dequantize")
def truncated_to_bfloat16(call: Call) -> Any:
    out = call.kwargs["out"]
    if out.dtype.name != "bfloat16":
        return call.run()
    wide = np.empty(out.shape, np.float32)
    call.kwargs["out"] = wide
    call.run()
    out[...] = (wide.view(np.uint32) >> 16).astype(np.uint16).view(out.dtype)
    return out


@mutant("dequantize")
def zero_point_ignored(call: Call) -> Any:
    q = call.args[0]
    if q.zero is not None:
        call.args[0] = q._replace(zero=np.zeros_like(q.zero))
    return call.run()


@mutant("dequantize")
def overflow_becomes_infinity(call: Call) -> Any:
    out = call.kwargs["out"]
    wide = np.empty(out.shape, np.float32)
    call.kwargs["out"] = wide
    call.run()
    with np.errstate(over="ignore"):
        out[...] = wide.astype(out.dtype)
    return out


@mutant("dequantize")
def codes_without_a_level_wrap(call: Call) -> Any:
    q, spec = call.args[0], call.kwargs["spec"]
    if spec.kind == "codebook":
        call.args[0] = q._replace(codes=q.codes % len(spec.levels))
    return call.run()


# --- rotate


@mutant("rotate")
def not_normalised(call: Call) -> Any:
    out = call.run()
    factor = np.float32(np.sqrt(call.kwargs["block"]))
    out[...] = narrow(out.astype(np.float32) * factor, out.dtype)
    return out


@mutant("rotate")
def sign_of_the_wrong_channel(call: Call) -> Any:
    call.kwargs["seed"] = (call.kwargs["seed"] + 0x9E3779B97F4A7C15) % (1 << 64)
    return call.run()


@mutant("rotate")
def signs_start_over_in_each_block(call: Call) -> Any:
    x, block, out = call.args[0], call.kwargs["block"], call.kwargs["out"]
    for start in range(0, x.shape[-1], block):
        call.args[0], call.kwargs["out"] = x[..., start : start + block], out[..., start : start + block]
        call.run()
    return out


@mutant("rotate")
def inverse_without_its_signs(call: Call) -> Any:
    out = call.run()
    if call.kwargs.get("inverse"):
        out[...] = narrow(out.astype(np.float32) * rotation_signs(call.kwargs["seed"], out.shape[-1]), out.dtype)
    return out


@mutant("rotate")
def butterflies_from_the_widest(call: Call) -> Any:
    x, block, seed, out = call.args[0], call.kwargs["block"], call.kwargs["seed"], call.run()
    v = x.astype(np.float32)
    v = np.where(np.abs(v) < 2.0**-90, np.float32(0), v)
    signs = rotation_signs(seed, x.shape[-1])
    if not call.kwargs.get("inverse"):
        v = v * signs
    v, h = v.reshape(*x.shape[:-1], -1, block), block // 2
    while h:
        pairs = v.reshape(*v.shape[:-1], block // (2 * h), 2, h)
        v = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(
            v.shape
        )
        h //= 2
    v = v.reshape(x.shape) * np.float32(1 / np.sqrt(np.float64(block)))
    out[...] = narrow(v * signs if call.kwargs.get("inverse") else v, out.dtype)
    return out


@mutant("rotate")
def limit_unchecked(call: Call) -> Any:
    try:
        return call.run()
    except QuantizationError:
        return call.kwargs["out"]
