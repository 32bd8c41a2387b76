"""``kvcore bench --suite store``: what it measures, in which order, and how it is printed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.cli.output import console, plain_table

if TYPE_CHECKING:
    from kvcore.bench.data import KV
    from kvcore.bench.store import Latency, StoreRow

__all__ = ["measure_stores", "print_stores"]


def measure_stores(
    kv: KV | None, backend_name: str | None, peer_python: str | None, uris: Sequence[str], repeats: int, folder: Path,
    *, quiet: bool,
) -> tuple[dict[str, Any], list[StoreRow]]:  # fmt: skip
    """Measure; return what ``--json`` prints but for the machine, and the rows.

    Parameters
    ----------
    kv : KV, optional
        Whose first 256 tokens are stored; without it KV is made up.
    backend_name, peer_python : str, optional
    uris : sequence of str
        Of stores; none for those of `store_cases`.
    repeats : int
    folder : Path
        For what the suite writes.
    quiet : bool
        Show no progress.

    Raises
    ------
    ConfigError, StoreError
        A store cannot be opened: before anything is measured.
    """
    from kvcore.bench.cases import pinned
    from kvcore.bench.peer import Peer
    from kvcore.bench.store import aims, measure_store, measure_tasks
    from kvcore.bench.store_cases import Bench, store_cases
    from kvcore.ops import open_backend
    from kvcore.tiers.stores import open_store

    for uri in uris:
        open_store(uri).close()
    core = pinned()
    backend = open_backend(backend_name)
    rows: list[StoreRow] = []
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_progress(quiet))
        peer = stack.enter_context(Peer(peer_python)) if peer_python else None
        kv = made_up(folder) if kv is None else kv
        bench = stack.enter_context(Bench(backend, kv, folder))
        cases = stack.enter_context(contextlib.closing(store_cases(bench, uris)))
        show("tasks")
        tasks = measure_tasks(repeats)
        for row in measure_store(cases, peer, repeats):
            show(row.path)
            rows.append(row)
    report = {
        "suite": "store",
        "core": core,
        "backend": backend.name,
        "peer": None if peer is None else peer.name,
        "kv": kv.source,
        "object_bytes": bench.nbytes,
        "repeats": repeats,
        "rows": [row.to_dict() for row in rows],
        "tasks": tasks,
        "aims": aims(rows, tasks),
        "left_out": bench.left_out,
    }
    return report, rows


def made_up(folder: Path) -> KV:
    """Return KV of 8 MiB: 16 layers of 8 heads of 64 channels, 256 tokens."""
    from kvcore.bench.data import made_up_kv

    return made_up_kv(folder / "kv.npy", layers=16, heads=8, tokens=256, width=64)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("store")
        yield lambda what: progress.update(task, description=f"store: {what}")


def print_stores(report: dict[str, Any], rows: Sequence[StoreRow]) -> None:
    """Print the figures for people."""
    from kvcore.bench.store import BATCH

    out = console()
    machine = report["machine"]
    out.print(f"{report['backend']} on {machine['processor'] or machine['machine']}, one thread")
    if report["peer"]:
        out.print(f"peer: {report['peer']}")
    out.print(f"objects of {report['object_bytes']:,} B, {report['kv']}")
    rates = plain_table("path", "GB/s", "spread", "size ratio", "peer", "times peer", "limit", "of limit", "")
    calls = plain_table("path", "one: p50 ms", "p95", "p99", f"{BATCH}: GB/s", "p50 ms", "p95", "p99")
    rates.columns[0].no_wrap = calls.columns[0].no_wrap = True
    for row in rows:
        figures = (row.size_ratio, row.peer_gbps, row.ratio_peer, row.roofline_gbps, row.ratio_roofline)
        rates.add_row(
            row.path, _figure(row.kvcore_gbps), f"{100 * row.spread:.0f} %", *map(_figure, figures), row.limit
        )
        calls.add_row(row.path, *_latency(row.single), _figure(row.batch_gbps), *_latency(row.batch))
    out.print(rates)
    out.print(calls)
    for note in (*(f"{row.path}: {row.note}" for row in rows if row.note), *report["left_out"]):
        out.print(note)
    tasks = plain_table("task", "us beyond its work", "p99")
    for task in report["tasks"]:
        tasks.add_row(task["path"], f"{task['us']:g}", f"{task['p99_us']:g}")
    out.print(tasks)
    for aim in report["aims"]:
        sign = "<" if aim["what"] == "us" else ">="
        verdict = "met" if aim["met"] else "MISSED"
        out.print(f"{aim['path']}: {aim['value']:.3g} {aim['what']}, aim {sign} {aim['aim']:g}: {verdict}")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _latency(latency: Latency | None) -> tuple[str, str, str]:
    if latency is None:
        return "", "", ""
    return _figure(latency.p50_ms), _figure(latency.p95_ms), _figure(latency.p99_ms)
