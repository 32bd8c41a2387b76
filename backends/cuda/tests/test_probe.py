"""The probe says no, says why, and says what it found; with a stand-in for the driver's libraries, too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import kvcore_cuda

NVML = """
extern "C" int nvmlInit_v2() { return %(init)d; }
extern "C" int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
extern "C" int nvmlShutdown() { return 0; }
"""


def probe_in_a_process(*, libraries="", prelude="") -> dict[str, object]:
    code = f"""{prelude}
import json, sys, kvcore_cuda
before = "torch" in sys.modules
answer = kvcore_cuda.backend().probe()
print(json.dumps([answer.usable, answer.reason, dict(answer.details), before or "torch" not in sys.modules]))
"""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    usable, reason, details, torch_untouched = json.loads(done.stdout)
    assert torch_untouched
    return {"usable": usable, "reason": reason, "details": details}


def build(folder, name, text):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build a stand-in for the driver")
    source = folder / "library.cpp"
    source.write_text(text)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(folder / name), str(source)], check=True)


def test_the_probe_says_no_for_want_of_kernels_and_names_what_it_found():
    answer = kvcore_cuda.backend().probe()
    assert answer.usable is False
    assert "no kernels" in answer.reason
    assert set(answer.details) == {"driver", "devices", "torch"}
    assert all(value and value in answer.reason for value in answer.details.values())


def test_the_backend_describes_itself():
    spec = kvcore_cuda.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("cuda", ("cuda",), 100)
    assert (spec.distribution, dict(spec.implementations)) == ("kvcore-cuda", {})


def test_a_driver_and_its_devices_are_found_and_still_there_are_no_kernels(tmp_path):
    build(tmp_path, "libnvidia-ml.so.1", NVML % {"init": 0})
    build(tmp_path, "libcuda.so.1", 'extern "C" int cuInit(unsigned) { return 0; }')
    answer = probe_in_a_process(libraries=tmp_path)
    assert answer["usable"] is False
    assert answer["details"]["driver"] == "libcuda.so.1 present"
    assert answer["details"]["devices"] == "3"
    assert "no kernels" in answer["reason"]
    assert "devices: 3" in answer["reason"]


def test_a_driver_that_fails_is_reported_with_its_status(tmp_path):
    build(tmp_path, "libnvidia-ml.so.1", NVML % {"init": 9})
    assert probe_in_a_process(libraries=tmp_path)["details"]["devices"] == "unknown (nvmlInit returned 9)"


def test_a_rocm_build_of_torch_belongs_to_the_backend_rocm():
    answer = probe_in_a_process(
        prelude="import importlib.metadata; importlib.metadata.version = lambda name: '2.13.0+rocm7.0'"
    )
    assert answer["details"]["torch"] == "ROCm build 2.13.0+rocm7.0"
    assert "belongs to the backend rocm" in answer["reason"]


def test_a_loaded_torch_is_asked_itself():
    prelude = "\n".join(
        [
            "import importlib.metadata, sys, types",
            "importlib.metadata.version = lambda name: '2.13.0'",
            "version = types.SimpleNamespace(hip='7.0', cuda=None)",
            "sys.modules['torch'] = types.SimpleNamespace(version=version)",
        ]
    )
    assert probe_in_a_process(prelude=prelude)["details"]["torch"] == "ROCm build 2.13.0"
