"""The engine's configuration: the settings, and where they come from."""

from __future__ import annotations

from kvcore.engine.config_model import ConfigRow, EngineConfig, PrefetchConfig
from kvcore.engine.config_sources import load_config, setting_names

__all__ = ["ConfigRow", "EngineConfig", "PrefetchConfig", "load_config", "setting_names"]
