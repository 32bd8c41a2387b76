"""What doctor advises: the packages that the machine's GPUs and torch ask for."""

from __future__ import annotations

import pytest

from kvcore.cli import machine
from kvcore.cli.machine import advice, gpus
from kvcore.plugins.discover import Candidate


@pytest.fixture
def bus(tmp_path, monkeypatch):
    """Return a function that plugs a device in: class and vendor."""
    monkeypatch.setattr(machine, "PCI", tmp_path / "devices")

    def plug(kind, vendor):
        device = tmp_path / "devices" / f"0000:{len(list((tmp_path / 'devices').glob('*'))):02x}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        (device / "vendor").write_text(f"{vendor}\n")

    return plug


def test_gpus_are_told_by_class_and_vendor(bus):
    assert gpus() is None
    bus("0x020000", "0x8086")  # a network card of Intel
    assert gpus() == ()
    bus("0x030200", "0x10de")
    bus("0x120000", "0x1002")
    bus("0x030000", "0x1a03")  # the screen of a server's management
    assert gpus() == ("cuda", "rocm")
    bus("0x038000", "0x8086")
    assert gpus() == ("cuda", "rocm", "xpu")


def advised(present, torch=None, **statuses):
    return advice([Candidate(name, status, "its reason") for name, status in statuses.items()], present, torch)


def test_a_gpu_without_its_backend_is_told_of():
    assert advised(["xpu"], cuda="missing", xpu="missing") == [
        'this machine has an Intel GPU: pip install "kvcore[xpu]"'
    ]


@pytest.mark.parametrize("status", ["usable", "blocked"])
def test_nothing_is_advised_where_all_is_well_or_meant(status):
    assert advised(["cuda"], "cuda", cuda=status, rocm="missing") == []
    assert advised([], "cpu", cuda="missing") == []


def test_the_wrong_package_for_the_machine_is_named_with_the_right_one():
    (line,) = advised(["rocm"], "rocm", cuda="unusable", rocm="usable")
    assert line.startswith("wrong package for this machine: kvcore-cuda is installed, and there is no NVIDIA GPU")
    assert line.endswith('but an AMD GPU: pip install "kvcore[rocm]", pip uninstall kvcore-cuda')
    (line,) = advised([], "cpu", cuda="unusable")
    assert line.endswith('for the processor alone: pip install "kvcore[cpu]", pip uninstall kvcore-cuda')


def test_the_wrong_torch_is_named_with_both_ways_out():
    (line,) = advised(["cuda"], "rocm", cuda="unusable")
    assert line.startswith("wrong torch for kvcore-cuda: it is built for ROCm; install one that is built for CUDA")
    assert 'pip install "kvcore[rocm]", pip uninstall kvcore-cuda' in line


@pytest.mark.parametrize(("name", "gpu", "torch"), [("xpu", "Intel", "cuda"), ("cuda", "NVIDIA", "xpu")])
def test_torch_is_not_blamed_where_its_build_excludes_nothing(name, gpu, torch):
    (line,) = advised([name], torch, **{name: "unusable"})
    assert line == f"this machine has an {gpu} GPU, which kvcore-{name} cannot use: its reason"


def test_another_reason_is_handed_on():
    (line,) = advised(["cuda"], "cuda", cuda="unusable")
    assert line == "this machine has an NVIDIA GPU, which kvcore-cuda cannot use: its reason"


def test_nothing_is_guessed_where_there_is_no_bus_to_look_at():
    assert advised(None, None, cuda="unusable", rocm="missing") == []
