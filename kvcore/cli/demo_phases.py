"""The two phases of the demo, each the whole life of a process: load the model, measure, say what came out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO, Any

from kvcore.cli.models import load_model, load_tokenizer
from kvcore.connectors.transformers import PrefixKVCache, cache_argument
from kvcore.engine.engine import OPS
from kvcore.errors import ConfigError, KVCoreError
from kvcore.ops import open_backend
from kvcore.tiers.config import open_tiers
from kvcore.tiers.tiered import TieredCache

__all__ = ["run_phase"]

_QUESTION = "\n\nQuestion: What is the text above about? Answer in one sentence.\nAnswer:"
_WARM_UP_TOKENS = 8

Tell = Callable[..., None]


def run_phase() -> None:
    """Read a request from standard input, run its phase, write JSON lines to standard output."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # whatever a library prints from here on goes to the log, not between our lines
        tell = _teller(out)
        request = json.load(sys.stdin)
        try:
            tell(result=_cold(request, tell) if request["phase"] == "cold" else _warm(request, tell))
        except KVCoreError as error:
            tell(error=str(error))


def _cold(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Compute the whole prompt, go on from it, and store its KV."""
    from transformers import DynamicCache

    tell(stage="cold process: load the model", total=None)
    tokenizer = load_tokenizer(request["model"])
    model = load_model(request["model"])
    tokens = _prompt(tokenizer, request["text"], request["max_prompt_tokens"])
    _check_length(model, len(tokens), request["new_tokens"])
    tiers, kv_cache = _open_cache(model, request)
    if len(tokens) <= kv_cache.engine.namespace.chunk_tokens:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens; more than one chunk of {kv_cache.engine.namespace.chunk_tokens} is "
            "needed to restore anything: give a longer --text, or a larger --max-prompt-tokens"
        )
    _warm_up(model, tokens)
    tell(stage=f"cold process: compute {len(tokens):,} tokens", total=None)
    began = time.perf_counter()
    cache = DynamicCache(config=model.config)
    first = _next_token(model, tokens, cache)
    ttft = time.perf_counter() - began
    new = _decode(model, first, cache, request["new_tokens"], "cold", tell)
    tell(stage="cold process: store the KV", total=len(tokens) // kv_cache.engine.namespace.chunk_tokens)
    report = kv_cache.save(tokens, cache, progress=lambda _: tell(advance=1))
    tiers.close()
    if not report.tokens:
        raise ConfigError(f"serde {request['serde']} does not take the values of the first chunk; the log says why")
    return {
        "tokens": tokens,
        "new_tokens": new,
        "generated": tokenizer.decode(new, skip_special_tokens=True),
        "ttft_ms": ttft * 1e3,
        "raw_bytes": report.raw_bytes,
        "stored_bytes": report.stored_bytes,
    }


def _warm(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Restore the prefix, compute the rest, and go on from there."""
    tell(stage="warm process: load the model", total=None)
    tokenizer = load_tokenizer(request["model"])
    model, tokens = load_model(request["model"]), request["tokens"]
    tiers, kv_cache = _open_cache(model, request)
    _warm_up(model, tokens)
    ttft = {}
    for place in ("the store", "host memory"):  # what came from the store is in host memory then
        tell(stage=f"warm process: restore the KV from {place}", total=None)
        began = time.perf_counter()
        restored, tokens_found = kv_cache.restore(tokens)
        next_token = _next_token(model, tokens[tokens_found:], restored)
        ttft[place] = time.perf_counter() - began
        if place == "the store":
            cache, hit, first = restored, tokens_found, next_token
            misses = dict(kv_cache.misses)
    stats = {name: asdict(one) for name, one in tiers.stats().items()}
    new = _decode(model, first, cache, request["new_tokens"], "warm", tell)
    backend = kv_cache.engine.backend
    plans = [backend.plan(op) for op in OPS]
    tiers.close()
    return {
        "hit_tokens": hit,
        "new_tokens": new,
        "generated": tokenizer.decode(new, skip_special_tokens=True),
        "ttft_ms": ttft["the store"] * 1e3,
        "host_ttft_ms": ttft["host memory"] * 1e3,
        "tiers": stats,
        "backend": backend.name,
        "ops": [{"op": p.op, "backend": p.backend, "implementation": p.implementation} for p in plans],
        "misses": misses,
    }


def _teller(out: IO[str]) -> Tell:
    def tell(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return tell


def _open_cache(model: Any, request: dict[str, Any]) -> tuple[TieredCache, PrefixKVCache]:
    """Open host memory and the store behind it, and the model's cache over both."""
    backend = open_backend(request["backend"], fallback="error")
    store = {"store": request["store"], "serde": request["serde"]}
    tiers = open_tiers({"host_bytes": request["host_bytes"], "pinned": False, "tiers": [store]}, backend)
    try:
        cache = PrefixKVCache.for_model(
            model, store=tiers, backend=backend, name=request["model"]["name"], kv_dtype=request["kv_dtype"]
        )
    except BaseException:
        tiers.close()
        raise
    return tiers, cache


def _prompt(tokenizer: Any, text: str, most: int) -> list[int]:
    """The document, cut so that the question fits behind it."""
    question = tokenizer(_QUESTION, add_special_tokens=False)["input_ids"]
    document = tokenizer(text)["input_ids"]
    return [*document[: max(most - len(question), 0)], *question]


def _check_length(model: Any, prompt: int, new: int) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and prompt + new > most:
        raise ConfigError(f"{prompt} + {new} tokens are more than the model's {most}; lower --max-prompt-tokens")


def _warm_up(model: Any, tokens: Sequence[int]) -> None:
    """Let one-time costs (thread pools, lazy initialisation) fall on neither measurement."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    first = _next_token(model, tokens[:_WARM_UP_TOKENS], cache)
    _next_token(model, [first], cache)


def _next_token(model: Any, tokens: Sequence[int], cache: Any) -> int:
    """Compute some tokens behind what the cache holds; return the most likely next one."""
    import inspect

    import torch

    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)], device=model.device), **arguments).logits
    return int(logits[0, -1].argmax())


def _decode(model: Any, first: int, cache: Any, count: int, phase: str, tell: Tell) -> list[int]:
    """Generate greedily, `first` included, to `count` tokens or the end of the text."""
    tell(stage=f"{phase} process: generate", total=count)
    ends = _end_tokens(model)
    new = [first]
    tell(advance=1)
    while len(new) < count and new[-1] not in ends:
        new.append(_next_token(model, new[-1:], cache))
        tell(advance=1)
    return new


def _end_tokens(model: Any) -> set[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
