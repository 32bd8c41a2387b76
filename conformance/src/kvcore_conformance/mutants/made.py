"""Every mutant by name, as a factory: ``--kvcore-backend kvcore_conformance.mutants.made:rotate_not_normalised``.

``unchanged`` is the reference in the same wrapping, without a defect.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore import BackendSpec
from kvcore_conformance.mutants.catalogue import MUTANTS, publish

__all__ = ["named"]


def named(name: str) -> Callable[[], BackendSpec]:
    """Return the factory of a mutant's backend.

    Raises
    ------
    AttributeError
        There is no such mutant.
    """
    wrong = next((m for m in MUTANTS if m.key == name), None)
    if wrong is None and name != "unchanged":
        raise AttributeError(f"no mutant {name!r}; they are unchanged, {', '.join(m.key for m in MUTANTS)}")
    return lambda: publish(wrong)


def __getattr__(name: str) -> Callable[[], BackendSpec]:
    if name.startswith("__"):
        raise AttributeError(name)
    return named(name)
