"""Whose KV does a vLLM engine make? Its namespace, from vLLM's configuration.

The scheduler and every worker compute it for themselves, from the same configuration and the same files. Everything
that changes the bytes of the KV or their meaning is in it; what only changes where or how fast they are computed is
not, so that engines share: parallel degrees, attention backends, memory layouts, draft models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvcore.connectors.rope_config import closed_form
from kvcore.connectors.vllm.weights import content_digest, snapshot_commit
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.engine.keys import Namespace
from kvcore.errors import ConfigError, UnsupportedOpError
from kvcore.rope import RopeParams

__all__ = ["IdentityConfig", "model_namespace"]

_CONFIG_TAG = b"kvcore model configuration 1\n"
_SCALES_TAG = b"kvcore vllm static scales 1\n"

# vLLM's names of element types. Others have scales that change from token to token, or packed bytes: not plain KV.
_KV_DTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# Models that rotate the first half of a head's channels with the second: vLLM says so in code, not in configurations.
_NEOX_MODELS = frozenset(
    ("gemma", "gemma2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
)
# Where what is rotated depends on how long a sequence may become.
_LENGTH_ROPES = frozenset(("dynamic", "longrope", "su"))
# What a configuration says about where it came from, and who wrote it.
_VOLATILE = frozenset(
    ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "auto_map", "tokenizer")
)


class IdentityConfig(Protocol):
    """What a user may say about it: `kvcore.engine.config.EngineConfig` has all of it."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""

    @property
    def model_name(self) -> str:
        """Model id; empty: what vLLM says."""

    @property
    def model_revision(self) -> str:
        """Revision of its weights; empty: found here."""

    @property
    def salt(self) -> str:
        """Separates tenants."""

    @property
    def hash(self) -> str:
        """The hash of keys."""


def model_namespace(vllm_config: Any, kv_cache_config: Any, config: IdentityConfig) -> Namespace:
    """Return the namespace of an engine's KV.

    Parameters
    ----------
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig
    config : IdentityConfig

    Raises
    ------
    UnsupportedOpError
        The KV is not plain K and V of a prefix: the model has an encoder or looks ahead, or its cache is quantized with
        scales that change from token to token.
    ConfigError
        Nothing names the weights for sure.
    StoreError
        The weights cannot be read.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    _check_prefix(model)
    kv_dtype, quantized = _kv_dtype(model, cache)
    revision = config.model_revision or _revision(vllm_config)
    cache_class = _cache_class(model, kv_cache_config)
    revision += "".join(f" {word}" for word in _words(vllm_config, kv_dtype, cache_class))
    scales = _blake3(_SCALES_TAG + revision.encode()) if quantized else b""
    return Namespace(
        model=config.model_name or _name(model),
        revision=revision,
        kv_dtype=kv_dtype,
        scales=scales,
        cache_class=cache_class,
        rope=_rope(model) if cache_class == "mha" else None,
        chunk_tokens=config.chunk_tokens,
        salt=config.salt,
        hash=config.hash,
    )


def _check_prefix(model: Any) -> None:
    """Refuse models whose KV of a token depends on tokens after it."""
    kind = getattr(model, "attn_type", "decoder")
    if kind not in ("decoder", "hybrid", "attention_free") or getattr(model, "is_encoder_decoder", False):
        raise UnsupportedOpError(
            f"{_architecture(model)} has attention of type {kind}: a prefix has no KV of its own; do without kvcore"
        )
    pooler = getattr(model, "pooler_config", None)
    if pooler is not None and not getattr(model, "is_prefix_caching_supported", False):
        raise UnsupportedOpError(
            f"{_architecture(model)} pools over all tokens of a prompt, so none may be left out; do without kvcore"
        )


def _kv_dtype(model: Any, cache: Any) -> tuple[str, bool]:
    """Return the element type of K and V, and whether they are quantized with scales."""
    name = str(cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedOpError(
            "calculate_kv_scales makes the scales of the KV cache from the first prompt, so that no two engines have "
            "the same; use a model with scales in its weights, or kv_cache_dtype='auto'"
        )
    if name == "auto":
        name = dtype_name(to_dtype(model.dtype))
    if name not in _KV_DTYPES:
        raise UnsupportedOpError(
            f"kv_cache_dtype {name!r} packs values or scales in a way that is not read here; known are auto, "
            f"{', '.join(_KV_DTYPES)}"
        )
    return _KV_DTYPES[name], name.startswith("fp8")


def _cache_class(model: Any, kv_cache_config: Any) -> str:
    """``"mha"``, ``"mla"``, ``"recurrent"``, or ``"hybrid"``: attention and recurrent states."""
    kinds = {_spec_kind(spec) for spec in _specs(kv_cache_config)}
    if kinds == {"recurrent"}:
        return "recurrent"
    if "recurrent" in kinds:
        return "hybrid"
    return "mla" if getattr(model, "use_mla", False) else "mha"


def _specs(kv_cache_config: Any) -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield from inner.values() if isinstance(inner, Mapping) else (group.kv_cache_spec,)


def _spec_kind(spec: Any) -> str:
    """By the names of the class and of those it is made from: vLLM need not be there."""
    return "recurrent" if any(base.__name__ == "MambaSpec" for base in type(spec).__mro__) else "attention"


def _architecture(model: Any) -> str:
    names = getattr(model.hf_config, "architectures", None) or [getattr(model.hf_config, "model_type", "a model")]
    return str(names[0])


def _name(model: Any) -> str:
    """Return the model's id on the hub, else its architecture: what its folder is called does not matter."""
    path = Path(model.model)
    if snapshot_commit(path):
        folder = path.parent.parent.name  # models--OWNER--NAME
        return folder.removeprefix("models--").replace("--", "/", 1)
    return _architecture(model) if path.exists() else str(model.model)


def _revision(vllm_config: Any) -> str:
    """Name the weights: by a commit of the hub, or by their content."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        # Each rank draws weights of its own.
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return f"dummy:{_config_digest(model)} seed:{model.seed} ranks:{ranks}"
    if getattr(model, "model_weights", ""):
        raise ConfigError(
            f"weights streamed from {model.model_weights!r} are not read here; say in model_revision which they are, "
            "and change it whenever they change"
        )
    path = Path(model.model)
    if commit := snapshot_commit(path):
        return f"commit:{commit}"
    if path.exists():
        return f"sampled:{content_digest(path).hex()} config:{_config_digest(model)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and not getattr(model, "hf_config_path", None):
        return f"commit:{commit}"
    raise ConfigError(
        f"{model.model!r} is no folder, and nothing says which revision of it is in use; say it in model_revision, and "
        "change it whenever the weights change"
    )


def _words(vllm_config: Any, kv_dtype: str, cache_class: str) -> Iterator[str]:
    """What else changes the KV, where it is not as the weights have it."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = dtype_name(to_dtype(model.dtype))
    if dtype != kv_dtype:
        yield f"compute:{dtype}"
    if model.quantization:
        yield f"weights:{model.quantization}"
    if overrides := _plain(getattr(model, "hf_overrides", None)):
        # A function may do anything; what it has made of the configuration, it says.
        yield f"overrides:{_config_digest(model) if callable(model.hf_overrides) else _digest_of(overrides)}"
    if quantization := _plain(getattr(model, "quantization_config", None)):
        yield f"quantization:{_digest_of(quantization)}"
    if skipped := getattr(cache, "kv_cache_dtype_skip_layers", None):
        yield f"unquantized:{','.join(sorted(map(str, skipped)))}"
    if getattr(model, "disable_sliding_window", False):
        yield "window:off"
    if any(str(kind) in _LENGTH_ROPES for kind in _rope_kinds(model)):
        yield f"positions:{model.max_model_len}"
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype") if cache_class in ("hybrid", "recurrent") else ():
        if getattr(cache, name, "auto") != "auto":
            yield f"{name}:{getattr(cache, name)}"
    media = getattr(model, "multimodal_config", None)
    for name in ("video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype"):
        if (value := getattr(media, name, None)) is not None:
            yield f"{name}:{value}"


def _rope_kinds(model: Any) -> Iterator[Any]:
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for entry in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        yield entry.get("rope_type")


def _rope(model: Any) -> RopeParams | None:
    """Return how keys are rotated; None where the configuration does not say it for sure."""
    text = model.hf_text_config
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or any(isinstance(value, (Mapping, list, tuple)) for value in parameters.values()):
        return None
    if getattr(text, "model_type", "") not in _NEOX_MODELS or model.quantization == "gguf":
        return None
    dims = int(model.get_head_size() * float(parameters.get("partial_rotary_factor", 1.0)))
    return closed_form(parameters, str(parameters.get("rope_type", "default")), dims, False)


def _config_digest(model: Any) -> str:
    """Return a digest of the model's configuration, as far as it says something about the model."""
    return _digest_of({key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE})


def _digest_of(value: object) -> str:
    return _blake3(_CONFIG_TAG + json.dumps(_plain(value), sort_keys=True).encode()).hex()


def _plain(value: Any) -> Any:
    """A value as JSON has it; of a function its name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple, set, frozenset)):
        plain = [_plain(inner) for inner in value]
        return sorted(plain, key=json.dumps) if isinstance(value, (set, frozenset)) else plain
    if callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict())
    fields = getattr(value, "__dataclass_fields__", None)
    if fields:
        return {name: _plain(getattr(value, name)) for name in fields}
    return getattr(value, "__qualname__", None) or str(value)


def _blake3(data: bytes) -> bytes:
    from blake3 import blake3

    return blake3(data).digest()
