"""The probe says no, says why, and says what it found."""

from __future__ import annotations

import subprocess
import sys

import kvcore_cpu


def test_the_probe_says_no_for_want_of_kernels_and_names_the_processor():
    answer = kvcore_cpu.backend().probe()
    assert answer.usable is False
    assert "no native kernels" in answer.reason
    assert answer.details["machine"] in answer.reason
    assert f"{answer.details['cores']} usable cores" in answer.reason
    assert int(answer.details["cores"]) >= 1
    assert answer.details["extensions"] in answer.reason


def test_the_backend_describes_itself():
    spec = kvcore_cpu.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("cpu", ("cpu",), 50)
    assert (spec.distribution, dict(spec.implementations)) == ("kvcore-cpu", {})


def test_discovery_and_probe_import_no_torch():
    code = "import sys, kvcore_cpu; kvcore_cpu.backend().probe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
