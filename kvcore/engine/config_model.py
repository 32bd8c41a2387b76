"""`EngineConfig`: everything about an engine that a user may set.

The page docs/configuration.md is made from the fields below: what a setting does is said here, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from kvcore.engine.config_values import (
    GIB,
    Form,
    choice,
    masked,
    read_bytes,
    read_count,
    read_disk,
    read_flag,
    read_gib,
    read_host,
    read_pair,
    read_path,
    read_real,
    read_serde,
    read_text,
    read_tiers,
    read_uri,
    unless_null,
)
from kvcore.engine.keys import HASHES
from kvcore.tiers.config import StoreTierConfig, TiersConfig
from kvcore.tiers.policies import policy_names
from kvcore.tiers.prefetch_controller import MAX_IN_FLIGHT
from kvcore.tiers.store_controller import STORE_POLICIES
from kvcore.tiers.stores.breaker import RETRY_SECONDS

__all__ = [
    "GROUPS",
    "ConfigRow",
    "EngineConfig",
    "PrefetchConfig",
    "contradictions",
    "field_of",
    "form_of",
    "leaf_names",
    "shown",
    "without_effect",
]

DEFAULT, ARGUMENT = "default", "argument"
_LEVELS = ("", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SEMANTIC = (
    "semantic does not exist: KV found by the meaning of a prompt is that of other tokens, and so changes what the "
    "model answers; write chunked or exact"
)

Flag: TypeAlias = Annotated[bool, BeforeValidator(read_flag), Form("true, false")]
Count: TypeAlias = Annotated[int, BeforeValidator(read_count), Form("number")]
Share: TypeAlias = Annotated[float, BeforeValidator(read_real), Form("number from 0 to 1")]
Gib: TypeAlias = Annotated[float, BeforeValidator(read_gib), Form("GiB, or a size such as `512MiB`", unit="GiB")]
Size: TypeAlias = Annotated[int, BeforeValidator(read_bytes), Form("bytes, or a size such as `64MiB`")]
Text: TypeAlias = Annotated[str, BeforeValidator(read_text), Form("text")]
Secret: TypeAlias = Annotated[str, BeforeValidator(read_text), Form("text", secret=True)]
Serde: TypeAlias = Annotated[
    str | dict[str, Any], BeforeValidator(read_serde), Form("[serde](serdes.md): a name, or a mapping with `type`")
]


class PrefetchConfig(BaseModel):
    """Loading ahead of requests: what is likely to be asked for next goes into host memory before it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    enabled: Flag = Field(
        default=False, description="Load chunks into host memory ahead of the requests that want them."
    )
    watermark: Share = Field(
        default=0.6, ge=0, le=1, description="Share of host memory in use from which on nothing is loaded ahead."
    )
    max_chunks: Count = Field(default=8, ge=1, description="Most chunks that are loaded ahead for one sequence.")


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One setting, for people: its name, its value as text (secrets hidden), and where that came from."""

    name: str
    value: str
    source: str


class EngineConfig(BaseModel):
    """What a user may set. Values are taken as they are or as text; each field's description says what it does.

    Examples
    --------
    >>> config = EngineConfig(local_disk="/var/cache/kvcore", max_local_disk_size="200GB", serde="kvs1")
    >>> [tier.store for tier in config.to_tiers().tiers]
    ['capped:200000000000,policy=lru:fs:/var/cache/kvcore']
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    chunk_tokens: Count = Field(
        default=256,
        ge=1,
        lt=2**32,
        description="Tokens of a chunk, the unit in which KV is stored and found. Part of every key: engines of other "
        "chunks share nothing.",
    )
    save_partial_chunk: Flag = Field(
        default=False,
        description="Store the last chunk of a prompt too where it is not full. It is of use to equal prompts.",
    )
    save_decode: Flag = Field(
        default=True,
        description="Store chunks with tokens in them that the model has written, not only those of prompts.",
    )
    min_retrieve_tokens: Count = Field(
        default=0, ge=0, description="A hit that saves fewer tokens than this is none: computing them is faster."
    )
    lookup_strategy: Annotated[
        str,
        BeforeValidator(choice("lookup strategy", lambda: ("chunked", "exact"), {"semantic": _SEMANTIC})),
        Form("`chunked`, `exact`"),
    ] = Field(
        default="chunked",
        description="`chunked`: the longest prefix of whole chunks that is there. `exact`: all of a prompt's chunks or "
        "nothing.",
    )

    model_name: Text = Field(
        default="", description="Model id to use in keys instead of the one that the inference engine gives."
    )
    model_revision: Text = Field(
        default="",
        description="Revision of the weights to use in keys. KV of other weights is never used, so name it where the "
        "inference engine does not know it.",
    )
    salt: Secret = Field(
        default="", description="Separates tenants: engines of other salts never see each other's KV. Never shown."
    )
    hash: Annotated[str, BeforeValidator(choice("hash", lambda: tuple(HASHES))), Form("`blake3`, `sha256`")] = Field(
        default="blake3", description="Hash of the keys. Part of every key."
    )

    local_cpu: Flag = Field(
        default=True,
        description="Keep KV in host memory. `false`: host memory is only a buffer on the way to and from the stores.",
    )
    max_local_cpu_size: Gib = Field(
        default=5.0,
        gt=0,
        description="Host memory for KV. Less is granted where the machine has less, and the log says so.",
    )
    reserve_local_cpu_size: Gib = Field(default=0.0, ge=0, description="Memory of the machine to leave to others.")
    local_cpu_use_hugepages: Flag = Field(default=False, description="Take host memory in pages of 2 MiB.")
    numa_node: Annotated[
        int | None, BeforeValidator(unless_null(read_count, None)), Form("number, or null for any")
    ] = Field(default=None, ge=0, description="NUMA node of the host memory.")
    pinned: Flag = Field(default=True, description="Lock the pages of host memory, so that devices copy at full speed.")
    cache_policy: Annotated[
        str, BeforeValidator(choice("policy", policy_names)), Form("[policy](eviction.md), in any case")
    ] = Field(
        default="lru", description="What leaves first where there is no more room, in host memory and in `local_disk`."
    )

    local_disk: Annotated[
        bool | str, BeforeValidator(unless_null(read_disk, False)), Form("directory, `file://` URI, true, false")
    ] = Field(
        default=False,
        description="Keep KV in this directory too: a tier named `disk`, the first behind host memory. `true`: in "
        "`$XDG_CACHE_HOME/kvcore/kv`. The store's options may follow: `/var/cache/kvcore?direct=1`.",
    )
    max_local_disk_size: Gib = Field(
        default=0.0, ge=0, description="Capacity of `local_disk`; 0: all that the disk has."
    )
    tiers: Annotated[
        tuple[StoreTierConfig, ...],
        BeforeValidator(unless_null(read_tiers, ())),
        Form("list of URIs, or of mappings with `store`, `serde`, `name`, `read_only`, `promote`, `retry_seconds`"),
    ] = Field(default=(), description="[Stores](stores.md) behind host memory, the fastest first.")
    remote_url: Annotated[
        str, BeforeValidator(unless_null(read_uri, "")), Form("URI of a [store](stores.md), or `redis://`, `rediss://`")
    ] = Field(default="", description="One more store, the last: a tier named `remote`.")
    serde: Serde = Field(default="raw", description="How KV is coded in tiers that do not say it themselves.")
    remote_serde: Annotated[
        str | dict[str, Any] | None,
        BeforeValidator(unless_null(read_serde, None)),
        Form("as `serde`, or null for the same"),
    ] = Field(default=None, description="How KV is coded in `remote_url`.")
    store_policy: Annotated[
        str,
        BeforeValidator(choice("store policy", lambda: STORE_POLICIES)),
        Form(", ".join(f"`{name}`" for name in STORE_POLICIES)),
    ] = Field(default="default", description="When KV goes to the stores; see [tiers](tiers.md).")
    max_in_flight: Count = Field(default=MAX_IN_FLIGHT, ge=1, description="Loads under way at a time.")
    serde_workers: Count = Field(default=1, ge=1, description="Threads of each serde.")
    store_workers: Count = Field(default=2, ge=1, description="Batches under way in each store.")
    store_retry_seconds: Annotated[
        tuple[float, float], BeforeValidator(read_pair), Form("seconds, or two numbers of them")
    ] = Field(
        default=RETRY_SECONDS,
        description="After how long a store that is down is tried again: at first, and at most. One number: always.",
    )
    prefetch: PrefetchConfig = Field(default_factory=PrefetchConfig, description="Loading ahead of requests.")

    backend: Text = Field(
        default="",
        description="Backend of the memory that KV is in; empty: the best for it. Obeyed, or the start fails.",
    )
    log_level: Annotated[
        str,
        BeforeValidator(choice("log level", lambda: _LEVELS)),
        Form("`debug`, `info`, `warning`, `error`, `critical`, or empty"),
    ] = Field(default="", description="Level of the logger `kvcore`; empty: as the program has it.")
    log_file: Annotated[str, BeforeValidator(read_path), Form("file")] = Field(
        default="", description="File for the log of kvcore; empty: none."
    )
    log_file_bytes: Size = Field(
        default=50 << 20, ge=1, description="A log file of this size is put aside for a new one."
    )
    log_file_count: Count = Field(default=5, ge=0, description="Log files put aside that are kept.")
    metrics: Flag = Field(default=False, description="Count for Prometheus; needs the extra `metrics`.")
    metrics_port: Count = Field(
        default=0, ge=0, le=65535, description="Port that serves the metrics by HTTP; 0: none. Rank r adds r."
    )
    metrics_host: Annotated[str, BeforeValidator(read_host), Form("address or name of a host")] = Field(
        default="127.0.0.1",
        description="Address on which that port listens. By default this machine alone reaches it; in a container take "
        "`0.0.0.0`: all networks, without a password.",
    )
    tracing: Flag = Field(default=False, description="Make OpenTelemetry spans; needs the extra `tracing`.")

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> EngineConfig:
        found = contradictions(self)
        if found:
            raise ValueError("; ".join(text for _, text in found))
        return self

    def __eq__(self, other: object) -> bool:
        """Equal settings, wherever they came from."""
        return isinstance(other, EngineConfig) and self.__dict__ == other.__dict__

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Without secrets, and without what is as it is anyway."""
        for row in self.describe():
            if row.source != DEFAULT:
                yield row.name, row.value

    def describe(self) -> tuple[ConfigRow, ...]:
        """Return every setting with its value and where that came from; secrets are hidden."""
        rows = []
        for name in leaf_names():
            outer, _, inner = name.partition(".")
            owner: BaseModel = getattr(self, outer) if inner else self
            given = ARGUMENT if (inner or outer) in owner.model_fields_set else DEFAULT
            rows.append(ConfigRow(name, shown(name, getattr(owner, inner or outer)), self._sources.get(name, given)))
        return tuple(rows)

    def to_tiers(self) -> TiersConfig:
        """Return the tiers that this is the configuration of: `local_disk`, `tiers`, `remote_url`, in this order."""
        default = {"serde": self.serde}
        tiers = [t if "serde" in t.model_fields_set else t.model_copy(update=default) for t in self.tiers]
        if self.local_disk:
            tiers.insert(0, StoreTierConfig(store=self._disk_uri(), serde=self.serde, name="disk"))
        if self.remote_url:
            serde = self.serde if self.remote_serde is None else self.remote_serde
            tiers.append(StoreTierConfig(store=self.remote_url, serde=serde, name="remote"))
        return TiersConfig(
            tiers=tuple(tiers),
            host_bytes=max(1, round(self.max_local_cpu_size * GIB)),
            min_host_bytes=1,
            reserve_host_bytes=round(self.reserve_local_cpu_size * GIB),
            pinned=self.pinned,
            hugepages=self.local_cpu_use_hugepages,
            numa_node=self.numa_node,
            policy=self.cache_policy,
            store_policy=self.store_policy if self.local_cpu else "buffer_only",
            max_in_flight=self.max_in_flight,
            serde_workers=self.serde_workers,
            store_workers=self.store_workers,
            retry_seconds=self.store_retry_seconds,
        )

    def _disk_uri(self) -> str:
        if self.local_disk is True:
            from kvcore.kernels.images import cache_folder

            folder = str(cache_folder() / "kv")
        else:
            folder = str(self.local_disk)
            folder = str(Path(folder).expanduser()) if folder.startswith("~") else folder
        capacity = round(self.max_local_disk_size * GIB)
        return f"capped:{capacity},policy={self.cache_policy}:fs:{folder}" if capacity else f"fs:{folder}"


GROUPS: dict[str, tuple[str, ...]] = {
    "Chunks": ("chunk_tokens", "save_partial_chunk", "save_decode", "min_retrieve_tokens", "lookup_strategy"),
    "Whose KV it is": ("model_name", "model_revision", "salt", "hash"),
    "Host memory": (
        "local_cpu",
        "max_local_cpu_size",
        "reserve_local_cpu_size",
        "local_cpu_use_hugepages",
        "numa_node",
        "pinned",
        "cache_policy",
    ),
    "Stores": (
        "local_disk",
        "max_local_disk_size",
        "tiers",
        "remote_url",
        "serde",
        "remote_serde",
        "store_policy",
        "max_in_flight",
        "serde_workers",
        "store_workers",
        "store_retry_seconds",
    ),
    "Loading ahead": ("prefetch.enabled", "prefetch.watermark", "prefetch.max_chunks"),
    "What it runs on, and what it tells": (
        "backend",
        "log_level",
        "log_file",
        "log_file_bytes",
        "log_file_count",
        "metrics",
        "metrics_port",
        "metrics_host",
        "tracing",
    ),
}
"""All settings, by what they are about; those of `PrefetchConfig` as ``prefetch.NAME``."""


def leaf_names() -> tuple[str, ...]:
    """Return the names of all settings, as in `GROUPS`."""
    return tuple(name for group in GROUPS.values() for name in group)


def form_of(name: str) -> Form:
    """Return how the values of a setting are written."""
    return next(item for item in field_of(name).metadata if isinstance(item, Form))


def field_of(name: str) -> Any:
    """Return pydantic's description of a setting."""
    outer, _, inner = name.partition(".")
    return PrefetchConfig.model_fields[inner] if inner else EngineConfig.model_fields[outer]


def shown(name: str, value: Any) -> str:
    """Return the text of a setting's value for people, without secrets."""
    if form_of(name).secret:
        return "(set)" if value else ""
    if isinstance(value, str):
        return masked(value)
    if name == "tiers":
        value = [tier.model_dump(exclude_unset=True) for tier in value]
    unit = form_of(name).unit
    return masked(json.dumps(value, ensure_ascii=False)) + (f" {unit}" if unit else "")


def contradictions(config: EngineConfig) -> list[tuple[tuple[str, ...], str]]:
    """Return what cannot be meant, as the settings that it is about and the reason."""
    found: list[tuple[tuple[str, ...], str]] = []
    stores = bool(config.local_disk or config.tiers or config.remote_url)
    if not config.local_cpu and not stores:
        text = "local_cpu is false, and there is no store: nothing would be kept; set local_disk, tiers or remote_url"
        found.append((("local_cpu",), text))
    elif not config.local_cpu and config.store_policy == "write_through":
        text = "local_cpu false is store_policy buffer_only, not write_through; leave one of them out"
        found.append((("local_cpu", "store_policy"), text))
    elif config.store_policy == "buffer_only" and not stores:
        text = "store_policy buffer_only needs a store: set local_disk, tiers or remote_url"
        found.append((("store_policy",), text))
    if config.metrics_port and not config.metrics:
        found.append((("metrics_port", "metrics"), "metrics_port serves metrics, but metrics is false; set it to true"))
    names = ["host", *(["disk"] if config.local_disk else []), *(tier.label for tier in config.tiers)]
    names += ["remote"] if config.remote_url else []
    if len(set(names)) < len(names):
        text = f"tiers need names of their own, got {', '.join(names)}; give some a name= that is not taken"
        found.append((("local_disk", "tiers", "remote_url"), text))
    return found


def without_effect(config: EngineConfig) -> list[tuple[str, str]]:
    """Return settings that say something which does not count, and why."""
    found = []
    if config.max_local_disk_size and not config.local_disk:
        found.append(("max_local_disk_size", "counts with local_disk only"))
    if config.remote_serde is not None and not config.remote_url:
        found.append(("remote_serde", "counts with remote_url only"))
    if not config.metrics_port and "metrics_host" in config.model_fields_set:
        found.append(("metrics_host", "counts with metrics_port only"))
    return found
