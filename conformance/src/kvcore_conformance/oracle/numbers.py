"""Floating-point formats as integers: decode to a Python float, encode with one correct rounding.

Nothing here uses NumPy's or ml_dtypes' conversions; they are part of what is tested.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.dtypes import dtype_name
from kvcore.errors import QuantizationError

__all__ = ["FORMATS", "Format", "f32", "format_of", "policy", "read", "read_all", "write"]

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    Parameters
    ----------
    nbytes, exponent, mantissa : int
        Size, and bits of the two fields.
    infinite : bool
        Whether the all-ones exponent is infinity and NaN (IEEE); else only all ones everywhere is NaN (e4m3fn).
    nan : int
        Bits of the quiet NaN that ops write.
    """

    nbytes: int
    exponent: int
    mantissa: int
    infinite: bool
    nan: int

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def top(self) -> int:
        """Bits of the largest finite value."""
        ones = (1 << (self.exponent + self.mantissa)) - 1
        return ones - (1 << self.mantissa) if self.infinite else ones - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.decode(self.top)

    def decode(self, bits: int) -> float:
        """Return the value of a bit pattern, exactly."""
        sign = -1.0 if bits >> (self.exponent + self.mantissa) & 1 else 1.0
        magnitude = bits & ((1 << (self.exponent + self.mantissa)) - 1)
        if magnitude > self.top:
            return sign * math.inf if self.infinite and magnitude == self.top + 1 else math.nan
        field, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if field == 0:
            return sign * math.ldexp(fraction, 1 - self.bias - self.mantissa)
        return sign * math.ldexp(fraction + (1 << self.mantissa), field - self.bias - self.mantissa)

    def encode(self, value: float) -> int:
        """Round to nearest even; finite values beyond the format become its largest, a NaN the quiet one."""
        if math.isnan(value):
            return self.nan
        sign = (1 << (self.exponent + self.mantissa)) if math.copysign(1.0, value) < 0 else 0
        if math.isinf(value):
            return sign | self.top + 1 if self.infinite else self.nan
        if value == 0:
            return sign
        exponent = max(math.frexp(abs(value))[1] - 1, 1 - self.bias)
        # In units of the last place: exact in a double, and Python rounds half to even.
        units = round(math.ldexp(abs(value), self.mantissa - exponent))
        magnitude = units + ((exponent + self.bias - 1) << self.mantissa)
        return sign | min(magnitude, self.top)


FORMATS = {
    "float16": Format(2, 5, 10, infinite=True, nan=0x7E00),
    "bfloat16": Format(2, 8, 7, infinite=True, nan=0x7FC0),
    "float32": Format(4, 8, 23, infinite=True, nan=0x7FC00000),
    "float8_e4m3fn": Format(1, 4, 3, infinite=False, nan=0x7F),
    "float8_e5m2": Format(1, 5, 2, infinite=True, nan=0x7E),
}
_FP32_MAX = FORMATS["float32"].largest


def f32(value: float) -> float:
    """Round a Python float to float32, overflow to infinity.

    One operation on float32 values computed in double and rounded by this is correctly rounded: a double has more than
    twice the bits.
    """
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def hold(value: float, *operands: float) -> float:
    """Hold a float32 that overflowed from finite operands at the largest finite value."""
    if math.isinf(value) and all(map(math.isfinite, operands)):
        return math.copysign(_FP32_MAX, value)
    return value


def format_of(array: npt.NDArray[Any]) -> Format | None:
    """Return the format of a float array's elements, None for integers."""
    return FORMATS.get(dtype_name(array.dtype))


def raw(array: npt.NDArray[Any], at: Index) -> bytes:
    """Return the bytes of one element."""
    data: bytes = array[at].tobytes()
    return data


def read(array: npt.NDArray[Any], at: Index) -> float:
    """Return one element as a Python number, exactly."""
    fmt = format_of(array)
    bits = int.from_bytes(raw(array, at), "little", signed=fmt is None and array.dtype.kind == "i")
    return bits if fmt is None else fmt.decode(bits)


def read_all(array: npt.NDArray[Any]) -> dict[Index, float]:
    """Return every element by index, in C order."""
    return {at: read(array, at) for at in np.ndindex(array.shape)}


def write_bits(array: npt.NDArray[Any], at: Index, bits: int) -> None:
    """Set the bit pattern of one element."""
    size = array.dtype.itemsize
    array[at] = np.frombuffer((bits % (1 << 8 * size)).to_bytes(size, "little"), array.dtype)[0]


def write(array: npt.NDArray[Any], at: Index, value: float) -> None:
    """Store a Python number: integers as they are, floats with one rounding (saturating, canonical NaN)."""
    fmt = format_of(array)
    write_bits(array, at, int(value) if fmt is None else fmt.encode(value))


def policy(x: npt.NDArray[Any], nonfinite: str) -> dict[Index, float]:
    """Read every element under a policy for NaN and infinity.

    Raises
    ------
    QuantizationError
        There is one, and the policy is ``"error"``.
    """
    values = read_all(x)
    fmt = format_of(x)
    for at, value in values.items():
        if math.isfinite(value) or nonfinite == "propagate" or fmt is None:
            continue
        if nonfinite == "error":
            raise QuantizationError(f"x{list(at)} is {value}")
        values[at] = 0.0 if math.isnan(value) else math.copysign(fmt.largest, value)
    return values


def groups(shape: Index, axes: tuple[int, ...]) -> Iterator[tuple[Index, list[Index]]]:
    """Yield the index of each result of a reduction with the indices reduced into it, in C order of the axes."""
    for kept in np.ndindex(*(1 if i in axes else n for i, n in enumerate(shape))):
        spans = [range(n) if i in axes else (kept[i],) for i, n in enumerate(shape)]
        members: list[Index] = [()]
        for span in spans:
            members = [(*m, i) for m in members for i in span]
        yield kept, members
