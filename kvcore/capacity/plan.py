"""What fits: tokens and prompts by tier, for a model, an element type, tensor-parallel ranks and serdes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.capacity.bits import bits_of, codec_of
from kvcore.capacity.shapes import ModelShape
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import ConfigError
from kvcore.serde import SerdeConfig

__all__ = ["Place", "Plan", "PlanRow", "plan"]


@dataclass(frozen=True, slots=True)
class Place:
    """A tier and its size.

    Parameters
    ----------
    tier : str
    nbytes : int
    host : bool
        Host memory: KV as it is, and every rank has its own.
    """

    tier: str
    nbytes: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What a tier takes in one way of coding KV.

    Parameters
    ----------
    tier, serde : str
    nbytes : int or None
        Size of the tier; None where none is given.
    bits : float
        Of an element.
    measured : bool
        Whether `bits` was measured, on a model of its own; else it follows from the element type.
    token_bytes : float
    chunk_bytes, state_bytes : int
        Of a whole chunk, and of the recurrent states at one place of a sequence.
    prompt_bytes : int
        Of all whole chunks of a prompt, and its states once.
    tokens, prompts : int or None
        How many fit.
    """

    tier: str
    serde: str
    nbytes: int | None
    bits: float
    measured: bool
    token_bytes: float
    chunk_bytes: int
    state_bytes: int
    prompt_bytes: int
    tokens: int | None
    prompts: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The KV of a model, and what fits where.

    Parameters
    ----------
    model : ModelShape
    dtype : str
    ranks : int
    chunk_tokens, prompt_tokens : int
    token_bytes : int
        Of a token in all layers.
    rank_token_bytes : int
        Of these, what one rank has; heads that ranks have in common count in each.
    state_bytes : int
        Of a request's recurrent states.
    held_bytes : int
        What one rank of an engine keeps for a prompt: of layers with a window, no more than that.
    rows : tuple of PlanRow
    """

    model: ModelShape
    dtype: str
    ranks: int
    chunk_tokens: int
    prompt_tokens: int
    token_bytes: int
    rank_token_bytes: int
    state_bytes: int
    held_bytes: int
    rows: tuple[PlanRow, ...]


def plan(
    model: ModelShape,
    *,
    dtype: str = "",
    ranks: int = 1,
    serdes: Sequence[SerdeConfig] = (),
    places: Sequence[Place] = (),
    chunk_tokens: int = 256,
    prompt_tokens: int = 8192,
) -> Plan:
    """Say how much KV a model makes, and how much of it fits where.

    Parameters
    ----------
    model : ModelShape
    dtype : str
        Element type of the KV; that of the model if not given, or bfloat16.
    ranks : int
        Tensor-parallel degree. Stores hold each head once, whatever it is; host memory once for each rank that has it.
    serdes : sequence of SerdeConfig
        Ways of coding KV in stores, beside ``raw``, which is always there.
    places : sequence of Place
    chunk_tokens, prompt_tokens : int

    Raises
    ------
    ConfigError
        A number is below one, heads cannot be shared out, the element type is unknown, a serde was not measured on it,
        or a prompt has no whole chunk.
    """
    for name, value in (("tp", ranks), ("chunk tokens", chunk_tokens), ("prompt tokens", prompt_tokens)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if prompt_tokens < chunk_tokens:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens has no whole chunk of {chunk_tokens}: nothing of it would be stored"
        )
    dtype = dtype_name(to_dtype(dtype or model.dtype or "bfloat16"))
    rank = model.of_rank(ranks)
    latent = any(shape.kind == "latent" for layer in model.layers for shape in layer)
    raw = SerdeConfig("raw")
    for serde in serdes:
        if latent and codec_of(serde) == "asym_k16_v8":
            raise ConfigError("serde asym_k16_v8 needs keys apart from values, and latent rows (MLA) have none")

    def row(tier: str, serde: SerdeConfig, nbytes: int | None, *, host: bool = False) -> PlanRow:
        bits = bits_of(serde, dtype)
        held, times = (rank, ranks) if host else (model, 1)
        plain = held.token_bytes(dtype, kinds=("index",))  # codecs take rows of elements: the rest stays as it is
        token = times * (plain + bits / bits_of(raw, dtype) * (held.token_bytes(dtype) - plain))
        states = times * held.state_bytes(dtype)
        chunk = round(token * chunk_tokens)
        prompt = prompt_tokens // chunk_tokens * chunk + states
        fits = None if nbytes is None or not chunk else nbytes // chunk * chunk_tokens
        return PlanRow(
            tier, codec_of(serde), nbytes, bits, codec_of(serde) != "raw", token, chunk, states, prompt, fits,
            None if nbytes is None or not prompt else nbytes // prompt,
        )  # fmt: skip

    coded = [raw, *(serde for serde in serdes if codec_of(serde) != "raw")]
    rows = [row(place.tier, raw, place.nbytes, host=True) for place in places if place.host]
    stores = [place for place in places if not place.host]
    rows += [row(place.tier, serde, place.nbytes) for place in stores for serde in coded]
    if not stores:
        rows += [row("store", serde, None) for serde in coded]
    return Plan(
        model, dtype, ranks, chunk_tokens, prompt_tokens, model.token_bytes(dtype), rank.token_bytes(dtype),
        model.state_bytes(dtype), rank.held_bytes(dtype, prompt_tokens), tuple(rows),
    )  # fmt: skip
