"""Print the score of the suite."""

from __future__ import annotations

import sys

from kvcore_conformance.mutants import MUTANTS, judge


def main() -> int:
    """Run every mutant; return 0 if all were caught."""
    caught = 0
    for mutant in MUTANTS:
        outcome = judge(mutant)
        good = outcome.caught(mutant.op)
        caught += good
        print(f"{'caught' if good else 'MISSED'}  {mutant.title}  ({outcome.failed or 'no test failed'})")  # noqa: T201
    print(f"mutants caught: {caught}/{len(MUTANTS)}")  # noqa: T201
    return 0 if caught == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
