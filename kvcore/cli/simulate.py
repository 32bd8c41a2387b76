"""``kvcore simulate``: what a tier would have had of a trace, by eviction policy and capacity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcore.cli.output import console, count_bytes, parse_size, plain_table, print_json, require
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.tiers.simulation import Row

__all__ = ["simulate"]

_COLOURS = ("#1f6feb", "#8250df", "#bf3989", "#9a6700", "#1a7f37", "#cf222e", "#57606a")


def simulate(
    trace: Annotated[Path | None, typer.Argument(help="A trace: a file of JSON lines.")] = None,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas: lru, lfu, fifo, mru, arc, ttl.")] = "lru",
    capacity: Annotated[str, typer.Option(help="Bytes of the tier, separated by commas: 512MiB,4GiB.")] = "1GiB",
    quota: Annotated[
        list[str] | None, typer.Option(help="TENANT=SIZE: those above theirs give first; may be repeated.")
    ] = None,
    watermark: Annotated[
        float | None, typer.Option(help="Also evict 0.2 of what is used, above this share of the capacity: 0.8.")
    ] = None,
    ttl: Annotated[float, typer.Option(help="Seconds that a chunk lives under the policy ttl.")] = 600.0,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of K and V of one token. Default: what the trace says.")
    ] = None,
    generate: Annotated[str | None, typer.Option(help="Make up a load, and write its trace: chat, rag, agent.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file for --generate; it is replaced.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to generate.")] = 1000,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate against capacity into this file; its ending names the format.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Replay a trace of requests over eviction policies, or generate one.

    Beside the policies there are two yardsticks: the optimum, which knows the future, and a tier without limit.
    """
    if generate is not None:
        if trace is not None:
            raise ConfigError(f"--generate writes a trace, and {trace} is one to read: give one of the two")
        if out is None:
            raise ConfigError("--generate needs the file to write: --out trace.jsonl")
        _generate(generate, out, requests, seed, bytes_per_token, as_json=as_json)
        return
    if trace is None:
        raise ConfigError(
            "there is nothing to replay: give a trace, or make one with --generate chat --out trace.jsonl"
        )
    if out is not None:
        raise ConfigError(f"--out {out} is for --generate; figures are written with --json, pictures with --plot")
    if plot is not None:
        require("eval", "matplotlib")
        from kvcore.bench.plot import check_path

        check_path(plot)
    names = [name.strip() for name in policy.split(",")]
    capacities = [parse_size(size, "--capacity") for size in capacity.split(",")]
    report, rows = _replay(trace, names, capacities, _quotas(quota or []), watermark, ttl, bytes_per_token, as_json)
    if plot is not None:
        _draw(rows, f"{trace.name}: {report['requests']:,} requests, {report['tokens']:,} tokens", plot)
    if as_json:
        print_json(report)
    else:
        _print(report, rows)


def _quotas(texts: Sequence[str]) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for text in texts:
        tenant, equals, size = text.rpartition("=")
        if not equals:
            raise ConfigError(f"--quota {text!r}: write TENANT=SIZE, such as team-0=1GiB")
        if tenant in quotas:
            raise ConfigError(f"--quota {text!r}: tenant {tenant!r} has a quota already")
        quotas[tenant] = parse_size(size, f"--quota {text!r}:")
    return quotas


def _generate(kind: str, out: Path, requests: int, seed: int, bytes_per_token: int | None, *, as_json: bool) -> None:
    from kvcore.tiers.traces import BYTES_PER_TOKEN, write_trace
    from kvcore.tiers.workloads import generate

    trace = generate(kind, requests, seed, bytes_per_token=bytes_per_token or BYTES_PER_TOKEN)
    write_trace(trace, out)
    tokens = sum(request.tokens for request in trace.requests)
    if as_json:
        print_json({"file": str(out), "load": kind, "requests": requests, "tokens": tokens, "seed": seed})
    else:
        console().print(f"{out}: {kind}, {requests:,} requests, {tokens:,} tokens, seed {seed}", soft_wrap=True)


def _replay(
    path: Path,
    names: Sequence[str],
    capacities: Sequence[int],
    quotas: dict[str, int],
    watermark: float | None,
    ttl: float,
    bytes_per_token: int | None,
    quiet: bool,
) -> tuple[dict[str, Any], list[Row]]:
    """Return what ``--json`` prints, and the rows: of each capacity the policies and the optimum, then unlimited."""
    from kvcore.tiers.policies import create_policy
    from kvcore.tiers.simulation import Simulation
    from kvcore.tiers.traces import read_trace

    options: dict[str, dict[str, Any]] = {"ttl": {"ttl_s": ttl}}
    for name in names:  # nothing is replayed in vain
        create_policy(name, capacities[0], **options.get(name, {}))
    trace = read_trace(path)
    simulation = Simulation(trace, bytes_per_token=bytes_per_token)
    runs = (len(names) + 1) * len(capacities) + 1
    rows: list[Row] = []
    with _progress(runs * len(trace.requests), quiet=quiet) as tick:
        for capacity in capacities:
            rows += [
                simulation.run(name, capacity, options=options.get(name), quotas=quotas, watermark=watermark, tick=tick)
                for name in names
            ]
            rows.append(simulation.optimum(capacity, tick=tick))
        rows.append(simulation.unlimited(tick=tick))
    report = {
        "trace": str(path),
        "requests": len(trace.requests),
        "tokens": rows[-1].tokens,
        "chunk_tokens": trace.chunk_tokens,
        "bytes_per_token": bytes_per_token or trace.bytes_per_token,
        "unique_bytes": simulation.unique_bytes,
        "quotas": quotas,
        "watermark": watermark,
        "rows": [
            {**asdict(row), "token_hit_rate": row.token_hit_rate, "byte_hit_rate": row.byte_hit_rate} for row in rows
        ],
    }
    return report, rows


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show one bar on standard error."""
    with Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=quiet,
        transient=True,
    ) as progress:
        task = progress.add_task("replay", total=total)
        yield lambda: progress.advance(task)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else count_bytes(nbytes).partition(" (")[0]


def _print(report: dict[str, Any], rows: Sequence[Row]) -> None:
    out = console()
    table = plain_table("policy", "capacity", "tokens %", "bytes %", "evictions", "evicted", "refused")
    table.collapse_padding = True  # or it is wider than a terminal
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header == "policy" else "right"
    for row in rows:
        table.add_row(
            row.policy,
            _size(row.capacity_bytes),
            f"{100 * row.token_hit_rate:.1f}",
            f"{100 * row.byte_hit_rate:.1f}",
            f"{row.evictions:,}",
            _size(row.evicted_bytes),
            f"{row.refused:,}",
        )
    out.print(table)
    out.print(
        f"\n{report['trace']}: {report['requests']:,} requests, {report['tokens']:,} tokens in chunks of "
        f"{report['chunk_tokens']}; {_size(report['unique_bytes'])} of different chunks. tokens, bytes: those that "
        "were hits. refused: chunks that were not kept. optimum: knows the future. unlimited: evicts nothing.",
        style="dim",
    )


def _draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a picture of the share of tokens hit, over the capacity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    limited = [(row, row.capacity_bytes) for row in rows if row.capacity_bytes is not None]
    for number, name in enumerate(dict.fromkeys(row.policy for row, _ in limited)):
        points = sorted((capacity / 2**30, 100 * row.token_hit_rate) for row, capacity in limited if row.policy == name)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=colour, label=name)
    for row in rows:
        if row.capacity_bytes is None:
            axes.axhline(100 * row.token_hit_rate, color="#57606a", linestyle=":", label=row.policy)
    axes.set_xscale("log", base=2)
    ticks = sorted({capacity / 2**30 for _, capacity in limited})
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_xlabel("capacity, GiB")
    axes.set_ylabel("tokens hit, percent")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
