"""The checked ops, plans, and the way to open a backend."""

from __future__ import annotations

from kvcore.ops.backend import Backend, Plan, candidates, explain, open_backend
from kvcore.ops.staging import fetch, on_host, send

__all__ = ["Backend", "Plan", "candidates", "explain", "fetch", "on_host", "open_backend", "send"]
