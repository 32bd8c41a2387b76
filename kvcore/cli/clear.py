"""``kvcore clear``: remove what is stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.cli.describe import survey
from kvcore.cli.opened import Opened, open_configured, watched
from kvcore.cli.output import console, count_bytes, print_json
from kvcore.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from kvcore.tiers.store_tier import StoreTier

__all__ = ["clear"]

_LEAST_DIGITS = 8


def clear(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: KVCORE_CONFIG_FILE and the environment.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="URI of a store, instead of a configuration; may be repeated.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="Only this tier; may be repeated. Default: all that are not read-only.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace: its hex digits, or the first 8 or more of them.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Remove stored KV, after a question.

    All that stores hold, or that of some tiers or of one namespace. It says how much would go, and asks.
    Engines that are running go on, and compute what they do not find; what they hold in host memory stays there.
    """
    if namespace is not None and not re.fullmatch(rf"[0-9a-fA-F]{{{_LEAST_DIGITS},64}}", namespace):
        raise ConfigError(
            f"--namespace {namespace!r}: give {_LEAST_DIGITS} to 64 hex digits; `kvcore describe` shows what there is"
        )
    with open_configured(config, store or ()) as opened:
        chosen = _chosen(opened, tier)
        found = [_survey(one, quiet=as_json) for one in chosen]
        space = _namespace(namespace, found)
        doomed = {one.name: _doomed(seen, space) for one, seen in zip(chosen, found, strict=True)}
        down = {one.name: seen["reason"] for one, seen in zip(chosen, found, strict=True) if "reason" in seen}
        if down:
            said = "; ".join(f"{name}: {reason}" for name, reason in down.items())
            raise ConfigError(f"nothing was removed, because not all tiers can be reached: {said}")
        objects = sum(count for count, _ in doomed.values())
        if objects and not yes:
            _ask(opened, doomed, space)
        removed, failed = _remove(opened, chosen, space, quiet=as_json) if objects else (dict.fromkeys(doomed, 0), {})
    names = [*removed, *(name for name in opened.absent if tier is None or name in tier)]
    values = {
        "namespace": None if space is None else space.hex(),
        "removed": {name: removed.get(name, 0) for name in names},
        "bytes": {name: None if name in failed else doomed.get(name, (0, 0))[1] for name in names},
        "failed": failed,
    }
    if as_json:
        print_json(values)
    else:
        _print(values)
    raise typer.Exit(1 if failed else 0)


def _chosen(opened: Opened, names: list[str] | None) -> list[StoreTier]:
    """Return the tiers to empty.

    Raises
    ------
    ConfigError
        There is no such tier, it is read-only, or all are.
    """
    known = {tier.name: tier for tier in opened.tiers.tiers}
    if names is None:
        chosen = [tier for tier in known.values() if not tier.read_only]
        if not chosen and known:
            raise ConfigError(f"nothing may be removed: {', '.join(known)} is read-only in this configuration")
        return chosen
    for name in names:
        if name == "host":
            raise ConfigError(
                "host memory belongs to the engine's process, which empties it; this command empties stores"
            )
        if name not in known and name not in opened.absent:
            raise ConfigError(f"there is no tier {name!r}; there are {', '.join([*known, *opened.absent])}")
        if name in known and known[name].read_only:
            raise ConfigError(f"tier {name} is read-only in this configuration: nothing is removed there")
    return [known[name] for name in dict.fromkeys(names) if name in known]


def _survey(tier: StoreTier, *, quiet: bool) -> dict[str, Any]:
    outage = tier.outage()
    if outage is not None:
        return {"reason": outage.reason}
    with watched(f"list {tier.name}", quiet=quiet) as seen:
        return survey(tier, 0, seen)


def _namespace(digits: str | None, found: list[dict[str, Any]]) -> bytes | None:
    """Return the namespace that is meant: given in full, or the only one that begins so."""
    if digits is None or len(digits) == 64:
        return None if digits is None else bytes.fromhex(digits)
    names = {space["namespace"] for seen in found for space in seen.get("namespaces") or ()}
    matching = sorted(name for name in names if name.startswith(digits.lower()))
    if len(matching) != 1:
        which = f"{len(matching)} namespaces begin" if matching else "no stored namespace begins"
        raise ConfigError(f"--namespace {digits}: {which} so; `kvcore describe` shows what there is")
    return bytes.fromhex(matching[0])


def _doomed(seen: dict[str, Any], space: bytes | None) -> tuple[int, int]:
    spaces = [s for s in seen.get("namespaces") or () if space is None or s["namespace"] == space.hex()]
    return sum(s["objects"] for s in spaces), sum(s["bytes"] for s in spaces)


def _ask(opened: Opened, doomed: dict[str, tuple[int, int]], space: bytes | None) -> None:
    """Say what would go; end the command unless that is wanted."""
    stores = {tier.name: tier.store.store.name for tier in opened.tiers.tiers}
    err = console(stderr=True)
    for name, (count, nbytes) in doomed.items():
        err.print(f"{name} ({stores[name]}): {count:,} objects, {count_bytes(nbytes)}", soft_wrap=True)
    whose = "" if space is None else f" of namespace {space.hex()[:16]}"
    try:
        wanted = typer.confirm(f"Remove them{whose}?", err=True)
    except typer.Abort:  # nobody is there to answer
        err.print()
        wanted = False
    if not wanted:
        typer.echo("kvcore: nothing was removed; --yes answers the question", err=True)
        raise typer.Exit(1)


def _remove(
    opened: Opened, chosen: list[StoreTier], space: bytes | None, *, quiet: bool
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Empty tiers, all of them, also where one fails.

    Returns
    -------
    dict of str to int or None, dict of str to str
        How many objects went, None where that is not known; and why not all did, of tiers that failed.
    """
    removed: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    for tier in chosen:
        with watched(f"remove from {tier.name}", quiet=quiet):
            try:
                removed.update(opened.tiers.clear([tier.name], namespace=space))
            except StoreError as error:
                removed[tier.name], failed[tier.name] = None, str(error.strerror or error)
    return removed, failed


def _print(values: dict[str, Any]) -> None:
    out = console()
    for name, count in values["removed"].items():
        if count is not None:
            freed = f", {count_bytes(values['bytes'][name])}" if count else ""
            out.print(f"{name}: removed {count:,} objects{freed}")
    for name, why in values["failed"].items():
        console(stderr=True).print(f"{name}: not all could be removed: {why}", style="bold red", soft_wrap=True)
