"""The specification of every op and of the plug-in itself.

Each function here is a pluggy hookspec: its signature is what an implementation must have, its docstring is the whole
definition. Users call the same ops as methods of `kvcore.Backend`, which checks arguments, allocates `out` and calls
the implementation bound for the backend; ops never go through pluggy's dispatch.

What holds for every op
-----------------------
- An implementation is a plain function named like its spec, marked `@kvcore.hookimpl`, with exactly these parameters.
- The core has checked all shapes, dtypes and static arguments before it calls. What only the data can tell (a slot
  out of range, a NaN under policy ``"error"``) the implementation checks *before it writes anything*, and raises the
  error named here; an asynchronous device backend sets a status word instead, read by ``Runtime.check(stream)``.
- ``out`` is always given and is returned. Nothing outside it is written, not even padding between its rows. It shares
  no memory with an input, unless the op says so.
- ``stream`` is None (the current one) or an object of the backend's `Runtime`. Inputs stay alive until it has passed.
- ``workspace`` is None, or scratch memory of at least the plan's ``workspace_bytes``.
- Arrays are what the backend's ``Runtime.array`` returns: `numpy.ndarray` on hosts. They may be non-contiguous,
  and begin at any address; uint64 arrays of digests are aligned.
- Every op is **bit-exact**: the same input gives the same bytes on every backend. fp32 arithmetic, each operation
  rounded to nearest even, no fused multiply-add, no dependence on flush-to-zero, no division in a loop.
- ``nonfinite`` is the policy for NaN and infinities in the input: ``"error"`` raises `QuantizationError` and
  writes nothing; ``"saturate"`` reads NaN as zero and an infinity as the largest finite value of the input's dtype
  with its sign; ``"propagate"`` lets them through as the op says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvcore.hookspecs import bits, composite, digest, entropy, movement, position, quantization, reduction

__all__ = ["FUSED_PREFIX", "OP_PREFIX", "SPEC_MODULES", "composite_specs", "op_names", "op_specs"]

OP_PREFIX = "kvcore_op_"
FUSED_PREFIX = "kvcore_fused_"
SPEC_MODULES: tuple[ModuleType, ...] = (
    movement,
    reduction,
    quantization,
    bits,
    entropy,
    position,
    digest,
)


def op_specs() -> dict[str, Callable[..., Any]]:
    """Return every op's hookspec by the op's name (without prefix), in the order of the documentation."""
    return {
        name.removeprefix(OP_PREFIX): function
        for module in SPEC_MODULES
        for name, function in vars(module).items()
        if name.startswith(OP_PREFIX) and inspect.isfunction(function)
    }


def op_names() -> tuple[str, ...]:
    """Return the names of all ops, in the order of the documentation."""
    return tuple(op_specs())


def composite_specs() -> dict[str, Callable[..., Any]]:
    """Return the hookspec of every composite that a backend may fuse, by its name (without prefix)."""
    found = vars(composite).items()
    return {n.removeprefix(FUSED_PREFIX): f for n, f in found if n.startswith(FUSED_PREFIX) and inspect.isfunction(f)}
