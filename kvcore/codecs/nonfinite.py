"""NaN and infinities in lossy codecs: the policies there are, and what each makes of a value.

``error`` refuses them, ``saturate`` stores another value in their place, ``raw`` stores their token rows as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.places import Array, copied, host, on_device, put_rows, taken_rows
from kvcore.dtypes import finite_max
from kvcore.errors import ConfigError, QuantizationError
from kvcore.ops import Backend

__all__ = ["TOO_LARGE", "check_finite", "check_policy", "largest_by_row", "saturated", "with_saturated_rows"]


TOO_LARGE = np.float32(2.0**29)
"""From here on the coarsest step of KVS1 may not reach a value, whatever its row's multiplier; below, it does."""


def check_policy(codec: str, nonfinite: str, *, raw_rows: bool = False) -> None:
    """Raise `ConfigError` unless a codec has a policy; only one with raw rows has ``"raw"``."""
    known = ("error", "saturate", "raw") if raw_rows else ("error", "saturate")
    if nonfinite not in known:
        why = "; only high, balanced and small store rows as they are" if nonfinite == "raw" else ""
        raise ConfigError(f"codec {codec} has no policy nonfinite={nonfinite!r}{why}; it has {', '.join(known)}")


def largest_by_row(backend: Backend, x: Any) -> npt.NDArray[np.float32]:
    """Return the largest magnitude in each row of ``[S, T, C]``: not finite where a value is not."""
    largest: npt.NDArray[np.float32] = host(backend, backend.reduce_absmax(x, (2,), nonfinite="propagate"))[:, :, 0]
    return largest


def check_finite(largest: npt.NDArray[np.float32], names: Sequence[str]) -> None:
    """Raise `QuantizationError` for the first row ``[S, T]`` with a NaN or infinity; names are those of S segments."""
    bad = np.argwhere(~np.isfinite(largest))
    if len(bad):
        s, t = map(int, bad[0])
        raise QuantizationError(
            f"{names[s]} has a value in row {t} that is {largest[s, t]}; nonfinite='raw' stores such rows as they are"
        )


def saturated(x: Array) -> Array:
    """Read NaN as zero, and an infinity as the largest finite value with its sign."""
    limit = np.float32(finite_max(x.dtype))
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet, which is no error here
        wide = x.astype(np.float32)
    held: Array = np.where(np.isnan(wide), np.float32(0), np.clip(wide, -limit, limit)).astype(x.dtype)
    return held


def with_saturated_rows(backend: Backend, x: Any, bad: npt.NDArray[np.bool_]) -> Any:
    """Return a copy of ``[S, T, C]`` whose rows that are marked in ``[S, T]`` are `saturated`."""
    held, places = copied(backend, x), [(int(s), int(t)) for s, t in np.argwhere(bad)]
    rows = taken_rows(backend, x, places)
    if on_device(x):
        backend.runtime.check()  # they are there when somebody has waited
    put_rows(backend, held, places, saturated(rows))
    return held
