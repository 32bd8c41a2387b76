"""The reference runs wherever NumPy does."""

from __future__ import annotations

from importlib.metadata import version

from kvcore.plugins import Probe

__all__ = ["probe"]


def probe() -> Probe:
    """Say yes, with the versions that decide what the ops compute with."""
    versions = {name: version(name) for name in ("numpy", "ml_dtypes")}
    return Probe(True, "works everywhere: plain NumPy, readable before fast", versions)
