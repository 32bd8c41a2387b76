"""The probe says no, says why, and says what it found; with a stand-in for the driver's files, too."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import kvcore_rocm
from kvcore_rocm import probe


def test_the_probe_says_no_for_want_of_kernels_and_names_what_it_found():
    answer = kvcore_rocm.backend().probe()
    assert answer.usable is False
    assert "no kernels" in answer.reason
    assert set(answer.details) == {"driver", "runtime", "devices", "torch"}
    assert all(value and value in answer.reason for value in answer.details.values())


def test_the_backend_describes_itself():
    spec = kvcore_rocm.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("rocm", ("cuda",), 100)
    assert (spec.distribution, dict(spec.implementations)) == ("kvcore-rocm", {})


def test_discovery_and_probe_import_no_torch():
    code = "import sys, kvcore_rocm; kvcore_rocm.backend().probe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_nodes_with_simd_units_are_counted_as_devices(tmp_path):
    for node, simds in enumerate((0, 304, 304)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count {16 if not simds else 0}\nsimd_count {simds}\n")
    assert probe._devices(tmp_path) == "2"
    assert probe._devices(tmp_path / "absent") == "none"


@pytest.mark.parametrize(
    ("version", "loaded", "expected"),
    [
        ("2.13.0+rocm7.0", None, "ROCm build 2.13.0+rocm7.0"),
        ("2.13.0", types.SimpleNamespace(hip="7.0", cuda=None), "ROCm build 2.13.0"),
        ("2.13.0+cu130", None, "CUDA build 2.13.0+cu130"),
        ("2.13.0", types.SimpleNamespace(hip=None, cuda="13.0"), "CUDA build 2.13.0"),
        ("2.13.0+cpu", None, "build without ROCm 2.13.0+cpu"),
        ("2.13.0", None, "2.13.0"),
    ],
)
def test_what_torch_was_built_for(monkeypatch, version, loaded, expected):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if loaded is not None:
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=loaded))
    answer = kvcore_rocm.backend().probe()
    assert answer.details["torch"] == expected
    assert ("belongs to the backend cuda" in answer.reason) == expected.startswith("CUDA")
