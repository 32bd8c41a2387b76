"""Run a command with the kernels compiled under address and undefined behaviour sanitizers.

``python -m kvcore_emu.sanitize pytest --pyargs kvcore_conformance --kvcore-backend emu``. The first access of a kernel
outside of its memory, on the device or shared, and the first undefined operation end the command with a report.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

from kvcore import settings
from kvcore.errors import BackendLoadError
from kvcore_emu.probe import COMPILER

__all__ = ["environment"]

_FLAGS = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_OPTIONS = {
    "detect_leaks": 0,  # Python's own
    "detect_stack_use_after_return": 0,  # threads of a block have stacks of their own, which it knows nothing of
}


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with all that a sanitized run needs, from the one given.

    Raises
    ------
    BackendLoadError
        The compiler has no sanitizers.
    """
    asked = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = asked.stdout.strip()
    if not os.path.isabs(runtime):
        raise BackendLoadError(f"{COMPILER} has no address sanitizer; install libasan")
    return {
        **environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in _OPTIONS.items()),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KVCORE_EMU_FLAGS": shlex.join((*settings.current(environ).emu_flags, *_FLAGS)),
    }


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], environment(os.environ))  # noqa: S606  # the command is the caller's own
