"""What this machine has, as far as it can be told without a vendor's driver, and which packages that asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcore.plugins.discover import Candidate

__all__ = ["VENDORS", "advice", "gpus"]

PCI = Path("/sys/bus/pci/devices")
_DISPLAYS = ("0x03", "0x12")
"""PCI classes: display controllers, and processing accelerators, which is what some AMD Instincts call themselves."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """A maker of GPUs, as its backend, the PCI bus and torch know it.

    Parameters
    ----------
    gpu : str
        For people.
    pci : str
        Its number.
    torch : str
        What torch calls a build for it.
    """

    gpu: str
    pci: str
    torch: str


VENDORS: Mapping[str, Vendor] = {
    "cuda": Vendor("NVIDIA GPU", "0x10de", "CUDA"),
    "rocm": Vendor("AMD GPU", "0x1002", "ROCm"),
    "xpu": Vendor("Intel GPU", "0x8086", "XPU"),
}
"""The project's own vendor backends. Others are told apart by their probes' reasons alone."""
_EXCLUSIVE = ("cuda", "rocm")
"""Those whose devices torch calls by one name, so that its build decides between them."""


def gpus() -> tuple[str, ...] | None:
    """Return the backends whose vendors' GPUs are on the PCI bus; None where there is no bus to look at.

    A container may show more than it may use, or less than there is.
    """
    if not PCI.is_dir():
        return None
    vendors = set()
    for device in PCI.iterdir():
        try:
            if (device / "class").read_text("ascii").startswith(_DISPLAYS):
                vendors.add((device / "vendor").read_text("ascii").strip())
        except OSError:  # it was unplugged, or is not shown
            continue
    return tuple(name for name, vendor in VENDORS.items() if vendor.pci in vendors)


def advice(found: Sequence[Candidate], present: Collection[str] | None, torch: str | None) -> list[str]:
    """Return what to install, or to install instead, for the GPUs of this machine.

    Parameters
    ----------
    found : sequence of Candidate
        Probed.
    present : collection of str, optional
        As `gpus` gives it.
    torch : str, optional
        The kind of `kvcore.plugins.torch_build.torch_build`.
    """
    by_name = {candidate.name: candidate for candidate in found}
    here = [name for name in VENDORS if present is not None and name in present]
    lines = []
    for name, vendor in VENDORS.items():
        candidate = by_name.get(name)
        if candidate is None:
            continue
        if candidate.status == "missing" and name in here:
            lines.append(f'this machine has an {vendor.gpu}: pip install "kvcore[{name}]"')
        elif candidate.status == "unusable" and present is not None and name not in here:
            lines.append(_wrong_package(name, vendor, here))
        elif candidate.status == "unusable" and torch and torch != name and {name, torch} == set(_EXCLUSIVE):
            lines.append(_wrong_torch(name, vendor, torch))
        elif candidate.status in ("unusable", "broken") and name in here:
            lines.append(f"this machine has an {vendor.gpu}, which kvcore-{name} cannot use: {candidate.reason}")
    return lines


def _wrong_package(name: str, vendor: Vendor, here: Sequence[str]) -> str:
    text = (
        f"wrong package for this machine: kvcore-{name} is installed, and there is no {vendor.gpu} (or this container "
        "is not given it)"
    )
    if here:
        there = " and ".join(f"an {VENDORS[other].gpu}" for other in here)
        return f'{text}, but {there}: pip install "kvcore[{",".join(here)}]", pip uninstall kvcore-{name}'
    return f'{text}; for the processor alone: pip install "kvcore[cpu]", pip uninstall kvcore-{name}'


def _wrong_torch(name: str, vendor: Vendor, torch: str) -> str:
    return (
        f"wrong torch for kvcore-{name}: it is built for {VENDORS[torch].torch}; install one that is built for "
        f'{vendor.torch}, or the backend that goes with it: pip install "kvcore[{torch}]", '
        f"pip uninstall kvcore-{name}"
    )
