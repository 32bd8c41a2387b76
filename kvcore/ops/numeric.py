"""Checked numeric ops: reductions, quantisers, rotation, bit packing, histograms, re-positioning."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.dtypes import BFLOAT16, dtype_name, to_dtype
from kvcore.errors import ConfigError, LayoutError
from kvcore.ops.base import FLOATS, OpsBase, check_axes, kept
from kvcore.ops.checks import check_bits, check_block, check_nonfinite, check_seed
from kvcore.quant import Quantized, QuantSpec

__all__ = ["NumericOps"]

_BYTES = ("uint8", "int8")
_FLOAT_OUT = dict(zip(FLOATS, (np.float16, BFLOAT16, np.float32), strict=True))


class NumericOps(OpsBase):
    """Everything that computes. `kvcore.hookspecs` defines each op."""

    def reduce_absmax(
        self, x: Any, axes: Any, *, nonfinite: str = "error", out: Any = None, stream: Any = None, workspace: Any = None
    ) -> Any:
        """Return max |x| over axes, float32 with 1 for each reduced axis; see `kvcore.hookspecs.reduction`."""
        return self._reduce("reduce_absmax", x, axes, (), nonfinite, out, stream, workspace)

    def reduce_minmax(
        self, x: Any, axes: Any, *, nonfinite: str = "error", out: Any = None, stream: Any = None, workspace: Any = None
    ) -> Any:
        """Return min and max over axes, float32 ``[2, ...]``; see `kvcore.hookspecs.reduction`."""
        return self._reduce("reduce_minmax", x, axes, (2,), nonfinite, out, stream, workspace)

    def reduce_norm(
        self, x: Any, axes: Any, *, nonfinite: str = "error", out: Any = None, stream: Any = None, workspace: Any = None
    ) -> Any:
        """Return the L2 norm over axes, float32 with 1 for each reduced axis; see `kvcore.hookspecs.reduction`."""
        return self._reduce("reduce_norm", x, axes, (), nonfinite, out, stream, workspace)

    def _reduce(
        self, op: str, x: Any, axes: Any, lead: tuple[int, ...], nonfinite: str, out: Any, stream: Any, workspace: Any
    ) -> Any:
        array = self._in(x, "x", FLOATS)
        function = self.resolve(op, array.dtype)
        reduced = self._axes(array, axes)
        check_nonfinite(nonfinite)
        native, out = self._out(out, "out", (*lead, *kept(array.shape, reduced)), np.float32, array)
        function(array, axes=reduced, nonfinite=nonfinite, out=native, stream=stream, workspace=workspace)
        return out

    def reduce_moments(
        self, x: Any, exponent: Any, axes: Any, *, out: Any = None, stream: Any = None, workspace: Any = None
    ) -> Any:
        """Return integer sums and sums of squares, int64 ``[2, ...]``; see `kvcore.hookspecs.reduction`."""
        array = self._in(x, "x", ("int16", *FLOATS))
        function = self.resolve("reduce_moments", array.dtype)
        reduced = self._axes(array, axes)
        power = self._in(exponent, "exponent", ("int32",))
        if len(power.shape) != len(array.shape) or any(
            e not in (1, n) for e, n in zip(power.shape, array.shape, strict=True)
        ):
            raise LayoutError(f"exponent {list(power.shape)} does not broadcast to x {list(array.shape)}, dim by dim")
        native, out = self._out(out, "out", (2, *kept(array.shape, reduced)), np.int64, array, power)
        function(array, power, axes=reduced, out=native, stream=stream, workspace=workspace)
        return out

    def quantize(
        self,
        x: Any,
        spec: QuantSpec,
        *,
        scale: Any = None,
        nonfinite: str = "error",
        out: Quantized | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Quantized:
        """Quantise; see `kvcore.hookspecs.quantization`.

        Raises
        ------
        QuantizationError
            A NaN or infinity under ``nonfinite="error"``, or a given scale out of range.
        LayoutError, ConfigError, UnsupportedOpError
        """
        array = self._in(x, "x", FLOATS)
        function = self.resolve("quantize", array.dtype)
        shape = kept(array.shape, self._spec_axes(array, spec))
        check_nonfinite(nonfinite)
        if nonfinite == "propagate" and spec.kind != "fp8":
            raise ConfigError(f"codes of kind {spec.kind!r} cannot carry NaN; use nonfinite='error' or 'saturate'")
        if scale is not None:
            if spec.kind == "affine":
                raise ConfigError("affine quantisation chooses scale and zero point together; a scale cannot be given")
            scale = self._in(scale, "scale", ("float32",))
            if scale.shape != shape:
                raise LayoutError(f"scale is {list(scale.shape)}; {list(shape)} would fit")
        given = out if out is not None else Quantized(None, None, None)
        inputs = (array,) if scale is None else (array, scale)
        codes, out_codes = self._out(given.codes, "out.codes", array.shape, spec.code_dtype, *inputs)
        scales, out_scales = self._out(given.scale, "out.scale", shape, np.float32, *inputs)
        zeros, out_zeros = None, None
        if spec.kind == "affine":
            zeros, out_zeros = self._out(given.zero, "out.zero", shape, np.int32, *inputs)
        native = Quantized(codes, scales, zeros)
        function(array, spec=spec, scale=scale, nonfinite=nonfinite, out=native, stream=stream, workspace=workspace)
        return out if out is not None else Quantized(out_codes, out_scales, out_zeros)

    def dequantize(
        self,
        q: Quantized,
        spec: QuantSpec,
        *,
        dtype: object = "float32",
        out: Any = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Turn codes into values of `dtype` (or of `out`); see `kvcore.hookspecs.quantization`."""
        codes = self._in(q.codes, "codes", (dtype_name(spec.code_dtype),))
        target = self._float_target(dtype, out)
        function = self.resolve("dequantize", target)
        shape = kept(codes.shape, self._spec_axes(codes, spec))
        scale = self._in(q.scale, "scale", ("float32",))
        zero = self._in(q.zero, "zero", ("int32",)) if spec.kind == "affine" else None
        for what, array in (("scale", scale), ("zero", zero)):
            if array is not None and array.shape != shape:
                raise LayoutError(f"{what} is {list(array.shape)}; {list(shape)} would fit")
        inputs = (codes, scale) if zero is None else (codes, scale, zero)
        native, out = self._out(out, "out", codes.shape, target, *inputs)
        function(Quantized(codes, scale, zero), spec=spec, out=native, stream=stream, workspace=workspace)
        return out

    def rotate(
        self,
        x: Any,
        *,
        seed: int,
        block: int,
        inverse: bool = False,
        dtype: object = "float32",
        out: Any = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Rotate blocks of channels by a randomised Hadamard matrix; see `kvcore.hookspecs.quantization`."""
        array = self._in(x, "x", FLOATS)
        function = self.resolve("rotate", array.dtype)
        check_block(block)
        check_seed(seed)
        if not array.shape or array.shape[-1] % block:
            raise LayoutError(f"the last axis of x {list(array.shape)} is not a multiple of block={block}")
        native, out = self._out(out, "out", array.shape, self._float_target(dtype, out), array)
        function(array, seed=seed, block=block, inverse=inverse, out=native, stream=stream, workspace=workspace)
        return out

    def pack_bits(self, x: Any, bits: int, *, out: Any = None, stream: Any = None, workspace: Any = None) -> Any:
        """Pack values into `bits` bits each, row by row; see `kvcore.hookspecs.bits`."""
        array = self._in(x, "x", _BYTES)
        function = self.resolve("pack_bits", array.dtype)
        row = _packed_row(array.shape, bits)
        native, out = self._out(out, "out", (*array.shape[:-1], row), np.uint8, array)
        function(array, bits=bits, out=native, stream=stream, workspace=workspace)
        return out

    def unpack_bits(
        self,
        x: Any,
        bits: int,
        count: int,
        *,
        dtype: object = "uint8",
        out: Any = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Unpack `count` values a row, as uint8 or int8; see `kvcore.hookspecs.bits`."""
        array = self._in(x, "x", ("uint8",))
        function = self.resolve("unpack_bits", array.dtype)
        if not array.shape or count < 0 or array.shape[-1] != _packed_row((count,), bits):
            raise LayoutError(f"{count} values of {bits} bits do not fill rows of x {list(array.shape)}")
        target = to_dtype(dtype) if out is None else self._in(out, "out", _BYTES).dtype
        if target.name not in _BYTES:
            raise LayoutError(f"unpack_bits gives uint8 or int8, not {target}")
        native, out = self._out(out, "out", (*array.shape[:-1], count), target, array)
        function(array, bits=bits, out=native, stream=stream, workspace=workspace)
        return out

    def count_symbols(self, x: Any, *, out: Any = None, stream: Any = None, workspace: Any = None) -> Any:
        """Count byte values per channel, uint32 ``[..., C, 256]``; see `kvcore.hookspecs.bits`."""
        array = self._in(x, "x", ("uint8",))
        function = self.resolve("count_symbols", array.dtype)
        if len(array.shape) < 2:
            raise LayoutError(f"count_symbols takes [..., T, C], got {list(array.shape)}")
        native, out = self._out(out, "out", (*array.shape[:-2], array.shape[-1], 256), np.uint32, array)
        function(array, out=native, stream=stream, workspace=workspace)
        return out

    def shift_rope(
        self,
        x: Any,
        cos: Any,
        sin: Any,
        *,
        interleaved: bool = False,
        out: Any = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Rotate keys ``[..., T, H, D]`` by a table ``[T, R]``; see `kvcore.hookspecs.position`."""
        array = self._in(x, "x", FLOATS)
        function = self.resolve("shift_rope", array.dtype)
        c, s = self._in(cos, "cos", ("float32",)), self._in(sin, "sin", ("float32",))
        if len(array.shape) < 3 or c.shape != s.shape or len(c.shape) != 2 or c.shape[0] != array.shape[-3]:
            raise LayoutError(
                f"keys [..., T, H, D] {list(array.shape)} need cos and sin [T, R], "
                f"got {list(c.shape)} and {list(s.shape)}"
            )
        if 2 * c.shape[1] > array.shape[-1]:
            raise LayoutError(
                f"a table of {c.shape[1]} pairs rotates {2 * c.shape[1]} channels, heads have {array.shape[-1]}"
            )
        target = array.dtype if out is None else self._in(out, "out", FLOATS).dtype
        native, out = self._out(out, "out", array.shape, target, c, s, in_place=array)
        function(array, c, s, interleaved=interleaved, out=native, stream=stream, workspace=workspace)
        return out

    def _axes(self, array: Any, axes: Any) -> tuple[int, ...]:
        reduced = check_axes(axes, len(array.shape))
        if 0 in array.shape and any(array.shape[a] == 0 for a in reduced):
            raise LayoutError(f"axes {reduced} of x {list(array.shape)} are empty; there is nothing to reduce")
        return reduced

    def _spec_axes(self, array: Any, spec: QuantSpec) -> tuple[int, ...]:
        if spec.axes and spec.axes[-1] >= len(array.shape):
            raise LayoutError(
                f"the quantiser shares scales over axes {spec.axes}, x {list(array.shape)} has no such axis"
            )
        if 0 in array.shape and any(array.shape[a] == 0 for a in spec.axes):
            raise LayoutError(f"axes {spec.axes} of x {list(array.shape)} are empty; there is nothing to quantise")
        return spec.axes

    def _float_target(self, dtype: object, out: Any) -> Any:
        if out is not None:
            return self._in(out, "out", FLOATS).dtype
        name = dtype_name(to_dtype(dtype))
        if name not in _FLOAT_OUT:
            raise LayoutError(f"values come as {', '.join(FLOATS)}, not {name}")
        return np.dtype(_FLOAT_OUT[name])


def _packed_row(shape: tuple[int, ...], bits: int) -> int:
    check_bits(bits)
    if not shape:
        raise LayoutError("bits are packed row by row; a scalar has no rows")
    return -(-shape[-1] * bits // 8)
