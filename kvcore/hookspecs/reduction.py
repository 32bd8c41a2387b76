"""Reductions whose result does not depend on the order of evaluation, or fixes it."""

from __future__ import annotations

from typing import Any

from kvcore.hookspecs.markers import hookspec

__all__ = [
    "kvcore_op_reduce_absmax",
    "kvcore_op_reduce_minmax",
    "kvcore_op_reduce_moments",
    "kvcore_op_reduce_norm",
]


@hookspec(firstresult=True)
def kvcore_op_reduce_absmax(
    x: Any,
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Return the largest magnitude over some axes: ``out = max |x|``.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array
    axes : tuple of int
        The axes reduced over, ascending, not negative; at least one. Each has at least one element.
    nonfinite : {"error", "saturate", "propagate"}
        Propagate: NaN if any element is NaN (the quiet NaN 0x7FC00000), else infinity if any is infinite.
    out : float32 array
        Shape of `x` with 1 for each reduced axis.

    Raises
    ------
    QuantizationError
        A NaN or infinity under ``"error"``.

    Notes
    -----
    Exactness: bit-exact; a result of zero is +0.
    """


@hookspec(firstresult=True)
def kvcore_op_reduce_minmax(
    x: Any,
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Return smallest and largest value over some axes: ``out[0] = min x``, ``out[1] = max x``.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array
    axes : tuple of int
        As for `kvcore_op_reduce_absmax`.
    nonfinite : {"error", "saturate", "propagate"}
        Propagate: both are NaN (0x7FC00000) if any element is NaN, else infinities order as usual.
    out : float32 array
        ``[2, ...]``: 2, then the shape of `x` with 1 for each reduced axis.

    Raises
    ------
    QuantizationError
        A NaN or infinity under ``"error"``.

    Notes
    -----
    Exactness: bit-exact; a result of zero is +0.
    """


@hookspec(firstresult=True)
def kvcore_op_reduce_moments(
    x: Any,
    exponent: Any,
    *,
    axes: tuple[int, ...],
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Return integer sums and sums of squares of the values scaled by a power of two.

    ``q = rint(x * 2**exponent)`` (the exact product, rounded half to even, once), ``out[0] = sum q``,
    ``out[1] = sum q*q``. Integers, so any order of summation gives the same.

    Parameters
    ----------
    x : int16, float16, bfloat16 or float32 array
    exponent : int32 array
        Same number of dims as `x`, each extent 1 or that of `x`. All zero for int16 input.
    axes : tuple of int
        As for `kvcore_op_reduce_absmax`.
    out : int64 array
        ``[2, ...]``: 2, then the shape of `x` with 1 for each reduced axis.

    Raises
    ------
    QuantizationError
        A value that is not finite, or a ``q`` outside -32768 .. 32767.

    Notes
    -----
    Exactness: bit-exact in any order. Sums fit: at most 2**31 elements are reduced into one.
    """


@hookspec(firstresult=True)
def kvcore_op_reduce_norm(
    x: Any,
    *,
    axes: tuple[int, ...],
    nonfinite: str = "error",
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Return the L2 norm over some axes, in fp32, by a fixed tree.

    The reduced elements, in C order of the reduced axes, are squared in fp32 and padded with +0 to a power of two.
    While more than one is left, the upper half is added to the lower: ``s[i] = s[i] + s[i + n/2]``. The result is the
    correctly rounded square root. (The order a warp takes with strided loads and a butterfly.)

    Squares are of ``x * 2**-e`` and the root is multiplied by ``2**e``, where ``2**e`` is the power of two with
    ``2**e <= max|x| < 2**(e+1)`` and ``e`` is clamped to -126 .. 126, so nothing overflows in the squares and
    subnormals do not matter: a scaled magnitude below 2**-24 counts as +0.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array
    axes : tuple of int
        As for `kvcore_op_reduce_absmax`.
    nonfinite : {"error", "saturate", "propagate"}
        Propagate: NaN (0x7FC00000) if any element is NaN, else infinity if any is infinite.
    out : float32 array
        Shape of `x` with 1 for each reduced axis.

    Raises
    ------
    QuantizationError
        A NaN or infinity under ``"error"``.

    Notes
    -----
    Exactness: bit-exact. A norm beyond fp32 is infinity. If max|x| is below 2**-126, the result is +0.
    """
