"""The probe says yes or no and why, and what it found; with a stand-in for what a machine has."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvcore_xpu
from kvcore_xpu import probe

_VERSIONS = {"intel-sycl-rt": "2026.2.0", "intel-opencl-rt": "2026.2.0", "torch": "2.13.0+xpu"}


@pytest.fixture
def machine(monkeypatch):
    """A machine with all there is to have; returns what takes something away."""
    has = {"_nodes": "/dev/dri present", "_devices": "2", "_driver": "libze_loader.so.1 present"}

    def change(**others):
        for name, value in (has | others).items():
            monkeypatch.setattr(probe, name, lambda *_, value=value: value)

    monkeypatch.setattr(probe, "_version", lambda name: _VERSIONS[name])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    change()
    return change


def test_a_machine_with_everything_is_usable(machine):
    answer = kvcore_xpu.backend().probe()
    assert answer.usable
    assert answer.details["devices"] == "2"
    assert all(answer.details.values())


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"_devices": "none"}, "no Intel GPU"),
        ({"_nodes": "/dev/dri/renderD* not found"}, "access to /dev/dri"),
        ({"_driver": "libze_loader.so.1 not found"}, "libze_loader.so.1 is not installed; install"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(machine, lacks, reason):
    machine(**lacks)
    answer = kvcore_xpu.backend().probe()
    assert not answer.usable
    assert reason in answer.reason
    assert all(answer.details.values())


def test_compilers_are_needed_on_both_devices(machine, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for spec in (kvcore_xpu.backend(), kvcore_xpu.cpu_device()):
        assert "no g++ on PATH; install it" in spec.probe().reason
    monkeypatch.setattr(probe, "_version", lambda name: "not installed")
    for spec in (kvcore_xpu.backend(), kvcore_xpu.cpu_device()):
        assert "pip install intel-sycl-rt" in spec.probe().reason
        assert not spec.probe().usable


def test_the_processor_needs_no_gpu_but_opencl(machine, monkeypatch):
    machine(_devices="none", _nodes="not found", _driver="not found")
    assert kvcore_xpu.cpu_device().probe().usable
    versions = _VERSIONS | {"intel-opencl-rt": "not installed"}
    monkeypatch.setattr(probe, "_version", lambda name: versions[name])
    assert "pip install intel-opencl-rt" in kvcore_xpu.cpu_device().probe().reason


def test_the_backends_describe_themselves():
    spec, cpu = kvcore_xpu.backend(), kvcore_xpu.cpu_device()
    assert (spec.name, spec.device_types, spec.priority) == ("xpu", ("xpu",), 100)
    assert (cpu.name, cpu.device_types, cpu.priority) == ("xpu_cpu", ("xpu_cpu",), -1)
    assert {spec.distribution, cpu.distribution} == {"kvcore-xpu"}


def test_discovery_and_probe_import_no_torch():
    code = (
        "import sys, kvcore_xpu; kvcore_xpu.backend().probe(); kvcore_xpu.cpu_device().probe(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_render_nodes_of_the_vendor_are_counted_as_devices(tmp_path):
    for node, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de"), ("card0", "0x8086")):
        folder = tmp_path / node / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    assert probe._devices(tmp_path) == "1"
    assert probe._devices(tmp_path / "absent") == "none"
