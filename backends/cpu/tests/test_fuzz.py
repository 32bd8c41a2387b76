"""A short run of the fuzzer; ``make fuzz`` makes a long one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[1] / "fuzz" / "run.py"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build the fuzzer")
def test_mutated_tiles_and_segments_are_decoded_or_refused():
    done = subprocess.run([sys.executable, str(FUZZER), "20000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20000 inputs" in done.stdout
