"""Packing, unpacking, counting: bit by bit and one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import QuantizationError
from kvcore_conformance.oracle.numbers import read, read_all, write

__all__ = ["count_symbols", "pack_bits", "unpack_bits"]

Array = npt.NDArray[Any]


def pack_bits(x: Array, bits: int, *, out: Array) -> None:
    """Bit j of value i is bit (i*bits + j) of its row."""
    signed = x.dtype.kind == "i"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    for at, value in read_all(x).items():
        if not low <= value <= high:
            raise QuantizationError(f"x{list(at)} is {value}, outside {low} .. {high}")
    for row in np.ndindex(x.shape[:-1]):
        packed = 0
        for i in range(x.shape[-1]):
            packed |= (int(read(x, (*row, i))) & ((1 << bits) - 1)) << (i * bits)
        for k in range(out.shape[-1]):
            write(out, (*row, k), packed >> (8 * k) & 0xFF)


def unpack_bits(x: Array, bits: int, count: int, *, out: Array) -> None:
    """The reverse; a set top bit is a sign where the output is signed."""
    signed = out.dtype.kind == "i"
    for row in np.ndindex(x.shape[:-1]):
        packed = sum(int(read(x, (*row, k))) << (8 * k) for k in range(x.shape[-1]))
        for i in range(count):
            value = packed >> (i * bits) & ((1 << bits) - 1)
            if signed and value >> (bits - 1):
                value -= 1 << bits
            write(out, (*row, i), value)


def count_symbols(x: Array, *, out: Array) -> None:
    """out[..., c, s] is the number of t with x[..., t, c] == s."""
    *lead, tokens, channels = x.shape
    for row in np.ndindex(*lead):
        for c in range(channels):
            counts = [0] * 256
            for t in range(tokens):
                counts[int(read(x, (*row, t, c)))] += 1
            for symbol, count in enumerate(counts):
                write(out, (*row, c, symbol), count)
