"""``kvcore inspect``: what a stored frame is, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore.cli.output import console, count_bytes, plain_table, print_json
from kvcore.codecs import GroupInfo
from kvcore.codecs.envelope import Envelope
from kvcore.codecs.frame_format import HEADER_BYTES, FrameHeader
from kvcore.codecs.frame_values import Flags
from kvcore.codecs.inspection import FrameReport, inspect_frame
from kvcore.errors import ConfigError, CorruptFrameError, KVCoreError
from kvcore.ops import Backend, open_backend
from kvcore.rope import SCALING_PARAMETERS

__all__ = ["inspect"]

_RAW_LISTS, _RAW_LISTED = 8, 12  # lists of raw rows, and numbers of one, that people are shown


def inspect(
    file: Annotated[Path, typer.Argument(help="A frame: a .kvf file of a store, say.")],
    backend: Annotated[
        str | None,
        typer.Option(help="Backend that checks and decodes the layers. Default: cpu_ref if installed, or the best."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Show what a stored frame holds: header, groups, layers, tiles, and every problem with it.

    A damaged file is shown as far as it can be read. Exits with 1 if anything is wrong with it.
    """
    data = _read(file)
    opened, why = _open(backend)
    report = inspect_frame(data, opened)
    values = _values(file, report, opened.name if opened else None)
    if as_json:
        print_json(values)
    else:
        _print(values, why)
    raise typer.Exit(0 if report.good else 1)


def _read(file: Path) -> bytes:
    """Return the file's bytes: of a frame all, and one more if there are more; of anything else its beginning."""
    if file.is_dir():
        frame = next(file.rglob("*.kvf"), None)
        raise ConfigError(
            f"{file} is a directory, and a frame is one file: "
            + (f"kvcore inspect {frame}, say" if frame else "there is none in it, their names end in .kvf")
        )
    try:
        with file.open("rb") as stream:
            head = stream.read(HEADER_BYTES)
            try:
                rest = FrameHeader.parse(head).stored_bytes + 1 - len(head)
            except CorruptFrameError:
                return head
            size = file.stat().st_size
            return head + stream.read(max(0, min(rest, size)))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _open(name: str | None) -> tuple[Backend | None, str]:
    """Return a backend, or None and why there is none: the head can be shown without."""
    if name is not None:
        return open_backend(name, fallback="error"), ""
    try:
        return open_backend("cpu_ref", fallback="error"), ""
    except KVCoreError:
        try:
            return open_backend(fallback="error"), ""
        except KVCoreError as error:
            return None, str(error).splitlines()[0]


def _values(file: Path, report: FrameReport, backend: str | None) -> dict[str, Any]:
    """Return the report as plain values: the object that ``--json`` prints."""
    header, varlen, tiles = report.header, report.varlen, report.tiles
    return {
        "file": str(file),
        "bytes": report.nbytes,
        "good": report.good,
        "problems": [asdict(problem) for problem in report.problems],
        "backend": backend,
        "header": None if header is None else _header(header),
        "codec": None if report.codec is None else report.codec.name,
        "chain": None if varlen is None else list(varlen.codecs),
        "envelope": None if report.envelope is None else _envelope(report.envelope),
        "namespace": None if varlen is None else varlen.namespace.hex(),
        "key": None if varlen is None else varlen.key.hex(),
        "groups": [] if varlen is None else [_group(group) for group in varlen.groups],
        "layers": [asdict(layer) for layer in report.layers],
        "tiles": {
            "modes": dict(tiles.modes),
            "classes": {str(c): tiles.classes[c] for c in sorted(tiles.classes)},
            "symbols": tiles.symbols,
            "escapes": tiles.escapes,
            "escape_rate": tiles.escapes / tiles.symbols if tiles.symbols else None,
        },
    }


def _envelope(envelope: Envelope) -> dict[str, Any]:
    return {"version": envelope.version, "key_id": envelope.key_id}


def _header(header: FrameHeader) -> dict[str, Any]:
    return {
        "version": f"{header.major}.{header.minor}",
        "flags": [flag.name for flag in Flags if header.flags & flag],
        "codec_id": header.codec_id,
        "preset": header.preset,
        "precision": header.precision,
        "levels": None if header.levels is None else list(header.levels),
        "tokens": header.tokens,
        "layers": header.layers,
        "groups": header.groups,
        "varlen_bytes": header.varlen_bytes,
        "directory_bytes": header.directory_bytes,
        "raw_bytes": header.raw_bytes,
        "stored_bytes": header.stored_bytes,
        "ratio": round(header.raw_bytes / header.stored_bytes, 4) if header.stored_bytes else None,
        "tables": header.tables.hex(),
        "profile": header.profile.hex(),
    }


def _group(group: GroupInfo) -> dict[str, Any]:
    values = asdict(group)
    values["layers"] = list(group.layers)
    values["parts"] = [asdict(part) for part in group.parts]
    values["rope"] = None if group.rope is None else group.rope.to_dict()
    return values


def _print(values: dict[str, Any], no_backend: str) -> None:
    out = console()
    table = plain_table("", "", header=False)
    header = values["header"]
    table.add_row("file", f"{values['file']}, {count_bytes(values['bytes'])} read")
    if header is not None:
        table.add_row("format", f"KVS1 {header['version']}, flags {', '.join(header['flags']) or 'none'}")
        known = values["codec"] or "unknown to this build"
        levels = "" if header["levels"] is None else f", levels K {header['levels'][0]} V {header['levels'][1]}"
        table.add_row("codec", f"{known} (id {header['codec_id']}, preset {header['preset']}{levels})")
        if values["chain"] is not None:
            table.add_row("chain", ", ".join(values["chain"]))
        if values["envelope"] is not None:
            table.add_row("encryption", _envelope_line(values["envelope"]))
        table.add_row("tables", f"{header['tables']}, n = {header['precision']}" if header["precision"] else "none")
        table.add_row("tokens, layers, groups", f"{header['tokens']}, {header['layers']}, {header['groups']}")
        table.add_row("KV, raw", count_bytes(header["raw_bytes"]))
        table.add_row("KV, stored", f"{count_bytes(header['stored_bytes'])}, ratio {header['ratio']}")
        table.add_row("varlen part, directory", f"{header['varlen_bytes']} B, {header['directory_bytes']} B")
    if values["namespace"] is not None:
        table.add_row("namespace", values["namespace"])
        table.add_row("key", values["key"])
    for index, group in enumerate(values["groups"]):
        table.add_row(f"group {index}", _group_line(group))
        table.add_row("", f"rope: {_rope_line(group['rope'])}")
    out.print(table)
    if values["layers"]:
        out.print(_layer_table(values["layers"]))
    _print_raw_rows(values["layers"], values["groups"])
    _print_tiles(values["tiles"])
    encrypted = header is not None and Flags.ENCRYPTED.name in header["flags"]
    if encrypted:
        out.print("\nLayers are encrypted, and were not checked. Places are those in the plain frame.")
    elif no_backend:
        out.print(f"\nLayers were not checked: {no_backend}")
    for problem in values["problems"]:
        where = f"byte {problem['offset']:,}" + ("" if problem["layer"] is None else f", layer {problem['layer']}")
        out.print(f"\nDamaged ({problem['reason']}) at {where}: {problem['message']}", style="bold red")
    if values["good"]:
        out.print(f"\nNothing is wrong with {'its head' if no_backend or encrypted else 'it'}.")


def _envelope_line(envelope: dict[str, Any]) -> str:
    key = "the key without id" if envelope["key_id"] is None else f"key {envelope['key_id']}"
    return f"AES-GCM, envelope version {envelope['version']}, {key}"


def _group_line(group: dict[str, Any]) -> str:
    parts = ", ".join(f"{p['name']} {p['dtype']} x {p['width']}" for p in group["parts"])
    heads = f"heads {group['head_start']}-{group['head_start'] + group['head_count'] - 1}"
    rows = f"{group['rows']} rows from position {group['base_position']}"
    return f"{group['layout']}: {len(group['layers'])} layers, {heads}, {rows}, {parts}"


def _rope_line(rope: dict[str, Any] | None) -> str:
    if rope is None:
        return "none known"
    table = "" if rope["inv_freq"] is None else ", own table of frequencies"
    pairs = "neighbours" if rope["interleaved"] else "halves"
    named = [f"{name} {rope[name]:g}" for name in SCALING_PARAMETERS[rope["scaling"]] if name in rope]
    return (
        f"{rope['rotary_dims']} channels in {pairs}, theta {rope['theta']:g}, scaling {rope['scaling']} x "
        f"{rope['factor']:g}{' (' + ', '.join(named) + ')' if named else ''}{table}"
    )


def _layer_table(layers: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(name for layer in layers for name in layer["parts"]))
    table = plain_table("\nlayer", "\nat byte", "\nbytes", *(f"\n{name}" for name in names), "\ndigest", "\ndecoded")
    for layer in layers:
        parts = [f"{layer['parts'][name]:,}" if name in layer["parts"] else "" for name in names]
        sizes = [str(layer["layer"]), f"{layer['start']:,}", f"{layer['nbytes']:,}"]
        table.add_row(*sizes, *parts, layer["digest"], layer["decoded"])
    return table


def _print_raw_rows(layers: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Say which rows are stored as they are: those that most segments have in common, and the others' own."""
    found: dict[tuple[int, ...], list[str]] = {}
    for layer in layers:
        for part, heads in layer["raw_rows"].items():
            for head, rows in enumerate(heads, groups[layer["group"]]["head_start"]):
                found.setdefault(tuple(rows), []).append(f"layer {layer['layer']} {part} head {head}")
    if not found.keys() - {()}:
        return
    out = console()
    out.print("\nRows stored as they are:")
    for rows, where in sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))[:_RAW_LISTS]:
        listed = ", ".join(map(str, rows[:_RAW_LISTED])) + ", ..." * (len(rows) > _RAW_LISTED) or "none"
        out.print(f"  {listed}: {where[0] if len(where) == 1 else f'{len(where):,} segments'}")
    if len(found) > _RAW_LISTS:
        out.print(f"  and {len(found) - _RAW_LISTS:,} other lists")


def _print_tiles(tiles: dict[str, Any]) -> None:
    if not tiles["modes"]:
        return
    out = console()
    modes = ", ".join(f"{count:,} {mode}" for mode, count in sorted(tiles["modes"].items()))
    out.print(f"\nTiles: {modes}")
    if tiles["symbols"]:
        used = ", ".join(f"{name}: {count:,}" for name, count in tiles["classes"].items())
        out.print(f"Channels by table: {used}")
        rate = f"{tiles['escapes']:,} of {tiles['symbols']:,} symbols ({tiles['escape_rate']:.6f})"
        out.print(f"Escaped: {rate}")
