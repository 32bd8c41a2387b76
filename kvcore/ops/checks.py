"""What static arguments of ops may be; the checked methods and the plans share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.entropy import TableSet
from kvcore.errors import ConfigError
from kvcore.quant import NONFINITE, QuantSpec

__all__ = ["STATIC_CHECKS", "check_bits", "check_block", "check_nonfinite", "check_seed", "check_unit"]


def check_nonfinite(policy: Any) -> None:
    """Raise `ConfigError` unless a non-finite policy is one of those there are."""
    if policy not in NONFINITE:
        raise ConfigError(f"nonfinite={policy!r} is no policy; {', '.join(NONFINITE)} are")


def check_unit(unit: Any) -> None:
    """Raise `ConfigError` unless an index holds slots or blocks."""
    if unit not in ("slot", "block"):
        raise ConfigError(f"unit={unit!r}; an index holds 'slot's or 'block's")


def check_bits(bits: Any) -> None:
    """Raise `ConfigError` unless values are packed in 1 to 8 bits."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ConfigError(f"bits must be 1 to 8, got {bits!r}")


def check_block(block: Any) -> None:
    """Raise `ConfigError` unless a rotation's block is a power of two up to 1024."""
    if not isinstance(block, int) or not 1 <= block <= 1024 or block & (block - 1):
        raise ConfigError(f"block must be a power of two from 1 to 1024, got {block!r}")


def check_seed(seed: Any) -> None:
    """Raise `ConfigError` unless a seed has 64 bits."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed must be 0 .. 2**64 - 1, got {seed!r}")


def _check_axes(axes: Any) -> None:
    ordered = isinstance(axes, tuple) and all(isinstance(a, int) and a >= 0 for a in axes) and axes
    if not ordered or list(axes) != sorted(set(axes)):
        raise ConfigError(f"axes of a plan are a tuple, ascending and not negative, as in (0, 2); got {axes!r}")


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, QuantSpec):
        raise ConfigError(f"spec is a kvcore.QuantSpec, got a {type(spec).__qualname__}")


def _check_tables(tables: Any) -> None:
    if not isinstance(tables, TableSet):
        raise ConfigError(f"tables is a TableSet, got a {type(tables).__qualname__}")


def _check_flag(value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"True or False is expected, got {value!r}")


def _check_skip(skip_tokens: Any) -> None:
    if not isinstance(skip_tokens, int) or skip_tokens < 0:
        raise ConfigError(f"skip_tokens must not be negative, got {skip_tokens!r}")


STATIC_CHECKS: dict[str, Callable[[Any], None]] = {
    "axes": _check_axes,
    "bits": check_bits,
    "block": check_block,
    "check_duplicates": _check_flag,
    "interleaved": _check_flag,
    "inverse": _check_flag,
    "nonfinite": check_nonfinite,
    "seed": check_seed,
    "skip_tokens": _check_skip,
    "spec": _check_spec,
    "tables": _check_tables,
    "unit": check_unit,
    "use_offsets": _check_flag,
}
"""By name, for every keyword argument of an op that is no array: a plan binds and checks these."""
