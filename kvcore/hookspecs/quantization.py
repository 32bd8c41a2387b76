"""Quantise, dequantise, rotate."""

from __future__ import annotations

from typing import Any

from kvcore.hookspecs.markers import hookspec
from kvcore.quant import Quantized, QuantSpec

__all__ = ["kvcore_op_dequantize", "kvcore_op_quantize", "kvcore_op_rotate"]


@hookspec(firstresult=True)
def kvcore_op_quantize(
    x: Any,
    *,
    spec: QuantSpec,
    scale: Any = None,
    nonfinite: str = "error",
    out: Quantized,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    r"""Quantise values, group by group; the elements that differ only along ``spec.axes`` share a scale.

    All arithmetic is fp32, each operation rounded once. For each group, with ``fl(1/q)`` the correctly rounded
    reciprocal of a constant:

    ============ =============================================== ============================================
    kind         scale                                           code
    ============ =============================================== ============================================
    ``int``      ``absmax * fl(1/q)``, ``q = 2**(bits-1) - 1``   ``clamp(rint(x*inv), -q, q)`` as int8 (16: int16)
    ``affine``   ``max(hi*fl(1/q) - lo*fl(1/q), absmax*2**-20)`` ``clamp(rint(x*inv) + zero, 0, q)`` as uint8,
                 ``q = 2**bits - 1``, lo/hi = min/max            ``zero = -rint(lo*inv)`` as int32
    ``fp8``      ``absmax * fl(1/q)``, q = largest finite code   ``x*inv`` clamped to +-q, rounded to nearest
                                                                 even in the 8-bit float
    ``codebook`` ``absmax * fl(1/q)``, q = largest \\|level\\|     number of i with ``x*inv > mid[i]``,
                                                                 ``mid[i] = (level[i] + level[i+1]) * 0.5``;
                                                                 a magnitude below 2**-30 of x*inv counts as 0
    ============ =============================================== ============================================

    ``inv = 1/scale`` is one correctly rounded division per group. A scale below 2**-100 becomes 1, so such a group
    quantises to zeros; one above 2**125 becomes 2**125, so its largest values saturate. Then no result depends on
    how a machine treats subnormals.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array
    spec : QuantSpec
    scale : float32 array, optional
        Scales to use instead of those above (kinds ``int``, ``fp8``, ``codebook`` only): shape of `x` with 1 for each
        axis of ``spec.axes``; within 2**-100 .. 2**125. They are copied to ``out.scale``.
    nonfinite : {"error", "saturate", "propagate"}
        Propagate (kind ``fp8`` only): NaN becomes the NaN code 0x7F (e4m3fn) or 0x7E (e5m2); an infinity becomes
        that NaN in e4m3fn and infinity in e5m2. Scales are taken over the finite values.
    out : Quantized
        ``codes`` of the shape of `x`; ``scale`` float32 and, for ``affine``, ``zero`` int32 of that shape with 1 for
        each axis of ``spec.axes``.

    Raises
    ------
    QuantizationError
        A NaN or infinity under ``"error"``; a given scale out of range.

    Notes
    -----
    Exactness: bit-exact. Nothing is written when an error is raised.
    """


@hookspec(firstresult=True)
def kvcore_op_dequantize(q: Quantized, *, spec: QuantSpec, out: Any, stream: Any = None, workspace: Any = None) -> Any:
    """Turn codes back into values: one fp32 multiply, rounded once more to the output's dtype.

    ``int``: ``code*scale``; ``affine``: ``(code - zero)*scale``; ``fp8``: ``value(code)*scale``; ``codebook``:
    ``level[code]*scale``. Rounded to nearest even in ``out``'s dtype; a finite product beyond it becomes its largest
    finite value. A NaN code gives the quiet NaN of ``out``'s dtype with sign bit 0, an infinity (e5m2) an infinity.

    Parameters
    ----------
    q : Quantized
        As `kvcore_op_quantize` wrote it.
    spec : QuantSpec
    out : float16, bfloat16 or float32 array
        Shape of ``q.codes``.

    Raises
    ------
    QuantizationError
        A codebook code that has no level; a scale outside 2**-100 .. 2**125.

    Notes
    -----
    Exactness: bit-exact.
    """


@hookspec(firstresult=True)
def kvcore_op_rotate(
    x: Any,
    *,
    seed: int,
    block: int,
    inverse: bool = False,
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Rotate blocks of channels by a randomised Hadamard matrix, which spreads outliers before quantisation.

    Within each block of `block` consecutive channels of the last axis, with ``c`` the channel's index in the whole
    axis and ``s(c)`` its sign:

    1. ``v[c] = x[c] * s(c)`` (skipped when ``inverse``),
    2. for ``h = 1, 2, 4, ... block/2``: every pair ``(a, b)`` of channels whose indices within the block differ by
       ``h``, the first having that bit clear, becomes ``(a + b, a - b)``,
    3. ``v * fl(1/sqrt(block))``, one multiply,
    4. if ``inverse``: times ``s(c)``,
    5. rounded to nearest even in ``out``'s dtype; a finite value beyond it becomes the largest finite one.

    ``s(c)`` is -1 where bit 63 of ``mix(seed + (c + 1) * 0x9E3779B97F4A7C15)`` is set (mod 2**64, `mix` as in
    `kvcore_op_digest`), else +1: it depends on nothing but seed and channel. The inverse undoes the rotation up to
    rounding.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array ``[..., C]``
        Magnitudes at most 2**100.
    seed : int
        0 .. 2**64 - 1.
    block : int
        A power of two, 1 .. 1024, that divides C.
    inverse : bool
    out : float16, bfloat16 or float32 array
        Shape of `x`.

    Raises
    ------
    QuantizationError
        A value that is not finite or beyond 2**100 in magnitude.

    Notes
    -----
    Exactness: bit-exact; elements of magnitude below 2**-90 are read as +0, so that no sum is subnormal.
    """
