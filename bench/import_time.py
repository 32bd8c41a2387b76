"""What `import kvcore` takes beyond `import numpy`: medians over fresh interpreters, the two in turn. Target: 60 ms.

Run ``python bench/import_time.py [--json] [--runs N]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

TARGET_MS = 60.0
BASE = "import numpy"
STATEMENTS = {
    "import kvcore": "import numpy, kvcore",
    "a layout bound": "import numpy, kvcore; kvcore.Layout('TD').bind(numpy.zeros((4, 8), numpy.float16))",
    "every public name": "import numpy, kvcore; [getattr(kvcore, name) for name in kvcore.__all__]",
}


def milliseconds(statement: str) -> float:
    """Return how long a statement takes in a new interpreter, its start not counted, in ms."""
    code = f"import time; start = time.perf_counter(); {statement}; print((time.perf_counter() - start) * 1e3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(runs: int) -> dict[str, float]:
    """Return statement -> median ms; all are run in turn, so that a slow moment of the machine hits each of them."""
    statements = {BASE: BASE, **STATEMENTS}
    samples: dict[str, list[float]] = {name: [] for name in statements}
    for run in range(runs + 1):
        for name, statement in statements.items():
            taken = milliseconds(statement)
            if run:  # the first round fills the caches of files
                samples[name].append(taken)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=11, help="interpreters for each figure, at least 11")
    options = parser.parse_args()
    medians = measure(max(options.runs, 11))
    beyond = {name: round(taken - medians[BASE], 2) for name, taken in medians.items() if name != BASE}
    met = beyond["import kvcore"] <= TARGET_MS
    if options.json:
        print(
            json.dumps(
                {"numpy_ms": round(medians[BASE], 2), "beyond_numpy_ms": beyond, "target_ms": TARGET_MS, "met": met}
            )
        )
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="imports, beyond `import numpy` (medians)")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_row(f"({BASE} itself)", f"{medians[BASE]:.1f}")
    for name, taken in beyond.items():
        table.add_row(name, f"{taken:.1f}")
    Console().print(table)
    print(f"target for `import kvcore` of {TARGET_MS:g} ms {'met' if met else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
