"""The probe says no, says why, and says what it found; with a stand-in for the driver's files, too."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import kvcore_xpu
from kvcore_xpu import probe


def test_the_probe_says_no_for_want_of_kernels_and_names_what_it_found():
    answer = kvcore_xpu.backend().probe()
    assert answer.usable is False
    assert "no kernels" in answer.reason
    assert set(answer.details) == {"driver", "runtime", "devices", "torch"}
    assert all(value and value in answer.reason for value in answer.details.values())


def test_the_backend_describes_itself():
    spec = kvcore_xpu.backend()
    assert (spec.name, spec.device_types, spec.priority) == ("xpu", ("xpu",), 100)
    assert (spec.distribution, dict(spec.implementations)) == ("kvcore-xpu", {})


def test_discovery_and_probe_import_no_torch():
    code = "import sys, kvcore_xpu; kvcore_xpu.backend().probe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_render_nodes_of_the_vendor_are_counted_as_devices(tmp_path):
    for node, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de"), ("card0", "0x8086")):
        folder = tmp_path / node / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    assert probe._devices(tmp_path) == "1"
    assert probe._devices(tmp_path / "absent") == "none"


@pytest.mark.parametrize(
    ("version", "loaded", "expected"),
    [
        ("2.13.0+xpu", None, "XPU build 2.13.0+xpu"),
        ("2.13.0", types.SimpleNamespace(xpu="20260000"), "XPU build 2.13.0"),
        ("2.13.0+cpu", None, "build without XPU 2.13.0+cpu"),
        ("2.13.0", None, "2.13.0"),
    ],
)
def test_what_torch_was_built_for(monkeypatch, version, loaded, expected):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if loaded is not None:
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=loaded))
    assert kvcore_xpu.backend().probe().details["torch"] == expected
