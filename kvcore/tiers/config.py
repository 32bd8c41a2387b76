"""Tiers as they are written down in a configuration, and opened."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from kvcore.errors import ConfigError
from kvcore.memory import BufferPool
from kvcore.ops import Backend, open_backend
from kvcore.serde import AsyncSerdeProcessor, SerdeConfig, SerdeProcessor, create_serde_processor
from kvcore.tiers.arena import DEFAULT_BYTES, HostArena
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.observer import TierCounters, TierObserver
from kvcore.tiers.prefetch_controller import MAX_IN_FLIGHT
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.store_tier import StoreTier
from kvcore.tiers.stores.breaker import RETRY_SECONDS, check_retry
from kvcore.tiers.stores.guarded import open_guarded
from kvcore.tiers.tiered import TieredCache

__all__ = ["StoreTierConfig", "TiersConfig", "open_tiers"]

TEMPORARY_BYTES = 4 << 30
"""Most bytes of buffers between serdes and stores; as much is taken as is used."""


def _as_pair(given: Any) -> Any:
    """Take one number for both waits."""
    return (given, given) if isinstance(given, (int, float)) and not isinstance(given, bool) else given


_Retry: TypeAlias = Annotated[tuple[float, float], BeforeValidator(_as_pair), AfterValidator(check_retry)]


class StoreTierConfig(BaseModel):
    """A store, and how KV is coded in it.

    Parameters
    ----------
    store : str
        URI of the store.
    serde : str or mapping
        As `SerdeConfig.of` takes it. Tiers of equal serdes share one, and so their frames: a hit in the lower one is
        copied to the upper one.
    name : str
        For metrics and messages; by default ``"disk"`` for ``fs:`` and ``"remote"`` for what is reached by a network.
    read_only : bool
        Nothing is stored there.
    promote : bool
        What was found in a tier below is copied there.
    retry_seconds : (float, float) or float, optional
        After how many seconds it is tried again when it is down: at first, and at most. That of all tiers if not given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    serde: str | dict[str, Any] = "raw"
    name: str = ""
    read_only: bool = False
    promote: bool = True
    retry_seconds: _Retry | None = None

    @field_validator("serde")
    @classmethod
    def _known(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        SerdeConfig.of(given)
        return given

    @property
    def label(self) -> str:
        """The name, given or not."""
        return self.name or _label(self.store)


class TiersConfig(BaseModel):
    """Host memory and the stores behind it.

    Parameters
    ----------
    tiers : sequence of StoreTierConfig
        The fastest first.
    host_bytes : int
        Host memory for KV. Less is granted where the machine has less.
    reserve_host_bytes : int
        RAM to leave to others.
    min_host_bytes : int
        Refuse to start with less: the bytes of a chunk.
    pinned, hugepages, numa_node
        How that memory is taken; see `HostArena`.
    policy : str
        Which objects leave host memory first.
    store_policy : str
        When objects go to the stores; see `TieredCache`.
    max_in_flight : int
        Loads at a time.
    serde_workers, store_workers : int
        Threads of each serde, and batches under way in each store.
    retry_seconds : (float, float) or float
        After how many seconds a store that is down is tried again: at first, and at most; see `GuardedStore`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tiers: tuple[StoreTierConfig, ...] = ()
    host_bytes: int = Field(DEFAULT_BYTES, gt=0)
    reserve_host_bytes: int = Field(0, ge=0)
    min_host_bytes: int = Field(1, gt=0)
    pinned: bool = True
    hugepages: bool = False
    numa_node: int | None = None
    policy: str = "lru"
    store_policy: str = "default"
    max_in_flight: int = Field(MAX_IN_FLIGHT, gt=0)
    serde_workers: int = Field(1, gt=0)
    store_workers: int = Field(2, gt=0)
    retry_seconds: _Retry = RETRY_SECONDS

    @classmethod
    def of(cls, given: TiersConfig | Mapping[str, Any]) -> TiersConfig:
        """Take a configuration as an object or as a mapping; `ConfigError` says what is wrong with it."""
        if isinstance(given, cls):
            return given
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError("; ".join(_complaint(one) for one in error.errors())) from error


def open_tiers(
    config: TiersConfig | Mapping[str, Any],
    backend: Backend | None = None,
    *,
    observer: TierObserver | None = None,
) -> TieredCache:
    """Open stores and serdes, take host memory, and put them together; closing the cache closes them all.

    A store that cannot be reached, now or later, is an empty tier until it is back: see `GuardedStore`.

    Parameters
    ----------
    config : TiersConfig or mapping
    backend : Backend, optional
        Its runtime gives the host memory, its ops run the serdes; without it that which `kvcore.open_backend` chooses.
    observer : TierObserver, optional

    Raises
    ------
    ConfigError
        Something in the configuration means nothing, or the machine has less host memory than `min_host_bytes`.
    StoreError
        A store cannot be opened, and will not be by waiting: another's directory, no permission.
    """
    config = TiersConfig.of(config)
    backend = open_backend() if backend is None else backend
    with contextlib.ExitStack() as stack:
        arena = HostArena(
            backend.runtime,
            config.host_bytes,
            reserve_bytes=config.reserve_host_bytes,
            pinned=config.pinned,
            hugepages=config.hugepages,
            numa_node=config.numa_node,
            min_bytes=config.min_host_bytes,
        )
        stack.callback(arena.close)  # the last: others hold views of its memory
        told = TierCounters(observer)
        tiers = _open_stores(config, backend, told, stack)
        host = HostTier(arena, policy=config.policy)
        stack.callback(host.clear)
        cache = TieredCache(
            host,
            tiers,
            store_policy=config.store_policy,
            max_in_flight=config.max_in_flight,
            observer=told,
        )
        opened = stack.pop_all()

        def close() -> None:
            opened.close()
            arena.close()  # where somebody was still reading the first time

        cache.on_close = close
        return cache


def _open_stores(
    config: TiersConfig, backend: Backend, told: TierObserver, stack: contextlib.ExitStack
) -> Sequence[StoreTier]:
    pool = BufferPool(TEMPORARY_BYTES)
    wanted = [SerdeConfig.of(tier.serde) for tier in config.tiers]
    serdes: list[SerdeProcessor] = []
    for number, one in enumerate(wanted):
        first = wanted.index(one)
        if first < number:
            serdes.append(serdes[first])
            continue
        serde = create_serde_processor(one, backend, config.serde_workers)
        stack.callback(serde.close)
        serdes.append(serde)
        if isinstance(serde, AsyncSerdeProcessor):
            serde.on_step = functools.partial(told.serde, _serde_label(one))
    tiers = []
    parts = zip(config.tiers, serdes, map(_serde_label, wanted), strict=True)
    for tier, serde, serde_name in parts:  # opened after the serdes, and closed before them
        store = open_guarded(
            tier.store,
            label=tier.label,
            retry_seconds=tier.retry_seconds or config.retry_seconds,
            on_down=functools.partial(told.degraded, tier.label),
            on_up=functools.partial(told.recovered, tier.label),
        )
        stack.callback(store.close)
        wrapped = SerdeStore(store, serde, pool, max_workers=config.store_workers)
        stack.callback(wrapped.close)
        tiers.append(StoreTier(tier.label, wrapped, tier.read_only, tier.promote, serde_name))
    return tiers


def _serde_label(config: SerdeConfig) -> str:
    """Return what a serde is called in metrics: types and presets, and nothing of keys or tenants."""
    if config.type == "chain":
        return "+".join(_serde_label(SerdeConfig.of(step)) for step in config.kwargs["steps"])
    preset = config.kwargs.get("preset")
    return config.type if preset is None else f"{config.type}:{preset}"


def _label(uri: str) -> str:
    scheme, _, rest = uri.partition(":")
    if scheme in ("capped", "fault"):  # they stand before another one
        return _label(rest.partition(":")[2])
    return {"fs": "disk", "memory": "memory"}.get(scheme, "remote")


def _complaint(error: Any) -> str:
    """Say in one line what is wrong with a value, and where."""
    place = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        fields = list((StoreTierConfig if error["loc"][0] == "tiers" else TiersConfig).model_fields)
        near = difflib.get_close_matches(str(error["loc"][-1]), fields, n=1)
        said = f"no such setting; {f'did you mean {near[0]!r}? ' if near else ''}there are {', '.join(fields)}"
    return f"tiers: {place}: {said}" if place else f"tiers: {said}"
