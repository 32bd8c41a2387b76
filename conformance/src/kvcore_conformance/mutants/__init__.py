"""Backends that are wrong on purpose: they test the suite, which must catch every one of them.

``python -m kvcore_conformance.mutants`` runs them all and prints the score.
"""

from __future__ import annotations

from kvcore_conformance.mutants import alignment, codecs, movement, numeric, symbols, tiles
from kvcore_conformance.mutants.catalogue import MUTANTS, Mutant
from kvcore_conformance.mutants.runner import Outcome, judge

__all__ = ["MUTANTS", "Mutant", "Outcome", "alignment", "codecs", "judge", "movement", "numeric", "symbols", "tiles"]
