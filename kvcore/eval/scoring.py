"""The model's side: KV of a prefix, and how predictions from other KV differ from those of the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from kvcore.connectors.transformers import cache_argument
from kvcore.connectors.transformers_model import check_cacheable, check_layers
from kvcore.dtypes import BFLOAT16

__all__ = ["Predictions", "Scores", "compare", "prefill", "score"]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]

_ROWS = 64  # of logits at a time in float64, which a whole vocabulary makes large


@dataclass(frozen=True, slots=True)
class Predictions:
    """Logits ``[n, vocabulary]`` of n next tokens, and the tokens that really follow."""

    logits: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """How predictions differ from the reference's, token by token.

    Parameters
    ----------
    kl : float64 array ``[n]``
        Kullback-Leibler divergence of the prediction from the reference's, nats.
    loss : float64 array ``[n]``
        Negative log-likelihood of the real token under the prediction, nats.
    reference_loss : float64 array ``[n]``
        The same under the reference's.
    agree : bool array ``[n]``
        Whether both find the same token most likely.
    """

    kl: Floats
    loss: Floats
    reference_loss: Floats
    agree: npt.NDArray[np.bool_]


def prefill(model: Any, tokens: Sequence[int]) -> tuple[Array, Array]:
    """Compute the KV of tokens and round it to bfloat16, the form in which it would be stored.

    Returns
    -------
    k, v : bfloat16 arrays ``[layers, heads, T, width]``

    Raises
    ------
    UnsupportedOpError
        The model keeps more or other than plain keys and values.
    """
    check_cacheable(model, "")
    cache = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # none are wanted, and those of all tokens would be large
    with torch.inference_mode():
        model(input_ids=_batch(model, tokens), **arguments)
    check_layers(cache)
    k, v = (
        torch.stack([getattr(layer, name)[0] for layer in cache.layers]).to("cpu", torch.bfloat16).contiguous()
        for name in ("keys", "values")
    )
    return _numpy(k), _numpy(v)


def score(model: Any, k: Array, v: Array, tokens: Sequence[int]) -> Predictions:
    """Predict each token but the first from those before it, in one forward pass behind the KV of a prefix.

    Parameters
    ----------
    k, v : bfloat16 arrays ``[layers, heads, T, width]``
        What the prefix's cache holds, exact or not.
    tokens : sequence of int
        Those that follow the prefix; n + 1 of them give n predictions.
    """
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(zip(k, v, strict=True)):
        cache.update(_tensor(keys, model), _tensor(values, model), index)
    arguments = {cache_argument(model): cache, "use_cache": True}
    with torch.inference_mode():
        logits = model(input_ids=_batch(model, tokens[:-1]), **arguments).logits[0]
    return Predictions(logits, torch.tensor(list(tokens[1:]), device=logits.device))


def compare(reference: Predictions, other: Predictions) -> Scores:
    """Hold predictions of the same tokens against the reference's."""
    pieces = []
    for start in range(0, len(reference.targets), _ROWS):
        rows = slice(start, start + _ROWS)
        targets = reference.targets[rows, None]
        p = reference.logits[rows].double().log_softmax(-1)
        q = other.logits[rows].double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        agree = reference.logits[rows].argmax(-1) == other.logits[rows].argmax(-1)
        pieces.append((kl, -q.gather(-1, targets)[:, 0], -p.gather(-1, targets)[:, 0], agree))
    kl, loss, reference_loss, agree = (torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True))
    return Scores(kl, loss, reference_loss, agree)


def _batch(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=model.device)


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.view(torch.int16).numpy().view(BFLOAT16)
    return array


def _tensor(array: Array, model: Any) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))[None].to(model.device, model.dtype)
