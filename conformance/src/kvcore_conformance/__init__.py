"""The conformance suite of kvcore backends: a pytest plugin, an oracle, strategies, and the tests themselves."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
__all__ = ["__version__"]
