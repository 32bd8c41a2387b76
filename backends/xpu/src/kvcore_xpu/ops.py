"""The ops of Intel's GPUs."""

from __future__ import annotations

from kvcore_xpu.device import hooks

globals().update(hooks("gpu"))
