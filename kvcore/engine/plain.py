"""Engines for models whose layers are alike: keys and values of every token, in one piece, over one store or tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvcore.codecs import Codec, get_codec
from kvcore.dtypes import to_dtype
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import Namespace
from kvcore.engine.parts import CachePart
from kvcore.engine.transfer import WINDOW, Misses
from kvcore.errors import ConfigError
from kvcore.layout import Layout
from kvcore.memory import BufferPool, LayoutDesc, MemoryPlan
from kvcore.ops import Backend
from kvcore.runtime import HostRuntime
from kvcore.serde.builtin import codec_serde
from kvcore.serde.processor import AsyncSerdeProcessor
from kvcore.tiers.arena import HostArena
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.store_tier import StoreTier
from kvcore.tiers.stores import Store
from kvcore.tiers.tiered import TieredCache

__all__ = ["plain_engine", "plain_part"]

_LOADS = 4
"""Loads that find room at a time where host memory is but a staging buffer. What is not used takes no pages."""
_BUFFERS = 1 << 40


def plain_part(namespace: Namespace, *, layers: int, heads: int, width: int) -> CachePart:
    """Return the one part of a model that keeps keys and values of every token, and all of them alike.

    Parameters
    ----------
    namespace : Namespace
        Decides the element type and the tokens of a chunk.
    layers, heads, width : int
        Layers of the model, its KV heads, and the channels of a head.

    Raises
    ------
    LayoutError
        An extent below 1.
    """
    k_dtype, v_dtype = (namespace.kv_dtype,) * 2 if isinstance(namespace.kv_dtype, str) else namespace.kv_dtype
    # As `chunk_desc` has it: what engines with other memory put into the same tiers can then be had from there.
    text = "LKTHD" if k_dtype == v_dtype else "L[K:THD,V:THD]"
    layout = Layout(text, L=layers, T=namespace.chunk_tokens, H=heads, D=width)
    desc = LayoutDesc(layout, {"K": to_dtype(k_dtype), "V": to_dtype(v_dtype)})
    return CachePart(desc, tuple(range(layers)), (0, heads), heads)


def plain_engine(
    store: Store | TieredCache,
    namespace: Namespace,
    *,
    layers: int,
    heads: int,
    width: int,
    backend: Backend,
    codec: Codec | str | None = None,
    codecs: Sequence[str] | None = None,
) -> CacheEngine:
    """Open an engine with a `plain_part`, whose hits are whole chunks.

    Parameters
    ----------
    store : Store or TieredCache
        A store by itself, without host memory in front that would keep anything; or tiers. It stays the caller's.
    namespace, layers, heads, width
        As in `plain_part`.
    backend : Backend
        Its ops move, digest, encode and decode the bytes.
    codec : Codec or str
        How chunks are coded that this engine writes to a store: a preset's name, or a codec with options, such as
        ``get_codec("balanced", nonfinite="raw")`` with a policy for NaN and infinities; ``"raw"`` if not given. Tiers
        have their serdes instead.
    codecs : sequence of str, optional
        The codecs whose frames it takes from the store: `codec`, ``"raw"`` and ``"lossless"`` if not given. The codec
        is no part of a key: who stored a chunk first decided how, and a frame of a codec that is not accepted is a
        miss. It stays where it is, for those who accept it; nothing that is stored is coded again.

    Raises
    ------
    ConfigError
        There is no such codec, `codecs` leaves out the one that is written, or codecs were given for tiers; or host
        memory has no room for a chunk.
    UnsupportedOpError
        The backend lacks one of the ops.
    LayoutError
        The extents do not fit a frame.
    """
    part = plain_part(namespace, layers=layers, heads=heads, width=width)
    given = isinstance(store, TieredCache)
    if given and (codec is not None or codecs is not None):
        raise ConfigError("tiers have serdes of their own: say there how KV is coded, and leave out codec, codecs")
    misses = Misses()
    if isinstance(store, TieredCache):
        tiers = store
    else:
        tiers = _tiers_over(store, part, backend, "raw" if codec is None else codec, codecs, _LookupFailures(misses))
    try:
        return CacheEngine(
            namespace,
            [part],
            tiers,
            backend=backend,
            model_layers=layers,
            block_tokens=namespace.chunk_tokens,
            misses=misses,
            own=not given,
        )
    except BaseException:
        if not given:
            tiers.close()
        raise


def _tiers_over(
    store: Store,
    part: CachePart,
    backend: Backend,
    codec: Codec | str,
    codecs: Sequence[str] | None,
    observer: TierObserver,
) -> TieredCache:
    """Put a store behind as much host memory as chunks need on their way."""
    codec = get_codec(codec) if isinstance(codec, str) else codec
    accepted = {codec.name, "raw", "lossless"} if codecs is None else set(codecs)
    for name in sorted(accepted):
        if getattr(get_codec(name), "omits", ()):  # which also says what there is
            raise ConfigError(
                f"frames of codec {name} do not hold all parts, and an engine gives whole chunks back; use "
                "kvcore.codecs.composites, which leave such parts as they are, or another codec"
            )
    if codec.name not in accepted:
        raise ConfigError(
            f"chunks are written as {codec.name}, but only {', '.join(sorted(accepted))} would be accepted: what "
            f"this engine stores it could never use; add {codec.name!r} to codecs"
        )
    serde = codec_serde(backend, codec, sorted(accepted))
    size = MemoryPlan.of([part.desc]).size
    with contextlib.ExitStack() as stack:
        arena = HostArena(HostRuntime(), 2 * _LOADS * WINDOW * size, pinned=False, min_bytes=2 * WINDOW * size)
        stack.callback(arena.close)
        processor = AsyncSerdeProcessor(serde.serializer, serde.deserializer)
        stack.callback(processor.close)
        wrapped = SerdeStore(store, processor, BufferPool(_BUFFERS), max_workers=1, window=1)
        stack.callback(wrapped.close)
        host = HostTier(arena)
        stack.callback(host.clear)
        tier = StoreTier("store", wrapped)
        tiers = TieredCache(host, [tier], store_policy="buffer_only", max_in_flight=2, observer=observer)
        opened = stack.pop_all()

        def close() -> None:
            opened.close()
            arena.close()  # where somebody was still reading the first time

        tiers.on_close = close
        return tiers


class _LookupFailures(TierObserver):
    """Counts lookups that failed: a store that cannot be asked is a miss."""

    def __init__(self, misses: Misses) -> None:
        self._misses = misses

    def failure(self, tier: str, operation: str, error: Exception) -> None:
        """See `TierObserver.failure`."""
        if operation == "lookup":
            self._misses.count("store", f"tier {tier} cannot be asked: {error}")
