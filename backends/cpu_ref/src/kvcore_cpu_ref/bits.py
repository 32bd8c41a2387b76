"""Pack, unpack and count small integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import hookimpl
from kvcore.errors import QuantizationError

__all__ = ["kvcore_op_count_symbols", "kvcore_op_pack_bits", "kvcore_op_unpack_bits"]


@hookimpl
def kvcore_op_pack_bits(
    x: npt.NDArray[Any], *, bits: int, out: npt.NDArray[np.uint8], stream: Any = None, workspace: Any = None
) -> Any:
    low, high = (0, 2**bits - 1) if x.dtype == np.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if x.size and (x.min() < low or x.max() > high):
        raise QuantizationError(f"values {x.min()} .. {x.max()} do not fit {bits} bits of {x.dtype}: {low} .. {high}")
    each = np.unpackbits(x.view(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    rows = each.reshape(*x.shape[:-1], x.shape[-1] * bits)
    out[...] = np.packbits(rows, axis=-1, bitorder="little")
    return out


@hookimpl
def kvcore_op_unpack_bits(
    x: npt.NDArray[np.uint8], *, bits: int, out: npt.NDArray[Any], stream: Any = None, workspace: Any = None
) -> Any:
    count = out.shape[-1]
    stream_of_bits = np.unpackbits(x, axis=-1, bitorder="little")[..., : count * bits]
    each = stream_of_bits.reshape(*x.shape[:-1], count, bits)
    if out.dtype == np.int8:  # sign-extend: the top bit of each value fills the byte
        each = np.concatenate([each, np.repeat(each[..., -1:], 8 - bits, axis=-1)], axis=-1)
    out[...] = np.packbits(each, axis=-1, bitorder="little")[..., 0].view(out.dtype)
    return out


@hookimpl
def kvcore_op_count_symbols(
    x: npt.NDArray[np.uint8], *, out: npt.NDArray[np.uint32], stream: Any = None, workspace: Any = None
) -> Any:
    for position in np.ndindex(out.shape[:-1]):
        *lead, channel = position
        out[position] = np.bincount(x[(*lead, slice(None), channel)], minlength=256)
    return out
