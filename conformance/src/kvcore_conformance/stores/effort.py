"""How much the tests of stores do, by profile."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EFFORTS", "Effort"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much the tests of stores do.

    Parameters
    ----------
    name : str
        Of the profile.
    sequences, steps : int
        Sequences of calls against the model, and calls in each.
    crashes : int
        Times that a writing process is killed.
    operations : int
        Of the search for leaks.
    rounds : int
        Of tests with threads.
    largest : int
        Bytes of the largest frame.
    """

    name: str
    sequences: int
    steps: int
    crashes: int
    operations: int
    rounds: int
    largest: int


_MIB = 1 << 20
EFFORTS = {
    "tiny": Effort("tiny", 2, 20, 1, 300, 5, 1 * _MIB),
    "quick": Effort("quick", 8, 30, 3, 1000, 15, 8 * _MIB),
    "ci": Effort("ci", 20, 30, 20, 10_000, 40, 8 * _MIB),
    "nightly": Effort("nightly", 500, 60, 200, 100_000, 400, 64 * _MIB),
}
"""By the names of `kvcore_conformance.profiles.PROFILES`."""
