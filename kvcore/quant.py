"""How values are quantised: the static description that `quantize` and `dequantize` share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcore.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, finite_max, to_dtype
from kvcore.errors import ConfigError

__all__ = ["NONFINITE", "SCALE_MAX", "SCALE_MIN", "QuantSpec", "Quantized"]

NONFINITE = ("error", "saturate", "propagate")
SCALE_MIN = 2.0**-100
"""A group whose scale would be smaller is treated as zeros (its scale is 1)."""
SCALE_MAX = 2.0**125
"""A larger scale is held here, so that its reciprocal stays a normal number."""

_FP8 = (FLOAT8_E4M3FN, FLOAT8_E5M2)


class Quantized(NamedTuple):
    """Codes and what turns them back into values.

    ``codes`` has the shape of the values; ``scale`` (float32) and ``zero`` (int32, kind ``affine``, else None) have
    1 for each axis that shares a scale.
    """

    codes: Any
    scale: Any
    zero: Any = None


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Kind, width and grouping of a quantiser. Use the constructors `symmetric`, `affine`, `fp8` and `codebook`.

    Parameters
    ----------
    kind : {"int", "affine", "fp8", "codebook"}
    axes : tuple of int
        The axes whose elements share a scale, ascending. For groups of 32 channels, reshape ``[..., C]`` to
        ``[..., C/32, 32]`` and share the last axis.
    bits : int
        Width of a code.
    code_dtype : numpy.dtype
        int8, uint8 or an 8-bit float.
    levels : tuple of float
        Codebook levels, strictly ascending, each exactly a float32; empty for other kinds. Levels and the gaps between
        them are at least 2**-20 in magnitude, a level of 0 apart, so that nothing subnormal is ever compared.
    """

    kind: str
    axes: tuple[int, ...]
    bits: int
    code_dtype: np.dtype[Any]
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if list(self.axes) != sorted(set(self.axes)) or any(a < 0 for a in self.axes):
            raise ConfigError(f"axes must be ascending, distinct and not negative, got {self.axes}")

    @classmethod
    def symmetric(cls, bits: int, axes: tuple[int, ...]) -> QuantSpec:
        """Signed integers around zero, of 2 to 8 bits (as int8), or of 16 (as int16)."""
        if bits != 16:
            _check_bits(bits, 2)
        return cls("int", axes, bits, np.dtype(np.int16 if bits == 16 else np.int8))

    @classmethod
    def affine(cls, bits: int, axes: tuple[int, ...]) -> QuantSpec:
        """Unsigned integers of 1 to 8 bits with a zero point."""
        _check_bits(bits, 1)
        return cls("affine", axes, bits, np.dtype(np.uint8))

    @classmethod
    def fp8(cls, dtype: object, axes: tuple[int, ...]) -> QuantSpec:
        """8-bit floats, ``"float8_e4m3fn"`` or ``"float8_e5m2"``."""
        resolved = to_dtype(dtype)
        if resolved not in _FP8:
            raise ConfigError(f"fp8 means float8_e4m3fn or float8_e5m2, got {dtype!r}")
        return cls("fp8", axes, 8, resolved)

    @classmethod
    def codebook(cls, levels: tuple[float, ...], axes: tuple[int, ...]) -> QuantSpec:
        """The nearest of 2 to 256 given levels; a tie goes to the lower one."""
        if not 2 <= len(levels) <= 256:
            raise ConfigError(f"a codebook has 2 to 256 levels, got {len(levels)}")
        exact = np.array(levels, dtype=np.float32)
        if not np.all(np.isfinite(exact)) or not np.all(exact[1:] > exact[:-1]):
            raise ConfigError("codebook levels must be finite and strictly ascending in float32")
        small = (exact != 0) & (np.abs(exact) < 2.0**-20)
        if small.any() or (np.diff(exact) < 2.0**-20).any():
            raise ConfigError(
                "codebook levels must be 0 or at least 2**-20 in magnitude, and as far from one another; scale them up"
            )
        return cls("codebook", axes, math.ceil(math.log2(len(levels))), np.dtype(np.uint8), tuple(exact.tolist()))

    @property
    def code_max(self) -> float:
        """The largest magnitude a code stands for at scale 1: what absmax (or the range) is mapped to."""
        if self.kind == "int":
            return float((1 << (self.bits - 1)) - 1)
        if self.kind == "affine":
            return float((1 << self.bits) - 1)
        if self.kind == "fp8":
            return finite_max(self.code_dtype)
        return max(abs(self.levels[0]), abs(self.levels[-1]))


def _check_bits(bits: int, low: int) -> None:
    if not low <= bits <= 8:
        raise ConfigError(f"bits must be {low} to 8, got {bits}")
