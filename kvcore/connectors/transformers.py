"""Saves the KV cache of a transformers model, and restores it: another request, process or day.

>>> cache = PrefixKVCache.for_model(model, store="fs:kv-store")  # doctest: +SKIP
>>> kv, hit_tokens = cache.restore(tokens)  # doctest: +SKIP
>>> output = model.generate(tokens, cache=kv)  # doctest: +SKIP
>>> cache.save(tokens, kv)  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from kvcore.codecs.contract import Codec
from kvcore.connectors.transformers_memory import TensorKV, allocate
from kvcore.connectors.transformers_model import (
    cache_shape,
    check_cacheable,
    check_layers,
    model_rope,
    weights_revision,
)
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import ExtraKey, Namespace
from kvcore.engine.plain import plain_engine
from kvcore.engine.transfer import StoreReport
from kvcore.errors import ConfigError, LayoutError, UnsupportedOpError
from kvcore.ops import Backend, open_backend
from kvcore.rope import RopeParams
from kvcore.tiers.stores import Store, open_store
from kvcore.tiers.tiered import TieredCache

__all__ = ["KV_DTYPES", "PrefixKVCache", "SaveReport", "cache_argument"]

KV_DTYPES = ("bfloat16", "float16", "float32")
"""Element types that K and V may be stored in."""

SaveReport: TypeAlias = StoreReport
"""What `PrefixKVCache.save` did."""


def cache_argument(model: Any) -> str:
    """Return the name of the argument of ``model.forward`` that takes the cache.

    ``"cache"`` in recent transformers, ``"past_key_values"`` before, and in models that are not of transformers' own.

    Raises
    ------
    UnsupportedOpError
        The model takes neither.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    name = type(model).__name__
    raise UnsupportedOpError(f"{name}.forward takes no cache; its arguments are {', '.join(parameters)}")


class PrefixKVCache:
    """The KV of token prefixes of one model, in a store. Get one from `for_model`.

    Parameters
    ----------
    model : PreTrainedModel
    engine : CacheEngine
        Of the model's namespace, with a `kvcore.engine.plain.plain_part` of its shape.

    Attributes
    ----------
    engine : CacheEngine
    refused : int
        Chunks that `save` left out, because the codec does not take a value of theirs (a NaN or infinity in a lossy
        one, under policy ``"error"``), or of one before them.
    """

    def __init__(self, model: Any, engine: CacheEngine) -> None:
        import torch

        self.engine = engine
        self.refused = 0
        self._config = model.config
        self._dtype, self._device = model.dtype, model.device
        self._shape = cache_shape(model)
        self._kv_dtype = getattr(torch, str(engine.namespace.kv_dtype))

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        store: Store | TieredCache | str,
        backend: Backend | str | None = None,
        name: str | None = None,
        revision: str | None = None,
        kv_dtype: object = None,
        adapter: str = "",
        salt: str = "",
        chunk_tokens: int = 256,
        rope: RopeParams | None = None,
        codec: Codec | str | None = None,
        codecs: Sequence[str] | None = None,
    ) -> PrefixKVCache:
        """Make a cache for a model; everything that identifies its KV is read from the model unless it is given.

        Parameters
        ----------
        model : PreTrainedModel
            Decoder-only, on one device. Memory of other devices than the CPU is copied through the host.
        store : Store, TieredCache or str
            Or what `kvcore.tiers.stores.open_store` opens: ``"memory:"``, ``"fs:DIRECTORY"``, ``"resp://HOST"``, ...
            `close` closes what was opened here; a store or tiers that were given stay open.
        backend : Backend or str, optional
            Or its name; by default the best one for the CPU's memory.
        name : str, optional
            Model id; by default the path or hub id that the model was loaded from.
        revision : str, optional
            Revision of the weights; by default the hub's commit, or a digest of the weights in memory, with
            the constant that the model multiplies rotated keys by where there is one.
        kv_dtype : dtype or name, optional
            Element type that K and V are stored in, one of `KV_DTYPES`; by default the model's. A narrower one is
            lossy: values are rounded to it once.
        adapter : str
            The LoRA or other adapter in force; needed where the model has any.
        salt : str
            Separates tenants who must not see each other's hits.
        chunk_tokens : int
        rope : RopeParams, optional
            How keys are rotated, for models where it cannot be read for sure.
        codec : Codec or str
            How KV is coded that this cache writes to a store: ``"raw"`` if not given, ``"lossless"``, ``"high"``,
            ``"balanced"``, ``"small"``, ... Tiers have serdes of their own.
        codecs : sequence of str, optional
            The codecs whose frames are taken from the store; by default `codec`, ``"raw"`` and ``"lossless"``.

        Raises
        ------
        UnsupportedOpError
            The model's cache is not one of plain keys and values of every token.
        ConfigError
            Something that identifies the KV is neither given nor to be found, or an argument means nothing.
        NoBackendError, BackendLoadError, StoreError
        """
        check_cacheable(model, adapter)
        kv_name = dtype_name(to_dtype(model.dtype if kv_dtype is None else kv_dtype))
        if kv_name not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_name} is no type that K and V are stored in; {', '.join(KV_DTYPES)} are")
        model_id = name or getattr(model.config, "_name_or_path", "")
        if not model_id:
            raise ConfigError(f"this {type(model).__name__} was not loaded from anywhere; pass name='...'")
        shape = cache_shape(model)
        namespace = Namespace(
            model=model_id,
            revision=weights_revision(model) if revision is None else revision,
            adapter=adapter,
            kv_dtype=kv_name,
            rope=model_rope(model) if rope is None else rope,
            chunk_tokens=chunk_tokens,
            salt=salt,
        )
        backend = backend if isinstance(backend, Backend) else open_backend(backend, fallback="error")
        opened = open_store(store) if isinstance(store, str) else store
        try:
            engine = plain_engine(
                opened,
                namespace,
                layers=shape.layers,
                heads=shape.heads,
                width=shape.width,
                backend=backend,
                codec=codec,
                codecs=codecs,
            )
        except BaseException:
            if isinstance(store, str):
                opened.close()
            raise
        if isinstance(store, str):
            engine.on_close(opened.close)
        return cls(model, engine)

    @property
    def misses(self) -> Counter[str]:
        """Chunks that could not be used though they were looked for, by reason.

        Those of `CorruptFrameError`; ``"codec"`` where a frame's codec is not accepted or the backend lacks its ops,
        ``"store"`` where the medium failed, ``"memory"`` where there was no room for it, ``"absent"`` where a chunk
        vanished after it was looked up, ``"lease"`` where its memory was held for too long.
        """
        return self.engine.misses

    def close(self) -> None:
        """Free threads and buffers, and close the store if it was given by its URI."""
        self.engine.close()

    def __enter__(self) -> PrefixKVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, tokens: Any, *, extra_keys: Sequence[ExtraKey] = ()) -> int:
        """Return how many leading tokens `restore` would find; at least one token is left to compute."""
        return self.engine.lookup(_token_ids(tokens), extra_keys=extra_keys)

    def save(
        self,
        tokens: Any,
        cache: Any,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        progress: Callable[[int], None] | None = None,
    ) -> SaveReport:
        """Store the whole chunks of a prefix that are not stored yet.

        A lossy codec takes no NaN and no infinity: a chunk that has one is left out with those after it, and the
        report counts them. A policy may say otherwise: ``get_codec("balanced", nonfinite="raw")``.

        Parameters
        ----------
        tokens : sequence of int, or integer array or tensor ``[num_tokens]`` or ``[1, num_tokens]``
            The tokens that the cache begins with. No padding.
        cache : DynamicCache
            Holds at least these tokens; it may hold more, and is left as it is.
        extra_keys : sequence of ExtraKey
            Identify inputs that token ids do not: images, prompt embeddings.
        progress : callable, optional
            Called after each chunk with the tokens covered so far.

        Raises
        ------
        LayoutError
            The cache has a batch, fewer tokens, or another shape than the model's.
        UnsupportedOpError
            A layer of the cache is not a plain `DynamicLayer`, or the backend lacks the codec's ops.
        QuantizationError
            A value is too large for `kv_dtype`.
        StoreError
            The store failed; what it holds is of use.
        """
        ids = _token_ids(tokens)
        memory = TensorKV(self.engine.backend, self._tensors(cache, len(ids)), self._kv_dtype)
        report = self.engine.store(ids, memory, extra_keys=extra_keys, wait=True, progress=progress)
        self.refused += report.chunks_refused
        return report

    def restore(self, tokens: Any, *, extra_keys: Sequence[ExtraKey] = ()) -> tuple[Any, int]:
        """Return a new `DynamicCache` with the longest stored prefix, and its number of tokens.

        Compute the tokens after it: ``model(tokens[:, hit:], cache=kv)``; there is at least one.

        Parameters
        ----------
        tokens, extra_keys
            As in `save`.

        Returns
        -------
        cache : DynamicCache
            Of the model's dtype, on its device; empty if nothing is stored.
        hit_tokens : int
            A multiple of the chunk size.
        """
        import torch
        from transformers import DynamicCache

        ids = _token_ids(tokens)
        keys = self.engine.keys(ids, extra_keys=extra_keys)
        found = self.engine.lookup_keys(keys, len(ids))
        cache = DynamicCache(config=self._config)
        if not found:
            return cache, 0
        shape = (1, self._shape.heads, found, self._shape.width)
        planes = allocate(self._shape.layers, shape, self._dtype, self._device)
        memory = TensorKV(self.engine.backend, planes, self._kv_dtype)
        hit = self.engine.retrieve_keys(keys, memory, start=0, stop=found)
        with torch.no_grad():
            for index, (k, v) in enumerate(planes if hit else ()):
                # An empty update sets the layer up. The tensors are then put in its place: update would copy them.
                cache.update(k[:, :, :0], v[:, :, :0], index)
                cache.layers[index].keys, cache.layers[index].values = k[:, :, :hit], v[:, :, :hit]
        return cache, hit

    def _tensors(self, cache: Any, tokens: int) -> list[tuple[Any, Any]]:
        """Return the cache's (keys, values) by layer, checked."""
        from transformers import DynamicCache

        if not isinstance(cache, DynamicCache):
            raise UnsupportedOpError(f"a DynamicCache can be saved, not a {type(cache).__name__}")
        check_layers(cache)
        if len(cache.layers) != self._shape.layers:
            raise LayoutError(f"the cache has {len(cache.layers)} layers, the model {self._shape.layers}")
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        for index, pair in enumerate(pairs):
            for what, tensor in zip(("keys", "values"), pair, strict=True):
                self._check(f"{what} of layer {index}", tensor, tokens)
        return pairs

    def _check(self, what: str, tensor: Any, tokens: int) -> None:
        """Raise `LayoutError` unless a plane is ``[1, heads, at least tokens, width]``."""
        if tensor is None or tensor.numel() == 0:
            batch, heads, length, width = 1, self._shape.heads, 0, self._shape.width
        else:
            batch, heads, length, width = tensor.shape
        if batch != 1:
            raise LayoutError(f"{what} hold a batch of {batch} sequences; save one sequence at a time")
        if (heads, width) != (self._shape.heads, self._shape.width):
            raise LayoutError(
                f"{what} have {heads} heads of {width} channels; the model's configuration says {self._shape.heads} of "
                f"{self._shape.width}"
            )
        if length < tokens:
            raise LayoutError(
                f"{what} hold {length} tokens, {tokens} were given; pass the tokens it begins with (the one "
                "generated last is not in it yet)"
            )


def _token_ids(tokens: Any) -> np.ndarray[Any, Any]:
    """Return tokens as an integer array ``[num_tokens]``."""
    host = tokens.detach().cpu().numpy() if hasattr(tokens, "detach") else tokens
    try:
        ids = np.asarray(host)
    except ValueError as error:
        raise ConfigError(f"tokens must be one sequence of integers: {error}") from error
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ConfigError(f"tokens must be one sequence, [num_tokens] or [1, num_tokens], got {list(ids.shape)}")
    return ids
