"""``kvcore describe``: what is stored where, and the configuration that is in force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.cli.opened import Opened, open_configured, watched
from kvcore.cli.output import console, count_bytes, plain_table, print_json
from kvcore.errors import StoreError

if TYPE_CHECKING:
    from kvcore.keys import StoreKey
    from kvcore.tiers.store_tier import StoreTier
    from kvcore.tiers.stores import Store

__all__ = ["describe", "survey"]

_AT_A_TIME = 256


def describe(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: KVCORE_CONFIG_FILE and the environment.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="URI of a store, instead of a configuration; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="List nothing: only what stores know without.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="Frames of each store to look into for their codecs.")] = 16,
    every: Annotated[bool, typer.Option("--all", help="Show settings that are at their defaults, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Say what is stored where, and what the configuration is.

    How much, whose and how coded, and where each value of the configuration came from. Nothing is changed, and no
    directory is made. Exits with 1 if a store is down.
    """
    with open_configured(config, store or ()) as opened:
        values = _values(opened, quick=quick, sample=sample, quiet=as_json)
    if as_json:
        print_json(values)
    else:
        _print(values, every=every)
    raise typer.Exit(1 if any(tier["state"] == "down" for tier in values["tiers"]) else 0)


def _values(opened: Opened, *, quick: bool, sample: int, quiet: bool) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    tiers: list[dict[str, Any]] = []
    known = opened.tiers.describe()
    if opened.config is not None:
        room = opened.config.to_tiers().host_bytes
        tiers.append(_tier("host", "host memory", "in each engine", capacity_bytes=room))
    for tier in opened.tiers.tiers:
        info = known[tier.name]
        values = _tier(
            tier.name,
            info.store,
            info.health.state,
            serde=opened.serdes[tier.name],
            read_only=info.read_only,
            objects=info.objects,
            bytes=info.nbytes,
            capacity_bytes=info.capacity_bytes or opened.capacities.get(tier.name),
            reason=info.health.reason,
        )
        if info.health.ok and not quick:
            with watched(f"list {tier.name}", quiet=quiet) as seen:
                values.update(survey(tier, sample, seen))
        tiers.append(values)
    tiers += [
        _tier(
            name,
            uri,
            "absent",
            serde=opened.serdes[name],
            objects=0,
            bytes=0,
            reason="there is nothing in this directory",
        )
        for name, uri in opened.absent.items()
    ]
    rows = None if opened.config is None else [asdict(row) for row in opened.config.describe()]
    return {"config": rows, "tiers": tiers}


def _tier(name: str, store: str, state: str, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": name,
        "store": store,
        "state": state,
        "reason": "",
        "serde": "",
        "read_only": False,
    }
    values.update(objects=None, bytes=None, capacity_bytes=None, namespaces=None, sampled=None)
    return {**values, **more}


def survey(tier: StoreTier, sample: int, tick: Callable[[int], None]) -> dict[str, Any]:
    """List what a tier's store holds, by namespace, and look into some of its frames.

    Parameters
    ----------
    tier : StoreTier
    sample : int
        How many frames, at most.
    tick : callable
        Told how many more objects have been seen.

    Returns
    -------
    dict
        ``objects``, ``bytes``, ``namespaces``, ``sampled``; or ``state`` and ``reason`` where it went down meanwhile.
    """
    store: Store = tier.store.store
    spaces: dict[bytes, list[int]] = {}
    chosen: list[StoreKey] = []
    dice, seen = random.Random(0), 0  # each object has the same chance, however many there are
    try:
        keys = iter(store.list())
        while batch := list(islice(keys, _AT_A_TIME)):
            for key, stat in zip(batch, store.stat_batch(batch), strict=True):
                if isinstance(stat, StoreError):
                    raise stat
                if stat is None:  # somebody deleted it
                    continue
                space = spaces.setdefault(key.namespace, [0, 0])
                space[0], space[1], seen = space[0] + 1, space[1] + stat.nbytes, seen + 1
                if len(chosen) < sample:
                    chosen.append(key)
                elif sample and (place := dice.randrange(seen)) < sample:
                    chosen[place] = key
            tick(len(batch))
        sampled = _look_into(store, chosen) if chosen else None
    except StoreError as error:
        return {"state": "down", "reason": str(error.strerror or error)}
    ordered = sorted(spaces.items(), key=lambda one: (-one[1][1], one[0]))
    return {
        "objects": seen,
        "bytes": sum(nbytes for _, nbytes in spaces.values()),
        "namespaces": [{"namespace": n.hex(), "objects": count, "bytes": size} for n, (count, size) in ordered],
        "sampled": sampled,
    }


def _look_into(store: Store, keys: list[StoreKey]) -> dict[str, Any]:
    """Return what frames of a store are: their codecs, what they make of KV, and how many are damaged."""
    from kvcore.codecs.inspection import inspect_frame

    codecs: Counter[str] = Counter()
    damaged = raw = stored = 0
    for key in keys:
        frame = store.get(key)
        if frame is None:
            continue
        report = inspect_frame(frame, None)
        if report.header is None or report.varlen is None or not report.good:
            damaged += 1
            continue
        first, *others = report.varlen.codecs or ("unknown",)
        codecs["+".join([first if report.codec is None else report.codec.name, *others])] += 1
        raw, stored = raw + report.header.raw_bytes, stored + report.nbytes
    return {
        "frames": sum(codecs.values()) + damaged,
        "codecs": dict(codecs.most_common()),
        "damaged": damaged,
        "ratio": round(raw / stored, 3) if stored else None,
    }


def _print(values: dict[str, Any], *, every: bool) -> None:
    out = console()
    for tier in values["tiers"]:
        out.print(f"{tier['name']}: {tier['store']}", style="bold", soft_wrap=True)
        table = plain_table("", "", header=False)
        state = f"{tier['state']}: {tier['reason']}" if tier["reason"] else tier["state"]
        table.add_row("  state", state + (", read-only" if tier["read_only"] else ""))
        if tier["serde"]:
            table.add_row("  serde", tier["serde"])
        table.add_row("  holds", _holds(tier))
        for space in tier["namespaces"] or ():
            held = f"{space['objects']:,} objects, {count_bytes(space['bytes'])}"
            table.add_row("  namespace", f"{space['namespace'][:16]}: {held}")
        if tier["sampled"]:
            table.add_row("  frames", _frames(tier["sampled"]))
        out.print(table)
    rows = [row for row in values["config"] or () if every or row["source"] != "default"]
    if rows:
        table = plain_table("\nsetting", "\nvalue", "\nfrom")
        for row in rows:
            table.add_row(row["name"], row["value"], row["source"])
        out.print(table)
    elif values["config"] is not None:
        out.print("\nAll settings are at their defaults.")


def _holds(tier: dict[str, Any]) -> str:
    capacity = tier["capacity_bytes"]
    most = "" if capacity is None else f", of at most {count_bytes(capacity)}"
    if tier["objects"] is None and tier["bytes"] is None:
        return f"not known{most}"
    objects = "?" if tier["objects"] is None else f"{tier['objects']:,}"
    nbytes = "?" if tier["bytes"] is None else count_bytes(tier["bytes"])
    return f"{objects} objects, {nbytes}{most}"


def _frames(sampled: dict[str, Any]) -> str:
    codecs = ", ".join(f"{count} {name}" for name, count in sampled["codecs"].items()) or "none is good"
    ratio = "" if sampled["ratio"] is None else f"; KV is {sampled['ratio']:g} times as large"
    damaged = f"; {sampled['damaged']} damaged" if sampled["damaged"] else ""
    return f"of {sampled['frames']} looked into: {codecs}{damaged}{ratio}"
