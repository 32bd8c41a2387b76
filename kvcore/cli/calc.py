"""``kvcore calc``: how much KV a model makes for a token, and how much fits in each tier."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement

from kvcore.cli.output import console, count_bytes, parse_size, plain_table, print_json
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.capacity import LayerShape, ModelShape, Plan

__all__ = ["calc"]

_WIDEST = 1000


def calc(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a directory with one, or a built-in model. Default: list the built-in ones."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type of the KV: bfloat16, fp8, ... Default: the model's.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    serde: Annotated[
        list[str] | None,
        typer.Option(help="How stores code KV: a name or JSON; may be repeated. Beside raw, which is always shown."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host memory for KV, of all ranks together: 64GB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Room of the tier disk: 2TB.")] = None,
    remote: Annotated[str | None, typer.Option(help="Room of the tier remote: 20TB.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 8192,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Say how much KV a model makes, and how much fits in each tier.

    In bytes, tokens and prompts, from the model's configuration alone: no weights, no engine and no accelerator are
    needed.
    """
    from kvcore.capacity import Place, bits_of, find_model, plan
    from kvcore.serde import SerdeConfig

    serdes = [SerdeConfig.of(one) for one in serde or ("kvs1",)]
    sizes = {"host": host, "disk": disk, "remote": remote}
    places = [
        Place(tier, parse_size(size, f"--{tier}"), host=tier == "host")
        for tier, size in sizes.items()
        if size is not None
    ]
    if model is None:
        if places or tp > 1 or serde:
            raise ConfigError(
                "there is nothing to plan for: name a model before --host, --disk, --remote, --tp or --serde"
            )
        _list(dtype, as_json=as_json)
        return
    shape = find_model(model)
    if serde is None:  # the default is left out where it does not apply
        try:
            bits_of(serdes[0], dtype or shape.dtype or "bfloat16")
        except ConfigError:
            serdes = []
    planned = plan(shape, dtype=dtype, ranks=tp, serdes=serdes, places=places, chunk_tokens=chunk, prompt_tokens=tokens)
    if as_json:
        print_json(_values(planned))
    else:
        _print(planned, assumed=not (dtype or shape.dtype))


def _list(dtype: str, *, as_json: bool) -> None:
    """Show the built-in models."""
    from kvcore.capacity.configs import built_in_models
    from kvcore.dtypes import dtype_name, to_dtype

    models = built_in_models().values()
    rows = []
    for shape in models:
        element = dtype_name(to_dtype(dtype or shape.dtype))
        rows.append(
            {
                "model": shape.name,
                "dtype": element,
                "token_bytes": shape.token_bytes(element),
                "state_bytes": shape.state_bytes(element),
                "source": shape.source,
            }
        )
    if as_json:
        print_json(rows)
        return
    table = plain_table("model", "element type", "bytes of a token", "of a request's states")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        state = f"{row['state_bytes']:,}" if row["state_bytes"] else ""
        table.add_row(str(row["model"]), str(row["dtype"]), f"{row['token_bytes']:,}", state)
    console().print(table)


def _values(planned: Plan) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    from kvcore.capacity import MEASURED_ON

    return {
        "model": planned.model.name,
        "source": planned.model.source,
        "layers": len(planned.model.layers),
        "dtype": planned.dtype,
        "tp": planned.ranks,
        "groups": _groups(planned.model, planned.dtype),
        "token_bytes": planned.token_bytes,
        "rank_token_bytes": planned.rank_token_bytes,
        "state_bytes": planned.state_bytes,
        "chunk_tokens": planned.chunk_tokens,
        "prompt_tokens": planned.prompt_tokens,
        "held_bytes": planned.held_bytes,
        "bits_measured_on": MEASURED_ON if any(row.measured for row in planned.rows) else None,
        "rows": [{**asdict(row), "token_bytes": round(row.token_bytes, 2)} for row in planned.rows],
    }


def _groups(model: ModelShape, dtype: str) -> list[dict[str, Any]]:
    from kvcore.dtypes import to_dtype

    size = to_dtype(dtype).itemsize
    return [
        {
            "kind": shape.kind,
            "layers": len(layers),
            "heads": shape.heads,
            "widths": list(shape.widths),
            "window": shape.window,
            "token_bytes": len(layers) * shape.token_bytes(size),
            "state_bytes": len(layers) * shape.state_bytes(size),
        }
        for shape, layers in model.groups().items()
    ]


def _print(planned: Plan, *, assumed: bool) -> None:
    from kvcore.capacity import MEASURED_ON

    out, model = console(), planned.model
    said = ", assumed: the configuration does not say" if assumed else ""
    out.print(f"{model.name}: {len(model.layers)} layers, KV in {planned.dtype}{said} ({model.source})", soft_wrap=True)
    table = plain_table("layers", "keep", "bytes a token", "window")
    for shape, layers in model.groups().items():
        table.add_row(str(len(layers)), _keep(shape), *_cells(shape, len(layers), planned.dtype))
    out.print(table)
    facts = plain_table("", "", header=False)
    facts.add_row("a token", count_bytes(planned.token_bytes))
    if planned.state_bytes:
        facts.add_row("a request's states", count_bytes(planned.state_bytes))
    if planned.ranks > 1:
        facts.add_row(f"a token, on each of {planned.ranks} ranks", count_bytes(planned.rank_token_bytes))
    each = " on each rank" if planned.ranks > 1 else ""
    facts.add_row(f"{planned.prompt_tokens:,} tokens in the engine{each}", count_bytes(planned.held_bytes))
    out.print(facts)
    rows = plain_table(
        "\ntier", "\nroom", "\nserde", "\nbits", "bytes of\na token", f"chunk of\n{planned.chunk_tokens}", "\ntokens",
        f"prompts of\n{planned.prompt_tokens:,}",
    )  # fmt: skip
    rows.collapse_padding = True  # or it is wider than a terminal
    for column in rows.columns:
        column.no_wrap = True
        column.justify = "left" if column.header in ("\ntier", "\nserde") else "right"
    for row in planned.rows:
        rows.add_row(
            row.tier,
            "" if row.nbytes is None else _short(row.nbytes),
            row.serde + ("*" if row.measured else ""),
            f"{row.bits:g}",
            f"{row.token_bytes:,.0f}",
            _short(row.chunk_bytes),
            *("" if n is None else f"{n:,}" for n in (row.tokens, row.prompts)),
        )
    out.print()
    # A table that is folded cannot be read.
    out.width = max(out.width, Measurement.get(out, out.options.update_width(_WIDEST), rows).maximum)
    out.print(rows)
    if any(row.measured for row in planned.rows):
        out.print(f"\n* bits measured on {MEASURED_ON}: an estimate for other models", style="dim", soft_wrap=True)


def _keep(shape: LayerShape) -> str:
    if shape.kind == "recurrent":
        return f"a state of {shape.state:,} elements"
    if shape.kind == "latent":
        return f"latent rows of {shape.widths[0]} + {shape.widths[1]}"
    if shape.kind == "index":
        return f"an indexer's keys, {shape.widths[0]} B"
    widths = sorted(set(shape.widths))
    return f"K and V, {shape.heads} heads of {' and '.join(map(str, widths))}"


def _cells(shape: LayerShape, count: int, dtype: str) -> tuple[str, str]:
    from kvcore.dtypes import to_dtype

    size = to_dtype(dtype).itemsize
    token = count * shape.token_bytes(size)
    return f"{token:,}" if token else "", f"{shape.window:,}" if shape.window else ""


def _short(nbytes: int) -> str:
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"
