"""Rotary position embedding: its parameters, and cos/sin tables that are the same on every machine.

Keys are stored after RoPE by most engines. Moving a cached key from position p to position q, or taking the rotation
off, is a rotation by (q - p) or by -p. `rope_table` computes its cos and sin in float64 with nothing but correctly
rounded operations (`+ - * /`, `rint`), so no maths library decides a bit of what is stored.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Argument reduction after
Cody and Waite; the polynomials are Taylor series, enough terms for |x| <= pi/4 in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, UnsupportedOpError

__all__ = ["RopeParams", "cos_sin", "rope_table"]

_SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How a model rotates its keys.

    Parameters
    ----------
    rotary_dims : int
        Leading channels of a head that are rotated; even, at least 2.
    theta : float
        Base of the frequencies ``theta ** (-2 i / rotary_dims)``; not used where `inv_freq` is given.
    interleaved : bool
        Pairs are channels (2i, 2i+1) if true (GPT-J style), else (i, i + rotary_dims / 2) (Llama style).
    scaling : str
        ``"none"``, ``"linear"``, ``"ntk"``, ``"yarn"`` or ``"llama3"``.
    factor : float
        Context extension factor of `scaling`.
    inv_freq : tuple of float, optional
        An explicit table of ``rotary_dims / 2`` inverse frequencies, which overrides theta and scaling.

    Raises
    ------
    ConfigError
        A parameter is out of range.
    """

    rotary_dims: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    inv_freq: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rotary_dims < 2 or self.rotary_dims % 2:
            raise ConfigError(f"rotary_dims must be even and at least 2, got {self.rotary_dims}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ConfigError(f"theta must be a positive number, got {self.theta}")
        if self.scaling not in _SCALINGS:
            raise ConfigError(f"unknown RoPE scaling {self.scaling!r}; known are {', '.join(_SCALINGS)}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"factor must be a positive number, got {self.factor}")
        if self.inv_freq is not None and len(self.inv_freq) != self.rotary_dims // 2:
            raise ConfigError(
                f"inv_freq needs rotary_dims / 2 = {self.rotary_dims // 2} entries, got {len(self.inv_freq)}"
            )

    def frequencies(self) -> npt.NDArray[np.float64]:
        """Return the inverse frequencies, float64 ``[rotary_dims / 2]``, in radians per token.

        Powers are taken in 40-digit decimal arithmetic and rounded once, so they do not depend on a maths library.

        Raises
        ------
        UnsupportedOpError
            The scaling needs more than `factor` (ntk, yarn, llama3): give the engine's own `inv_freq` instead.
        """
        if self.inv_freq is not None:
            return np.array(self.inv_freq, dtype=np.float64)
        if self.scaling not in ("none", "linear"):
            raise UnsupportedOpError(
                f"RoPE scaling {self.scaling!r} is not computed here; pass the engine's table as inv_freq=(...)"
            )
        context = Context(prec=40)
        theta, half = Decimal(self.theta), self.rotary_dims // 2
        powers = [context.power(theta, context.divide(Decimal(-i), Decimal(half))) for i in range(half)]
        return np.array([float(context.divide(p, Decimal(self.factor))) for p in powers], dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as plain values, for frames and digests."""
        return {
            "factor": self.factor,
            "interleaved": self.interleaved,
            "inv_freq": None if self.inv_freq is None else list(self.inv_freq),
            "rotary_dims": self.rotary_dims,
            "scaling": self.scaling,
            "theta": self.theta,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeParams:
        """Build the parameters from `to_dict`'s form."""
        table = values.get("inv_freq")
        return cls(**{**values, "inv_freq": None if table is None else tuple(table)})


# pi/2 in three parts of 33, 33 and 53 bits: n * part is exact for n < 2**20, that is for angles up to 1.6e6.
_PIO2 = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_TWO_OVER_PI = 0.6366197723675814
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(9))


def cos_sin(angle: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return cos and sin of angles in radians, the same bits on every machine; error under 2e-15 for |angle| < 1e6."""
    n = np.rint(angle * _TWO_OVER_PI)
    r = ((angle - n * _PIO2[0]) - n * _PIO2[1]) - n * _PIO2[2]
    r2 = r * r
    sin, cos = np.full_like(r, _SIN[-1]), np.full_like(r, _COS[-1])
    for s, c in zip(_SIN[-2::-1], _COS[-2::-1], strict=True):
        sin = sin * r2 + s
        cos = cos * r2 + c
    sin = sin * r
    quadrant = n.astype(np.int64) & 3
    swap = (quadrant & 1).astype(bool)
    out_cos = np.where(swap, sin, cos)
    out_sin = np.where(swap, cos, sin)
    return (
        np.where((quadrant == 1) | (quadrant == 2), -out_cos, out_cos),
        np.where(quadrant >= 2, -out_sin, out_sin),
    )


def rope_table(
    params: RopeParams, shift: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the cos/sin table that `shift_rope` takes.

    Parameters
    ----------
    params : RopeParams
    shift : int64 ``[T]``
        New position minus old position of each token; minus the position takes RoPE off.

    Returns
    -------
    cos, sin : float32 ``[T, rotary_dims / 2]``
        A row of shift 0 is exactly (1, 0), which `shift_rope` treats as the identity.

    Raises
    ------
    ConfigError
        A shift of 2**20 tokens or more, where the argument reduction would lose accuracy.
    """
    if shift.size and int(np.abs(shift).max()) >= 1 << 20:
        raise ConfigError(f"position shift {int(np.abs(shift).max())} is 2**20 or more; re-base the chunk first")
    angle = shift.astype(np.float64)[:, None] * params.frequencies()[None, :]
    cos, sin = cos_sin(angle)
    return cos.astype(np.float32), sin.astype(np.float32)
