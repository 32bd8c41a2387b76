"""What `describe` and `clear` share: the stores of a configuration, or of URIs, opened as tiers without making any."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.cli.output import console
from kvcore.errors import ConfigError
from kvcore.sizes import parse_size

if TYPE_CHECKING:
    from kvcore.engine.config import EngineConfig
    from kvcore.tiers.config import StoreTierConfig
    from kvcore.tiers.tiered import TieredCache

__all__ = ["Opened", "open_configured", "watched"]

_HOST_BYTES = 1 << 20  # no KV passes through


@dataclass(frozen=True, slots=True)
class Opened:
    """Tiers, opened to look at them.

    Parameters
    ----------
    tiers : TieredCache
        Without those of `absent`.
    serdes : dict of str to str
        What codes KV there, by tier, for people.
    capacities : dict of str to int
        Most bytes that a tier holds, where its configuration says so.
    absent : dict of str to str
        Tiers whose directory does not exist or is empty, and their store: opening them would make one.
    config : EngineConfig or None
        None where URIs were given.
    """

    tiers: TieredCache
    serdes: dict[str, str]
    capacities: dict[str, int]
    absent: dict[str, str]
    config: EngineConfig | None


@contextlib.contextmanager
def open_configured(file: Path | None, stores: Sequence[str]) -> Iterator[Opened]:
    """Open the stores of a configuration, or those that are named; close them at the end.

    Parameters
    ----------
    file : Path, optional
        The configuration; without it and without stores, that of the environment.
    stores : sequence of str
        URIs.

    Raises
    ------
    ConfigError
        Both are given; the configuration is wrong, or has no store.
    StoreError
        A store cannot be opened, and will not be by waiting.
    """
    from kvcore.engine.config import load_config
    from kvcore.tiers.config import StoreTierConfig, TiersConfig, open_tiers

    config = None
    if stores:
        if file is not None:
            raise ConfigError("--config and --store are two ways to say what is meant; give one")
        given = _named([StoreTierConfig(store=uri) for uri in stores])
    else:
        config = load_config(file=file)
        given = list(config.to_tiers().tiers)
        if not given:
            raise ConfigError(
                "the configuration has no store, and what engines hold in host memory only they can tell: set "
                "local_disk, tiers or remote_url, name a file with --config, or a store with --store fs:DIRECTORY"
            )
    serdes = {tier.label: _serde(tier) if config else "" for tier in given}
    # Opening a capacity checks all frames, and moves bad ones: what is behind it is all that is to be seen here.
    capacities = {tier.label: parse_size(size) for tier in given if (size := _capacity(tier.store)[0])}
    given = [tier.model_copy(update={"store": _capacity(tier.store)[1], "name": tier.label}) for tier in given]
    absent = {tier.label: tier.store for tier in given if _no_store(tier.store)}
    # As they are stored, whatever the serde is: nothing is coded here, and no key is needed.
    plain = [tier.model_copy(update={"serde": "raw"}) for tier in given if tier.label not in absent]
    wanted = TiersConfig.of({"host_bytes": _HOST_BYTES, "pinned": False}).model_copy(update={"tiers": tuple(plain)})
    with open_tiers(wanted) as tiers:
        yield Opened(tiers, serdes, capacities, absent, config)


@contextlib.contextmanager
def watched(what: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show on standard error that something goes on; yield what is to be told of each further number of objects."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} objects"),
        TimeElapsedColumn(), console=console(stderr=True), disable=quiet, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(what, total=None)

        def seen(objects: int) -> None:
            progress.advance(task, objects)

        yield seen


def _named(tiers: Sequence[StoreTierConfig]) -> list[StoreTierConfig]:
    """Give stores of one kind names of their own: ``disk``, ``disk-2``."""
    named: dict[str, StoreTierConfig] = {}
    for tier in tiers:
        label, number = tier.label, 1
        while label in named:
            number += 1
            label = f"{tier.label}-{number}"
        named[label] = tier.model_copy(update={"name": label})
    return list(named.values())


def _capacity(uri: str) -> tuple[str, str]:
    """Return the size that stands before a store's URI, empty if there is none, and the URI behind it."""
    scheme, _, rest = uri.partition(":")
    if scheme != "capped":
        return "", uri
    options, _, inner = rest.partition(":")
    return options.partition(",")[0], _capacity(inner)[1]


def _no_store(uri: str) -> bool:
    """Whether a URI is that of a directory in which there is nothing."""
    scheme, _, rest = uri.partition(":")
    if scheme != "fs" or not rest:
        return False
    folder = Path(rest.partition("?")[0])
    try:
        return not (folder.is_file() or (folder.is_dir() and any(folder.iterdir())))
    except OSError:  # opening it says what is wrong
        return False


def _serde(tier: StoreTierConfig) -> str:
    return tier.serde if isinstance(tier.serde, str) else json.dumps(tier.serde, ensure_ascii=False)
