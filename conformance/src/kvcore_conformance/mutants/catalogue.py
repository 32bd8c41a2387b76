"""The list of mutants, and how one is made a backend.

A mutant is the NumPy reference with one defect: a function around one op's implementation, or around a composite that
is fused from the reference's own ops. It is registered as a module, so that it is linked, checked and called exactly as
a backend that was installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvcore import BackendSpec, hookimpl
from kvcore.hookspecs import FUSED_PREFIX, OP_PREFIX
from kvcore_cpu_ref import backend as reference
from kvcore_cpu_ref import ops

__all__ = ["COMPOSITES", "MUTANTS", "Call", "Mutant", "mutant", "publish"]

_PREFIX = "kvcore_mutant_"


@dataclass(slots=True)
class Call:
    """What an implementation was called with; a defect may change it before it runs the original."""

    original: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the original implementation."""
        return self.original(*self.args, **self.kwargs)


Defect = Callable[[Call], Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """An op with a defect.

    Parameters
    ----------
    name : str
        Of the defect.
    op : str
        The op, one of `COMPOSITES`, or ``"runtime"``.
    defect : callable
        From the call to its result; for the runtime a class.
    """

    name: str
    op: str
    defect: Any

    @property
    def key(self) -> str:
        """Its name in `kvcore_conformance.mutants.made`."""
        return f"{self.op}_{self.name}"

    @property
    def title(self) -> str:
        """Op and defect, for people."""
        return f"{self.op}: {self.name.replace('_', ' ')}"


MUTANTS: list[Mutant] = []
COMPOSITES: dict[str, Callable[..., Any]] = {}
"""Fused composites without a defect, by name: every mutant has them."""


def mutant(*names: str) -> Callable[[Defect], Defect]:
    """Add a defect to the list, once for each op that is to have it."""

    def add(defect: Defect) -> Defect:
        MUTANTS.extend(Mutant(defect.__name__, op, defect) for op in names)
        return defect

    return add


def publish(wrong: Mutant | None) -> BackendSpec:
    """Register the module of a mutant (None: of the reference wrapped, but unchanged), and return its backend."""
    known = reference()
    name = _PREFIX + (wrong.key if wrong is not None else "unchanged")
    module = ModuleType(name)
    for attribute, function in vars(ops).items():
        if attribute.startswith(OP_PREFIX):
            op = attribute.removeprefix(OP_PREFIX)
            defect = wrong.defect if wrong is not None and wrong.op == op else Call.run
            setattr(module, attribute, hookimpl(_around(function, defect)))
    for composite, function in COMPOSITES.items():
        defect = wrong.defect if wrong is not None and wrong.op == composite else Call.run
        setattr(module, FUSED_PREFIX + composite, hookimpl(_around(function, defect)))
    runtime = known.runtime
    if wrong is not None and wrong.op == "runtime":
        setattr(module, wrong.name, wrong.defect)
        runtime = f"{name}:{wrong.name}"
    sys.modules[name] = module
    return BackendSpec(
        name=name,
        device_types=known.device_types,
        priority=-1,
        api_version=known.api_version,
        probe=known.probe,
        implementations={"mutant": name},
        runtime=runtime,
        distribution=known.distribution,
    )


def _around(function: Callable[..., Any], defect: Defect) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return defect(Call(function, list(args), kwargs))

    return wrong
