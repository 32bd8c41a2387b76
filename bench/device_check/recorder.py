"""What a step finds, written line by line as it is found: a step that is stopped has told what it knew."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Forbidden", "Recorder", "pattern", "same"]


class Forbidden(Exception):
    """The machine or its container does not let this be tried; the message is its reason. Not a failure."""


class Recorder:
    """The findings of one step.

    Parameters
    ----------
    path : Path
        Of the file of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder = path.parent
        self.failed = False

    def check(self, name: str, run: Callable[[], str | None]) -> None:
        """Run a check. What it returns is remarked; it fails by raising, unless it raises `Forbidden`."""
        print(f"--- {name}", flush=True)
        start, status, detail = time.perf_counter(), "ok", ""
        try:
            detail = run() or ""
        except Forbidden as error:
            status, detail = "forbidden", str(error)
        except Exception as error:  # noqa: BLE001  # whatever goes wrong in a check is its finding; the next one runs
            status, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
            traceback.print_exc()
            self.failed = True
        seconds = round(time.perf_counter() - start, 3)
        print(f"{status} {detail}", flush=True)
        self._write({"check": name, "status": status, "detail": detail[:2000], "seconds": seconds})

    def fact(self, name: str, value: object) -> None:
        """Write down something that is known of the machine."""
        self._write({"fact": name, "value": value})

    def figure(self, table: str, case: str, **values: object) -> None:
        """Write down a measurement: a row of a table."""
        print(f"{table}: {case}: {values}", flush=True)
        self._write({"figure": case, "table": table, **values})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def same(found: object, wanted: object, what: str) -> None:
    """Raise unless two things are equal."""
    if found != wanted:
        raise ValueError(f"{what}: {str(found)[:200]} where {str(wanted)[:200]} is right")


def pattern(nbytes: int, seed: int) -> Any:
    """Return random bytes, uint8 ``[nbytes]``; the same for the same seed."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
