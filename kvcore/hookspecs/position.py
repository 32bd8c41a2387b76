"""Moving keys to another position."""

from __future__ import annotations

from typing import Any

from kvcore.hookspecs.markers import hookspec

__all__ = ["kvcore_op_shift_rope"]


@hookspec(firstresult=True)
def kvcore_op_shift_rope(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool = False,
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Rotate keys by a table: re-position them, or take RoPE off.

    For each token t and each pair (a, b) of rotated channels, i its number:
    ``a' = a*cos[t,i] - b*sin[t,i]`` and ``b' = b*cos[t,i] + a*sin[t,i]``, in fp32 with two products, one addition or
    subtraction and one rounding to ``out``'s dtype (nearest even; a finite value beyond it becomes its largest finite
    one). Where ``cos[t,i] == 1`` and ``sin[t,i] == 0`` the pair is converted as it is, so a shift of zero is the
    identity, for every bit pattern where the dtypes are equal. Channels from ``2*R`` on are converted as they are.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array ``[..., T, H, D]``
    cos, sin : float32 arrays ``[T, R]``
        From `kvcore.rope.rope_table`; ``2*R <= D``.
    interleaved : bool
        Pair i is channels ``(2i, 2i+1)`` if true, else ``(i, i+R)``.
    out : array of the shape of `x`
        float16, bfloat16 or float32. May be `x` itself.

    Notes
    -----
    Exactness: bit-exact for finite input whose products are not subnormal (|a*sin| of 2**-126 and up, or zero).
    An infinity in a rotated pair gives what IEEE arithmetic gives, an infinity or a NaN. Every NaN that is computed, or
    converted to another dtype, is the quiet NaN with sign bit 0. Source: Su et al. 2021 (RoFormer).
    """
