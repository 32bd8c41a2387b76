"""RoPE shifts, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore_conformance.oracle.numbers import f32, hold, read, write, write_bits

__all__ = ["shift_rope"]

Array = npt.NDArray[Any]


def shift_rope(x: Array, cos: Array, sin: Array, *, interleaved: bool = False, out: Array) -> None:
    """a' = a*cos - b*sin, b' = b*cos + a*sin: two products, one sum, one rounding; the identity copies bits."""
    pairs = cos.shape[1]
    same_type = x.dtype == out.dtype

    def keep(at: tuple[int, ...]) -> None:
        if same_type:
            write_bits(out, at, int.from_bytes(x[at].tobytes(), "little"))
        else:
            write(out, at, read(x, at))

    source = x.copy()  # `out` may be `x`
    for at in np.ndindex(*x.shape[:-1]):
        for channel in range(2 * pairs, x.shape[-1]):
            keep((*at, channel))
        for i in range(pairs):
            first = 2 * i if interleaved else i
            second = first + 1 if interleaved else i + pairs
            c, s = read(cos, (at[-2], i)), read(sin, (at[-2], i))
            if c == 1 and s == 0:
                keep((*at, first))
                keep((*at, second))
                continue
            a, b = read(source, (*at, first)), read(source, (*at, second))
            write(out, (*at, first), hold(f32(f32(a * c) - f32(b * s)), a, b))
            write(out, (*at, second), hold(f32(f32(b * c) + f32(a * s)), a, b))
