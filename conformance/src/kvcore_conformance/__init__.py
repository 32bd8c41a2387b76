"""The conformance suites of kvcore backends and stores: a pytest plugin, an oracle, strategies, the tests."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
__all__ = ["__version__"]
