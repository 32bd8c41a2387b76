"""What a transformers model says about its KV cache: its shape, its rotation, and which weights made it.

Everything here ends up in the namespace. What cannot be told for sure is refused, because a wrong guess would serve
one model's KV to another.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.connectors.rope_config import closed_form
from kvcore.errors import ConfigError, UnsupportedOpError
from kvcore.rope import RopeParams

__all__ = ["CacheShape", "cache_shape", "check_cacheable", "model_rope", "weights_revision"]

_GIVE_ROPE = "pass rope=kvcore.RopeParams(...) with what the model does"
_REVISION_TAG = b"kvcore transformers weights 1\n"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Layers, KV heads and channels of a head."""

    layers: int
    heads: int
    width: int


def cache_shape(model: Any) -> CacheShape:
    """Read the cache's extents from the model's configuration.

    Raises
    ------
    UnsupportedOpError
        The configuration does not say.
    """
    config = _decoder_config(model)
    layers, query_heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    width = getattr(config, "head_dim", None)
    if width is None and isinstance(query_heads, int) and query_heads:
        width = getattr(config, "hidden_size", 0) // query_heads
    for extent in (layers, heads, width):
        if not isinstance(extent, int) or extent < 1:
            raise UnsupportedOpError(
                f"{type(config).__name__} does not give one number of layers, KV heads and channels of a head (found "
                f"{layers}, {heads}, {width}); this connector takes models whose layers are alike"
            )
    return CacheShape(layers, int(heads), int(width or 0))


def check_cacheable(model: Any, adapter: str) -> None:
    """Raise unless the model keeps plain keys and values of every token, in one memory.

    Raises
    ------
    UnsupportedOpError
        An encoder-decoder, a cache with sliding, recurrent or otherwise special layers, a rotation that depends on
        the length of the sequence, or a model spread over several devices.
    ConfigError
        Adapters are loaded and `adapter` does not name them.
    """
    from transformers import DynamicCache

    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedOpError(f"{name} has an encoder; prefixes of decoder-only models can be cached")
    check_layers(DynamicCache(config=model.config))
    kind = (getattr(_decoder_config(model), "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedOpError(
            f"{name} has RoPE of type {kind!r}, where rotation depends on the length of the sequence: a prefix has no "
            "KV of its own"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        raise UnsupportedOpError(f"{name} lies on {', '.join(devices) or 'no device'}; one device is supported")
    if not adapter and (getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None)):
        raise ConfigError(f"{name} has adapters loaded; pass adapter='...', or its KV would pass for the base model's")


def check_layers(cache: Any) -> None:
    """Raise `UnsupportedOpError`, naming the class, unless all layers are plain `DynamicLayer`."""
    from transformers.cache_utils import DynamicLayer

    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedOpError(
                f"layer {index} of the cache is a {type(layer).__name__}; only DynamicLayer, which keeps the keys and "
                "values of every token as they are, can be saved and restored"
            )


def weights_revision(model: Any) -> str:
    """Name the weights: the commit that the hub gave, or else a digest of the weights in memory.

    With it what the model multiplies keys by as it rotates them, if not by 1: an attention factor is in no weights, and
    in no `RopeParams`.

    Raises
    ------
    ConfigError
        The model's state holds something that is no tensor.
    """
    import torch
    from blake3 import blake3

    scales = sorted({float(m.attention_scaling) for m in _rotary_modules(model)} - {1.0})
    suffix = "".join(f" keys x {scale!r}" for scale in scales)
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return f"commit:{commit}{suffix}"
    digest = blake3(_REVISION_TAG, max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} is a {type(tensor).__name__} and cannot be digested; pass revision='...'")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        head = f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode()
        digest.update(len(head).to_bytes(4, "little") + head)
        digest.update(flat.view(torch.uint8).numpy())
    return f"weights:{digest.hexdigest()}{suffix}"


def model_rope(model: Any) -> RopeParams | None:
    """Read how the model rotates its keys: from its configuration, checked against its rotary module.

    Returns
    -------
    RopeParams or None
        None for a model without rotary parameters (learned positions, ALiBi).

    Raises
    ------
    ConfigError
        The parameters cannot be read for sure.
    """
    parameters = getattr(_decoder_config(model), "rope_parameters", None)
    if not parameters:
        return None
    kind = parameters.get("rope_type", "default")
    unread = [key for key, value in parameters.items() if isinstance(value, (dict, list, tuple))]
    if unread:
        raise ConfigError(f"RoPE parameters {', '.join(unread)} are not read here; {_GIVE_ROPE}")
    found = _rotary_modules(model)
    if len(found) != 1:
        raise ConfigError(f"{type(model).__name__} has {len(found)} rotary modules where one is expected; {_GIVE_ROPE}")
    rotary = found[0]
    table = rotary.inv_freq.detach().cpu().double().numpy()
    return _params(parameters, kind, table, _interleaved(rotary))


def _rotary_modules(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]


def _params(parameters: dict[str, Any], kind: str, table: np.ndarray[Any, Any], interleaved: bool) -> RopeParams:
    """The closed form where it gives the model's own table, else the table."""
    dims = 2 * len(table)
    closed = closed_form(parameters, kind, dims, interleaved)
    # The module computes in float32: a few of its roundings are allowed for, another formula is not.
    if closed is not None and np.allclose(closed.frequencies(), table, rtol=1e-5, atol=0.0):
        return closed
    return RopeParams(dims, interleaved=interleaved, inv_freq=tuple(map(float, table)))


def _interleaved(rotary: Any) -> bool:
    """Tell which channels are pairs, by asking the model's own `rotate_half`."""
    import torch

    source = sys.modules[type(rotary).__module__]
    rotate = getattr(source, "rotate_half", None)
    turned = rotate(torch.arange(1.0, 5.0)).tolist() if callable(rotate) else None
    if turned == [-3.0, -4.0, 1.0, 2.0]:
        return False
    if turned == [-2.0, 1.0, -4.0, 3.0]:
        return True
    raise ConfigError(f"{source.__name__} does not show which channels it rotates together; {_GIVE_ROPE}")


def _decoder_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
