"""The step of a KVS1 segment and of each of its tokens, in exact integers.

The statistics are sums of integers, and every comparison with a power ``2**(i/4)`` is one of integers too, so a step
does not depend on who added up, or in which order. docs/bitstream.md has the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import QuantizationError

__all__ = ["K_MAX", "MULTIPLIERS", "TARGET_BITS", "fit_codes", "fits", "rms_exponent", "steps", "token_multipliers"]

TARGET_BITS = 14
"""Values are scaled by the power of two that brings their largest magnitude under ``2**14``, then rounded."""
MULTIPLIERS = (-8, 7)
"""Least and largest token multiplier m; the step of a token is that of its segment times ``2**(m/4)``."""
K_MAX = 255
CODE_MAX = 32767

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_GRID_BITS = 30
_GRID = (1073741824, 1276901417, 1518500250, 1805811302)  # ceil(2**(i/4 + 30)), i = 0..3
_MANTISSA = (8388608, 9147842, 9975792, 10878679, 11863283, 12937002, 14107901, 15384775)  # rint(2**(23 + i/8))
_FEW_TOKENS = 32


def rms_exponent(squares: int, tokens: int, channels: int) -> int:
    """Return the least j >= 0 with ``R <= 2**(j/8)``, R the root mean square about the channel means.

    Parameters
    ----------
    squares : int
        ``sum over channels of (T * sum of squares - sum**2)``: T**2 * C times the variance.
    tokens, channels : int
        T, at least 2, and C. Below 32 tokens the unbiased variance is taken, T / (T - 1) times as large.
    """
    left, right = squares, tokens * tokens * channels
    if tokens < _FEW_TOKENS:
        left, right = left * tokens, right * (tokens - 1)
    left <<= _GRID_BITS
    # The bit lengths bound j from below; from there it is a few steps.
    j = max(0, 4 * (left.bit_length() - right.bit_length() - _GRID_BITS - 2))
    while left > right * _GRID[j % 4] << j // 4:
        j += 1
    return j


def token_multipliers(squares: Ints, j: int, channels: int) -> Ints:
    """Return each token's multiplier: the largest m with ``sum of squares >= C * 2**(j/4 + m - 1/2)``, within -8 .. 7.

    Parameters
    ----------
    squares : int64 array ``[T]``
        Sum of squares of each token.
    j : int
        From `rms_exponent`.
    channels : int
        C.
    """
    low, high = MULTIPLIERS
    thresholds = []
    for m in range(low + 1, high + 1):
        i = j + 4 * m - 2
        exact, shift = channels * _GRID[i % 4], _GRID_BITS - i // 4
        thresholds.append(-(-exact >> shift) if shift >= 0 else exact << -shift)
    return low + np.searchsorted(np.array(thresholds, np.int64), squares, side="right")


def steps(index: Ints) -> Floats:
    """Return ``2**(index/8 - 16)`` in float32, correctly rounded."""
    octave, eighth = np.divmod(index, 8)
    scaled: Floats = np.ldexp(np.array(_MANTISSA, np.float32)[eighth], octave - (16 + 23)).astype(np.float32)
    return scaled


def fits(k: Ints, multipliers: Ints, largest: Floats) -> bool:
    """Tell whether `fit_codes` would give k as it is, but for those below 0; `largest` may be more than the values."""
    return bool((k <= K_MAX).all()) and not _too_fine(np.clip(k, 0, None), multipliers, largest).any()


def _too_fine(k: Ints, multipliers: Ints, largest: Floats) -> npt.NDArray[np.bool_]:
    """Whether a value of a segment is beyond int16 with its step."""
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / steps(np.minimum(k, K_MAX)[:, None] + 2 * multipliers)
        return np.asarray((np.rint(largest * inverse) > CODE_MAX).any(axis=1))


def fit_codes(k: Ints, multipliers: Ints, largest: Floats, names: Sequence[str]) -> Ints:
    """Raise k where it must be, to the least one for which every value rounds to an int16: nothing is ever clamped.

    Parameters
    ----------
    k : int64 array ``[S]``
        Wanted step of each segment.
    multipliers : int64 array ``[S, T]``
    largest : float32 array ``[S, T]``
        Largest magnitude of each token.
    names : sequence of str
        Of the segments, for the error.

    Returns
    -------
    int64 array ``[S]``, within 0 .. 255

    Raises
    ------
    QuantizationError
        No step is coarse enough.
    """
    k = np.clip(k, 0, None)
    while True:
        over = _too_fine(k, multipliers, largest)
        bad = np.flatnonzero(k + over > K_MAX)
        if bad.size:
            raise QuantizationError(
                f"{names[bad[0]]} has values up to {float(largest[bad[0]].max()):.3g}, beyond what 16-bit codes reach "
                "with the coarsest step"
            )
        if not over.any():
            return k
        k = k + over
