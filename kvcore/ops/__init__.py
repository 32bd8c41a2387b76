"""The checked ops, plans, and the way to open a backend."""

from __future__ import annotations

from kvcore.ops.backend import Backend, Plan, candidates, explain, open_backend
from kvcore.ops.staging import fetch, on_host, send
from kvcore.ops.streams import of_all_streams, on_stream

__all__ = [
    "Backend",
    "Plan",
    "candidates",
    "explain",
    "fetch",
    "of_all_streams",
    "on_host",
    "on_stream",
    "open_backend",
    "send",
]
