"""The same ops on the processor."""

from __future__ import annotations

from kvcore_xpu.device import hooks

globals().update(hooks("cpu"))
