"""``kvcore bench``: how fast ops and codecs are, beside a peer and beside the machine's memory."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.cli.bench_store import measure_stores, print_stores
from kvcore.cli.bench_ttft import LENGTHS, TtftSizes, bench_ttft, print_ttft
from kvcore.cli.output import console, plain_table, print_json, require
from kvcore.errors import ConfigError, KVCoreError

if TYPE_CHECKING:
    from kvcore.bench.cases import Row
    from kvcore.bench.data import KV
    from kvcore.bench.store import StoreRow

__all__ = ["bench"]


class Suite(str, Enum):
    """What is measured."""

    COPY = "copy"
    QUANT = "quant"
    ENTROPY = "entropy"
    CODEC = "codec"
    STORE = "store"
    DISPATCH = "dispatch"
    TTFT = "ttft"


_NEEDS_KV = (Suite.ENTROPY, Suite.CODEC)
_KV_TOKENS = 768


def bench(
    suite: Annotated[Suite, typer.Option(help="What to measure.")] = Suite.COPY,
    backend: Annotated[str | None, typer.Option(help="Backend to measure. Default: the best one for the CPU.")] = None,
    peer_python: Annotated[
        str | None, typer.Option(help="Python of an environment with LMCache: measured in turn with kvcore.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose KV is coded; 'none' makes KV up. Default: SmolLM2-135M where it is installed; suite "
            "store makes KV up."
        ),
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="URI of a store, for suite ttft; or for suite store, and then it may be repeated. "
            "Default: a new directory; of suite store memory, too."
        ),
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(
            help="Python of an environment with vLLM, for suite ttft. Default: this one, or that of `make vllm-env`."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help=f"Tokens of the prefixes that users share, with commas, for suite ttft. Default: {LENGTHS}."),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Users who share a prefix, for suite ttft. Default: 3.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of kvcore's chunks, for suite ttft. Default: 256.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Samples of each figure. Default: 15; of suite ttft 1.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures into this file; its ending names the format.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Measure paths on one pinned thread, or a real vLLM.

    Medians, with the peer's and the memory's own speed in the same run; of suite ttft times to the first token.
    """
    if store and suite not in (Suite.STORE, Suite.TTFT):
        raise ConfigError(f"--suite {suite.value} uses no store; --store goes with --suite store and --suite ttft")
    if suite is Suite.TTFT:
        _refuse(suite, "measures a whole engine", {"--backend": backend, "--peer-python": peer_python})
        sizes = TtftSizes.of(lengths=lengths, users=users, chunk_tokens=chunk_tokens, repeats=repeats)
        _bench_ttft(engine_python, model, store, sizes, plot, as_json)
        return
    of_ttft = {"--engine-python": engine_python, "--lengths": lengths, "--users": users, "--chunk-tokens": chunk_tokens}
    _refuse(suite, "starts no engine, as suite ttft does", of_ttft)
    os.environ["KVCORE_CPU_THREADS"] = "1"  # one thread against one thread
    repeats = repeats or 15
    if suite is Suite.DISPATCH:
        given = {"--backend": backend, "--peer-python": peer_python, "--model": model, "--plot": plot}
        _refuse(suite, "times calls that do nothing", given)
        _bench_dispatch(repeats, as_json)
        return
    if plot is not None:
        require("eval", "matplotlib")
        from kvcore.bench.plot import check_path

        check_path(plot)
    _check_host(backend)
    with tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder, contextlib.redirect_stdout(sys.stderr):
        rows: Sequence[Row]
        stored: list[StoreRow] = []
        if suite is Suite.STORE:
            report, stored = _measure_stores(backend, peer_python, model, store or (), repeats, Path(folder), as_json)
            rows = stored
        else:
            report, rows = _measure(suite, backend, peer_python, model, repeats, Path(folder), quiet=as_json)
    if plot is not None:
        from kvcore.bench.plot import draw

        limit = "limit" if suite is Suite.STORE else "memcpy"
        draw(rows, f"kvcore {report['backend']}, suite {suite.value}", plot, limit=limit)
    if as_json:
        print_json(report)
    elif suite is Suite.STORE:
        print_stores(report, stored)
    else:
        _print(report, rows)


def _refuse(suite: Suite, what: str, given: dict[str, Any]) -> None:
    """Raise if an option was given that the suite has no use for."""
    useless = [name for name, value in given.items() if value is not None]
    if useless:
        raise ConfigError(f"--suite {suite.value} {what}; it takes no {' and no '.join(useless)}")


def _bench_ttft(
    python: str | None,
    model: str | None,
    stores: Sequence[str] | None,
    sizes: TtftSizes,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure a real engine, and print or draw it."""
    if stores and len(stores) > 1:
        raise ConfigError("--suite ttft measures one store; give --store once")
    if plot is not None:
        require("eval", "matplotlib")
        from kvcore.bench.plot import check_path

        check_path(plot)
    store = stores[0] if stores else None
    report, rows = bench_ttft(python, model, store, sizes, quiet=as_json)
    report = {"suite": report.pop("suite"), "machine": _machine(None), **report}
    if plot is not None:
        from kvcore.bench.ttft_plot import draw_ttft

        draw_ttft(rows, f"{report['engine']}, {report['model']}", plot)
    if as_json:
        print_json(report)
    else:
        print_ttft(report, rows)


def _check_host(name: str | None) -> None:
    """Refuse a device's backend before anything is loaded: the suites time work on the host's memory."""
    from kvcore.ops import explain

    taken = next(verdict for verdict in explain(name).verdicts if verdict.taken)
    if "cpu" not in taken.device_types:
        raise ConfigError(
            f"bench measures backends of the host's memory; {taken.name} has {', '.join(taken.device_types)} memory"
        )


def _measure(
    suite: Suite,
    name: str | None,
    peer_python: str | None,
    model: str | None,
    repeats: int,
    folder: Path,
    *,
    quiet: bool,
) -> tuple[dict[str, Any], list[Row]]:
    """Run a suite; return what ``--json`` prints, and its rows."""
    from kvcore.bench.cases import measure, pinned
    from kvcore.bench.peer import Peer
    from kvcore.bench.suites import SUITES
    from kvcore.ops import open_backend

    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console(stderr=True),
        disable=quiet, transient=True,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(progress).add_task("find KV")
        kv = _find_kv(model, folder) if suite in _NEEDS_KV else _no_kv(folder)
        core = pinned()
        backend = open_backend(name)
        peer = stack.enter_context(Peer(peer_python)) if peer_python else None
        rows = []
        for row in measure(SUITES[suite.value](backend, kv), peer, repeats):
            progress.update(task, description=f"{suite.value}: {row.path}")
            rows.append(row)
    report = {
        "suite": suite.value,
        "machine": _machine(core),
        "backend": backend.name,
        "peer": None if peer is None else peer.name,
        "kv": kv.source,
        "repeats": repeats,
        "rows": [row.to_dict() for row in rows],
    }
    return report, rows


def _measure_stores(
    name: str | None, peer_python: str | None, model: str | None, uris: Sequence[str], repeats: int, folder: Path,
    quiet: bool,
) -> tuple[dict[str, Any], list[StoreRow]]:  # fmt: skip
    """Run the suite of stores, on made-up KV unless a model is named."""
    kv = None if model in (None, "none") else _find_kv(model, folder)
    report, rows = measure_stores(kv, name, peer_python, uris, repeats, folder, quiet=quiet)
    return {"suite": report.pop("suite"), "machine": _machine(report.pop("core")), **report}, rows


def _find_kv(model: str | None, folder: Path) -> KV:
    """Return a real model's KV of a text of Python's own; made-up KV where there is no model."""
    from kvcore.bench.data import made_up_kv, model_kv
    from kvcore.cli.models import find_model, load_model, load_tokenizer, quiet_environment

    if model == "none":
        return made_up_kv(folder / "kv.npy")
    try:
        where = find_model(model)
        require("demo", "torch", "transformers")
    except KVCoreError:
        if model is not None:
            raise
        return made_up_kv(folder / "kv.npy")
    os.environ.update(quiet_environment(hub=where["hub"]))
    return model_kv(load_model(where), load_tokenizer(where), where["name"], _KV_TOKENS, folder / "kv.npy")


def _no_kv(folder: Path) -> KV:
    """A place holder of the smallest size, for suites that make their own arrays."""
    from kvcore.bench.data import made_up_kv

    return made_up_kv(folder / "kv.npy", layers=1, heads=1, tokens=8, width=2)


def _machine(core: int | None) -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"machine": platform.machine(), "processor": model, "system": platform.platform(), "core": core}


def _print(report: dict[str, Any], rows: Sequence[Row]) -> None:
    out = console()
    out.print(f"{report['backend']} on {report['machine']['processor'] or report['machine']['machine']}, one thread")
    if report["peer"]:
        out.print(f"peer: {report['peer']}")
    if report["suite"] in {s.value for s in _NEEDS_KV}:
        out.print(f"KV: {report['kv']}")
    table = plain_table("path", "kvcore", "spread", "peer", "times peer", "memcpy", "of memcpy")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(
            row.path,
            f"{row.kvcore_gbps:.3g} {row.unit}",
            f"{100 * row.spread:.0f} %",
            *(
                "" if v is None else f"{v:.3g}"
                for v in (row.peer_gbps, row.ratio_peer, row.roofline_gbps, row.ratio_roofline)
            ),
        )
    out.print(table)
    for row in rows:
        if row.note:
            out.print(f"{row.path}: {row.note}")


def _bench_dispatch(repeats: int, as_json: bool) -> None:
    """What the core adds to a call."""
    from kvcore.bench.cases import pinned
    from kvcore.bench.dispatch import CHECKED_TARGET_US, PLAN_TARGET, measure_calls

    core = pinned()
    rows = measure_calls(repeats)
    ratio, checked = max(r["planned_ratio"] for r in rows), max(r["checked_us"] for r in rows)
    met = ratio <= PLAN_TARGET and checked <= CHECKED_TARGET_US
    if as_json:
        targets = {"planned_ratio": PLAN_TARGET, "checked_us": CHECKED_TARGET_US}
        figures = {"planned_ratio": ratio, "checked_us": checked, "targets": targets, "met": met}
        print_json({"suite": "dispatch", "machine": _machine(core), "rows": rows, **figures})
        return
    out = console()
    out.print("what kvcore adds to a call that does nothing")
    table = plain_table(
        "op", "bare call, ns", "planned, ns", f"ratio (<= {PLAN_TARGET:g})", f"checks, us (<= {CHECKED_TARGET_US:g})"
    )
    for r in rows:
        table.add_row(
            r["path"], f"{r['bare_ns']}", f"{r['planned_ns']}", f"{r['planned_ratio']:.2f}", f"{r['checked_us']:.2f}"
        )
    out.print(table)
    out.print(f"worst: {ratio:.2f}x, {checked:.2f} us; targets {'met' if met else 'MISSED'}")
