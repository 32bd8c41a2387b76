"""How a KVS1 preset chooses the steps of segments, by statistics that are taken where the values are.

Of a device, only what the choice needs crosses the link: for each token some 5 bytes over, and 1 back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.nonfinite import check_finite
from kvcore.codecs.places import fetched_ints, filled, host, near, on_device, widened
from kvcore.codecs.quantizer import TARGET_BITS, fit_codes, fits, rms_exponent, steps, token_multipliers
from kvcore.ops import Backend
from kvcore.quant import Quantized, QuantSpec

__all__ = ["StepRule", "choose_steps", "placed_steps"]

_LIFT = 16  # steps are held as levels 2**16 times as large: a codebook's must be 2**-20 apart
_LEVELS = 256


@dataclass(frozen=True, slots=True)
class StepRule:
    """How a preset turns R into a step.

    Parameters
    ----------
    constant : int
        Eighths of an octave: the step is ``R * 2**(constant / 8)``.
    level : int, optional
        The model's level c on the same grid; then the step is ``sqrt(R * 2**(c/8)) * 2**(constant / 8)``.
    """

    constant: int
    level: int | None = None

    def k(self, j: int) -> int:
        """Return k for an R of ``2**(j/8)``."""
        return 128 + self.constant + (j if self.level is None else -(-(j + self.level) // 2))


def choose_steps(
    backend: Backend, x: Any, skip: npt.NDArray[np.bool_], rule: StepRule, names: Sequence[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Choose the steps of segments.

    Parameters
    ----------
    backend : Backend
    x : float16, bfloat16 or float32 array ``[S, T, C]``
        Where the backend computes.
    skip : bool array ``[S, T]``
        Raw rows, which are zeros in `x`.
    rule : StepRule
    names : sequence of str
        Of the segments, for errors.

    Returns
    -------
    k : int64 array ``[S]``
    multipliers : int64 array ``[S, T]``
        0 for raw rows.

    Raises
    ------
    QuantizationError
        A NaN or infinity, or values beyond every step.
    """
    count, tokens, channels = x.shape
    by_row = backend.reduce_absmax(x, (2,), nonfinite="propagate")
    top = host(backend, backend.reduce_absmax(by_row, (1,), nonfinite="propagate"))[:, 0, 0]
    if not np.isfinite(top).all():
        check_finite(host(backend, by_row)[:, :, 0], names)
    exponent = np.where(top > 0, TARGET_BITS - np.frexp(top)[1], 0).astype(np.int32)
    power = near(backend, exponent[:, None, None])
    # A scaled value is at most 2**14: its sums over 256 tokens take 4 bytes, its squares over C channels 28 + log2(C)
    # bits and a sign.
    sums = fetched_ints(backend, backend.reduce_moments(x, power, (1,))[0], 4)
    squares = fetched_ints(backend, backend.reduce_moments(x, power, (2,))[1], -(-(30 + channels.bit_length()) // 8))
    if on_device(x):
        backend.runtime.check()
    by_channel, by_token = widened(sums)[:, 0], widened(squares)[:, :, 0]
    kept = tokens - skip.sum(axis=1)
    # T * sum of squares stays below 2**45 for a channel, and so does the sum over channels below 2**63.
    spread = kept * by_token.sum(axis=1) - (by_channel**2).sum(axis=1)
    k, multipliers = np.zeros(count, np.int64), np.zeros((count, tokens), np.int64)
    for s in np.flatnonzero(top):
        j = rms_exponent(int(spread[s]), int(kept[s]), channels)
        k[s] = rule.k(j - 8 * int(exponent[s]))
        multipliers[s] = token_multipliers(by_token[s], j, channels)
    multipliers[skip] = 0
    # A row's largest magnitude is at most the root of its sum of squares, and the rounding of each; that is enough to
    # tell that no code is too large, save where a value is some 10**4 times as large as its segment's others.
    bound = np.minimum(np.ldexp(np.sqrt(by_token) + 1, -exponent[:, None]), top[:, None]).astype(np.float32)
    if fits(k, multipliers, bound):
        return np.clip(k, 0, None), multipliers
    return fit_codes(k, multipliers, host(backend, by_row)[:, :, 0], names), multipliers


def placed_steps(backend: Backend, index: npt.NDArray[np.int64]) -> Any:
    """Return the `steps` of tokens ``[S, T]`` as scales ``[S, T, 1]`` where the backend computes."""
    placed = index[:, :, None]
    low = int(index.min())
    if "cpu" in backend.spec.device_types or index.max() - low >= _LEVELS:
        return near(backend, steps(placed))
    scale = filled(backend, 2.0**-_LIFT, (1, 1, 1), np.float32)
    return backend.dequantize(Quantized(near(backend, (placed - low).astype(np.uint8)), scale), _codebook(low))


@functools.lru_cache(maxsize=64)
def _codebook(low: int) -> QuantSpec:
    """Return the steps from one on, as levels."""
    levels = np.ldexp(steps(np.arange(low, low + _LEVELS)), _LIFT)
    return QuantSpec.codebook(tuple(levels.tolist()), (0, 1, 2))
