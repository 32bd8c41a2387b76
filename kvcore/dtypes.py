"""The element types of KV caches, by their canonical names.

NumPy has no bfloat16 and no 8-bit floats; `ml_dtypes` supplies them. Everything in kvcore speaks `numpy.dtype`; frames
and messages use the canonical names below, which never change their meaning.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kvcore.errors import ConfigError

__all__ = ["BFLOAT16", "DTYPES", "FLOAT8_E4M3FN", "FLOAT8_E5M2", "dtype_name", "finite_max", "is_float", "to_dtype"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3fn": FLOAT8_E4M3FN,
    "float8_e5m2": FLOAT8_E5M2,
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "e5m2": "float8_e5m2",
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = frozenset(DTYPES[n] for n in DTYPES if "float" in n)


def to_dtype(value: object) -> np.dtype[Any]:
    """Return the `numpy.dtype` for a name, a NumPy dtype or scalar type, or a torch dtype.

    Parameters
    ----------
    value
        ``"bfloat16"``, ``"bf16"``, ``numpy.float32``, ``torch.bfloat16``, ... torch is recognised by how its dtypes
        print, so it is never imported.

    Raises
    ------
    ConfigError
        The value names no element type of a KV cache.
    """
    if isinstance(value, np.dtype) and value in _NAMES:
        return value
    name = str(value) if not isinstance(value, (np.dtype, type)) else ""
    name = name.removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name in DTYPES:
        return DTYPES[name]
    if isinstance(value, type):
        try:
            dtype = np.dtype(value)
        except TypeError:
            dtype = None
        if dtype is not None and dtype in _NAMES:
            return dtype
    raise ConfigError(f"unknown element type {value!r}; known are {', '.join(DTYPES)} (and {', '.join(_ALIASES)})")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the canonical name of a dtype that `to_dtype` knows."""
    name = _NAMES.get(dtype)
    if name is None:
        raise ConfigError(f"unknown element type {dtype!r}; known are {', '.join(DTYPES)}")
    return name


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is a floating-point one, 8-bit floats included."""
    return dtype in _FLOATS


def finite_max(dtype: np.dtype[Any]) -> float:
    """Return the largest finite value of a floating-point dtype (448 for float8_e4m3fn)."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
