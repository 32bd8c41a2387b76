"""Models' configurations, read for the KV that they keep. Nothing is guessed: what is not understood is refused."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.capacity.layer_kinds import ENCODERS, HYBRID_MODELS, UNREAD_MODELS, layer_kinds
from kvcore.capacity.layer_kinds import Fields as _Fields
from kvcore.capacity.layer_kinds import MissingField as _MissingField
from kvcore.capacity.shapes import LayerShape, ModelShape
from kvcore.errors import ConfigError

__all__ = ["built_in_models", "find_model", "read_config"]

_INNER = ("text_config", "llm_config", "language_config")
"""Where the configurations of models that also see or hear keep that of their language model."""
_ALL_HEADS = ("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "mpt", "opt", "phi", "phi3")
"""Types of models whose KV heads are as many as their query heads, unless the configuration says otherwise."""
_OWN_WIDTH = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "vaultgemma",
)
"""Types of models whose heads have a width of their own, which a configuration may leave out."""
_APART = ("head_dim", "v_head_dim", "num_key_value_heads", "num_attention_heads")
"""Fields in which layers may differ."""
_MOST_BYTES = 16 << 20
_INDEX_GROUP, _SCALE_BYTES = 128, 4
"""Keys of an indexer are 8-bit floats with a float32 scale for each of these many, as vLLM keeps them."""

_MATTERS = re.compile(
    r"kv|key_value|heads|head_dim|window|state|ssm|mamba|conv|linear|lru|hybrid|layer_types|layers_block|block_types"
    r"|block_configs|chunk|cla_|compress|index|latent|lora_rank|recurrent|attn_type|cache|head_size|head_width"
)
_STATES = re.compile("mamba|ssm|conv|linear_|state")
_HARMLESS = re.compile(
    r"use_cache|cache_implementation|layer_types|mtp_.*|max_window_layers|mlp_layer_types|q_lora_rank|qk_(nope_|rope_)?head_dim"
    r"|output_hidden_states|.*_token_(id|index)|.*_interval|pruned_heads|.*_norm(_.*)?|.*_bias|.*rope_.*"
    r"|index_(topk.*|n_heads)|use_mamba_kernels|use_associative_scan|chunk_size(_.*)?"
    r"|mamba_(dt_rank|chunk_size|expand|hidden_act|ssm_cache_dtype)|ssm_.*multipliers?"
)
"""Fields that look like those that matter, and do not change how much is kept."""


def built_in_models() -> dict[str, ModelShape]:
    """Return the models that are known by name."""
    return {name: read_config(entry["config"], name, entry["source"]) for name, entry in _built_in().items()}


def find_model(model: str) -> ModelShape:
    """Return the shape of a model that is named.

    Parameters
    ----------
    model : str
        A ``config.json``, a directory with one, or a name: that of a built-in model, whatever its case, with or without
        an organisation before it and ``-Instruct``, ``-it`` or ``-chat`` behind.

    Raises
    ------
    ConfigError
        There is none, or its configuration cannot be read for sure.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = path.is_file()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if is_file or path.suffix == ".json":
        return read_config(_read_json(path), path.parent.name if path.name == "config.json" else path.stem, str(path))
    known = _built_in()
    names = {_plain(name): name for name in known}
    name = names.get(_plain(model))
    if name is None:
        near = [names[one] for one in difflib.get_close_matches(_plain(model), names, n=3)]
        raise ConfigError(
            f"{model!r} is neither a file, nor a directory, nor a built-in model; "
            + (f"did you mean {', '.join(near)}? " if near else "")
            + "give the model's config.json, or see `kvcore calc` for the names"
        )
    return read_config(known[name]["config"], name, known[name]["source"])


def read_config(values: Mapping[str, Any], name: str = "model", source: str = "") -> ModelShape:
    """Read what a model keeps from its configuration.

    Parameters
    ----------
    values : mapping
        What a ``config.json`` of transformers holds. Of a model that also sees or hears, the language model is read.
    name, source : str
        For the result, and for messages.

    Raises
    ------
    ConfigError
        The configuration is not that of a decoder, says something about its KV that is not understood here, or leaves
        something out that its type does not settle and transformers, which knows the types, is not installed.
    """
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "")
    if values.get("is_encoder_decoder"):
        raise ConfigError(f"{name} is an encoder-decoder: its cross-attention keeps KV of other tokens, not read here")
    heads_of = values.get("architectures")
    if values.get("model_type") in ENCODERS or (isinstance(heads_of, list) and "ForMaskedLM" in str(heads_of)):
        raise ConfigError(f"{name} is an encoder: it reads all of a text at once, and keeps no KV")
    inner = next((values[key] for key in _INNER if isinstance(values.get(key), Mapping)), None)
    if inner is not None:
        return read_config({"dtype": dtype, **inner}, name, source)
    try:
        layers = _layers(values, name)
    except _MissingField as missing:
        layers = _layers(_completed(values, missing), name, complete=True)
    return ModelShape(name, layers, dtype.removeprefix("torch."), source)


def _layers(values: Mapping[str, Any], name: str, *, complete: bool = False) -> tuple[tuple[LayerShape, ...], ...]:
    fields = _Fields(values, name, complete=complete)
    if fields.type in UNREAD_MODELS:
        raise ConfigError(f"{name} is of type {fields.type}: {UNREAD_MODELS[fields.type]}, which is not read here")
    kinds = layer_kinds(fields)
    count = len(kinds)
    if any(kind.attends for kind in kinds):
        attention = _apart(fields, _attention(fields, count))
    else:
        attention = []
        fields.ignore("num_attention_heads", "num_key_value_heads", "head_dim")
    state = _state(fields) if any(kind.recurrent for kind in kinds) else 0
    index = fields.number("index_head_dim") if any(kind.indexed for kind in kinds) else 0
    shared = fields.number("num_kv_shared_layers", default=0)
    layers: list[tuple[LayerShape, ...]] = []
    for number, kind in enumerate(kinds):
        layer: list[LayerShape] = []
        if kind.attends and number < count - shared:
            shape = attention[number]
            layer.append(LayerShape(shape.kind, shape.heads, shape.widths, kind.window))
        if kind.indexed:
            layer.append(LayerShape("index", 1, (index + -(-index // _INDEX_GROUP) * _SCALE_BYTES,)))
        if kind.recurrent:
            layer.append(LayerShape("recurrent", state=state))
        layers.append(tuple(layer))
    if not any(kind.recurrent for kind in kinds) and (fields.get("layer_types") or fields.type in HYBRID_MODELS):
        fields.ignore(*(key for key in values if _STATES.search(key)))  # of layers that there are none of
    unread = [
        key
        for key, value in values.items()
        if key not in fields.used and value and _MATTERS.search(key) and not _HARMLESS.fullmatch(key)
    ]
    if unread:
        raise ConfigError(
            f"{name}: {', '.join(f'{key} = {values[key]!r}' for key in unread)} in its configuration may change what "
            "it keeps, and is not read here"
        )
    return tuple(layers)


def _attention(fields: _Fields, count: int) -> Sequence[LayerShape]:
    """Return what attention keeps in each layer, windows aside."""
    rank = fields.number("kv_lora_rank", default=0)
    if rank:
        fields.ignore("num_key_value_heads", "num_attention_heads", "num_heads", "head_dim", "v_head_dim")
        return [LayerShape("latent", 1, (rank, fields.number("qk_rope_head_dim")))] * count
    inner = fields.values.get("attn_config")
    if isinstance(inner, Mapping):
        fields.ignore("attn_config")
        if inner.get("kv_n_heads"):
            with_heads = {**fields.values, "num_key_value_heads": inner["kv_n_heads"]}
            fields = _Fields(with_heads, fields.name, fields.used, complete=fields.complete)
    heads = fields.number("num_attention_heads", "n_head", "n_heads", "num_query_heads")
    width = fields.number("head_dim", "attention_head_dim", "kv_channels", default=0)
    if not width:
        if fields.type in _OWN_WIDTH and not fields.complete:
            raise fields.missing("head_dim")
        hidden = fields.number("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise ConfigError(f"{fields.name}: {hidden} channels are no multiple of {heads} heads; head_dim is missing")
        width = hidden // heads
    values = fields.number("v_head_dim", default=0) or width
    return [LayerShape("attention", n, (width, values)) for n in _kv_heads(fields, heads, count)]


def _apart(fields: _Fields, alike: Sequence[LayerShape]) -> Sequence[LayerShape]:
    """Return what attention keeps in each layer, where the configuration sets some of them apart from the others."""
    apart = fields.get("per_layer_config") or {}
    if not isinstance(apart, Mapping):
        raise fields.wrong(apart, "no object", "per_layer_config")
    shapes = list(alike)
    for number, values in apart.items():
        known = isinstance(values, Mapping) and str(number).isdecimal() and int(number) < len(shapes)
        if not known or any(k not in _APART and _MATTERS.search(k) and not _HARMLESS.fullmatch(k) for k in values):
            raise ConfigError(
                f"{fields.name}: per_layer_config of layer {number} in its configuration is not read here: {values!r}"
            )
        own = _Fields({**fields.values, **values}, fields.name, complete=fields.complete)
        shapes[int(number)] = _attention(own, len(shapes))[int(number)]
    return shapes


def _kv_heads(fields: _Fields, heads: int, count: int) -> Sequence[int]:
    """Return the KV heads of each layer."""
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    given = fields.get(*names)
    many = fields.get("multi_query_attention", "multi_query")
    if fields.type == "falcon":
        if not fields.get("new_decoder_architecture"):
            return [heads if many is False else 1] * count
    elif many is not None and given is None:
        return [1 if many else heads] * count
    if isinstance(given, list):
        if len(given) != count or not all(isinstance(n, int) and n > 0 for n in given):
            raise ConfigError(f"{fields.name}: KV heads {given!r} are not one number for each of {count} layers")
        return given
    if given is None:
        if not fields.complete and fields.type not in _ALL_HEADS and fields.type != "falcon":
            raise fields.missing("num_key_value_heads")
        return [heads] * count
    return [fields.number(*names)] * count


def _state(fields: _Fields) -> int:
    """Return the elements of a recurrent layer's state: its convolution but for the newest column, and its matrix."""
    if fields.get("linear_num_value_heads"):  # gated delta net
        keys, values = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
        key, value = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
        convolved = 2 * keys * key + values * value
        return convolved * (fields.number("linear_conv_kernel_dim") - 1) + values * key * value
    if fields.get("conv_L_cache"):  # short convolution
        return fields.number("hidden_size") * (fields.number("conv_L_cache") - 1)
    size = fields.number("mamba_d_state", "ssm_state_size", "state_size", default=0)
    if not size:
        raise fields.missing("mamba_d_state")
    kernel = fields.number("mamba_d_conv", "conv_kernel", "d_conv")
    expand = fields.get("mamba_expand", "expand") or 0
    if not isinstance(expand, (int, float)):
        raise fields.wrong(expand, "no factor", "mamba_expand", "expand")
    heads = fields.number("mamba_n_heads", "mamba_num_heads", default=0)
    if not heads and fields.type == "mamba2":
        heads = fields.number("num_heads")
    if not heads:  # the first Mamba
        inner = fields.number("intermediate_size") if fields.type in ("mamba", "falcon_mamba") and not expand else 0
        inner = inner or int(float(expand or 2) * fields.number("hidden_size", "d_model"))
        return inner * (kernel - 1) + inner * size
    own = ("mamba_d_head", "mamba_head_dim", *(["head_dim"] if fields.type == "mamba2" else []))
    inner = fields.number("mamba_d_ssm", default=0)
    if fields.get(*own) in (None, "auto"):
        inner = inner or int(float(expand or 2) * fields.number("hidden_size", "d_model"))
        width = inner // heads
    else:
        width = fields.number(*own)
    inner = heads * width
    convolved = inner + 2 * fields.number("mamba_n_groups", "n_groups", default=1) * size
    return convolved * (kernel - 1) + inner * size


def _completed(values: Mapping[str, Any], missing: _MissingField) -> Mapping[str, Any]:
    """Return a configuration with what its type says where it says nothing; raise `missing` if that is not known."""
    kind = values.get("model_type")
    if not kind or importlib.util.find_spec("transformers") is None:
        raise missing
    from transformers import AutoConfig

    try:
        full = AutoConfig.for_model(**values).to_dict()
    except (ValueError, KeyError):  # a type of its own, or of a newer transformers
        raise missing from None
    except Exception as error:  # whatever the checks of its type raise
        raise ConfigError(f"{missing}; transformers does not take its configuration: {error}") from error
    return {**full, **values}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is too large for a configuration; give the config.json of its model")
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text; give the config.json of its model") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds no object: it is not a model's configuration")
    return values


def _plain(name: str) -> str:
    """Return a model's name without what does not tell its shape."""
    bare = name.rpartition("/")[2].lower().removeprefix("meta-").replace("_", "-")
    return re.sub(r"(-(instruct|chat|hf|it|base|pt)(-\d{4})?)+(?=-v[\d.]+$|$)", "", bare)


@functools.cache
def _built_in() -> dict[str, Any]:
    text = importlib.resources.files("kvcore.capacity").joinpath("models.json").read_text("utf-8")
    models: dict[str, Any] = json.loads(text)
    return models
