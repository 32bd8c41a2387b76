"""What the tests of measuring share: a backend, a tiny random model on disk, and the command in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcore


@pytest.fixture(scope="session")
def backend() -> kvcore.Backend:
    return kvcore.open_backend("cpu_ref", fallback="error")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random model with a tokenizer of single bytes, as a local directory."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny"
    words = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,  # peaked predictions, or nothing would tell one KV from another
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def in_a_new_process() -> Callable[..., subprocess.CompletedProcess]:
    """Run ``kvcore eval`` with some arguments."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
        command = [sys.executable, "-m", "kvcore", "eval", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=clean)

    return run
