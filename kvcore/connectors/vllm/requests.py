"""What a request's KV depends on besides its tokens: images and sounds, prompt embeddings, adapter, salt.

What cannot be identified is not cached: `identify` says so, with a reason to count it by. A wrong guess would serve
one request's KV to another.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.connectors.vllm.weights import content_digest, file_signature, snapshot_commit
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.engine.keys import ExtraKey, Namespace
from kvcore.errors import ConfigError, StoreError

__all__ = ["AdapterNames", "RequestIdentity", "Uncacheable", "identify"]

_MEDIA_TAG = b"kvcore media 1\n"
_EMBEDS_TAG = b"kvcore prompt embeddings 1\n"
_CONTENT_HASH = re.compile(r"(?:.*:)?[0-9a-f]{64,128}", re.DOTALL)
"""What vLLM makes of an item's content, an adapter's name before it. Ids that callers choose look different."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Whose KV a request's is: with its tokens, all that its chunk keys are made of."""

    namespace: Namespace
    extra_keys: tuple[ExtraKey, ...]


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """Why a request cannot be cached.

    Parameters
    ----------
    reason : str
        For counters: ``"adapter"``, ``"salt"``, ``"media"``, ``"embeddings"``; ``"tokens"`` and ``"blocks"`` come from
        the scheduler side.
    detail : str
        For people.
    """

    reason: str
    detail: str


class AdapterNames:
    """What LoRA adapters are called in keys: a name, and a digest of the content.

    The content is read once. If its files change afterwards, nobody can tell which ones the engine has in use: requests
    with this adapter are no longer cached until the engine is started anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], tuple[object, str]] = {}

    def name(self, lora: Any) -> str | Uncacheable:
        """Return what an adapter (vLLM's ``LoRARequest``) is called, or why it cannot be told."""
        path = Path(os.path.expanduser(lora.lora_path))
        # vLLM takes names of the hub, too, and tells nobody which commit it has fetched. (`Path.exists` may raise.)
        if not os.path.exists(path):
            return Uncacheable(
                "adapter",
                f"adapter {lora.lora_name!r} ({lora.lora_path}) is not in a folder of this machine; fetch it, and give "
                "its folder as lora_path",
            )
        key = (lora.lora_name, int(lora.lora_int_id), str(path))
        try:
            signature = file_signature(path)
            known = self._known.get(key)
            if known is None:
                commit = snapshot_commit(path)
                content = f"commit:{commit}" if commit else f"sampled:{content_digest(path).hex()}"
                known = self._known[key] = (signature, f"{lora.lora_name}@{content}")
        except (StoreError, ConfigError) as error:
            return Uncacheable("adapter", f"adapter {lora.lora_name!r} cannot be identified: {error}")
        if known[0] != signature:
            return Uncacheable(
                "adapter", f"the files of adapter {lora.lora_name!r} have changed since it was first used"
            )
        return known[1]


def identify(
    request: Any, namespace: Namespace, adapters: AdapterNames, *, trust_media_ids: bool = False
) -> RequestIdentity | Uncacheable:
    """Tell whose KV a request's is.

    Parameters
    ----------
    request : vllm.v1.request.Request
    namespace : Namespace
        The engine's.
    adapters : AdapterNames
    trust_media_ids : bool
        Take ids that callers gave to their images and sounds for the content: who uses one id for two contents gets
        the wrong KV, and so do all others. Otherwise such requests are not cached.
    """
    adapter = ""
    if getattr(request, "lora_request", None) is not None:
        name = adapters.name(request.lora_request)
        if isinstance(name, Uncacheable):
            return name
        adapter = name
    media = _media(request, trust_media_ids)
    if isinstance(media, Uncacheable):
        return media
    embeds = _embeds(request, namespace.chunk_tokens)
    if isinstance(embeds, Uncacheable):
        return embeds
    salt = getattr(request, "cache_salt", None) or ""
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        return Uncacheable("salt", f"cache_salt is no text that can be written: {error}")
    own = namespace.for_request(adapter=adapter, salt=salt)
    return RequestIdentity(own, (*media, *embeds))


def _media(request: Any, trust_ids: bool) -> list[ExtraKey] | Uncacheable:
    """One extra key for each image, sound, ...: kind, content hash, and where it is."""
    from blake3 import blake3

    keys = []
    for feature in getattr(request, "mm_features", None) or ():
        name = getattr(feature, "identifier", None)
        place = feature.mm_position
        if not name:
            return Uncacheable("media", f"a {feature.modality} at token {place.offset} has no content hash")
        if not trust_ids and not _CONTENT_HASH.fullmatch(name):
            return Uncacheable(
                "media", f"a {feature.modality} at token {place.offset} is named by its sender, not by its content"
            )
        if place.length < 1:
            return Uncacheable("media", f"a {feature.modality} at token {place.offset} stands for no token")
        kind, text = feature.modality.encode(), name.encode()
        digest = blake3(_MEDIA_TAG + len(kind).to_bytes(4, "little") + kind + text)
        mask = getattr(place, "is_embed", None)
        if mask is not None:
            digest.update(b"\0mask\0" + np.packbits(_array(mask).astype(bool)).tobytes())
        keys.append(ExtraKey(place.offset, place.offset + place.length, digest.digest()))
    return keys


def _embeds(request: Any, chunk_tokens: int) -> list[ExtraKey] | Uncacheable:
    """One extra key for what each chunk has of the prompt embeddings, so that prompts share their common prefix."""
    from blake3 import blake3

    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None:
        return []
    if getattr(embeds, "ndim", 0) != 2 or len(embeds) > request.num_prompt_tokens:
        return Uncacheable("embeddings", "prompt embeddings are not one row for each token of the prompt")
    dtype = dtype_name(to_dtype(embeds.dtype))
    is_token = getattr(request, "prompt_is_token_ids", None)
    keys = []
    for start in range(0, len(embeds), chunk_tokens):
        stop = min(start + chunk_tokens, len(embeds))
        digest = blake3(_EMBEDS_TAG + f"{dtype} {stop - start} {embeds.shape[1]}\n".encode())
        digest.update(_array(embeds[start:stop]).tobytes())
        if is_token is not None:
            digest.update(b"\0mask\0" + np.packbits(np.asarray(is_token[start:stop], dtype=bool)).tobytes())
        keys.append(ExtraKey(start, stop, digest.digest()))
    return keys


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    """The bytes of a tensor or array, in host memory, in order."""
    if hasattr(tensor, "detach"):
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return np.asarray(flat.view(torch.uint8).numpy() if flat.dtype != torch.bool else flat.numpy())
    return np.ascontiguousarray(tensor).reshape(-1)
