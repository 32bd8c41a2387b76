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
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, UnsupportedOpError

__all__ = ["SCALING_PARAMETERS", "RopeParams", "cos_sin", "rope_table"]

SCALING_PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": (),
    "ntk": (),
    "yarn": ("beta_fast", "beta_slow", "original_tokens", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_tokens"),
}
"""The scalings, and what each takes besides a factor, in the order of frames."""

_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_PARAMETERS = sorted({name for names in SCALING_PARAMETERS.values() for name in names})
_PI = Decimal("3.14159265358979323846264338327950288419716939937510")


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How a model rotates its keys.

    What an engine multiplies keys by as it rotates them (YaRN's attention factor, from ``mscale``) is no parameter: a
    rotation back and forth leaves it as it is.

    Parameters
    ----------
    rotary_dims : int
        Leading channels of a head that are rotated; even, at least 2.
    theta : float
        Base of the frequencies ``theta ** (-2 i / rotary_dims)``; not used where `inv_freq` is given.
    interleaved : bool
        Pairs are channels (2i, 2i+1) if true (GPT-J style), else (i, i + rotary_dims / 2) (Llama style).
    scaling : str
        ``"none"``, ``"linear"``, ``"ntk"`` (static), ``"yarn"`` or ``"llama3"``.
    factor : float
        Context extension factor of `scaling`.
    inv_freq : tuple of float, optional
        An explicit table of ``rotary_dims / 2`` inverse frequencies, in place of theta and scaling.
    original_tokens : int, optional
        Of yarn and llama3: the context that the model was trained for before it was extended.
    low_freq_factor, high_freq_factor : float, optional
        Of llama3: a frequency of fewer turns in the original context than the low one is divided by `factor`, one of
        more turns than the high one is kept, between them there is a ramp.
    beta_fast, beta_slow : float, optional
        Of yarn: turns in the original context at which its ramp begins and ends; 32 and 1 unless given.
    truncate : bool, optional
        Of yarn: the ramp begins and ends at whole channel pairs; true unless given.

    Raises
    ------
    ConfigError
        A parameter is out of range, missing, or not of this scaling. Only yarn and llama3 without any of their
        parameters stand for "scaled in a way that is not known": their keys keep their RoPE where they are stored.
    """

    rotary_dims: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    inv_freq: tuple[float, ...] | None = None
    original_tokens: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rotary_dims < 2 or self.rotary_dims % 2:
            raise ConfigError(f"rotary_dims must be even and at least 2, got {self.rotary_dims}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ConfigError(f"theta must be a positive number, got {self.theta}")
        if self.scaling not in SCALING_PARAMETERS:
            raise ConfigError(f"unknown RoPE scaling {self.scaling!r}; known are {', '.join(SCALING_PARAMETERS)}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"factor must be a positive number, got {self.factor}")
        if self.inv_freq is not None and len(self.inv_freq) != self.rotary_dims // 2:
            raise ConfigError(
                f"inv_freq needs rotary_dims / 2 = {self.rotary_dims // 2} entries, got {len(self.inv_freq)}"
            )
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Check the scaling's own parameters, and give each its one form: what is equal has equal digests."""
        given = {name: value for name in _PARAMETERS if (value := getattr(self, name)) is not None}
        if not given:
            return
        who = f"RoPE scaling {self.scaling!r}" if self.inv_freq is None else "an explicit inv_freq"
        takes = SCALING_PARAMETERS[self.scaling] if self.inv_freq is None else ()
        if extra := sorted(given.keys() - takes):
            raise ConfigError(f"{who} does not take {', '.join(extra)}")
        if self.scaling == "yarn":
            given = {**_YARN_DEFAULTS, **given}
        if missing := [name for name in takes if name not in given]:
            raise ConfigError(f"{who} needs {', '.join(missing)}")
        for name, value in given.items():
            object.__setattr__(self, name, _parameter(name, value))
        if self.scaling == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
            got = f"{given['low_freq_factor']} and {given['high_freq_factor']}"
            raise ConfigError(f"low_freq_factor must be below high_freq_factor, got {got}")
        if self.scaling == "yarn" and given["beta_slow"] > given["beta_fast"]:
            got = f"{given['beta_slow']} and {given['beta_fast']}"
            raise ConfigError(f"beta_slow must not be above beta_fast, got {got}")
        if self.scaling == "yarn" and self.theta <= 1:
            raise ConfigError(f"{who} needs a theta above 1, got {self.theta}")

    @property
    def parameters(self) -> dict[str, float]:
        """The scaling's own parameters, in the order of frames; empty if it has none, or they are not known."""
        found = {name: getattr(self, name) for name in SCALING_PARAMETERS[self.scaling]}
        return {} if None in found.values() else found

    def frequencies(self) -> npt.NDArray[np.float64]:
        """Return the inverse frequencies, float64 ``[rotary_dims / 2]``, in radians per token.

        Computed in 40-digit decimal arithmetic and rounded once, so they do not depend on a maths library.

        Sources: ntk: bloc97, "NTK-Aware Scaled RoPE", 2023. yarn: Peng et al., "YaRN: Efficient Context Window
        Extension of Large Language Models", 2023. llama3: the reference implementation of Llama 3.1, Meta, 2024.

        Raises
        ------
        UnsupportedOpError
            The scaling is yarn or llama3, and its parameters are not known.
        """
        if self.inv_freq is not None:
            return np.array(self.inv_freq, dtype=np.float64)
        if (names := SCALING_PARAMETERS[self.scaling]) and not self.parameters:
            raise UnsupportedOpError(
                f"RoPE scaling {self.scaling!r} is not computed without its parameters; pass {', '.join(names)}, or "
                "the engine's table as inv_freq=(...)"
            )
        return np.array(_rounded(self), dtype=np.float64)

    def _scaled(self) -> list[Decimal]:
        theta, factor, half = Decimal(self.theta), Decimal(self.factor), self.rotary_dims // 2
        plain = [theta ** (Decimal(-i) / half) for i in range(half)]
        if self.scaling == "ntk":
            # theta * factor**(d / (d - 2)) in place of theta; written so that two rotary channels are no special case.
            return [f / factor ** (Decimal(i) / max(half - 1, 1)) for i, f in enumerate(plain)]
        if self.scaling == "llama3":
            kept = self._llama3_kept(plain)
        elif self.scaling == "yarn":
            kept = self._yarn_kept(half)
        else:
            return [f / factor for f in plain]
        return [f * (share + (1 - share) / factor) for f, share in zip(plain, kept, strict=True)]

    def _llama3_kept(self, plain: list[Decimal]) -> list[Decimal]:
        """How much of each frequency is kept, 0 to 1: a ramp over the turns in the original context."""
        p = {name: Decimal(value) for name, value in self.parameters.items()}
        low, high = p["low_freq_factor"], p["high_freq_factor"]
        return [_clamped((p["original_tokens"] * f / (2 * _PI) - low) / (high - low)) for f in plain]

    def _yarn_kept(self, half: int) -> list[Decimal]:
        """How much of each frequency is kept, 1 to 0: a ramp over the channel pairs."""
        p = {name: Decimal(value) for name, value in self.parameters.items()}
        # The pair, in general a fraction, that makes so many turns in the original context.
        first, last = (
            half * (p["original_tokens"] / (turns * 2 * _PI)).ln() / Decimal(self.theta).ln()
            for turns in (p["beta_fast"], p["beta_slow"])
        )
        if self.truncate:
            first, last = first.to_integral_value(ROUND_FLOOR), last.to_integral_value(ROUND_CEILING)
        # The upper bound counts channels, not pairs; so do the models that were trained with it.
        first, last = max(first, Decimal(0)), min(last, Decimal(2 * half - 1))
        width = last - first or Decimal("0.001")
        return [1 - _clamped((i - first) / width) for i in range(half)]

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as plain values; those of a scaling only where it has them."""
        return {
            "factor": self.factor,
            "interleaved": self.interleaved,
            "inv_freq": None if self.inv_freq is None else list(self.inv_freq),
            "rotary_dims": self.rotary_dims,
            "scaling": self.scaling,
            "theta": self.theta,
            **self.parameters,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeParams:
        """Build the parameters from `to_dict`'s form."""
        table = values.get("inv_freq")
        return cls(**{**values, "inv_freq": None if table is None else tuple(table)})


@lru_cache(maxsize=64)
def _rounded(params: RopeParams) -> tuple[float, ...]:
    """The frequencies; kept, for they take milliseconds, and every chunk of a model asks for the same ones."""
    with localcontext(Context(prec=40)):
        return tuple(float(frequency) for frequency in params._scaled())


def _parameter(name: str, value: Any) -> float:
    """Check one parameter of a scaling, and return it in its one form."""
    if name == "truncate":
        if value not in (False, True):
            raise ConfigError(f"truncate must be true or false, got {value}")
        return bool(value)
    if name == "original_tokens":
        if not (1 <= value < 2**32 and value == int(value)):
            raise ConfigError(f"original_tokens must be a whole number in 1..2**32 - 1, got {value}")
        return int(value)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a positive number, got {value}")
    return float(value)


def _clamped(share: Decimal) -> Decimal:
    return min(max(share, Decimal(0)), Decimal(1))


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
