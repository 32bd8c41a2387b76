"""Backends as plug-ins: discover, probe, select, link; one verb per module."""

from __future__ import annotations

from kvcore.plugins.spec import API_VERSION, BackendSpec, Probe

__all__ = ["API_VERSION", "BackendSpec", "Probe"]
