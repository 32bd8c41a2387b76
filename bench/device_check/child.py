"""One step in a process of its own: ``python -m bench.device_check.child STEP --backend NAME --results FILE``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.device_check.recorder import Recorder

if TYPE_CHECKING:
    from kvcore import Backend

__all__ = ["Given"]

STEPS = ("build", "facts", "exchange", "races", "sharing", "host_memory", "bandwidth", "coding", "launches", "record")


@dataclass(frozen=True, slots=True)
class Given:
    """What a step is told.

    Parameters
    ----------
    backend : str
        The name of the backend under check, or module:factory.
    small : bool
        Sizes that an emulated device can do.
    deadline : float
        When it should have ended, in the time of `time.monotonic`.
    implementation : str
        Of the kernels that figures are taken of; empty: whichever are bound.
    """

    backend: str
    small: bool
    deadline: float
    implementation: str

    def open(self) -> Backend:
        """Open the backend; what it lacks it lacks."""
        from kvcore_conformance.run import open_named

        return open_named(self.backend)

    def measures(self, backend: Backend, op: str) -> bool:
        """Tell whether figures of an op are asked for: it has kernels of the implementation in question."""
        binding = backend.bindings.get(op)
        return binding is not None and self.implementation in ("", binding.implementation)

    @property
    def left_s(self) -> float:
        """How much time is left, in seconds."""
        return self.deadline - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.device_check.child")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--results", required=True, type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it may take")
    parser.add_argument("--implementation", default="")
    args = parser.parse_args()
    given = Given(args.backend, args.small, time.monotonic() + 0.9 * args.seconds, args.implementation)
    recorder = Recorder(args.results)
    importlib.import_module(f"bench.device_check.{args.step}").run(given, recorder)
    return 1 if recorder.failed else 0


if __name__ == "__main__":
    sys.exit(main())
