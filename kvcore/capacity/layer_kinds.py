"""What each layer of a model does, by its configuration: attention, all of it or a window, or a recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.errors import ConfigError

__all__ = ["ENCODERS", "HYBRID_MODELS", "UNREAD_MODELS", "Fields", "LayerKind", "MissingField", "layer_kinds"]

UNREAD_MODELS = {
    "deepseek_v4": "layers that keep compressed rows",
    "kimi_linear": "its own kind of linear attention",
    "longcat_flash": "two attentions in each layer",
    "minimax": "its own kind of linear attention",
    "recurrent_gemma": "its own kind of recurrence",
    "rwkv": "its own kind of recurrence",
    "xlstm": "its own kind of recurrence",
    "zamba": "attention that several layers share",
    "zamba2": "attention that several layers share",
}
"""Types of models that are known not to be read, and why."""

ENCODERS = ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta",
            "xlm-roberta")  # fmt: skip
"""Types of models that read all of a text at once, and keep no KV."""

HYBRID_MODELS = ("bamba", "jamba")
"""Types of models whose configuration says which layers are recurrent, and which attend."""
_RECURRENT_MODELS = ("mamba", "mamba2", "falcon_mamba")
_PATTERNS = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "olmo3": 4,
    "vaultgemma": 2,
}
"""Of these many layers the last attends to all tokens, those before it to a window, by type of model."""
_WINDOW_IF_SAID = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types of models that use their window only if `use_sliding_window` says so."""
_PATTERN_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NAMES = {
    "attention": "full_attention",
    "conv": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}


class MissingField(ConfigError):
    """A configuration leaves something out."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer does. `window` is that of its attention."""

    attends: bool = False
    recurrent: bool = False
    indexed: bool = False
    window: int | None = None


class Fields:
    """A configuration, and which of its fields have been read.

    Parameters
    ----------
    values : mapping
    name : str
        The model's, for messages.
    used : set of str, optional
        Fields that were read before.
    complete : bool
        What it does not say is not so: nothing is left out.
    """

    def __init__(
        self, values: Mapping[str, Any], name: str, used: set[str] | None = None, *, complete: bool = False
    ) -> None:
        self.complete = complete
        self.values = values
        self.name = name
        self.used: set[str] = set() if used is None else used
        self.type = str(values.get("model_type") or "")

    def get(self, *names: str) -> Any:
        """Return the first of some fields that is there; None if none is. All of them count as read."""
        self.used.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of some fields that is there: a whole number, and zero only where that is the default.

        Raises
        ------
        ConfigError
            It is none; or there is none of them and no default.
        """
        value = self.get(*names)
        if value is None:
            if default is None:
                raise self.missing(names[0])
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
            raise self.wrong(value, "no number of anything", *names)
        return value

    def listed(self, *names: str) -> list[Any] | None:
        """Return the first of some fields that is there, which has to be a list; None if none is."""
        value = self.get(*names)
        if value is not None and not isinstance(value, list):
            raise self.wrong(value, "no list", *names)
        return value

    def ignore(self, *names: str) -> None:
        """Count fields as read: they change nothing here."""
        self.used.update(names)

    def wrong(self, value: Any, what: str, *names: str) -> ConfigError:
        """Return the error that says that the first of some fields that is there has a value that means nothing."""
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        return ConfigError(f"{self.name}: {name} = {value!r} in its configuration is {what}")

    def missing(self, name: str) -> MissingField:
        """Return the error that says that a field is missing."""
        return MissingField(
            f"{self.name}: its configuration does not say {name}, and what a model of type {self.type or '(none)'!r} "
            f'has then is not known here: add it to the file, or pip install "kvcore[transformers]", which knows'
        )


def layer_kinds(fields: Fields) -> list[LayerKind]:
    """Return what each layer does.

    Raises
    ------
    ConfigError
        The configuration does not say it for each layer, or names a kind of layer that is not known here.
    """
    stated = fields.listed("layer_types", "layers_block_type")
    count = fields.number("num_hidden_layers", "n_layer", "num_layers", "n_layers", default=len(stated or ()) or None)
    names = _names(fields, count)
    if len(names) != count:
        raise ConfigError(f"{fields.name}: {len(names)} kinds of layers for {count} layers in its configuration")
    window = _window(fields)
    span = fields.number("attention_chunk_size", default=0)
    kinds = []
    for name in names:
        if name == "sliding_attention" and not window:
            raise fields.missing("sliding_window")
        if name == "chunked_attention" and not span:
            raise fields.missing("attention_chunk_size")
        known = {
            "full_attention": LayerKind(attends=True),
            "sliding_attention": LayerKind(attends=True, window=window),
            "chunked_attention": LayerKind(attends=True, window=span),
            "indexed_attention": LayerKind(attends=True, indexed=True),
            "linear_attention": LayerKind(recurrent=True),
            "hybrid": LayerKind(attends=True, recurrent=True),
            "mlp": LayerKind(),
            "moe": LayerKind(),
        }
        if name not in known:
            raise ConfigError(
                f"{fields.name}: layers of kind {name!r} are not known here; known are {', '.join([*known, *_NAMES])}"
            )
        kinds.append(known[name])
    return kinds


def _window(fields: Fields) -> int | None:
    """Return the window of layers that have one; None where the model does not use any."""
    window, used = fields.get("sliding_window"), fields.get("use_sliding_window")
    if used is None:
        used = fields.type not in _WINDOW_IF_SAID
    if not used or not window:
        return None
    return fields.number("sliding_window")


def _names(fields: Fields, count: int) -> list[str]:
    """Return the kind of each layer, by the names that transformers has for them."""
    given = fields.listed("layer_types", "layers_block_type")
    letters = fields.get("hybrid_override_pattern")
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    indices = fields.listed("attn_layer_indices", "full_attn_idxs")
    fields.ignore("attn_layer_period", "attn_layer_offset", "full_attention_interval")
    if given is not None:
        return [_NAMES.get(str(name), str(name)) for name in given]
    if isinstance(letters, str):
        return [_PATTERN_LETTERS.get(letter, letter) for letter in letters]
    if fields.type in _RECURRENT_MODELS:
        return ["linear_attention"] * count
    if fields.type == "falcon_h1":
        return ["hybrid"] * count
    if indices is not None or fields.type == "bamba":
        return ["full_attention" if i in (indices or ()) else "linear_attention" for i in range(count)]
    if fields.type == "jamba":
        period, offset = fields.number("attn_layer_period"), fields.number("attn_layer_offset", default=0)
        return ["full_attention" if i % period == offset else "linear_attention" for i in range(count)]
    if fields.get("linear_num_value_heads"):
        every = fields.number("full_attention_interval", default=4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return _attention_names(fields, count, pattern)


def _attention_names(fields: Fields, count: int, pattern: Any) -> list[str]:
    """Return the kind of each layer of a model that has nothing but attention."""
    window = _window(fields)
    if fields.get("index_head_dim"):
        return ["indexed_attention"] * count
    if fields.get("attention_chunk_size"):
        turned = fields.listed("no_rope_layers")
        interval = fields.number("no_rope_layer_interval", default=4)
        local = turned or [(i + 1) % interval for i in range(count)]
        return ["chunked_attention" if one else "full_attention" for one in local]
    if isinstance(pattern, str) and pattern:  # such as LLLG
        return ["sliding_attention" if pattern[i % len(pattern)] == "L" else "full_attention" for i in range(count)]
    if pattern:
        every = fields.number("sliding_window_pattern", "_sliding_window_pattern")
    else:
        every = _PATTERNS.get(fields.type, 0)
    if every and window is None and fields.type != "exaone4":  # which may do without
        raise fields.missing("sliding_window")
    if every and window is not None:
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if window is None:
        return ["full_attention"] * count
    first = fields.number("max_window_layers", default=0)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
