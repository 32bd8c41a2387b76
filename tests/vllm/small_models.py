"""Random models of a few layers, one for each class of cache: made once, with weights that let the KV tell.

The weights are wide, so that logits differ by whole units and a token depends on all of the prompt: with the narrow
ones that engines draw themselves every prompt goes on alike, and a wrong block would not be seen.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # class of the configuration in transformers, and what differs from the common one
    "gqa": ("LlamaConfig", {}),
    "window": ("MistralConfig", {"sliding_window": 256}),
    "mixed_window": (
        "Gemma3TextConfig",
        {
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mla": (
        "DeepseekV2Config",
        {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # vLLM's kernel for the processor returns one state for each sequence and step: it works with prefix caching while
    # no step has more than a chunk.
    "mamba2": (
        "Mamba2Config",
        {"state_size": 32, "num_heads": 4, "head_dim": 32, "n_groups": 1, "conv_kernel": 4, "chunk_size": 4096},
    ),
    "hybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "hidden_size": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 4096,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
        },
    ),
    "short_conv": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "hidden_size": 128,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "gdn": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "partial_rotary_factor": 0.5,
        },
    ),
}
"""Each small model by the class of its cache."""


def small_model(name: str, folder: Path) -> Path:
    """Return the directory of a model under `folder`; the first call makes it. Imports torch then.

    Parameters
    ----------
    name : str
        Of `CONFIGS`.
    folder : Path
        Where models are kept.
    """
    kind, changes = CONFIGS[name]
    wanted = {**_COMMON, **changes}
    digest = hashlib.sha256(json.dumps([kind, wanted, inspect.getsource(_make)]).encode()).hexdigest()[:12]
    target = folder / f"{name}-{digest}"
    if not target.is_dir():
        scratch = folder / f"{name}-making"
        _make(kind, wanted, scratch)
        scratch.rename(target)
    return target


def _make(kind: str, wanted: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, kind)(**wanted)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2 and "conv" not in name:
                weights.normal_(0.0, (2.0 if "lm_head" in name or "embed" in name else 1.0) * weights.shape[-1] ** -0.5)
            elif name.endswith("dt_bias"):
                weights.fill_(-6.0)  # states that last for hundreds of tokens
            elif name.endswith("A_log"):
                weights.zero_()
    model.save_pretrained(folder)


if __name__ == "__main__":
    for each in sys.argv[2:] or CONFIGS:
        print(each, small_model(each, Path(sys.argv[1])))
