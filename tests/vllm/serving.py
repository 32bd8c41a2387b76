"""How the tests configure engines: kvcore's connector, vLLM's own example, small models that start fast."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from .small_models import VOCABULARY

__all__ = ["SMALL", "example_connector", "kvcore_connector", "loading", "made_up"]

SMALL: dict[str, Any] = {
    "in_process": True,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 128 << 20,
    "timeout": 600,
}
"""Options of an engine with a small model."""


def kvcore_connector(extra: dict[str, Any], role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    """The fields of vLLM's configuration for kvcore's connector."""
    return {
        "kv_connector": "KVCoreConnector",
        "kv_connector_module_path": "kvcore.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"max_local_cpu_size": "256MiB", "log_level": "info", **extra},
        **changes,
    }


def example_connector(folder: Path) -> dict[str, Any]:
    """The same for the connector that vLLM brings as an example."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def loading(load: str) -> dict[str, Any]:
    """Options of vLLM with which the connector may load so: within a step only where vLLM caches nothing itself."""
    return {} if load == "async" else {"enable_prefix_caching": False}


def made_up(count: int, length: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Return prompts of small models: random tokens, of which the first `shared` are the same in all."""
    choose = random.Random(seed)
    common = [choose.randrange(2, VOCABULARY) for _ in range(shared)]
    return [common + [choose.randrange(2, VOCABULARY) for _ in range(length - shared)] for _ in range(count)]
